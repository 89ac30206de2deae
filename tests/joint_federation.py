"""Makes a federation that asks one joint query about all volumes, in a made-up frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from common.protocols.frame import Frame, plan_frame
from server.public.material import CodecRecord
from tests.federation import Federation, make_study
from tests.worlds import silent

VOLUMES = 5


def joint_federation(root: Path, *, rounds: int) -> Federation:
    terms = make_study(planned_queries=rounds, voters_per_site=2)
    study = replace(terms, codec=replace(terms.codec, joint=True))
    made = Federation(root, study=study, volumes=VOLUMES, sampler=silent)
    for voters in made.voters.values():
        voters.voters = 2
    made.frame = keep(made, frame_of(made))
    return made


def frame_of(fed: Federation, *, volumes: int = VOLUMES, codec: str = "") -> Frame:
    rng = np.random.default_rng(0)
    size = volumes * min(4, fed.codec.dimension)
    factors = rng.normal(size=(size, size))
    return plan_frame(
        kernel=factors @ factors.T,
        centre=rng.normal(0, 0.1, size=(volumes, fed.codec.dimension)),
        variances=np.linspace(0.2, 0.1, fed.codec.dimension),
        residual=0.5,
        temperature=0.5,
        noise_std=1e-4,
        radius=fed.study.codec.radius,
        codec=codec or fed.codec_hash,
    )


def keep(fed: Federation, frame: Frame) -> CodecRecord:
    return CodecRecord(sha256=fed.objects.put(frame.to_bytes()), dimension=frame.dimension)
