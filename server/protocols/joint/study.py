"""A joint query in a study's directory: the public start and the first frame before it is asked, the student after.

Everything before the query is public, everything after it is post-processing of the stored answers; between its rounds
:mod:`server.protocols.joint.rounds`. Refuses a study without a public start.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs import load_codec
from common.codecs.pca import PcaCodec
from common.errors import InvalidInput
from common.models.fit import OnStep
from common.models.unet import build_unet, save_weights, weights_from_bytes
from common.study_mechanism import study_mechanism
from server.aggregation.progress import OnStage
from server.ledger.server_ledger import Ledger, StoredAnswer
from server.postprocess.decode import mean_noise_std
from server.postprocess.finish import STUDENT_SEED, FitFiles, Fitted, fit_once, public_images
from server.protocols.joint.kernel import tangent_kernel
from server.protocols.joint.plausible import Plausible, shares
from server.protocols.joint.rounds import answered_rounds, believed, keep_frame, surprise
from server.protocols.joint.student import TEMPERATURE, joint_frame, labels_of, public_start, refine
from server.protocols.joint.student import control as control_of
from server.study.workspace import CodecRecord, Workspace


def prepare(workspace: Workspace, *, sites: int, on_stage: OnStage | None = None) -> CodecRecord:
    """Train the public start, keep it as a public object, and keep the first round's frame for ``sites`` sites."""
    study, codec = workspace.study(), _codec(workspace)
    images = public_images(workspace, workspace.volumes())
    tell = on_stage or (lambda _name, _done, _total: None)
    start = public_start(
        images,
        codec,
        codec.powers,
        study.student,
        seed=STUDENT_SEED,
        on_step=lambda step, _loss: tell("public start", step, study.student.steps),
    )
    save_weights(workspace.start_file, start.model)
    workspace.objects.put(workspace.start_file.read_bytes())
    kernel = tangent_kernel(
        start.model,
        images,
        codec,
        temperature=TEMPERATURE,
        on_volume=lambda done: tell("tangent kernel", done, len(images)),
    )
    voters = sites * study.privacy.voters_per_site
    frame = joint_frame(
        start,
        codec,
        kernel=kernel,
        noise_std=mean_noise_std(study_mechanism(study, dimension=1).noise_std, voters=voters),
        radius=study.codec.radius,
    )
    (record,) = keep_frame(workspace, frame, after=())
    return record


def decode_joint(workspace: Workspace) -> Iterator[tuple[str, str, Float[np.ndarray, "k x y z"]]]:
    """What the stored answers of all rounds say of each volume, before any student has learnt from it.

    (volume, the last round's query id, probabilities), none before the first answer.
    """
    if answers := _answers(workspace):
        _, codes = believed(workspace, answers)
        query = answers[-1].query
        for volume, probabilities in zip(query.volumes, labels_of(_codec(workspace), codes), strict=True):
            yield volume, query.id, probabilities


def weigh(workspace: Workspace) -> Plausible | None:
    """Whether the stored answers look like what was expected of them; None before the first."""
    if not (answers := _answers(workspace)):
        return None
    codec, names = _codec(workspace), workspace.study().data.labels
    begun, codes = believed(workspace, answers)
    statistic, dimension = surprise(workspace, answers)
    voxels = [_voxels(codec, each) for each in (codes, begun)]
    return Plausible(statistic, dimension, shares(names[1:], voxels[0][1:], voxels[1][1:]))


def _voxels(codec: PcaCodec, codes: Float[np.ndarray, "n l"]) -> list[int]:
    """Voxels of every label, background first, in the label maps of these codes together."""
    counts = np.zeros(codec.labels, dtype=np.int64)
    for code in codes:
        counts += np.bincount(codec.decode(code, noise_std=0.0).argmax(axis=0).ravel(), minlength=codec.labels)
    return [int(count) for count in counts]


def fit_joint(workspace: Workspace, *, files: FitFiles, on_step: OnStep, control: str | None = None) -> Fitted | None:
    """Refine the public start with the stored answers, or with what ``control`` reads in their place."""
    study = workspace.study()
    answers = _answers(workspace)
    if not answers:
        raise InvalidInput("stored answers", value=0, limit="at least one", remedy="run the study first")
    start = workspace.start_file.read_bytes()
    inputs = digest(
        "joint-student-inputs",
        [
            control or "student",
            study.id,
            repr(study.student),
            [[answer.query.id, sha256_bytes(answer.noisy_sum.tobytes())] for answer in answers],
            sha256_bytes(start),
        ],
    )

    def train() -> object:
        images = public_images(workspace, answers[-1].query.volumes)
        model = build_unet(
            study.student.channels, in_channels=len(study.data.channels), out_channels=len(study.data.labels)
        )
        weights_from_bytes(start, model)
        begun, codes = believed(workspace, answers)
        return refine(
            model,
            images,
            _codec(workspace),
            codes if control is None else control_of(control, begun, codes),
            study.student,
            seed=STUDENT_SEED,
            checkpoint=files.checkpoint,
            on_step=on_step,
        )

    return fit_once(train, files=files, inputs=inputs)


def _answers(workspace: Workspace) -> tuple[StoredAnswer, ...]:
    with Ledger.open(workspace.ledger_file) as ledger:
        return answered_rounds(workspace, ledger)


def _codec(workspace: Workspace) -> PcaCodec:
    name = workspace.codec().sha256
    codec = load_codec(workspace.objects.get(name), expected_hash=name)
    if not isinstance(codec, PcaCodec):
        raise InvalidInput("codec of a joint query", value=codec.name, limit="pca")
    return codec
