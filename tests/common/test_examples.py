"""Runs every example in a docstring of ``common``; ``tests/consilium/test_api.py`` runs those of public names."""

from __future__ import annotations

import doctest
import importlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import consilium

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for path in (ROOT / "common").rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))
GIVEN = {"c": consilium, "np": np, "Fraction": Fraction}


@pytest.mark.parametrize("path", MODULES, ids=[path.relative_to(ROOT).as_posix() for path in MODULES])
def test_every_example_runs(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for found in doctest.DocTestFinder().find(module, extraglobs=GIVEN):
        name = found.name.removeprefix(f"{module.__name__}.")
        if name.partition(".")[0] not in consilium.__all__:
            runner.run(found, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_there_are_examples_beside_the_public_names() -> None:
    assert len(MODULES) > 20
