"""Tests odd and broken files against verdicts.toml, whose verdicts were written before the code.

Odd files are accepted with finite values and left on the left, and the reading states what was corrected. Broken files
are refused with one reason and one remedy, and never with a patient's name.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from common.data.volume import load_example
from common.errors import InvalidInput
from tests.common.data.corpus import NAME, RULES, Files

VERDICTS = tomllib.loads((Path(__file__).parent / "verdicts.toml").read_text(encoding="utf-8"))


def test_every_rule_has_a_verdict_and_every_verdict_a_rule() -> None:
    assert RULES.keys() == VERDICTS["good"].keys() | VERDICTS["broken"].keys()
    assert len(VERDICTS["good"]) >= 20
    assert len(VERDICTS["broken"]) >= 60


@pytest.mark.parametrize("name", VERDICTS["good"])
def test_an_odd_but_usable_file_is_accepted_and_its_corrections_are_noted(name: str, tmp_path: Path) -> None:
    files: Files = RULES[name]()
    example = load_example(files.write(tmp_path), files.data)
    word = VERDICTS["good"][name]
    assert word in "; ".join(example.notes)
    assert bool(word) == bool(example.notes), example.notes
    assert np.isfinite(example.volume.image).all()
    assert example.volume.image.std() > 0.1
    assert example.label.max() < len(files.data.labels)
    assert NAME not in "".join(example.notes)
    if name != "label-empty":
        assert example.label.any()


@pytest.mark.parametrize("name", VERDICTS["broken"])
def test_a_broken_file_is_refused_with_a_reason_one_remedy_and_no_name(name: str, tmp_path: Path) -> None:
    files: Files = RULES[name]()
    with pytest.raises(InvalidInput) as caught:
        load_example(files.write(tmp_path), files.data)
    text = str(caught.value)
    assert VERDICTS["broken"][name] in text
    assert text.count("to fix:") == 1
    assert NAME not in text
    assert str(tmp_path) not in text


KEEP_THEIR_LABELS = [
    name
    for name in VERDICTS["good"]
    if not name.startswith(("anisotropic", "oblique", "shear-of-ten", "thin", "label-empty", "structure", "qform-only"))
]


@pytest.mark.parametrize("name", KEEP_THEIR_LABELS)
def test_whatever_was_odd_the_same_voxels_carry_the_same_labels(name: str, tmp_path: Path) -> None:
    """The expected label map of the clean case was placed by hand on the grid of 8³, with padding of 1, 1 and
    2 voxels.
    """
    files: Files = RULES[name]()
    label = load_example(files.write(tmp_path), files.data).label
    expected = np.zeros((8, 8, 8), dtype=np.uint8)
    expected[2:4, 2:5, 3:5] = 1
    expected[4:6, 3:5, 3:5] = 2
    np.testing.assert_array_equal(label, expected)
