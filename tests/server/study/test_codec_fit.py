"""Tests fitting a study's codec: an interrupted fit leaves none, and a codec with answers stays."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import DataConfig, TrainingConfig
from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from server.protocols.joint.protocol import Joint
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.earlier_versions import unpack
from tests.federation import make_study
from tests.golden.golden import HERE
from tests.studies import made_study


def test_a_joint_fit_that_is_interrupted_leaves_no_codec_without_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study()
    data = DataConfig(labels=("background", "anterior", "posterior"), spacing_mm=(4, 4, 4), grid=(8, 8, 8))
    codec = replace(study.codec, joint=True)
    small = TrainingConfig(channels=(2, 4), steps=4)
    workspace = made_study(tmp_path / "trial", replace(study, data=data, codec=codec, student=small, teacher=small))
    cases = write_phantoms(tmp_path / "public", cases=8, seed=1).cases
    setup.publish_volumes(workspace, [case.image for case in cases[:2]])
    maps = [case.label for case in cases[2:] if case.label is not None]
    monkeypatch.setattr(Joint, "prepare", lambda *_, **__: None)
    setup.fit_study_codec(workspace, maps, sites=2)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Joint, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.fit_study_codec(workspace, maps, sites=3)
    with pytest.raises(InvalidInput, match="`consilium codec fit`"):
        workspace.codec()


def test_codec_and_public_volumes_stay_what_a_study_s_answers_were_asked_with(tmp_path: Path) -> None:
    with tarfile.open(HERE / "per-volume-0.1.0.tar.xz") as archive:
        unpack(archive, tmp_path)
    workspace, before = Workspace(tmp_path / "study"), (tmp_path / "study" / "codec.json").read_bytes()
    with pytest.raises(InvalidInput, match=r"^codec .*--ledger"):
        setup.fit_study_codec(workspace, [tmp_path / "map.nii"], sites=9)
    with pytest.raises(InvalidInput, match=r"^public volumes"):
        setup.publish_volumes(workspace, [tmp_path / "image.nii"])
    assert (tmp_path / "study" / "codec.json").read_bytes() == before
