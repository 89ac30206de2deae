"""Estimates how structures look, from a public prior that is updated with the stored answer of every round.

The appearance protocol calls it. It is post-processing and does not import torch. A structure's *look* is the mean and
the standard deviation of its values in each channel, after :func:`~common.protocols.appearance.standardised`: with the
mean of its surroundings as 0 and their standard deviation as 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from common.config import Study
from common.protocols.frame import Frame, plan_frame
from server.protocols.query_protocol import Answer
from server.protocols.rounds import frame_of, observation
from server.public.material import PublicMaterial

MEAN_STD = 1.6
"""Prior standard deviation of a structure's mean value. The unit is the standard deviation of the surroundings' values.

It is large because tumours differ from their surroundings by two of these units in each of four MRI contrasts. With a
smaller value, every voter's code would be clipped in every round.
"""

LOG_STD = -0.4
"""Prior mean of log(spread of a structure's values / spread of all values of the volume)."""

LOG_STD_STD = 0.35
"""Prior standard deviation of the logarithm whose prior mean is :data:`LOG_STD`."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The look of J structures in C channels: means and spreads of their values, with their uncertainty.

    Attributes:
        values: For each structure its mean value in every channel, then the logarithm of the spread of its values in
            every channel; float [J, 2C].
        variances: Posterior variances of ``values``, float [J, 2C].
    """

    values: Float[np.ndarray, "j 2c"]
    variances: Float[np.ndarray, "j 2c"]

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return int(self.values.shape[1] // 2)

    @property
    def means(self) -> Float[np.ndarray, "j c"]:
        """Mean value of each of J structures in each of C channels, float [J, C]."""
        return self.values[:, : self.channels]

    @property
    def stds(self) -> Float[np.ndarray, "j c"]:
        """Spread of the values of each of J structures in each of C channels, float [J, C]."""
        result: np.ndarray = np.exp(self.values[:, self.channels :])
        return result

    @property
    def mean_variances(self) -> Float[np.ndarray, "j c"]:
        """Posterior variances of the structures' mean values, float [J, C], for J structures in C channels."""
        return self.variances[:, : self.channels]


def prior_look(*, structures: int, channels: int) -> Look:
    """Return the look of structures that is assumed before any answer (the prior).

    The prior needs no data, because values are relative to a structure's surroundings.

    Args:
        structures: Number of structures J, without the background.
        channels: Number of channels C.

    Returns:
        The look assumed before any answer.
    """
    one = np.concatenate([np.zeros(channels), np.full(channels, LOG_STD)])
    open_ = np.repeat([MEAN_STD**2, LOG_STD_STD**2], channels)
    return Look(np.tile(one, (structures, 1)), np.tile(open_, (structures, 1)))


def first_frame(study: Study, *, codec: str, noise_std: float) -> Frame:
    """Return the frame of the first round, made from the prior.

    A *frame* is the centre, axes and weights relative to which a round's codes are computed.

    Args:
        study: The study.
        codec: Hash of its codec.
        noise_std: Standard deviation of the noise on each coordinate of the mean code.

    Returns:
        The frame.
    """
    known = prior_look(structures=len(study.data.labels) - 1, channels=len(study.data.channels))
    variances = known.variances.ravel()
    return plan_frame(
        kernel=np.diag(variances),
        centre=known.values.reshape(1, -1),
        variances=variances,
        residual=1.0,
        temperature=1.0,
        noise_std=noise_std,
        radius=study.codec.radius,
        codec=codec,
    )


def estimate_looks(public: PublicMaterial, answers: Sequence[Answer]) -> tuple[Look, Look]:
    """Return the look of structures that the prior assumes, and the look estimated from the answers.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers, one a round, at least one.

    Returns:
        The prior, and the estimate after the last answer.
    """
    first, last = (frame_of(public, answer) for answer in (answers[0], answers[-1]))
    noise_std = answers[-1].query.mechanism.mean_noise_std(voters=answers[-1].voters)
    after = last.after(observation(answers[-1], last), noise_std=noise_std, radius=public.study.codec.radius)
    structures = len(public.study.data.labels) - 1
    return _look(first, structures), _look(after, structures)


def _look(frame: Frame, structures: int) -> Look:
    variances = np.square(frame.basis[:, 0].astype(np.float64)).T @ frame.variances
    return Look(np.array(frame.centre[0]).reshape(structures, -1), variances.reshape(structures, -1))
