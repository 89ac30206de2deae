"""Tests what public label maps predict of a joint query, and when they advise against it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from common.errors import InvalidInput
from common.intervals import next_interval
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from server.planning.public_shapes import PublicShapes, public_shapes, read_shapes
from server.planning.recommend import PAIRS, TASKS, Recommendation, recommend

PLACE = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
HIPPOCAMPI, HEARTS, TUMOURS = PublicShapes(0.89, 0.65), PublicShapes(0.72, 0.32), PublicShapes(0.58, 0.04)
DEMO, PLAIN = PublicShapes(0.85, 0.42), PublicShapes(0.88, 0.54)
PATIENT, HOSPITAL = Unit.PATIENT, Unit.HOSPITAL
MEASURED = [
    # label maps' shapes, hospitals, patients, unit, ε, δ; the gains measured (docs/utility.md)
    (HIPPOCAMPI, 8, 15, HOSPITAL, 8.0, 1e-3, (0.043, 0.046, 0.048, 0.065)),
    (HIPPOCAMPI, 8, 15, PATIENT, 8.0, 1e-5, (0.064, 0.085)),
    (HIPPOCAMPI, 8, 15, PATIENT, 2.0, 1e-5, (0.042, 0.063)),
    (HIPPOCAMPI, 4, 30, HOSPITAL, 8.0, 1e-3, (0.028, 0.042)),
    (HIPPOCAMPI, 8, 15, HOSPITAL, 1.0, 1e-5, (0.002,)),
    (HEARTS, 3, 9, PATIENT, 8.0, 1e-5, (0.114, 0.130, 0.139, 0.162, 0.293, 0.241, 0.205, 0.244, 0.147, 0.292, 0.221)),
    (TUMOURS, 4, 9, PATIENT, 8.0, 1e-5, (0.316, 0.333, 0.409, 0.328, 0.446, 0.245, 0.361, 0.304, 0.418, 0.363)),
    (
        DEMO,
        3,
        24,
        PATIENT,
        8.0,
        1e-5,
        (0.093, 0.141, 0.235, 0.140, 0.254, 0.064, 0.122, 0.237, 0.245, 0.078, 0.108, 0.149, 0.075, 0.173),
    ),
    (PLAIN, 4, 20, HOSPITAL, 8.0, 1e-3, (0.007, -0.004, -0.008)),
]


def balls(*, places: tuple[float, float]) -> list[np.ndarray]:
    draws = np.random.default_rng(0)
    centres = [draws.uniform(*places, 3) for _ in range(8)]
    return [(np.linalg.norm(PLACE - centre, axis=-1) < draws.uniform(2, 3)).astype(np.uint8) for centre in centres]


def advised(
    shapes: PublicShapes | None, hospitals: int, patients: int, unit: Unit, epsilon: float, delta: float
) -> Recommendation:
    return recommend(
        budget=Budget(epsilon, delta),
        accountant=AccountantName.EXACT,
        protection=Protection(unit, Relation.REPLACE_ONE),
        hospitals=hospitals,
        patients=patients,
        shapes=shapes,
    )


@pytest.mark.slow
def test_a_structure_with_a_place_has_a_mean_shape_and_one_without_has_none() -> None:
    placed, strewn = (public_shapes(balls(places=places), labels=2) for places in ((7.5, 8.5), (3.0, 13.0)))
    assert placed.mean_shape > 0.6
    assert strewn.mean_shape < 0.15
    assert placed.held > strewn.held
    assert 0 <= strewn.room <= 1


@pytest.mark.parametrize("kind", ["nowhere", "file"])
def test_a_path_that_is_no_folder_of_label_maps_is_named_as_such(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(
        InvalidInput, match=rf"folder of public label maps: got '.*{kind}'; allowed: an existing folder"
    ):
        read_shapes(tmp_path / kind)


@pytest.mark.slow
def test_maps_are_read_from_a_folder_and_fewer_than_four_are_refused(tmp_path: Path) -> None:
    maps = balls(places=(7.5, 8.5))
    for number, each in enumerate(maps[:4]):
        with pytest.raises(InvalidInput, match="at least 4" if number else "directly contains"):
            read_shapes(tmp_path)
        nib.save(nib.Nifti1Image(each, np.eye(4)), tmp_path / f"map-{number}.nii.gz")
    assert read_shapes(tmp_path).mean_shape > 0.5
    with pytest.raises(InvalidInput, match="at least 4"):
        public_shapes(maps[:3], labels=2)
    nib.save(nib.Nifti1Image(maps[0], np.eye(4)), tmp_path / "map-9.nii.gz")
    with pytest.raises(InvalidInput, match=r"map-9\.nii\.gz: got 'a copy of public label map map-0\.nii\.gz'"):
        read_shapes(tmp_path)


def header_field(path: Path, at: int, values: np.ndarray) -> None:
    """Write values into a NIfTI file's header."""
    data = bytearray(path.read_bytes())
    data[at : at + values.nbytes] = values.tobytes()
    path.write_bytes(data)


SPOILT: dict[str, Callable[[Path], object]] = {
    "no NIfTI": lambda path: path.write_bytes(b"hello"),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:2_000]),
    "no axis": lambda path: header_field(path, 42, np.zeros(1, "<i2")),
    "a bomb": lambda path: header_field(path, 42, np.full(3, 32_767, "<i2")),
    "no place": lambda path: header_field(path, 252, np.zeros(2, "<i2")),
    "NaN affine": lambda path: header_field(path, 280, np.full(12, np.nan, "<f4")),
    "four axes": lambda path: nib.save(nib.Nifti1Image(np.ones((8, 8, 8, 3), np.uint8), np.eye(4)), path),
    "two axes": lambda path: nib.save(nib.Nifti1Image(np.ones((8, 8), np.uint8), np.eye(4)), path),
    "too large a value": lambda path: header_field(path, 112, np.array([1e9, 0], "<f4")),
    "NaN": lambda path: nib.save(nib.Nifti1Image(np.full((8, 8, 8), np.nan, np.float32), np.eye(4)), path),
    "below zero": lambda path: header_field(path, 112, np.array([-1, 0], "<f4")),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_label_map_that_cannot_be_read_is_refused_by_its_name_with_a_remedy(how: str, tmp_path: Path) -> None:
    for number, each in enumerate(balls(places=(7.5, 8.5))[:4]):
        nib.save(nib.Nifti1Image(each, np.eye(4)), tmp_path / f"map-{number}.nii")
    SPOILT[how](tmp_path / "map-2.nii")
    with pytest.raises(InvalidInput, match=r"map-2\.nii.*to fix: "):
        read_shapes(tmp_path)


def test_a_map_given_twice_is_refused_since_it_would_be_in_both_halves() -> None:
    maps = balls(places=(7.5, 8.5))
    with pytest.raises(InvalidInput, match="map 4: got 'a copy of public label map 1'"):
        public_shapes([*maps[:3], maps[0].copy()], labels=2)


@pytest.mark.parametrize("setting", MEASURED)
def test_the_measured_gains_lie_in_the_interval(setting) -> None:
    *given, gains = setting
    found = advised(*given)
    assert all(found.low <= gain <= found.high for gain in gains)


def test_label_maps_alone_never_let_a_budget_be_spent() -> None:
    """The maps of phantoms look like others', although the phantoms' public start knew all that their teachers knew."""
    for *given, _ in MEASURED:
        found = advised(*given)
        assert found.low < 0
        assert not found.worth_asking
        assert "Do not spend" in found.summary


def test_of_five_tasks_four_lie_in_the_interval_that_the_others_give() -> None:
    held = []
    for task in TASKS:
        mean, half = next_interval([other for other in TASKS if other is not task])
        held.append(mean - half <= task <= mean + half)
    assert held == [True, True, True, True, False]  # plain phantoms


def test_nothing_is_advised_where_tumours_got_worse() -> None:
    """A measured joint query with pairs and twelve voters at patient (8, 1e-5) had Dice .161; its zero code
    had .243.
    """
    found = replace(advised(TUMOURS, 4, 12, PATIENT, 8.0, 1e-5), paired=3)
    assert found.low < -0.082 < found.high
    assert not found.worth_asking
    assert "Do not spend" in found.summary


def test_with_public_pairs_the_plan_says_that_no_gain_is_expected() -> None:
    terms = {"accountant": AccountantName.EXACT, "protection": Protection(Unit.PATIENT, Relation.REPLACE_ONE)}
    found = recommend(budget=Budget(8.0, 1e-5), hospitals=4, patients=9, paired=8, **terms)
    assert not found.worth_asking
    assert "8 public labelled cases" in found.summary
    assert "Do not spend" in found.summary
    for measured in (-0.001, 0.000, 0.001):  # over the best control: tumours, five rotations; hippocampi, two
        assert found.low < measured < found.high
    assert found.gain == 0
    few = recommend(budget=Budget(8.0, 1e-5), hospitals=4, patients=9, paired=PAIRS - 1, **terms)
    assert few.gain > 0


def test_a_plan_refuses_more_public_pairs_than_a_study_may_have() -> None:
    terms = {"accountant": AccountantName.EXACT, "protection": Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)}
    assert recommend(budget=Budget(8.0, 1e-3), hospitals=4, paired=1000, **terms).gain == 0
    with pytest.raises(InvalidInput, match="public pairs: got 1001; allowed: 0 to 1000"):
        recommend(budget=Budget(8.0, 1e-3), hospitals=4, paired=1001, **terms)


def test_where_the_mean_shape_says_little_looks_are_named() -> None:
    given = (3, 12, PATIENT, 8.0, 1e-5)
    found = advised(PublicShapes(0.73, 0.3), *given).summary
    assert re.search("^an appearance query .*4 rounds", found)
    assert 'codec.protocol = "appearance"' in found
    assert "codec.joint = true" in advised(HIPPOCAMPI, *given).summary


def test_without_label_maps_the_advice_names_the_task_it_stands_on() -> None:
    summary = advised(None, 8, 15, Unit.PATIENT, 8.0, 1e-5).summary
    assert "hippocampus" in summary
    assert "--label-maps" in summary


@pytest.mark.parametrize(
    ("shapes", "paired", "protocol"),
    [
        (PublicShapes(0.89, 0.65), 0, "joint"),  # hippocampi
        (PublicShapes(0.73, 0.37), 0, "appearance"),  # hearts, either draw
        (PublicShapes(0.70, 0.27), 0, "appearance"),
        (TUMOURS, 0, "appearance"),
        (TUMOURS, 8, "joint"),  # an appearance query learns from no pairs
        (PublicShapes(0.85, 0.42), 0, "joint"),  # the demo's
        (None, 0, "joint"),
    ],
)
def test_the_way_to_ask_follows_from_public_data(shapes, paired, protocol) -> None:
    found = advised(shapes, 3, 12, Unit.PATIENT, 8.0, 1e-5)
    assert replace(found, paired=paired).protocol == protocol
