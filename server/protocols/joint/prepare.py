"""What is public before the first round: the public start, kept and published, and the first frame around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from common.codecs.pca import PcaCodec
from common.data.volume import volume_from_bytes
from common.models.unet import save_weights
from common.study_mechanism import study_mechanism
from server.aggregation.progress import OnStage
from server.protocols.base import STUDENT_SEED
from server.protocols.joint.kernel import tangent_kernel
from server.protocols.joint.rounds import keep_frame
from server.protocols.joint.student import TEMPERATURE, Start, joint_frame, public_start
from server.protocols.paired import read_paired
from server.study.workspace import START_FILE, Public


def prepare(public: Public, codec: PcaCodec, *, sites: int, on_stage: OnStage | None = None) -> None:
    """Train the public start, keep it as a public object, and keep the first round's frame for ``sites`` sites."""
    study, images, tell = public.study, images_of(public), on_stage or (lambda _name, _done, _total: None)
    start = prepare_start(public, codec, images, on_stage=on_stage)
    kernel = tangent_kernel(
        start.model,
        images,
        codec,
        temperature=TEMPERATURE,
        on_volume=lambda done: tell("tangent kernel", done, len(images)),
    )
    voters = sites * study.privacy.voters_per_site
    noise_std = study_mechanism(study, dimension=1).mean_noise_std(voters=voters)
    frame = joint_frame(start, codec, kernel=kernel, noise_std=noise_std, radius=study.codec.radius)
    keep_frame(public, frame, after=())


def prepare_start(
    public: Public, codec: PcaCodec, images: Float[np.ndarray, "n c x y z"], *, on_stage: OnStage | None = None
) -> Start:
    """Train the public start on the public volumes' ``images`` and keep it, as a public object too."""
    study, file = public.study, public.folder / START_FILE
    tell = on_stage or (lambda _name, _done, _total: None)
    start = public_start(
        images,
        codec,
        codec.powers,
        study.student
        if study.data.finer == 1
        else replace(study.student, patch=()),  # whole volumes of the coarse grid
        seed=STUDENT_SEED,
        paired=read_paired(public),
        on_step=lambda step, _loss: tell("public start", step, study.student.steps),
    )
    save_weights(file, start.model)
    public.objects.put(file.read_bytes())
    return start


def images_of(public: Public) -> Float[np.ndarray, "n c x y z"]:
    """The public volumes' images on the study's grid."""
    return np.stack([volume_from_bytes(public.objects.get(each), public.study.data).image for each in public.volumes])
