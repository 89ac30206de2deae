"""The terms of a demo: who adds the noise, and how many hospitals must answer."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from common.errors import InvalidInput
from consilium.demo.options import DemoOptions, Places
from consilium.demo.run import _protocol, terms


@pytest.mark.parametrize(
    ("hospitals", "aggregation", "sealed", "quorum"),
    [(2, None, False, 2), (3, None, True, 3), (4, None, True, 3), (8, None, True, 5), (3, "open", False, 2)],
)
def test_a_demo_of_three_hospitals_or_more_trusts_no_operator_unless_it_says_so(
    hospitals: int, aggregation: str | None, sealed: bool, quorum: int
) -> None:
    privacy = terms(DemoOptions(aggregation=aggregation), Places(Path()), [], [15] * hospitals).privacy
    assert (privacy.sealed, privacy.quorum) == (sealed, quorum)


def test_a_sealed_demo_has_two_hospitals_beside_its_colluders() -> None:
    with pytest.raises(InvalidInput, match="sealed sum: got"):
        terms(DemoOptions(colluders=2), Places(Path()), [], [15] * 3)


@pytest.mark.parametrize(("places", "protocol"), [((7.5, 8.5), "joint"), ((3.0, 13.0), "appearance")])
def test_a_demo_on_data_asks_as_the_planner_says_of_its_public_maps(
    tmp_path: Path, places: tuple[float, float], protocol: str
) -> None:
    maps, draws = [tmp_path / f"map-{number}.nii.gz" for number in range(8)], np.random.default_rng(0)
    voxels = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    for path in maps:
        ball = np.linalg.norm(voxels - draws.uniform(*places, 3), axis=-1) < draws.uniform(2, 3)
        nib.save(nib.Nifti1Image(ball.astype(np.uint8), np.eye(4)), path)
    assert _protocol(DemoOptions(data="set"), maps)[0] == protocol
    assert _protocol(DemoOptions(data="set", rounds=True), maps)[0] == "joint"
    assert _protocol(DemoOptions(data="set", rounds=False), maps)[0] == "per-volume"
    assert _protocol(DemoOptions(data="set", codec="paper-pca"), maps)[0] == "per-volume"
