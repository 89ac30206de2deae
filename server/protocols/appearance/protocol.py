"""An appearance query at the server: a few rounds about how structures look, then labels and a student.

Where a structure is in every volume takes many numbers; what it looks like takes a few, with little noise. Frames and
rounds are a joint query's; everything after an answer is post-processing. Where public shapes share a place, a joint
query's public start says where structures may be, and the student begins from it. Every control is made as the student
is, of the looks that nobody was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs.pca import PcaCodec
from common.config import Study
from common.errors import InvalidInput
from common.study_mechanism import study_mechanism
from server.aggregation.progress import OnStage
from server.protocols.appearance.labels import LABELS, labelled, placed
from server.protocols.appearance.look import Look, first_frame, looks
from server.protocols.base import Answer, FitFiles, Label, Lesson, Training, Wording
from server.protocols.controls import DERANGEMENT_SEED, derangement
from server.protocols.joint.belief import surprise
from server.protocols.joint.plausible import Plausible
from server.protocols.joint.protocol import Joint, codec_of, rounds_of
from server.protocols.joint.rounds import keep_frame
from server.protocols.posterior import DRAW_SEED, Standing, doubt_of
from server.protocols.stored_labels import as_stored
from server.study.workspace import START_FILE, Public

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

Image = Float[np.ndarray, "c x y z"]
Map = Float[np.ndarray, "k x y z"]


class Appearance(Joint):
    """See :class:`~server.protocols.base.QueryProtocol`. It asks in rounds about all volumes, as a joint query does."""

    name: ClassVar[str] = "appearance"

    def wording(self, study: Study) -> Wording:
        return replace(super().wording(study), plan=f"an appearance query in {study.privacy.planned_queries} round(s)")

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        """The first frame needs no data; the volumes must be published, since every round is about all of them.

        Where public shapes share a place, the public start is trained, kept and published as a joint query's is.
        """
        made = public()
        (made.folder / START_FILE).unlink(missing_ok=True)  # an earlier codec's
        if placed(codec := codec_of(made)):
            from server.protocols.joint.prepare import images_of, prepare_start  # torch

            prepare_start(made, codec, images_of(made), on_stage=on_stage)
        voters = sites * made.study.privacy.voters_per_site
        noise_std = study_mechanism(made.study, dimension=1).mean_noise_std(voters=voters)
        keep_frame(made, first_frame(made.study, codec=made.codec.sha256, noise_std=noise_std), after=())

    def labels(self, public: Public, answers: Sequence[Answer]) -> Iterator[Label]:
        if rounds := rounds_of(public, answers):
            query, (_, look) = rounds[-1].query, looks(public, rounds)
            for volume, label in zip(query.volumes, _Volumes.of(public).labels(look), strict=True):
                yield Label(volume, query.id, label)

    def weigh(self, public: Public, answers: Sequence[Answer]) -> Plausible | None:
        rounds = rounds_of(public, answers)
        return Plausible(*surprise(public, rounds)) if rounds else None

    def standings(self, public: Public, answers: Sequence[Answer], *, draws: int) -> Iterator[Standing]:
        if rounds := rounds_of(public, answers):
            rng, (before, look) = np.random.default_rng(DRAW_SEED), looks(public, rounds)
            volumes = _Volumes.of(public)
            begun, found = (list(volumes.labels(each)) for each in (before, look))
            drawn = []
            for _ in range(draws):
                values = look.values + np.sqrt(look.variances) * rng.normal(size=look.values.shape)
                drawn.append(list(volumes.labels(replace(look, values=values))))
            for row, volume in enumerate(rounds[-1].query.volumes):
                centre = begun[row].argmax(axis=0).astype(np.uint8)
                yield Standing(volume, centre, doubt_of(found[row], (each[row] for each in drawn)))

    def student(self, lesson: Lesson) -> Training:
        """The public start, or a fresh network where there is none, from the labels of the volumes that stand."""
        return _training(lesson, "student", _look(lesson, after=True), lambda: dict(lesson.labels))

    def control(self, lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]) -> Training | None:
        """The same with the looks nobody was asked for: ``zero_code`` as they are, ``public_only`` with labels by its
        network, or with what the public start teaches itself where there is one, as in a joint query.
        ``shuffled_codes``: the student's labels, dealt to other volumes."""
        before, after = _look(lesson, after=False), _look(lesson, after=True)

        def silent() -> dict[str, Map]:
            volumes = list(lesson.labels)
            found = _Volumes.seen(lesson.public, [lesson.image(each) for each in volumes]).labels(before)
            return {volume: as_stored(label) for volume, label in zip(volumes, found, strict=True)}

        def dealt() -> dict[str, Map]:
            volumes = list(lesson.labels)
            order = derangement(len(volumes), seed=DERANGEMENT_SEED)
            return {volume: lesson.labels[volumes[other]] for volume, other in zip(volumes, order, strict=True)}

        def predicted() -> dict[str, Map]:
            from common.models.fit import predict

            model = trained("zero_code")
            return {volume: as_stored(predict(model, lesson.image(volume))) for volume in lesson.labels}

        match name:
            case "zero_code":
                return _training(lesson, name, before, silent)
            case "shuffled_codes":
                if len(lesson.labels) < 2:
                    return None
                return _training(lesson, name, after, dealt)
            case "public_only" if _start(lesson.public) is not None:
                return replace(_training(lesson, name, before, predicted), train=partial(_self_taught, lesson))
            case "public_only":
                return _training(lesson, name, before, predicted)
            case _:
                raise InvalidInput("control", value=name, limit="zero_code, shuffled_codes, public_only")


@dataclass(frozen=True, slots=True)
class _Volumes:
    """Public volumes, and what the public start says of each where there is one."""

    codec: PcaCodec
    images: Sequence[Image]
    begun: Sequence[Map] | None

    @classmethod
    def of(cls, public: Public) -> _Volumes:
        """All of the study's."""
        from common.data.volume import volume_from_bytes  # torch

        volumes = (volume_from_bytes(public.objects.get(volume), public.study.data) for volume in public.volumes)
        return cls.seen(public, [volume.image for volume in volumes])

    @classmethod
    def seen(cls, public: Public, images: Sequence[Image]) -> _Volumes:
        """Those of these images."""
        from common.models.fit import predict

        start = _start_model(public)
        return cls(codec_of(public), images, None if start is None else [predict(start, image) for image in images])

    def labels(self, look: Look) -> Iterator[Map]:
        """Their labels under a look."""
        return labelled(self.images, self.codec, look, begun=self.begun)


def _start(public: Public) -> bytes | None:
    """Weights of the public start; None where public shapes share no place."""
    path = public.folder / START_FILE
    return path.read_bytes() if path.exists() else None


def _start_model(public: Public) -> torch.nn.Module | None:
    from server.protocols.joint.student import read_start

    weights = _start(public)
    return None if weights is None else read_start(weights, public.study)


def _look(lesson: Lesson, *, after: bool) -> Look:
    rounds = rounds_of(lesson.public, lesson.answers)
    if not rounds:
        raise InvalidInput("stored answers", value=0, limit="at least one", remedy="run the study first")
    if not lesson.labels:
        raise InvalidInput("labels that do not stand rejected", value=0, limit="at least one")
    return looks(lesson.public, rounds)[after]


def _training(lesson: Lesson, name: str, look: Look, labels: Callable[[], dict[str, Map]]) -> Training:
    from server.protocols.joint.student import STUDENT_PASSES

    study, start = lesson.public.study, _start(lesson.public)
    inputs = digest(
        "appearance-student-of-labels",
        [
            name,
            study.id,
            repr(study.student),
            lesson.public.codec.sha256,
            sha256_bytes(look.values.tobytes() + look.variances.tobytes()),
            lesson.labels.hashes(),
            repr(LABELS),
            *([] if start is None else [sha256_bytes(start), STUDENT_PASSES]),
        ],
    )

    def train(files: FitFiles, on_step: OnStep) -> torch.nn.Module:
        from server.protocols.student import train_student

        taught = labels()
        images = np.stack([lesson.image(volume) for volume in taught])
        targets = np.stack(list(taught.values()))
        model, _ = train_student(
            images,
            targets,
            study.student,
            seed=lesson.seed,
            start=_start_model(lesson.public),
            checkpoint=files.checkpoint,
            on_step=on_step,
        )
        return model

    return Training(inputs, train, study.student.steps)


def _self_taught(lesson: Lesson, files: FitFiles, on_step: OnStep) -> torch.nn.Module:
    """The public start, trained on from its own codes: a joint query's zero code."""
    from server.protocols.joint.student import TEMPERATURE, codes_of, refine

    start, codec = _start_model(lesson.public), codec_of(lesson.public)
    assert start is not None
    images = np.stack([lesson.image(volume) for volume in lesson.labels])
    codes = codes_of(start, images, codec, temperature=TEMPERATURE)
    recipe = lesson.public.study.student
    return refine(start, images, codec, codes, recipe, seed=lesson.seed, checkpoint=files.checkpoint, on_step=on_step)
