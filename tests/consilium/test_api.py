"""Tests that ``import consilium`` provides these names with these parameters: documented, typed, cheap to
import.

``python -m tests.consilium.test_api`` writes the snapshot anew.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import json
import re
import subprocess
import sys
import tarfile
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import consilium
from common.config import SECTIONS, render_study
from tests.earlier_versions import unpack
from tests.federation import make_study

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "api.md"
HEADING = "\n## Every public name\n\n"
SNAPSHOT = Path(__file__).with_name("api.json")


def form(value: Any) -> str | list[str]:
    """Return what a caller writes: parameters with types, an enumeration's values, a protocol's members, an
    exit code.
    """
    if value in SECTIONS.values():
        return "docs/configuration.md"
    if isinstance(value, type) and issubclass(value, Enum):
        return [str(member.value) for member in value]
    if isinstance(value, type) and issubclass(value, Exception):
        return f"exit code {getattr(value, 'exit_code', None)}"
    if getattr(value, "_is_protocol", False):
        return sorted(name for name in vars(value) if not name.startswith("_"))
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))


def promised() -> dict[str, str | list[str]]:
    return {name: form(getattr(consilium, name)) for name in consilium.__all__}


def test_names_and_parameters_are_what_the_snapshot_promises() -> None:
    """A change here affects everybody who uses the package: note it in the CHANGELOG, then update ``api.json``."""
    assert promised() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert consilium.__all__ == sorted(consilium.__all__)


@pytest.mark.parametrize("name", consilium.__all__)
def test_every_public_name_says_what_it_takes_gives_and_refuses(name: str) -> None:
    """A function documents Args and Returns; a class documents Attributes or Args, unless it is an enumeration or a
    base error.
    """
    value = getattr(consilium, name)
    text = inspect.getdoc(value) or ""
    assert re.match(r"[A-Z].*?[.:]", text, re.DOTALL)
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters
        said = text.partition("Args:")[2].partition("\n\n")[0]
        assert [re.search(rf"^\s+{each}: ", said, re.MULTILINE) for each in parameters].count(None) == 0
        assert "Returns:" in text
    elif not issubclass(value, Enum) and value is not consilium.ConsiliumError:
        assert re.search(r"^(Args|Attributes):$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what examples of public names start with: a small study, public volumes with label maps, teachers, a
    ledger.
    """
    folder = tmp_path_factory.mktemp("ledger")
    with tarfile.open(ROOT / "tests" / "golden" / "per-volume-0.1.0.tar.xz") as archive:
        unpack(archive, folder)
    study = consilium.Study.new(
        labels=["background", "ball"],
        grid=(8, 8, 8),
        epsilon=8,
        delta=1e-5,
        unit="patient",
        quorum=3,
        voters=5,
        queries=2,
        codec=consilium.CodecConfig(augmentations=4),
        student=consilium.TrainingConfig(channels=(2, 4), steps=1),
    )
    x, y, z = np.indices((8, 8, 8)) - 3.5
    maps = [(x**2 + y**2 + z**2 < radius**2).astype(np.uint8) for radius in (1.5, 2.0, 2.5, 3.5)]
    images = [each + np.random.default_rng(0).normal(0, 0.1, each.shape) for each in maps]
    return {
        "c": consilium,
        "np": np,
        "Fraction": Fraction,
        "Path": Path,
        "study": study,
        "maps": maps,
        "images": images,
        "teachers": [lambda image: image[0] > 0.5] * 40,
        "ledger": folder / "study" / "ledger.sqlite",
    }


@pytest.mark.parametrize("name", consilium.__all__)
def test_every_public_name_has_an_example_that_runs(name: str, given: dict[str, Any]) -> None:
    found = doctest.DocTestFinder(recurse=False).find(getattr(consilium, name), name, globs=given)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert sum(len(each.examples) for each in found) > 0
    assert sum(runner.run(each, out=said.append).failed for each in found) == 0, "".join(said)


PATIENT = consilium.Protection(consilium.Unit.PATIENT, consilium.Relation.REPLACE_ONE)
BUDGET, EXACT = consilium.Budget(8.0, 1e-5), consilium.AccountantName.EXACT
RELEASE = consilium.Mechanism(2, 65536, 1, Fraction(1_000_000))
TRAINING = consilium.TrainingEvent(consilium.Sampling.FIXED_PARTITION, Fraction(1, 4), Fraction(4), 40)
PLAN = {"budget": BUDGET, "accountant": EXACT, "protection": PATIENT}
SOUND: dict[str, dict[str, Any]] = {
    "Budget": {"epsilon": 8.0, "delta": 1e-5},
    "CodecConfig": {"name": "pca", "radius": 1.0, "joint": False, "augmentations": 4},
    "Guarantee": {"epsilon": 8.0, "delta": 1e-5, "accountant": "exact", "protection": PATIENT, "group": 2},
    "Mechanism": {
        "dimension": 2,
        "radius_int": 9,
        "voters_per_site": 1,
        "noise_std": Fraction(9),
        "name": RELEASE.name,
    },
    "Protection": {"unit": "patient", "relation": "replace-one"},
    "PublicShapes": {"held": 0.9, "mean_shape": 0.6},
    "Rehearsal": {"patients": 3, "teachers": (0.8,) * 4, "control": (0.7,) * 4},
    "TrainingConfig": {"channels": (2, 4), "steps": 1, "learning_rate": 0.1, "amp": False, "network": "unet"},
    "TrainingEvent": {"sampling": "poisson", "rate": Fraction(1, 4), "noise_multiplier": Fraction(4), "steps": 4},
    "admits": {"spent": Fraction(1), "request": Fraction(1), "limit": Fraction(2)},
    "calibrate": {**PLAN, "queries": 4, "radius_int": 65536, "voters_per_site": 5},
    "clip": {"code": np.ones(3), "radius": 1.0},
    "compose": {"mechanisms": [RELEASE], "protection": PATIENT},
    "delta_exact": {"mu": 1.0, "epsilon": 1.0},
    "epsilon_exact": {"mu_squared": 1.0, "delta": 1e-5},
    "epsilon_of": {"event": TRAINING, "delta": 1e-5, "neighbours": "add-remove"},
    "epsilon_of_plan": {**PLAN, "accountant": "exact", "mechanism": RELEASE, "queries": 4},
    "epsilon_paper": {"mu_squared": 1.0, "delta": 1e-5},
    "epsilon_rdp": {"mu_squared": 1.0, "delta": 1e-5},
    "guarantee": {
        "mu_squared": Fraction(1),
        "budget": BUDGET,
        "protection": PATIENT,
        "accountant": "exact",
        "group": 2,
    },
    "load_codec": {"data": b"x", "expected_hash": "a" * 64},
    "load_study": {"path": "none.toml"},
    "max_mu_squared": {"accountant": "exact", "budget": BUDGET},
    "noise_multiplier": {"mechanism": RELEASE, "protection": PATIENT},
    "noisy_sum": {"codes": [np.array([3, 4])] * 3, "mechanism": RELEASE},
    "parse_study": {"text": ""},
    "plan": {
        **PLAN,
        "queries": 4,
        "hospitals": 8,
        "voters_per_site": 5,
        "radius": 1.0,
        "dimension": 3,
        "spent": Fraction(1),
    },
    "plan_noise": {"epsilon": 8.0, "delta": 1e-5, "rate": Fraction(1, 4), "steps": 4, "neighbours": "replace-one"},
    "quantise": {"code": np.ones(3), "radius_int": 9},
    "queries_left": {"mechanism": RELEASE, "protection": PATIENT, "spent": Fraction(1), "limit": Fraction(2)},
    "radius_int": {"radius": 1.0},
    "read_shapes": {"folder": "none"},
    "recommend": {**PLAN, "hospitals": 8},
    "rounded_gaussian": {"size": 3, "noise_std": Fraction(9)},
    "sensitivity": {"radius_int": 9, "voters_per_site": 2, "unit": "patient", "relation": "replace-one"},
    "verify": {"path": "none.sqlite"},
    "within": {"code": np.array([3, 4]), "bound_int": 5},
}
"""Sound arguments of public functions; a parameter with a default may be left out."""

WRONG: list[Any] = [None, object(), b"x", {1: 2}, {1, 2}, [None], 1j, 10**400, Fraction(1, 10**500), np.zeros((2, 2))]
GIVEN_STUDY: dict[str, dict[str, Any]] = {
    "ask": {"study": None, "codec": None, "volumes": [], "teachers": []},
    "compare": {"student": print, "controls": None, "held_out": []},
    "fit_codec": {"study": None, "label_maps": [], "sites": 8},
    "read_cases": {"folder": "none", "study": None},
    "study_mechanism": {"study": None, "dimension": 3},
    "train_student": {"images": [], "labels": []},
}


@pytest.mark.parametrize("name", [*SOUND, *GIVEN_STUDY])
def test_an_argument_of_a_wrong_type_is_refused_and_raises_no_other_error(name: str) -> None:
    """Some functions accept 0 or a list. No function may raise an error of another class."""
    sound = SOUND.get(name) or GIVEN_STUDY[name]
    called = getattr(consilium, name)
    for parameter in sound:
        for wrong in WRONG:
            with contextlib.suppress(consilium.ConsiliumError):
                called(**sound | {parameter: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Protection", {"unit": "person"}),
        ("Protection", {"relation": None}),
        ("max_mu_squared", {"accountant": "best"}),
        ("sensitivity", {"unit": "clinic"}),
        ("epsilon_of", {"neighbours": "zero-out"}),
        ("plan", {"budget": None}),
        ("recommend", {"protection": "patient"}),
        ("compose", {"protection": "patient"}),
        ("noisy_sum", {"codes": None}),
        ("load_study", {"path": 5}),
        ("verify", {"path": ""}),
        ("recommend", {"shapes": "none"}),
        ("plan", {"spare_draws": 3}),
    ],
)
def test_an_unknown_name_or_an_object_of_another_class_is_invalid_input(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(consilium.InvalidInput):
        getattr(consilium, name)(**SOUND[name] | wrong)


def names_listed() -> str:
    """Return every public name with the first sentence of its documentation, as docs/api.md ends with them."""
    rows = []
    for name in consilium.__all__:
        said = " ".join((inspect.getdoc(getattr(consilium, name)) or "").split("\n\n")[0].split())
        said = re.sub(r":\w+:`~?([^`<]+)`", lambda found: f"`{found[1].rpartition('.')[2]}`", said).replace("``", "`")
        rows.append(f"- `{name}`: {said}\n")
    return "".join(rows)


def test_the_document_ends_with_every_public_name() -> None:
    """``python -m tests.consilium.test_api`` writes the list."""
    assert DOCUMENT.read_text(encoding="utf-8").endswith(HEADING + names_listed())


def test_a_study_is_loaded_from_a_path_that_is_a_string(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(render_study(make_study()))
    assert consilium.load_study(str(tmp_path / "study.toml")) == make_study()
    with pytest.raises(consilium.InvalidInput, match="check the path"):
        consilium.load_study("nowhere.toml")


@pytest.mark.slow
def test_the_examples_in_the_document_run(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "per-volume-0.1.0.tar.xz") as archive:
        unpack(archive, tmp_path)
    document = str(ROOT / "docs" / "api.md")
    ledger = tmp_path / "study" / "ledger.sqlite"
    failed, tried = doctest.testfile(document, module_relative=False, globs={"ledger": ledger})
    assert (failed, tried > 30) == (0, True)


@pytest.mark.slow
def test_importing_consilium_loads_nothing_and_its_names_neither_torch_nor_flower() -> None:
    program = (
        "import sys, consilium\n"
        "before = {'numpy', 'scipy', 'torch', 'flwr', 'dp_accounting', 'common.errors'} & set(sys.modules)\n"
        "names = [getattr(consilium, name) for name in consilium.__all__]\n"
        "heavy = {'torch', 'monai', 'flwr', 'scipy.optimize'}\n"
        "print(sorted(before), sorted(heavy & set(sys.modules)), len(names) > 40)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[] [] True\n"


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    assert not hasattr(consilium, "check_schema")
    assert set(consilium.__all__) <= set(dir(consilium))


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(promised(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beginning = DOCUMENT.read_text(encoding="utf-8").partition(HEADING)[0]
    DOCUMENT.write_text(beginning + HEADING + names_listed(), encoding="utf-8")
