"""A joint query at the server: a public start and a frame before it, rounds about all volumes, the start trained on.

Everything before the query is public, everything after it is post-processing of the stored answers. Refuses a study
without a public start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.canonical import digest, sha256_bytes
from common.codecs import load_codec
from common.codecs.pca import PcaCodec
from common.config import Study
from common.data.grid import WHOLE_VOXELS
from common.errors import InvalidInput
from common.messages import MAX_VOLUMES
from common.privacy.mechanism import QuerySpec
from server.aggregation.progress import OnStage
from server.protocols.base import Answer, AnswerOf, FitFiles, Label, Lesson, QueryProtocol, Training, Wording, at_least
from server.protocols.joint.belief import believed, drawn_codes, labels_of, weighed
from server.protocols.joint.belief import control as control_of
from server.protocols.joint.plausible import Plausible
from server.protocols.joint.rounds import answered_rounds, ask_rounds
from server.protocols.posterior import Standing, doubt_of
from server.study.workspace import PAIRS_FILE, START_FILE, Public

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep
    from server.protocols.joint.student import Beside


class Joint(QueryProtocol):
    """See :class:`~server.protocols.base.QueryProtocol`."""

    name: ClassVar[str] = "joint"

    def wording(self, study: Study) -> Wording:
        planned = study.privacy.planned_queries
        times = "" if planned == 1 else f", up to {planned} times"
        return Wording(plan=f"a joint query in {planned} round(s)", which="the", each=f"all of them together{times},")

    def check_study(self, study: Study) -> None:
        if math.prod(study.data.grid) > WHOLE_VOXELS:
            raise InvalidInput(
                "voxels of a joint query's volumes",
                value=math.prod(study.data.grid),
                limit=f"at most {WHOLE_VOXELS}",
                remedy="ask on a coarser data.grid, with data.finer = 2 for the student, or set codec.joint = false",
            )
        if math.prod(study.data.student.grid) > WHOLE_VOXELS and not study.student.patch:
            raise InvalidInput("student.patch", value=(), limit="stated where the student's grid is so large")

    def check_volumes(self, study: Study, count: int) -> None:
        if count > MAX_VOLUMES:
            raise InvalidInput("public volumes of a joint query", value=count, limit=f"at most {MAX_VOLUMES}")
        at_least(count, needed=1)

    def asked_about(self, study: Study, volumes: Sequence[str]) -> tuple[str, ...]:
        return tuple(volumes)

    def volumes_answered(self, answers: int, *, asked: int) -> int:
        return asked if answers else 0

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        from server.protocols.joint.prepare import prepare  # torch, where a student is trained anyway

        prepare(made := public(), codec_of(made), sites=sites, on_stage=on_stage)

    def questions(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        return ask_rounds(public, answer_of)

    def labels(self, public: Public, answers: Sequence[Answer]) -> Iterator[Label]:
        """What the answers of all rounds say of each volume, before any student has learnt from it."""
        if rounds := rounds_of(public, answers):
            _, codes = believed(public, rounds)
            query = rounds[-1].query
            for volume, probabilities in zip(query.volumes, labels_of(codec_of(public), codes), strict=True):
                yield Label(volume, query.id, probabilities)

    def weigh(self, public: Public, answers: Sequence[Answer]) -> Plausible | None:
        rounds = rounds_of(public, answers)
        return weighed(public, codec_of(public), rounds) if rounds else None

    def standings(self, public: Public, answers: Sequence[Answer], *, draws: int) -> Iterator[Standing]:
        if rounds := rounds_of(public, answers):
            codec, (begun, codes) = codec_of(public), believed(public, rounds)
            drawn = [labels_of(codec, each) for each in drawn_codes(public, rounds, count=draws)]
            labels, centres = labels_of(codec, codes), labels_of(codec, begun).argmax(axis=1).astype(np.uint8)
            for row, volume in enumerate(rounds[-1].query.volumes):
                yield Standing(volume, centres[row], doubt_of(labels[row], (each[row] for each in drawn)))

    def student(self, lesson: Lesson) -> Training:
        """The public start trained on from what is believed after all rounds of the volumes whose labels stand."""
        return _training(lesson, None)

    def control(self, lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]) -> Training | None:
        """The same volumes, from what :func:`~server.protocols.joint.belief.control` reads in place of the answers."""
        training = _training(lesson, name)
        if name == "public_only" and lesson.paired is None:  # the zero code's student by another name
            return replace(training, train=lambda _files, _on_step: trained("zero_code"))
        return training


def codec_of(public: Public) -> PcaCodec:
    """The study's codec, which a frame can be laid over."""
    name = public.codec.sha256
    codec = load_codec(public.objects.get(name), expected_hash=name)
    if not isinstance(codec, PcaCodec):
        raise InvalidInput("codec of a joint query", value=codec.name, limit="pca")
    return codec


def rounds_of(public: Public, answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """The stored answers of the rounds so far, in order."""
    return answered_rounds(public, {answer.query.id: answer for answer in answers}.get)


def _training(lesson: Lesson, control: str | None) -> Training:
    public, study = lesson.public, lesson.public.study
    rounds = rounds_of(public, lesson.answers)
    if not rounds:
        raise InvalidInput("stored answers", value=0, limit="at least one", remedy="run the study first")
    volumes = rounds[-1].query.volumes
    kept = [row for row, volume in enumerate(volumes) if volume in lesson.labels]
    if not kept:
        raise InvalidInput("labels that do not stand rejected", value=0, limit="at least one")
    start = (public.folder / START_FILE).read_bytes()
    trainings = 2 if control is None and lesson.paired is not None else 1  # controls find the pairs' network trained

    def train(files: FitFiles, on_step: OnStep) -> torch.nn.Module:
        from server.protocols.joint.student import counted_on, read_start, refine, refine_finer

        beside = _beside(lesson, start, on_step if control in (None, "public_only") else None)
        if control == "public_only" and beside is not None:
            return beside.alone
        begun, found = (of_all[kept] for of_all in believed(public, rounds))
        codes = found if control is None else control_of(control, begun, found)
        if study.data.finer > 1:
            return refine_finer(
                read_start(start, study),
                ((lesson.image(volumes[row]), partial(lesson.onto, volumes[row])) for row in kept),
                codec_of(public),
                codes,
                study.student,
                seed=lesson.seed,
                checkpoint=files.checkpoint,
                on_step=on_step,
            )
        return refine(
            read_start(start, study),
            np.stack([lesson.image(volumes[row]) for row in kept]),
            codec_of(public),
            codes,
            study.student,
            seed=lesson.seed,
            beside=beside,
            checkpoint=files.checkpoint,
            on_step=on_step if trainings == 1 else counted_on(on_step, study.student.steps),
        )

    inputs = _inputs(lesson, control, rounds, kept, start)
    return Training(inputs, train, steps=trainings * study.student.steps)


def _inputs(lesson: Lesson, control: str | None, rounds: Sequence[Answer], kept: Sequence[int], start: bytes) -> str:
    """Digest of all that shapes a network, the constants of its recipe among it."""
    from common.models.fit import NEAR
    from server.protocols.joint.student import STUDENT_PASSES

    study, volumes, paired = lesson.public.study, rounds[-1].query.volumes, lesson.paired
    return digest(
        "joint-student-inputs",
        [
            control or "student",
            study.id,
            repr(study.student),
            [[answer.query.id, sha256_bytes(answer.noisy_sum.tobytes())] for answer in rounds],
            sha256_bytes(start),
            *([[volumes[row] for row in kept]] if len(kept) < len(volumes) else []),
            *([] if paired is None else [paired.hash]),
            *([repr(NEAR)] if paired is not None and control != "public_only" else []),
            *([STUDENT_PASSES] if paired is None and study.data.finer == 1 else []),
        ],
    )


def _beside(lesson: Lesson, start: bytes, on_step: OnStep | None) -> Beside | None:
    """The study's pairs and the network of them alone, which is trained once for student and controls."""
    from server.protocols.joint.student import Beside, read_start, refine_paired

    if lesson.paired is None:
        return None
    public, study = lesson.public, lesson.public.study
    alone = refine_paired(
        read_start(start, study),
        lesson.paired,
        study.student,
        seed=lesson.seed,
        checkpoint=public.folder / PAIRS_FILE,
        on_step=on_step,
    )
    return Beside(lesson.paired, alone)
