"""A joint query in a study's directory: the public start and the frame before it is asked, the student after.

The frame is part of the query's id, so it is made once and kept by hash before anything is asked: a run that resumes
asks the same question, and another frame would be another charge. Everything before the query is public, everything
after it is post-processing of the stored answer. Refuses a study without a public start.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs import load_codec
from common.codecs.frame import Frame, Observation
from common.codecs.pca import PcaCodec
from common.errors import InvalidInput
from common.ledger.store import Ledger, StoredAnswer
from common.models.fit import OnStep
from common.models.unet import build_unet, save_weights, weights_from_bytes
from common.privacy.calibration import study_mechanism
from common.privacy.mechanism import GRID_BITS
from server.decode import mean_noise_std
from server.finish import STUDENT_SEED, FitFiles, Fitted, fit_once, public_images
from server.joint import TEMPERATURE, joint_frame, labels_of, public_start, refine
from server.joint import control as control_of
from server.progress import OnStage
from server.tangent import tangent_kernel
from server.workspace import CodecRecord, Workspace


def prepare(workspace: Workspace, *, sites: int, on_stage: OnStage | None = None) -> CodecRecord:
    """Train the public start, keep it as a public object, and keep the frame of the query for ``sites`` sites."""
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
    record = CodecRecord(sha256=workspace.objects.put(frame.to_bytes()), dimension=frame.dimension)
    workspace.save_frame(record)
    return record


def decode_joint(workspace: Workspace, answer: StoredAnswer) -> dict[str, Float[np.ndarray, "k x y z"]]:
    """What a stored answer says of each volume, before any student has learnt from it."""
    codec, frame = _codec(workspace), _frame(workspace, answer)
    codes = frame.estimate(_observation(answer, frame))
    return dict(zip(answer.query.volumes, labels_of(codec, codes), strict=True))


def fit_joint(workspace: Workspace, *, files: FitFiles, on_step: OnStep, control: str | None = None) -> Fitted | None:
    """Refine the public start with the stored answer, or with what ``control`` reads in its place."""
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
    if not answers:
        raise InvalidInput("stored answers", value=0, limit="at least one", remedy="run the study first")
    answer = answers[0]
    codec, frame = _codec(workspace), _frame(workspace, answer)
    start = workspace.start_file.read_bytes()
    inputs = digest(
        "joint-student-inputs",
        [
            control or "student",
            study.id,
            repr(study.student),
            answer.query.id,
            sha256_bytes(answer.noisy_sum.tobytes()),
            sha256_bytes(start),
        ],
    )

    def train() -> object:
        images = public_images(workspace, answer.query.volumes)
        model = build_unet(
            study.student.channels, in_channels=len(study.data.channels), out_channels=len(study.data.labels)
        )
        weights_from_bytes(start, model)
        seen = _observation(answer, frame)
        read, observation = (frame, seen) if control is None else control_of(control, frame, seen)
        return refine(
            model,
            images,
            codec,
            read.estimate(observation),
            study.student,
            seed=STUDENT_SEED,
            checkpoint=files.checkpoint,
            on_step=on_step,
        )

    return fit_once(train, files=files, inputs=inputs)


def _observation(answer: StoredAnswer, frame: Frame) -> Observation:
    noise_std = mean_noise_std(answer.query.mechanism.noise_std, voters=answer.voters)
    return frame.read(answer.noisy_sum / (answer.voters * 2.0**GRID_BITS), noise_std=noise_std)


def _frame(workspace: Workspace, answer: StoredAnswer) -> Frame:
    return Frame.from_bytes(workspace.objects.get(answer.query.centre))


def _codec(workspace: Workspace) -> PcaCodec:
    name = workspace.codec().sha256
    codec = load_codec(workspace.objects.get(name), expected_hash=name)
    if not isinstance(codec, PcaCodec):
        raise InvalidInput("codec of a joint query", value=codec.name, limit="pca")
    return codec
