"""Estimates the volumes' codes before and after the answers of a joint query, and how much the answers weigh.

Post-processing of stored answers. The label of a volume is always the public mean shape plus a code. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.errors import InvalidInput
from server.protocols.controls import DERANGEMENT_SEED, derangement
from server.protocols.plausible import Plausible, shares
from server.protocols.posterior import DRAW_SEED
from server.protocols.query_protocol import Answer
from server.protocols.rounds import frame_of, observation, surprise
from server.public.material import Public


def believed(public: Public, answers: Sequence[Answer]) -> tuple[Float[np.ndarray, "n l"], Float[np.ndarray, "n l"]]:
    """The volumes' codes by the public start, and after these answers. Every later frame holds the answers before.

    Beside paired cases voters stay near what the start knows, and there may be nothing to hear: then what was heard is
    scaled by :func:`heard`, so that silence moves no label.
    """
    first, last = (frame_of(public, answer) for answer in (answers[0], answers[-1]))
    begun, codes = np.array(first.centre), last.estimate(observation(answers[-1], last))
    return begun, begun + heard(public, answers) * (codes - begun) if public.study.codec.paired else codes


def heard(public: Public, answers: Sequence[Answer]) -> float:
    """How large the offsets are beside what frames expect, 0 to 1: from how far the answers go beyond their noise.

    Unbiased before it is cut to 0 and 1: an answer's squares are in the mean those of the noise and of the offsets.
    """
    loud = quiet = dimension = 0.0
    for answer in answers:
        frame = frame_of(public, answer)
        seen = observation(answer, frame)
        loud, quiet = loud + frame.surprise(seen), quiet + frame.silence(seen)
        dimension += frame.dimension
    return min(1.0, max(0.0, (loud - quiet) / (dimension - quiet)))


def drawn_codes(public: Public, answers: Sequence[Answer], *, count: int) -> Iterator[Float[np.ndarray, "n l"]]:
    """The volumes' codes drawn from what is believed after these answers: the posterior along the last frame."""
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


def weighed(public: Public, codec: Codec, answers: Sequence[Answer]) -> Plausible:
    """Whether the answers look like what was expected of them, and each structure's volume beside public shapes'."""
    _, codes = believed(public, answers)
    ours, mean = _voxels(codec, codes), codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    volumes = shares(public.study.data.labels[1:], ours[1:], len(codes) * mean.sum(axis=(1, 2, 3))[1:])
    return Plausible(*surprise(public, answers), volumes)


def control(name: str, start: Float[np.ndarray, "n l"], believed: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "n l"]:
    """The codes a control is refined with, of the public start's and of what is ``believed`` after all releases.

    ``zero_code``: every release the code zero, so nothing moves. ``shuffled_codes``: every volume gets another volume's
    code: the link from volume to code is broken. ``shuffled_offsets``: every volume keeps its own start and gets
    another's offset from it; what all volumes share stays as it is, so this is no control of the release as a whole but
    tells how much of it that is. ``public_only``: nothing was asked.
    """
    match name:
        case "zero_code" | "public_only":
            return start
        case "shuffled_codes" | "shuffled_offsets":
            if len(start) < 2:
                return start
            order = list(derangement(len(start), seed=DERANGEMENT_SEED))
            dealt: np.ndarray = believed[order] if name == "shuffled_codes" else start + (believed - start)[order]
            return dealt
        case _:
            raise InvalidInput("control", value=name, limit="zero_code, shuffled_codes, shuffled_offsets, public_only")


def _voxels(codec: Codec, codes: Float[np.ndarray, "n l"]) -> list[int]:
    """Voxels of every label, background first, in the label maps of these codes together."""
    counts = np.zeros(codec.labels, dtype=np.int64)
    for code in codes:
        counts += np.bincount(codec.decode(code, noise_std=0.0).argmax(axis=0).ravel(), minlength=codec.labels)
    return [int(count) for count in counts]
