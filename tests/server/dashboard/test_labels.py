"""Tests which public volumes the Labels page lists."""

from dataclasses import replace
from pathlib import Path

from server.dashboard.labels import published
from server.study.workspace import Workspace
from tests.federation import make_study


def test_a_joint_query_lists_all_its_volumes_and_the_others_those_that_are_asked(tmp_path: Path) -> None:
    workspace, volumes = Workspace(tmp_path), tuple(digit * 64 for digit in "abc")
    study = make_study(planned_queries=1)
    assert published(workspace, study) == ()
    workspace.save_volumes(volumes)
    assert published(workspace, study) == volumes[:1]
    assert published(workspace, replace(study, codec=replace(study.codec, joint=True))) == volumes
