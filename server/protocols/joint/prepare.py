"""Prepares a joint study before its first round: trains and publishes the public start, and makes the first frame.

The joint query calls it. A *frame* is the centre, axes and weights relative to which a round's codes are computed.
"""

from __future__ import annotations

from common.codecs.codec import LinearCodec
from common.study_mechanism import mean_noise_std
from server.protocols.joint.kernel import tangent_kernel
from server.protocols.public_start import TEMPERATURE, images_of, joint_frame, keep_start
from server.protocols.rounds import keep_frame
from server.public.material import OnStage, Public


def prepare(public: Public, codec: LinearCodec, *, sites: int, on_stage: OnStage | None = None) -> None:
    """Train and publish the public start, and store the first round's frame.

    Args:
        public: The study's public material (terms, codec, volumes).
        codec: Its codec.
        sites: Number of sites expected to answer, which determines the noise on the mean code.
        on_stage: Called with the progress.
    """
    study, images, tell = public.study, images_of(public), on_stage or (lambda _name, _done, _total: None)
    start = keep_start(public, codec, images, on_stage=on_stage)
    kernel = tangent_kernel(
        start.model,
        images,
        codec,
        temperature=TEMPERATURE,
        on_volume=lambda done: tell("tangent kernel", done, len(images)),
    )
    noise_std = mean_noise_std(study, sites=sites)
    frame = joint_frame(start, codec, kernel=kernel, noise_std=noise_std, radius=study.codec.radius)
    keep_frame(public, frame, after=())
