"""Runs the appearance query at the server: a few rounds about how structures look, then labels and a student.

``protocol_of`` creates the protocol by name. To describe where a structure is in every volume takes many numbers. To
describe its intensities takes few, and at the same privacy cost few numbers have less relative noise. As in a joint
query, the study asks in rounds, each with a frame. Everything after an answer is post-processing. If public shapes
overlap enough, a public start (a network trained on public data alone) is trained as in a joint query. It contributes
to the labels, and the student's training begins from it. Controls are trained by the student's recipe. A training
without an answer or a label is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs.codec import LinearCodec
from common.errors import InvalidInput
from common.study_mechanism import mean_noise_std
from server.protocols.appearance.labels import LABELS, labelled, placed
from server.protocols.appearance.look import Look, estimate_looks, first_frame
from server.protocols.controls import CONTROLS, predicted, shuffled
from server.protocols.plausible import PlausibilityTest
from server.protocols.posterior import DRAW_SEED, LabelUncertainty, doubt_of
from server.protocols.query_protocol import Answer, AnswerResults, FitFiles, Label, NetworkTraining, StudentData
from server.protocols.rounds import InRounds, codec_of, keep_frame, rounds_of, rounds_to_learn, surprise
from server.protocols.stored_labels import as_stored
from server.public.material import START_FILE, OnStage, PublicMaterial

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

Image = Float[np.ndarray, "c x y z"]
Map = Float[np.ndarray, "k x y z"]


class Appearance(InRounds):
    """The appearance query, about how structures look; see :class:`~server.protocols.query_protocol.QueryProtocol`."""

    def prepare(self, public: Callable[[], PublicMaterial], *, sites: int, on_stage: OnStage) -> None:
        """Store the first frame and, if public shapes overlap enough, train and publish the public start.

        The first frame is computed without data. The volumes must nevertheless be published before, because every round
        is about all of them. If the study was given a network to begin from, that network is the public start, even if
        shapes do not overlap.

        Args:
            public: Returns the study's public material (terms, codec, volumes).
            sites: Number of sites expected to answer, which determines the noise on the mean code.
            on_stage: Called with the progress.
        """
        made = public()
        made.kept.discard(START_FILE)  # the file may belong to an earlier codec
        codec = codec_of(made)
        if made.study.start.weights or placed(codec):
            from server.protocols.public_start import images_of, keep_start  # torch

            keep_start(made, codec, images_of(made), on_stage=on_stage)
        noise_std = mean_noise_std(made.study, sites=sites)
        keep_frame(made, first_frame(made.study, codec=made.codec.sha256, noise_std=noise_std), after=())

    def aggregate(self, public: PublicMaterial, answers: Sequence[Answer]) -> AppearanceResults:
        return AppearanceResults(public, rounds_of(public, answers))

    def finish(self, student_data: StudentData) -> NetworkTraining:
        """Return the student's training on the labels that are not rejected, from the public start or else a fresh
        network.
        """
        return _training(student_data, "student", _looks(student_data)[1], lambda: student_data.labels)

    def control(self, student_data: StudentData, name: str) -> NetworkTraining | None:
        """Return the training of a control.

        * ``zero_code``: trained on labels computed from the appearance assumed before any answer;
        * ``public_only``: with a public start, the start trained on its own codes; without one, a network trained on
          labels that the ``zero_code`` network predicts;
        * ``shuffled_codes``: trained on the student's labels, each given to another volume.

        Returns:
            The training; None for ``shuffled_codes`` if there is only one label.
        """
        before, after = _looks(student_data)

        def silent() -> dict[str, Map]:
            volumes = list(student_data.labels)
            found = _Volumes.seen(student_data.public, [student_data.image(each) for each in volumes]).labels(before)
            return {volume: as_stored(label) for volume, label in zip(volumes, found, strict=True)}

        match name:
            case "zero_code":
                return _training(student_data, name, before, silent)
            case "shuffled_codes":
                if len(student_data.labels) < 2:
                    return None
                return _training(student_data, name, after, lambda: shuffled(student_data.labels))
            case "public_only":
                training = _training(student_data, name, before, lambda: predicted(student_data))
                return (
                    training
                    if _start(student_data.public) is None
                    else replace(training, train=partial(_self_taught, student_data))
                )
            case _:
                raise InvalidInput("control", value=name, limit=", ".join(CONTROLS))


@dataclass(frozen=True, slots=True)
class AppearanceResults(AnswerResults):
    """Computes how structures look from the answers of all rounds, and each volume's label from how structures look.

    Attributes:
        public: The study's public material (terms, codec, volumes).
        rounds: The stored answers, one a round.
    """

    public: PublicMaterial
    rounds: Sequence[Answer]

    def labels(self) -> Iterator[Label]:
        if self.rounds:
            query, (_, look) = self.rounds[-1].query, estimate_looks(self.public, self.rounds)
            for volume, label in zip(query.volumes, _Volumes.of(self.public).labels(look), strict=True):
                yield Label(volume, query.id, label)

    def plausibility(self) -> PlausibilityTest | None:
        return PlausibilityTest(*surprise(self.public, self.rounds)) if self.rounds else None

    def doubts(self, *, draws: int) -> Iterator[LabelUncertainty]:
        if self.rounds:
            rng, (before, look) = np.random.default_rng(DRAW_SEED), estimate_looks(self.public, self.rounds)
            volumes = _Volumes.of(self.public)
            begun, found = (list(volumes.labels(each)) for each in (before, look))
            drawn = []
            for _ in range(draws):
                values = look.values + np.sqrt(look.variances) * rng.normal(size=look.values.shape)
                drawn.append(list(volumes.labels(replace(look, values=values))))
            for row, volume in enumerate(self.rounds[-1].query.volumes):
                centre = begun[row].argmax(axis=0).astype(np.uint8)
                yield LabelUncertainty(volume, centre, doubt_of(found[row], (each[row] for each in drawn)))


@dataclass(frozen=True, slots=True)
class _Volumes:
    """Public volumes, with the public start's prediction for each if there is a start."""

    codec: LinearCodec
    images: Sequence[Image]
    begun: Sequence[Map] | None

    @classmethod
    def of(cls, public: PublicMaterial) -> _Volumes:
        """Return all volumes of the study."""
        return cls.seen(public, [public.image(volume) for volume in public.volumes])

    @classmethod
    def seen(cls, public: PublicMaterial, images: Sequence[Image]) -> _Volumes:
        """Return volumes with these images, and with the public start's predictions for them if there is a start."""
        from common.models.fit import predict

        start = _start_model(public)
        return cls(codec_of(public), images, None if start is None else [predict(start, image) for image in images])

    def labels(self, look: Look) -> Iterator[Map]:
        """Yield the volumes' labels, given how structures look."""
        return labelled(self.images, self.codec, look, begun=self.begun)


def _start(public: PublicMaterial) -> bytes | None:
    """Return the weights of the public start; None if the study has none."""
    return public.kept.read(START_FILE)


def _start_model(public: PublicMaterial) -> torch.nn.Module | None:
    from server.protocols.student_fit import read_start

    weights = _start(public)
    return None if weights is None else read_start(weights, public.study)


def _looks(student_data: StudentData) -> tuple[Look, Look]:
    """Return how structures look: as assumed before any answer, and after all answers."""
    return estimate_looks(student_data.public, rounds_to_learn(student_data))


def _training(
    student_data: StudentData, name: str, look: Look, labels: Callable[[], Mapping[str, Map]]
) -> NetworkTraining:
    from server.protocols.public_start import STUDENT_PASSES

    study, start = student_data.public.study, _start(student_data.public)
    inputs = digest(
        "appearance-student-of-labels",
        [
            name,
            study.id,
            repr(study.student),
            student_data.public.codec.sha256,
            sha256_bytes(look.values.tobytes() + look.variances.tobytes()),
            student_data.labels.hashes(),
            repr(LABELS),
            *([] if start is None else [sha256_bytes(start), STUDENT_PASSES]),
        ],
    )

    def train(files: FitFiles | None, on_step: OnStep) -> torch.nn.Module:
        from server.protocols.student_fit import learn

        return learn(student_data, labels(), files, on_step, start=_start_model(student_data.public))

    return NetworkTraining(inputs, train, study.student.steps)


def _self_taught(student_data: StudentData, files: FitFiles | None, on_step: OnStep) -> torch.nn.Module:
    """Train the public start further on its own codes, as a joint query trains its control ``zero_code``."""
    from server.protocols.public_start import TEMPERATURE, codes_of, refine

    start, codec = _start_model(student_data.public), codec_of(student_data.public)
    assert start is not None
    images = np.stack([student_data.image(volume) for volume in student_data.labels])
    codes = codes_of(start, images, codec, temperature=TEMPERATURE)
    recipe = student_data.public.study.student
    checkpoint = None if files is None else files.checkpoint
    return refine(start, images, codec, codes, recipe, seed=student_data.seed, checkpoint=checkpoint, on_step=on_step)
