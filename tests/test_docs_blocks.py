"""Tests every code block of every document: it is run, parsed by its reader, or compared with what was printed.

A block's language states what it is: ``console`` (commands and their output), ``sh`` (commands), ``text`` (output, or
one of :data:`DRAWINGS`), ``pycon`` and ``python`` (run), ``toml`` (read by its loader), ``json``, ``yaml``.
``tests/test_docs.py`` checks the options of every ``consilium`` command in any block; ``tests/test_docs_shown.py``
compares every shown line with what the command above it prints.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from client.policy import load_site
from common.config import parse_study
from server.dashboard.oidc import load_settings
from tests.worlds import STUDY, site_toml

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DRAWINGS = {
    "docs/architecture.md": ("study.toml  sites.json", "site.toml   request.json"),
    "docs/ledger.md": ("student   =",),
}
"""Blocks that nothing runs: two lists of files, and one of formats."""


@dataclass(frozen=True)
class Block:
    path: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()


def blocks(*languages: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        name = path.relative_to(ROOT).as_posix()
        if name != "CHANGELOG.md":
            fences = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.M | re.S)
            found += [
                Block(name, language, text) for language, text in fences if not languages or language in languages
            ]
    return found


def named(found: list[Block]) -> list[pytest.param]:
    return [pytest.param(one, id=f"{one.path}-{number}") for number, one in enumerate(found)]


def drawn(block: Block) -> bool:
    return any(block.text.lstrip().startswith(first) for first in DRAWINGS.get(block.path, ()))


def test_every_block_says_what_it_is_and_at_most_three_are_run_by_nothing():
    known = {"console", "sh", "text", "pycon", "python", "toml", "json", "yaml"}
    assert {one.language for one in blocks()} <= known
    assert [one.path for one in blocks() if drawn(one)] == [name for name in DRAWINGS for _ in DRAWINGS[name]]
    assert sum(map(len, DRAWINGS.values())) <= 3
    of_a_run = (
        "docs/dishonest-hospital.md"  # output of many parties; tests/faults/deployment/test_pushed_demo.py runs it
    )
    others = [one.text.split()[0] for one in blocks("text") if not drawn(one) and one.path != of_a_run]
    assert others == ["The", "a"], "output stands in a console block, below its command; or see README's demo"


@pytest.mark.parametrize("block", named(blocks("console", "sh")))
def test_every_command_is_a_shell_s_and_starts_what_there_is(block):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    lines = block.lines if block.language == "sh" else [line.strip()[2:] for line in block.lines if "$ " in line[:5]]
    script = "\n".join(re.sub(r" {2,}.*", "", line) for line in lines if "[" not in line and "|" not in line)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        for word in words:
            if word.endswith(".py") or word.startswith("tests/"):
                assert (ROOT / word.split("::")[0]).exists(), line
            if word.endswith((".yml", ".service", ".sysusers", ".tmpfiles")) and "/etc/" not in word:
                assert list((ROOT / "docker").rglob(Path(word).name)), line


@pytest.mark.parametrize("block", named(blocks("toml")))
def test_every_settings_block_is_read_by_its_loader(block, tmp_path):
    first = next(line for line in block.lines if line.strip())
    if first.startswith("issuer"):
        (tmp_path / "oidc.toml").write_text(block.text)
        assert load_settings(tmp_path / "oidc.toml").roles.operator
    elif first.startswith("schema"):
        assert parse_study(block.text).name
    elif first.startswith("[data]"):
        rest = re.sub(r"(?m)^labels = .*\n", "", STUDY)
        study = parse_study(rest.replace("[data]\n", block.text.rstrip() + "\n"))
        assert study.data.regions
    else:
        (tmp_path / "site.toml").write_text(site_toml(more=block.text))
        (tmp_path / "study.toml").write_text(STUDY)
        (tmp_path / "patients.csv").write_text("case_id,patient_id\n")
        assert load_site(tmp_path)


@pytest.mark.parametrize("block", named(blocks("json", "yaml")))
def test_every_document_in_json_or_yaml_is_one(block):
    assert json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


def test_every_python_block_runs():
    """But for CONTRIBUTING's, which ``tests/contracts/test_contributing.py`` puts in their places."""
    for text in {one.text: None for one in blocks("python") if one.path not in ("CONTRIBUTING.md", "README.md")}:
        exec(compile(text, "a document", "exec"), {})


@pytest.mark.slow
def test_the_scientists_script_gains_over_its_best_control(capsys):
    """A first example without a gain would teach its reader not to spend a budget."""
    (script,) = (one.text for one in blocks("python") if one.path == "README.md")
    exec(compile(script, "README.md", "exec"), {})
    assert "Gain proven" in capsys.readouterr().out


def test_the_scientists_script_has_fifteen_lines_and_imports_public_names_alone():
    (script,) = (one.text for one in blocks("python") if one.path == "README.md")
    lines = [line for line in script.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert [line for line in lines if "import" in line] == ["import numpy as np", "import consilium as c"]


def test_interactive_python_examples_are_only_in_the_page_whose_examples_are_run():
    """``tests/consilium/test_api.py`` runs them."""
    assert {one.path for one in blocks("pycon")} == {"docs/api.md"}


def test_the_rooms_on_the_map_are_there():
    shown = [re.findall(r"\b((?:server|client|common)/[\w{},]+)", one.text) for one in blocks("text")]
    (rooms,) = (names for names in shown if len(names) > 10)
    for room in rooms:
        top, _, names = room.partition("/")
        assert all(
            (ROOT / top / name).exists() or (ROOT / top / f"{name}.py").exists()
            for name in names.strip("{}").split(",")
        )
