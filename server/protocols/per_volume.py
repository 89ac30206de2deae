"""Runs the protocol with one query per public volume: each answer becomes a label, from which the student learns.

``protocol_of`` creates the protocol by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs import Codec, load_codec
from common.config import Study
from common.errors import InvalidInput
from common.objects import Objects
from common.privacy.mechanism import GRID_BITS, Mechanism, QuerySpec
from server.protocols.controls import CONTROLS, predicted, shuffled
from server.protocols.decode import decode_answer
from server.protocols.plausible import NoiseShare, PlausibilityTest, shares
from server.protocols.posterior import DRAW_SEED, LabelUncertainty, doubt_of
from server.protocols.query_protocol import (
    Answer,
    AnswerOf,
    AnswerResults,
    Label,
    NetworkTraining,
    QueryPlan,
    QueryProtocol,
    StudentData,
    query_about,
)
from server.protocols.stored_labels import as_stored
from server.public.material import CodecRecord, OnStage, PublicMaterial


def plan_queries(study: Study, *, codec: CodecRecord, volumes: Sequence[str]) -> tuple[QuerySpec, ...]:
    """Return one query for each of the first ``planned_queries`` public volumes, in order.

    Args:
        study: The study.
        codec: Its codec.
        volumes: Hashes of the public volumes.

    Returns:
        The queries, in the order of the volumes.
    """
    asked = volumes[: study.privacy.planned_queries]
    return tuple(query_about(study, [volume], codec=codec.sha256, dimension=codec.dimension) for volume in asked)


class PerVolume(QueryProtocol):
    """One query per public volume; see :class:`~server.protocols.query_protocol.QueryProtocol`."""

    def query_plan(self, study: Study) -> QueryPlan:
        planned = study.privacy.planned_queries
        return QueryPlan(f"{planned} queries", which=f"up to {planned}", each="each volume,", asks=planned, an_answer=1)

    def prepare(self, public: Callable[[], PublicMaterial], *, sites: int, on_stage: OnStage) -> None:
        """Do nothing, because a query needs only the codec.

        Args:
            public: Not called.
            sites: Not used.
            on_stage: Not called.
        """

    def configure(self, public: PublicMaterial, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """Yield all queries at once, since no query depends on another query's answer.

        Yields:
            One group with all queries.
        """
        yield plan_queries(public.study, codec=public.codec, volumes=public.volumes)

    def aggregate(self, public: PublicMaterial, answers: Sequence[Answer]) -> PerVolumeResults:
        return PerVolumeResults(public, answers)

    def finish(self, student_data: StudentData) -> NetworkTraining:
        from server.protocols.student_fit import learn  # imports torch

        study = student_data.public.study
        inputs = digest("student-inputs", [study.id, repr(study.student), student_data.labels.hashes()])
        return NetworkTraining(inputs, partial(learn, student_data, student_data.labels), study.student.steps)

    def control(self, student_data: StudentData, name: str) -> NetworkTraining | None:
        from server.protocols.student_fit import learn  # imports torch

        if not (labels := control_labels(student_data, name)):
            return None
        study = student_data.public.study
        hashes = [[volume, sha256_bytes(label.tobytes())] for volume, label in labels.items()]
        inputs = digest("control-inputs", [name, study.id, repr(study.student), hashes])
        return NetworkTraining(inputs, partial(learn, student_data, labels), study.student.steps)


@dataclass(frozen=True, slots=True)
class PerVolumeResults(AnswerResults):
    """Computes labels from answers that are about one volume each.

    Attributes:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers.
    """

    public: PublicMaterial
    answers: Sequence[Answer]

    def labels(self) -> Iterator[Label]:
        for answer, codec in self._decoders():
            (volume,) = answer.query.volumes
            yield Label(volume, answer.query.id, decoded(answer, codec, answer.noisy_sum))

    def plausibility(self) -> PlausibilityTest | None:
        """Test whether the answers are as large as expected.

        The expected variance of each coordinate is its variance over public shapes, plus that of the noise. Each
        structure's volume in the labels is also compared with its volume in the public mean shape.

        Returns:
            The comparison; None if no answer has a linear codec.
        """
        held = [(answer, linear) for answer, codec in self._decoders() if (linear := codec.linear) is not None]
        if not held:
            return None
        surprise, noise_share, names = 0.0, NoiseShare(), self.public.study.data.labels[1:]
        ours, shapes = np.zeros(len(names), dtype=np.int64), np.zeros(len(names))
        for answer, codec in held:
            noise = answer.query.mechanism.mean_noise_std(voters=answer.voters)
            mean = answer.noisy_sum / (answer.voters * 2.0**GRID_BITS)
            surprise += float((mean**2 / (codec.powers + noise**2)).sum())
            noise_share += NoiseShare.of(noise**2 / (codec.powers + noise**2))
            ours += _voxels(decoded(answer, codec, answer.noisy_sum))
            shapes += decoded(answer, codec, np.zeros_like(answer.noisy_sum)).sum(axis=(1, 2, 3))[1:]
        dimension = sum(codec.dimension for _, codec in held)
        return PlausibilityTest(surprise, dimension, noise_share, shares(names, ours.tolist(), shapes.tolist()))

    def doubts(self, *, draws: int) -> Iterator[LabelUncertainty]:
        """Yield how uncertain each volume's label is, from samples of the volume's code.

        With a linear codec the samples are from the posterior of the code, given the answer. With another codec they
        are the answer plus fresh noise.
        """
        rng = np.random.default_rng(DRAW_SEED)
        for answer, codec in self._decoders():
            (volume,) = answer.query.volumes
            label = decoded(answer, codec, answer.noisy_sum)
            centre = decoded(answer, codec, np.zeros_like(answer.noisy_sum)).argmax(axis=0).astype(np.uint8)
            yield LabelUncertainty(volume, centre, doubt_of(label, _draws(answer, codec, count=draws, rng=rng)))

    def _decoders(self) -> Iterator[tuple[Answer, Codec]]:
        codec_of = _codecs_in(self.public.objects)
        return ((answer, codec_of(answer)) for answer in self.answers)


def control_labels(student_data: StudentData, name: str) -> dict[str, Float[np.ndarray, "k x y z"]]:
    """Return the labels that a control is trained on, rounded to float16 as the student's labels are.

    Args:
        student_data: Public data and released labels to learn from.
        name: One of :data:`~server.protocols.controls.CONTROLS`.

    Returns:
        Labels by volume hash, in the student's order; empty for ``shuffled_codes`` if there is only one volume.

    Raises:
        InvalidInput: If there is no control of this name.
    """
    match name:
        case "zero_code":
            return _zero_labels(student_data)
        case "shuffled_codes":
            return shuffled(student_data.labels)
        case "public_only":
            return predicted(student_data)
        case _:
            raise InvalidInput("control", value=name, limit=", ".join(CONTROLS))


def _codecs_in(objects: Objects) -> Callable[[Answer], Codec]:
    """Return a function that loads the codec of an answer, each codec only once."""
    load = cache(lambda name: load_codec(objects.get(name), expected_hash=name))
    return lambda answer: load(answer.query.codec)


def decoded(answer: Answer, codec: Codec, noisy_sum: np.ndarray) -> Float[np.ndarray, "k x y z"]:
    """Decode a noisy sum as if it were the sum of an answer: with the answer's number of voters and its noise.

    Args:
        answer: The answer.
        codec: Its codec.
        noisy_sum: Int64 array [l]; the answer's own sum, or zeros.

    Returns:
        Float32 probabilities [k, x, y, z] of k classes.
    """
    return decode_answer(codec, noisy_sum, voters=answer.voters, mechanism=answer.query.mechanism)


def _voxels(probabilities: np.ndarray) -> np.ndarray:
    """Return the number of voxels of every structure, without the background."""
    return np.bincount(probabilities.argmax(axis=0).ravel(), minlength=len(probabilities))[1:]


def _draws(
    answer: Answer, codec: Codec, *, count: int, rng: np.random.Generator
) -> Iterator[Float[np.ndarray, "k x y z"]]:
    """Sample labels from the posterior given an answer.

    Given noise of standard deviation σ, a coordinate of prior variance p has posterior variance p·σ²/(p + σ²).
    """
    noise = answer.query.mechanism.mean_noise_std(voters=answer.voters)
    mean = answer.noisy_sum / (answer.voters * 2.0**GRID_BITS)
    for _ in range(count):
        normal = rng.normal(size=mean.shape)
        if (linear := codec.linear) is not None:
            kept = linear.powers / (linear.powers + noise**2)
            yield codec.decode(kept * mean + np.sqrt(kept) * noise * normal, noise_std=0.0)
        else:
            yield codec.decode(mean + noise * normal, noise_std=noise)


def _zero_labels(student_data: StudentData) -> dict[str, Float[np.ndarray, "k x y z"]]:
    """Decode the zero code in place of each volume's answer, with that answer's voters and noise."""
    codec_of = _codecs_in(student_data.public.objects)
    silent: dict[tuple[str, int, Mechanism], np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    for answer in student_data.answers:
        key = (answer.query.codec, answer.voters, answer.query.mechanism)
        if key not in silent:
            silent[key] = as_stored(decoded(answer, codec_of(answer), np.zeros_like(answer.noisy_sum)))
        labels |= dict.fromkeys(answer.query.volumes, silent[key])
    return {volume: labels[volume] for volume in student_data.labels}
