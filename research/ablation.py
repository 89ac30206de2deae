"""Measures what each idea of the joint recipe contributes, by training students without it and comparing by seed.

`consilium bench utility --ablate` calls it. Each variant runs everything up to a student by production functions with
one argument changed, with the same roles, public images, budget and steps. Results are stored, so a stopped run
continues. It refuses every recipe but ``joint``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float, Int64

from common.canonical import sha256_bytes
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from common.protocols.frame import Frame, plan_frame
from consilium.memory.asked import AnswerInMemory
from research.asked import Vote, ask, noised
from research.bench import Bench
from research.setting import RECIPE
from research.stored_results import array_hash
from research.utility import BenchAnswers
from server.protocols.joint.belief import estimated_codes
from server.protocols.joint.kernel import coordinates
from server.protocols.public_start import RESIDUAL, SPREAD, STUDENT_PASSES, TEMPERATURE, Start, codes_of
from server.protocols.rounds import observation, round_query
from server.public.material import CodecRecord

FROM_SCRATCH = TrainingConfig(steps=200, learning_rate=1e-2)
"""Training recipe of a teacher that starts from random weights."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The joint recipe with one thing changed. The attributes' defaults give the unchanged recipe.

    Attributes:
        what: Description for the table.
        kernel: ``tangent``, ``images`` (similarity of the images) or ``none``.
        leading: Number of leading coordinates of each volume over which the kernel is taken; None for all.
        temperature: Temperature that sharpens predictions; 1 leaves them as they are.
        spread: Least ratio between the variance of the public start's codes and that of the public label maps' codes.
        centred: True to encode relative to the public start, False to encode relative to the public mean shape.
        shrunk: True to shrink observations according to their noise, False to use them as they are.
        begun: True to train teachers from the public start, False to train them from random weights.
        joint: True to ask about all volumes at once, False to ask one query per volume.
        rounds: Number of rounds; None for the setting's.
        passes: Number of training passes of the student; None for the recipe's.
    """

    what: str
    kernel: str = "tangent"
    leading: int | None = None
    temperature: float = TEMPERATURE
    spread: float = SPREAD
    centred: bool = True
    shrunk: bool = True
    begun: bool = True
    joint: bool = True
    rounds: int | None = None
    passes: int | None = None


VARIANTS = {
    "recipe": Variant("the recipe"),
    "one-query-a-volume": Variant("one release a volume, a student from nothing", joint=False, begun=False),
    "one-round": Variant("all in one round", rounds=1),
    "one-pass": Variant("a student of the codec's labels alone", passes=1),
    "teachers-from-nothing": Variant("teachers do not begin from the public start", begun=False),
    "image-rows": Variant("volumes rotated by their images' likeness, no tangent kernel", kernel="images"),
    "independent": Variant("every volume and coordinate for itself, no kernel", kernel="none"),
    "leading-24": Variant("the kernel over 24 coordinates of a volume's 128", leading=24),
    "not-sharpened": Variant("predictions encoded as they are", temperature=1.0),
    "timid-start": Variant("the public start's spread not restored", spread=0.0),
    "mean-shape-centre": Variant("codes relative to the public mean shape", centred=False),
    "noisy-labels": Variant("observations taken as they are, not shrunk", shrunk=False),
}


def student(bench: Bench, name: str) -> float:
    """Return the Dice of one variant's student on the held-out cases. The student is trained once and its Dice stored.

    Raises:
        InvalidInput: If the setting's recipe is not ``joint``.
    """
    variant, setting = VARIANTS[name], bench.setting
    if variant.rounds is not None:
        bench = bench.at(setting := replace(setting, rounds=variant.rounds))
    if setting.recipe != "joint":
        raise InvalidInput("recipe of an ablation", value=setting.recipe, limit="joint")
    parts = [repr(setting), repr(variant), bench.seed, RECIPE, STUDENT_PASSES]
    make = partial(_joint, bench, variant) if variant.joint else partial(_single, bench)
    return bench.kept.number(f"variant-{name}", parts, make)


def ablate(bench: Bench, report: Callable[[str], None]) -> dict[str, float]:
    """Return the Dice of every variant's student at one setting and seed.

    Args:
        bench: The setting and seed.
        report: Called with each variant's name.
    """
    result = {}
    for name in VARIANTS:
        report(name)
        result[name] = student(bench, name)
    return result


def _single(bench: Bench) -> float:
    other = bench.at(replace(bench.setting, recipe="pca", teacher=FROM_SCRATCH, paired=0))
    return BenchAnswers(other, None, other.codes(other.teachers(None))).arm("student")["student"]


def _joint(bench: Bench, variant: Variant) -> float:
    codec = bench.linear
    start = bench.start(spread=variant.spread)
    if variant.begun:
        teachers = bench.teachers(start)
    else:
        teachers = bench.at(replace(bench.setting, teacher=FROM_SCRATCH)).teachers(None)
    codes = bench.codes(teachers, temperature=variant.temperature)
    centre = codes_of(start.model, bench.images, codec, temperature=variant.temperature)
    frame = plan_frame(
        kernel=_kernel(bench, variant, start, codec.powers),
        centre=centre if variant.centred else np.zeros_like(centre),
        variances=codec.powers,
        residual=RESIDUAL if variant.centred else 1.0,
        temperature=variant.temperature,
        noise_std=bench.noise_std,
        radius=bench.study.codec.radius,
        codec=sha256_bytes(codec.to_bytes()),
    )
    found = (_estimated_codes if variant.shrunk else _unshrunk)(bench, variant, start, frame, codes)
    return bench.taught(start, found, passes=variant.passes)


def _estimated_codes(
    bench: Bench, variant: Variant, start: Start, frame: Frame, codes: Float[np.ndarray, "k n l"]
) -> Float[np.ndarray, "n l"]:
    """Return the volumes' estimated codes after all rounds of the study; the first round uses this frame."""
    vote: Vote = lambda encoder, _query, voter: encoder.of_voter(codes[voter])  # noqa: E731
    with bench.asking(start, frame) as public:
        answers = ask(public, vote, voters=len(codes), draw=partial(_drawn, bench, variant))
        return estimated_codes(public, answers)[1]


def _unshrunk(
    bench: Bench, variant: Variant, start: Start, frame: Frame, codes: Float[np.ndarray, "k n l"]
) -> Float[np.ndarray, "n l"]:
    """Return the volumes' estimated codes after all rounds if observations are not shrunk, unlike in production."""
    study = bench.study
    for number in range(1, bench.setting.rounds + 1):
        query = round_query(
            study,
            codec=CodecRecord(frame.codec, bench.codec.dimension),
            volumes=[array_hash(image) for image in bench.images],
            frame=CodecRecord(sha256_bytes(frame.to_bytes()), frame.dimension),
            number=number,
        )
        votes = [quantise(frame.encode(each), radius_int=query.mechanism.radius_int) for each in codes]
        seen = observation(AnswerInMemory(query, _drawn(bench, variant, query, votes), len(codes)), frame)
        final = frame.estimate(replace(seen, variance=np.zeros_like(seen.variance)))
        frame = replace(frame.after(seen, noise_std=bench.noise_std, radius=study.codec.radius), centre=final)
    return final


def _drawn(
    bench: Bench, variant: Variant, query: QuerySpec, votes: Sequence[Int64[np.ndarray, "d"]]
) -> Int64[np.ndarray, "d"]:
    """Return the variant's own noisy sum, drawn once and stored."""
    parts = [repr(bench.setting), variant.what, bench.seed, query.id, array_hash(*votes)]
    return bench.kept.array("release", parts, lambda: noised(votes, query.mechanism))


def _kernel(bench: Bench, variant: Variant, start: Start, powers: Float[np.ndarray, "l"]) -> Float[np.ndarray, "k k"]:
    volumes = len(bench.images)
    size = coordinates(len(powers), volumes=volumes)
    match variant.kernel:
        case "images":
            return np.kron(likeness(bench.images), np.diag(powers[:size]))
        case "none":
            return np.kron(np.eye(volumes), np.diag(powers[:size]))
    kernel = bench.kernel(start, temperature=variant.temperature)
    if variant.leading is None:
        return kernel
    kept = (np.arange(volumes)[:, None] * size + np.arange(min(variant.leading, size))).ravel()
    part: np.ndarray = kernel[np.ix_(kept, kept)]
    return part


def likeness(images: Float[np.ndarray, "n c x y z"]) -> Float[np.ndarray, "n n"]:
    """Return a covariance matrix of the volumes that makes volumes with similar images similar.

    Its eigenvectors are the left singular vectors of the centred images, one row for each image. Its eigenvalues sum to
    1: nine tenths are divided in proportion to the cubes of the singular values, and one tenth equally.

    Args:
        images: Public volumes, float [n, c, x, y, z].
    """
    flat = images.reshape(len(images), -1).astype(np.float64)
    values, vectors = np.linalg.eigh((flat - flat.mean(axis=0)) @ (flat - flat.mean(axis=0)).T)
    spread = np.maximum(values, 0) ** 1.5
    shares = 0.9 * spread / spread.sum() + 0.1 / len(images)
    result: np.ndarray = (vectors * shares) @ vectors.T
    return result
