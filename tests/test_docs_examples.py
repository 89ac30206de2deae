"""Tests that the plan of every study which a document tells its reader to make expects a gain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from common.config import load_study
from consilium.cli.main import app
from consilium.cli.study_words import say_outlook
from tests.commands import typed

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    ROOT / "consilium" / "cli" / "study_create.py",
)
COMMAND = re.compile(r"^(?:\$ | +Example: )consilium (study init [^…\n]*--quorum[^…\n]*)$", re.MULTILINE)


def examples() -> dict[str, str]:
    """Return every whole `study init` that a document shows, without ``--ledger``, by the file that shows it first."""
    found: dict[str, str] = {}
    for path in PAGES:
        for command in COMMAND.findall(path.read_text(encoding="utf-8")):
            found.setdefault(re.sub(r" --ledger \S+", "", command), path.relative_to(ROOT).as_posix())
    return found


def test_the_documents_show_how_to_make_a_study() -> None:
    assert {"docs/deployment.md", "consilium/cli/study_create.py"} <= set(examples().values())


@pytest.mark.parametrize("command", [*examples()])
def test_the_plan_of_an_example_does_not_say_that_its_budget_buys_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = typed(app, *shlex.split(command))
    study = load_study(tmp_path / shlex.split(command)[2] / "study.toml")
    assert say_outlook(study, hospitals=study.privacy.quorum), done.output
    assert "mostly reflect" not in done.output
    assert "recommended instead" not in done.output
