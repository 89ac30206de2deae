"""Runs the joint query at the server: a public start, rounds about all volumes at once, and a student.

``protocol_of`` creates the protocol by name. The public start is a network trained on public data alone; the student is
the start, trained further. Everything before a query uses public data; everything after an answer is post-processing.
A training without a public start, an answer or a label is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.config import Study
from common.errors import InvalidInput
from common.study_mechanism import mean_noise_std
from server.protocols.decode import labels_of
from server.protocols.joint.belief import control as control_of
from server.protocols.joint.belief import drawn_codes, estimated_codes, plausibility
from server.protocols.plausible import PlausibilityTest
from server.protocols.posterior import LabelUncertainty, doubt_of
from server.protocols.query_protocol import Answer, AnswerResults, FitFiles, Label, NetworkTraining, StudentData
from server.protocols.rounds import InRounds, codec_of, keep_frame, rounds_of, rounds_to_learn
from server.public.material import PAIRS_FILE, START_FILE, OnStage, PublicMaterial
from server.public.paired import Paired

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep
    from server.protocols.public_start import PairTraining


class Joint(InRounds):
    """The joint query, about all public volumes; see :class:`~server.protocols.query_protocol.QueryProtocol`."""

    def prepare(self, public: Callable[[], PublicMaterial], *, sites: int, on_stage: OnStage) -> None:
        """Train and publish the public start, and store the first round's frame.

        Args:
            public: Returns the study's public material (terms, codec, volumes).
            sites: Number of sites expected to answer, which determines the noise on the mean code.
            on_stage: Called with the progress.
        """
        from server.protocols.joint.kernel import tangent_kernel  # imports torch, which training needs anyway
        from server.protocols.public_start import TEMPERATURE, images_of, joint_frame, keep_start

        made = public()
        codec, images = codec_of(made), images_of(made)
        start = keep_start(made, codec, images, on_stage=on_stage)
        kernel = tangent_kernel(
            start.model,
            images,
            codec,
            temperature=TEMPERATURE,
            on_volume=lambda done: on_stage("tangent kernel", done, len(images)),
        )
        noise_std = mean_noise_std(made.study, sites=sites)
        radius, sha256 = made.study.codec.radius, made.codec.sha256
        frame = joint_frame(start, codec, codec_sha256=sha256, kernel=kernel, noise_std=noise_std, radius=radius)
        keep_frame(made, frame, after=())

    def aggregate(self, public: PublicMaterial, answers: Sequence[Answer]) -> JointResults:
        return JointResults(public, rounds_of(public, answers))

    def finish(self, student_data: StudentData) -> NetworkTraining:
        """Return the student's training: the public start learns the codes estimated after all rounds.

        Volumes whose labels are rejected are left out.
        """
        return _training(student_data, None)

    def control(self, student_data: StudentData, name: str) -> NetworkTraining | None:
        """Return a control's training: the public start learns the codes of
        :func:`~server.protocols.joint.belief.control`.

        Without public pairs, ``public_only`` needs no training of its own: it is the trained network of ``zero_code``.
        """
        training = _training(student_data, name)
        if name == "public_only" and not student_data.public.paired:  # ProtocolTerms.one_public
            return replace(training, train=lambda _files, _on_step: student_data.trained("zero_code"))
        return training


@dataclass(frozen=True, slots=True)
class JointResults(AnswerResults):
    """Computes each volume's label and its uncertainty from the answers of all rounds of a joint query.

    Attributes:
        public: The study's public material (terms, codec, volumes).
        rounds: The stored answers, one a round.
    """

    public: PublicMaterial
    rounds: Sequence[Answer]

    def labels(self) -> Iterator[Label]:
        if self.rounds:
            _, codes = estimated_codes(self.public, self.rounds)
            query = self.rounds[-1].query
            for volume, probabilities in zip(query.volumes, labels_of(codec_of(self.public), codes), strict=True):
                yield Label(volume, query.id, probabilities)

    def plausibility(self) -> PlausibilityTest | None:
        return plausibility(self.public, codec_of(self.public), self.rounds) if self.rounds else None

    def doubts(self, *, draws: int) -> Iterator[LabelUncertainty]:
        if self.rounds:
            codec, (begun, codes) = codec_of(self.public), estimated_codes(self.public, self.rounds)
            drawn = [labels_of(codec, each) for each in drawn_codes(self.public, self.rounds, count=draws)]
            labels, centres = labels_of(codec, codes), labels_of(codec, begun).argmax(axis=1).astype(np.uint8)
            for row, volume in enumerate(self.rounds[-1].query.volumes):
                yield LabelUncertainty(volume, centres[row], doubt_of(labels[row], (each[row] for each in drawn)))


def _training(student_data: StudentData, control: str | None) -> NetworkTraining:
    public, study, paired = student_data.public, student_data.public.study, student_data.public.pairs()
    rounds = rounds_to_learn(student_data)
    volumes = rounds[-1].query.volumes
    kept = [row for row, volume in enumerate(volumes) if volume in student_data.labels]
    start = public.kept.read(START_FILE)
    if start is None:
        raise InvalidInput(
            "the public start is missing from the study",
            remedy="restore start.pt from a backup, or run `consilium codec fit` again",
        )
    trainings = 2 if control is None and paired is not None else 1  # with the network of the public pairs

    def train(files: FitFiles | None, on_step: OnStep) -> torch.nn.Module:
        from server.protocols.public_start import counted_on, refine
        from server.protocols.student_fit import read_start

        beside = _beside(student_data, paired, start, on_step if control in (None, "public_only") else None)
        if control == "public_only" and beside is not None:
            return beside.alone
        begun, found = (of_all[kept] for of_all in estimated_codes(public, rounds))
        codes = found if control is None else control_of(control, begun, found)
        if study.data.finer > 1:
            if files is None:
                raise InvalidInput(
                    "data.finer", value=study.data.finer, limit="1 in a study in memory, because it stores no files"
                )
            names = [volumes[row] for row in kept]
            return _on_finer_grid(student_data, read_start(start, study), names, codes, files.checkpoint, on_step)
        return refine(
            read_start(start, study),
            np.stack([student_data.image(volumes[row]) for row in kept]),
            codec_of(public),
            codes,
            study.student,
            seed=student_data.seed,
            beside=beside,
            checkpoint=None if files is None else files.checkpoint,
            on_step=on_step if trainings == 1 else counted_on(on_step, study.student.steps),
        )

    inputs = _inputs(study, paired, control, rounds, kept, start)
    passes = _passes(study, paired, trainings)
    return NetworkTraining(inputs, train, steps=trainings * study.student.steps, passes=passes)


def _on_finer_grid(
    student_data: StudentData,
    model: torch.nn.Module,
    volumes: Sequence[str],
    codes: Float[np.ndarray, "n l"],
    checkpoint: Path,
    on_step: OnStep,
) -> torch.nn.Module:
    """Train ``model`` on labels decoded from the volumes' codes, on a finer grid than that of the study's queries.

    There is one pass, because predictions on the finer grid cannot be encoded, and therefore cannot be shifted. Volumes
    that do not fit into the memory of :class:`~common.data.volume_cache.VolumeCache` are kept in files.
    """
    from common.data.volume_cache import StoredVolumes, VolumeCache
    from common.models.fit import fit

    public, codec = student_data.public, codec_of(student_data.public)
    with VolumeCache(checkpoint.with_suffix(".volumes")) as cache:
        images, targets = [], []
        for volume, code in zip(volumes, codes, strict=True):
            images.append(cache.keep(student_data.image(volume)))
            label = codec.decode(code, noise_std=0.0)
            targets.append(cache.keep(on_students_grid(public, volume, label)))
        parts = StoredVolumes(images), StoredVolumes(targets)
        fit(model, *parts, public.study.student, seed=student_data.seed, checkpoint=checkpoint, on_step=on_step)
    checkpoint.unlink(missing_ok=True)
    return model


def on_students_grid(
    public: PublicMaterial, volume: str, label: Float[np.ndarray, "k x y z"]
) -> Float[np.ndarray, "k u v w"]:
    """Resample a volume's label from the study's grid to the student's.

    Args:
        public: The study's public material, whose volumes are files.
        volume: The volume's hash.
        label: Probabilities, float array [k, x, y, z] for k classes.

    Returns:
        Probabilities, float array [k, u, v, w] for k classes on the student's grid of u × v × w voxels.
    """
    from common.data.volume import onto_grid, volume_from_bytes  # imports torch

    content, data = public.objects.get(volume), public.study.data
    return onto_grid(label, volume_from_bytes(content, data), volume_from_bytes(content, data.student))


def _passes(study: Study, paired: Paired | None, trainings: int) -> tuple[int, ...]:
    """Return the last step of each pass of a training; empty if it has one pass.

    If a network is first trained on the public pairs alone, each of the two trainings counts as a pass.
    """
    from server.protocols.public_start import pass_ends

    if trainings > 1:
        return tuple(number * study.student.steps for number in range(1, trainings + 1))
    return pass_ends(study.student) if paired is None and study.data.finer == 1 else ()


def _inputs(
    study: Study,
    paired: Paired | None,
    control: str | None,
    rounds: Sequence[Answer],
    kept: Sequence[int],
    start: bytes,
) -> str:
    """Return the digest of everything that determines a network, including the constants of its recipe."""
    from common.models.fit import NEAR
    from server.protocols.public_start import STUDENT_PASSES

    volumes = rounds[-1].query.volumes
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


def _beside(
    student_data: StudentData, paired: Paired | None, start: bytes, on_step: OnStep | None
) -> PairTraining | None:
    """Return the study's public pairs and a network trained on these pairs alone; None if the study has no pairs.

    The network is trained once, for the student and all controls.
    """
    from server.protocols.public_start import PairTraining, refine_paired
    from server.protocols.student_fit import read_start

    if paired is None:
        return None
    public, study = student_data.public, student_data.public.study
    alone = refine_paired(
        read_start(start, study),
        paired,
        study.student,
        seed=student_data.seed,
        checkpoint=public.kept.checkpoint(PAIRS_FILE),
        on_step=on_step,
    )
    return PairTraining(paired, alone)
