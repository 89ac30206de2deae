"""A codec in one file: principal components, every code of the opposite sign. Registered by one line in its test."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from jaxtyping import Float

from common.codecs.pca import PcaCodec


class MirrorCodec(PcaCodec):
    """See :class:`~common.codecs.pca.PcaCodec`."""

    __slots__ = ()
    name: ClassVar[str] = "mirror"

    def encode(self, probabilities: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "l"]:
        return -PcaCodec.encode(self, probabilities)

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "c x y z"]:
        return PcaCodec.decode(self, -mean_code, noise_std=noise_std)
