"""Tests the comparison of a per-volume study's answers with what public shapes lead one to expect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.privacy.mechanism import GRID_BITS
from server.protocols.per_volume import PerVolume
from server.protocols.plausible import FALSE_ALARMS, PlausibilityTest
from server.public.material import CodecRecord, PublicMaterial
from server.public.public_files import FilesInFolder
from tests.federation import Federation, make_study

SITES = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with Federation(tmp_path_factory.mktemp("weigh"), study=make_study(planned_queries=40), sites=SITES) as federation:
        yield federation


def weighed(world: Federation, tmp_path: Path, *, scale: float, push: float = 0.0) -> PlausibilityTest:
    """Weigh 40 made-up answers: honest means scaled by ``scale``, and a ``push`` by one site."""
    rng, answers = np.random.default_rng(5), []
    record = CodecRecord(sha256=world.codec_hash, dimension=world.codec.dimension)
    for query in world.planned():
        noise = query.mechanism.mean_noise_std(voters=SITES)
        mean = scale * rng.normal(size=record.dimension) * np.sqrt(world.codec.powers)  # type: ignore[attr-defined]
        mean += rng.normal(scale=noise, size=record.dimension)
        mean[0] += push / SITES
        total = np.rint(mean * SITES * 2**GRID_BITS).astype(np.int64)
        answers.append(SimpleNamespace(query=query, noisy_sum=total, voters=SITES))
    public = PublicMaterial(world.study, record, world.volumes, world.objects, FilesInFolder(tmp_path))
    found = PerVolume().aggregate(public, answers).plausibility()
    assert found is not None
    return found


def test_answers_of_the_size_that_public_shapes_have_are_nothing_out_of_the_ordinary(
    world: Federation, tmp_path: Path
) -> None:
    found = weighed(world, tmp_path, scale=1.0)
    assert found.dimension == 40 * world.codec.dimension
    assert found.chance > 0.05


def test_the_operator_is_warned_of_a_site_that_pushes_every_answer_one_way(world: Federation, tmp_path: Path) -> None:
    found = weighed(world, tmp_path, scale=1.0, push=12.0)
    assert found.chance < FALSE_ALARMS
    assert any("larger than expected" in warning for warning in found.warnings)
