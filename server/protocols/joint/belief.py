"""Estimates the volumes' codes before and after the answers of a joint query, and the size of the answers' effect.

The joint query calls it. It is post-processing of stored answers and does not import torch. Every code is relative to
the public mean shape. An *offset* is a volume's code minus the code of the public start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.errors import InvalidInput
from server.protocols.controls import DERANGEMENT_SEED, derangement
from server.protocols.plausible import PlausibilityTest, shares
from server.protocols.posterior import DRAW_SEED
from server.protocols.query_protocol import Answer
from server.protocols.rounds import frame_of, observation, surprise
from server.public.material import PublicMaterial


def estimated_codes(
    public: PublicMaterial, answers: Sequence[Answer]
) -> tuple[Float[np.ndarray, "n l"], Float[np.ndarray, "n l"]]:
    """Return the codes that the public start predicts for the volumes, and the codes estimated from the answers.

    The frame of the last round is centred on the estimate from all rounds before it, so only the last answer is added.

    In a study with public pairs, the teachers' weights are kept near the public start, so the codes may contain nothing
    that the start does not contain. The estimated offsets from the start's codes are therefore multiplied by
    :func:`offset_scale` in such a study, so that noise alone changes no label.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers, one a round, at least one.

    Returns:
        Two float arrays [n, l]: codes before any answer, and after all.
    """
    first, last = (frame_of(public, answer) for answer in (answers[0], answers[-1]))
    begun, codes = np.array(first.centre), last.estimate(observation(answers[-1], last))
    return begun, begun + offset_scale(public, answers) * (codes - begun) if public.study.codec.paired else codes


def offset_scale(public: PublicMaterial, answers: Sequence[Answer]) -> float:
    """Estimate the variance of the volumes' offsets from the public start, divided by the variance the frames expect.

    An answer's mean square estimates the noise variance plus the offsets' variance, so the noise variance is
    subtracted. The estimate is unbiased before it is clipped to the range from 0 to 1.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers, one a round.

    Returns:
        The ratio, from 0 to 1.
    """
    loud = quiet = dimension = 0.0
    for answer in answers:
        frame = frame_of(public, answer)
        seen = observation(answer, frame)
        loud, quiet = loud + frame.surprise(seen), quiet + frame.noise_surprise(seen)
        dimension += frame.dimension
    return min(1.0, max(0.0, (loud - quiet) / (dimension - quiet)))


def drawn_codes(public: PublicMaterial, answers: Sequence[Answer], *, count: int) -> Iterator[Float[np.ndarray, "n l"]]:
    """Sample the volumes' codes from their posterior, which varies only along the directions of the last frame.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers, one a round, at least one.
        count: Number of samples.

    Yields:
        Float array [n, l] of each sample.
    """
    last, rng = frame_of(public, answers[-1]), np.random.default_rng(DRAW_SEED)
    seen = observation(answers[-1], last)
    after = last.after(
        seen, noise_std=answers[-1].query.mechanism.mean_noise_std(voters=answers[-1].voters), radius=1.0
    )
    for _ in range(count):
        codes = np.array(after.centre)
        offsets = rng.normal(size=len(after.variances)) * np.sqrt(after.variances)
        codes[:, : after.basis.shape[2]] += np.tensordot(offsets, after.basis, axes=1)
        yield codes


def plausibility(public: PublicMaterial, codec: Codec, answers: Sequence[Answer]) -> PlausibilityTest:
    """Check whether the answers are plausible, by their size and by the volumes of the structures.

    The answers' size (sum of squares) is compared with its expected value. Each structure's volume in the labels is
    compared with its volume in the public mean shape.

    Args:
        public: The study's public material (terms, codec, volumes).
        codec: The study's codec.
        answers: The stored answers, one a round, at least one.

    Returns:
        The comparison, which also states the warnings for the operator.
    """
    _, codes = estimated_codes(public, answers)
    ours, mean = _voxels(codec, codes), codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    volumes = shares(public.study.data.labels[1:], ours[1:], len(codes) * mean.sum(axis=(1, 2, 3))[1:])
    return PlausibilityTest(*surprise(public, answers), volumes)


def control(name: str, start: Float[np.ndarray, "n l"], after: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "n l"]:
    """Return the codes that a control is trained with.

    * ``zero_code``: every release is replaced by the zero code, so the codes are those of the public start.
    * ``shuffled_codes``: every volume gets another volume's code, which breaks the link from volume to code.
    * ``shuffled_offsets``: every volume keeps its own start and gets another volume's offset. The part of the offsets
      that all volumes share remains, so this control only shows how large that part is.
    * ``public_only``: the codes are those of the public start.

    Args:
        name: One of these names.
        start: Codes of the public start, float [n, l].
        after: Codes after all answers, float [n, l].

    Returns:
        Float array [n, l]. For fewer than two volumes it is always ``start``.

    Raises:
        InvalidInput: If there is no control of this name.
    """
    match name:
        case "zero_code" | "public_only":
            return start
        case "shuffled_codes" | "shuffled_offsets":
            if len(start) < 2:
                return start
            order = list(derangement(len(start), seed=DERANGEMENT_SEED))
            moved: np.ndarray = after[order] if name == "shuffled_codes" else start + (after - start)[order]
            return moved
        case _:
            raise InvalidInput("control", value=name, limit="zero_code, shuffled_codes, shuffled_offsets, public_only")


def _voxels(codec: Codec, codes: Float[np.ndarray, "n l"]) -> list[int]:
    """Return the number of voxels of every class, background first, in all these codes' label maps together."""
    counts = np.zeros(codec.labels, dtype=np.int64)
    for code in codes:
        counts += np.bincount(codec.decode(code, noise_std=0.0).argmax(axis=0).ravel(), minlength=codec.labels)
    return [int(count) for count in counts]
