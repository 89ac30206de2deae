"""Estimates how structures look: from a public prior, updated after every round by the stored answers.

Post-processing of stored answers. Free of torch.
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
from server.public.material import Public

MEAN_STD = 1.6
"""Before anybody is asked, a structure's mean may lie so far from its surroundings', in their spreads. Were it
narrower, every voter's code would be clipped in every round: tumours lie two spreads off in each of four contrasts."""

LOG_STD = -0.4
"""Before anybody is asked: logarithm of a structure's spread beside its volume's, and"""

LOG_STD_STD = 0.35
"""how far off that may be."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Of J structures in C channels: means and logarithms of spreads [J, 2C], and the variances of what is believed."""

    values: Float[np.ndarray, "j 2c"]
    variances: Float[np.ndarray, "j 2c"]

    @property
    def channels(self) -> int:
        return int(self.values.shape[1] // 2)

    @property
    def means(self) -> Float[np.ndarray, "j c"]:
        return self.values[:, : self.channels]

    @property
    def stds(self) -> Float[np.ndarray, "j c"]:
        result: np.ndarray = np.exp(self.values[:, self.channels :])
        return result

    @property
    def mean_variances(self) -> Float[np.ndarray, "j c"]:
        return self.variances[:, : self.channels]


def unasked(*, structures: int, channels: int) -> Look:
    """What is believed before anybody is asked: values are relative to their surroundings, so it needs no data."""
    one = np.concatenate([np.zeros(channels), np.full(channels, LOG_STD)])
    open_ = np.repeat([MEAN_STD**2, LOG_STD_STD**2], channels)
    return Look(np.tile(one, (structures, 1)), np.tile(open_, (structures, 1)))


def first_frame(study: Study, *, codec: str, noise_std: float) -> Frame:
    """The frame before anybody is asked."""
    known = unasked(structures=len(study.data.labels) - 1, channels=len(study.data.channels))
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


def looks(public: Public, answers: Sequence[Answer]) -> tuple[Look, Look]:
    """What was believed before any answer, and what is after these rounds."""
    first, last = (frame_of(public, answer) for answer in (answers[0], answers[-1]))
    noise_std = answers[-1].query.mechanism.mean_noise_std(voters=answers[-1].voters)
    after = last.after(observation(answers[-1], last), noise_std=noise_std, radius=public.study.codec.radius)
    structures = len(public.study.data.labels) - 1
    return _look(first, structures), _look(after, structures)


def _look(frame: Frame, structures: int) -> Look:
    variances = np.square(frame.basis[:, 0].astype(np.float64)).T @ frame.variances
    return Look(np.array(frame.centre[0]).reshape(structures, -1), variances.reshape(structures, -1))
