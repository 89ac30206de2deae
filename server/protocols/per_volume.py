"""One query a public volume, at the server: each answer is decoded to that volume's label, a fresh student learns them.

Refuses to train on less than one label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs import Codec, load_codec
from common.codecs.pca import PcaCodec
from common.config import Study
from common.data.volume_cache import VolumeCache, together
from common.errors import InvalidInput
from common.objects import ObjectStore
from common.privacy.mechanism import GRID_BITS, Mechanism, QuerySpec
from server.aggregation.progress import OnStage
from server.protocols.base import (
    Answer,
    AnswerOf,
    FitFiles,
    Label,
    Lesson,
    QueryProtocol,
    Training,
    Wording,
    at_least,
    query_about,
)
from server.protocols.controls import CONTROLS, DERANGEMENT_SEED, derangement
from server.protocols.decode import decode_answer
from server.protocols.joint.plausible import Plausible
from server.protocols.posterior import DRAW_SEED, Standing, doubt_of
from server.protocols.stored_labels import as_stored
from server.study.workspace import CodecRecord, Public

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

CACHE_BYTES = 1 << 29
"""Volumes and labels held in memory while a student is trained; more lies in files."""

Labels = Mapping[str, Float[np.ndarray, "c x y z"]]


def plan_queries(study: Study, *, codec: CodecRecord, volumes: Sequence[str]) -> tuple[QuerySpec, ...]:
    """One query a public volume, in order, for the first ``planned_queries`` of them."""
    asked = volumes[: study.privacy.planned_queries]
    return tuple(query_about(study, [volume], codec=codec.sha256, dimension=codec.dimension) for volume in asked)


class PerVolume(QueryProtocol):
    """See :class:`~server.protocols.base.QueryProtocol`."""

    name: ClassVar[str] = "per-volume"

    def wording(self, study: Study) -> Wording:
        planned = study.privacy.planned_queries
        return Wording(plan=f"{planned} queries", which=f"up to {planned}", each="each")

    def check_volumes(self, study: Study, count: int) -> None:
        at_least(count, needed=study.privacy.planned_queries)

    def asked_about(self, study: Study, volumes: Sequence[str]) -> tuple[str, ...]:
        return tuple(volumes[: study.privacy.planned_queries])

    def volumes_answered(self, answers: int, *, asked: int) -> int:
        return answers

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        """Nothing: the codec is all that is needed."""

    def questions(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """All at once: no answer changes another question."""
        yield plan_queries(public.study, codec=public.codec, volumes=public.volumes)

    def labels(self, public: Public, answers: Sequence[Answer]) -> Iterator[Label]:
        codecs = Codecs(public.objects)
        for answer in answers:
            (volume,) = answer.query.volumes
            yield Label(volume, answer.query.id, decoded(answer, codecs.of(answer), answer.noisy_sum))

    def weigh(self, public: Public, answers: Sequence[Answer]) -> Plausible | None:
        """Nothing is known beforehand of a single answer's size."""
        return None

    def standings(self, public: Public, answers: Sequence[Answer], *, draws: int) -> Iterator[Standing]:
        """Draws from the posterior of a PCA codec's coordinates; of another codec from the answer and noise anew."""
        codecs, rng = Codecs(public.objects), np.random.default_rng(DRAW_SEED)
        for answer in answers:
            (volume,) = answer.query.volumes
            codec = codecs.of(answer)
            label = decoded(answer, codec, answer.noisy_sum)
            centre = decoded(answer, codec, np.zeros_like(answer.noisy_sum)).argmax(axis=0).astype(np.uint8)
            yield Standing(volume, centre, doubt_of(label, _draws(answer, codec, count=draws, rng=rng)))

    def student(self, lesson: Lesson) -> Training:
        study = lesson.public.study
        inputs = digest("student-inputs", [study.id, repr(study.student), lesson.labels.hashes()])
        return _training(lesson, lesson.labels, inputs)

    def control(self, lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]) -> Training | None:
        study, labels = lesson.public.study, control_labels(lesson, name, trained=trained)
        if not labels:
            return None
        hashes = [[volume, sha256_bytes(label.tobytes())] for volume, label in labels.items()]
        return _training(lesson, labels, digest("control-inputs", [name, study.id, repr(study.student), hashes]))


def control_labels(
    lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]
) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """A control's labels by volume hash, the student's volumes in the student's order; float16 as its own are.

    Empty for ``shuffled_codes`` where the student has one volume only: there is no wrong one to deal its answer to.
    """
    own = lesson.labels
    match name:
        case "zero_code":
            return _zero_labels(lesson)
        case "shuffled_codes":
            volumes = list(own)
            if len(volumes) < 2:
                return {}
            dealt = derangement(len(volumes), seed=DERANGEMENT_SEED)
            return {volume: own[volumes[other]] for volume, other in zip(volumes, dealt, strict=True)}
        case "public_only":
            from common.models.fit import predict

            model = trained("zero_code")
            return {volume: as_stored(predict(model, lesson.image(volume))) for volume in own}
        case _:
            raise InvalidInput("control", value=name, limit=", ".join(CONTROLS))


class Codecs:
    """The codecs of answers, each read once."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._known: dict[str, Codec] = {}

    def of(self, answer: Answer) -> Codec:
        name = answer.query.codec
        if name not in self._known:
            self._known[name] = load_codec(self._objects.get(name), expected_hash=name)
        return self._known[name]


def decoded(answer: Answer, codec: Codec, noisy_sum: np.ndarray) -> Float[np.ndarray, "c x y z"]:
    """``noisy_sum`` decoded as this answer's, with its voters and its noise."""
    return decode_answer(codec, noisy_sum, voters=answer.voters, mechanism=answer.query.mechanism)


def _draws(
    answer: Answer, codec: Codec, *, count: int, rng: np.random.Generator
) -> Iterator[Float[np.ndarray, "c x y z"]]:
    """What the label could have been: p_i·σ²/(p_i + σ²) is left open of a coordinate of power p_i by noise σ."""
    noise = answer.query.mechanism.mean_noise_std(voters=answer.voters)
    mean = answer.noisy_sum / (answer.voters * 2.0**GRID_BITS)
    for _ in range(count):
        normal = rng.normal(size=mean.shape)
        if isinstance(codec, PcaCodec):
            kept = codec.powers / (codec.powers + noise**2)
            yield codec.decode(kept * mean + np.sqrt(kept) * noise * normal, noise_std=0.0)
        else:
            yield codec.decode(mean + noise * normal, noise_std=noise)


def _zero_labels(lesson: Lesson) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """The zero code in place of each volume's answer, decoded as that answer was."""
    codecs = Codecs(lesson.public.objects)
    silent: dict[tuple[str, int, Mechanism], np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    for answer in lesson.answers:
        key = (answer.query.codec, answer.voters, answer.query.mechanism)
        if key not in silent:
            silent[key] = as_stored(decoded(answer, codecs.of(answer), np.zeros_like(answer.noisy_sum)))
        labels |= dict.fromkeys(answer.query.volumes, silent[key])
    return {volume: labels[volume] for volume in lesson.labels}


def _training(lesson: Lesson, labels: Labels, inputs: str) -> Training:
    """A fresh network by the study's student recipe on these labels."""

    def train(files: FitFiles, on_step: OnStep) -> torch.nn.Module:
        from server.protocols.student import train_student

        with VolumeCache(files.weights.with_suffix(".cache"), budget_bytes=CACHE_BYTES) as cache:
            images = [cache.keep(lesson.image(name)) for name in labels]
            model, _ = train_student(
                together(images),
                together([cache.keep(label) for label in labels.values()]),
                lesson.public.study.student,
                seed=lesson.seed,
                checkpoint=files.checkpoint,
                on_step=on_step,
            )
        return model

    return Training(inputs, train, lesson.public.study.student.steps)
