"""Every code block of every document is run, parsed by what reads it, or held against what the program can print.

What a block is says its language: ``console`` (commands and their output), ``sh`` (commands), ``text`` (output, or one
of :data:`DRAWINGS`), ``pycon`` and ``python`` (run), ``toml`` (read by the loader it is for), ``json``, ``yaml``.
``tests/test_docs.py`` holds every ``consilium`` command to the options that exist, whatever block it stands in.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache
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
    "docs/architecture.md": ("hospital A", "study.toml  sites.json", "site.toml   request.json"),
    "docs/ledger.md": ('{"ledger":', "hash      ="),
}
"""Blocks that nothing runs: one drawing of the flow, two lists of files, two of formats. No command and no code."""

PLAIN = re.compile(r"SHA256:\S+|[\w./~-]*/[\w./-]*|\S*\d\S*|…|\bok\b|\b(?:north|south|west|trial|hospital|phantoms?)\b")
"""What differs from run to run, or from site to site."""
FROM_ELSEWHERE = ("Up (healthy)", "sha256sum", "up -d, ps", "at the consortium, provision")
"""Lines of Docker's, and the remarks of a person who tried."""


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


def test_every_block_says_what_it_is_and_at_most_five_are_run_by_nothing():
    known = {"console", "sh", "text", "pycon", "python", "toml", "json", "yaml"}
    assert {one.language for one in blocks()} <= known
    assert [one.path for one in blocks() if drawn(one)] == [name for name in DRAWINGS for _ in DRAWINGS[name]]
    assert sum(map(len, DRAWINGS.values())) <= 5


@cache
def fragments() -> tuple[str, ...]:
    """Every piece of text that the program could print: constants and parts of f-strings, without docstrings."""
    found = set()
    for path in (path for top in ("client", "common", "consilium", "server") for path in (ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                found |= {part.strip(" ,;:()") for part in PLAIN.split(node.value)}
    return tuple(one for one in found if len(one) > 3 and re.search("[A-Za-z]{2}", one))


def said(line: str) -> float:
    """Which share of a line's letters, numbers and names aside, stands in texts of the program's."""
    rest = PLAIN.sub(lambda match: "\0" * len(match[0]), line)
    covered = bytearray(len(rest))
    if line.endswith("…"):  # cut by the document
        begun = rest.rstrip("\0 ")
        for size in range(8, len(begun)):
            if any(fragment.startswith(begun[-size:]) for fragment in fragments()):
                covered[len(begun) - size : len(begun)] = b"\1" * size
    for fragment in fragments():
        at = rest.find(fragment)
        while at >= 0:
            covered[at : at + len(fragment)] = b"\1" * len(fragment)
            at = rest.find(fragment, at + 1)
    letters = [place for place, letter in enumerate(rest) if letter.isalpha()]
    return sum(covered[place] for place in letters) / len(letters) if letters else 1.0


def outputs() -> list[tuple[str, str]]:
    """Every line of output that a document shows."""
    found = []
    for block in blocks("console", "text"):
        if not drawn(block) and not block.text.lstrip().startswith("a study is agreed"):
            lines = [line.strip() for line in block.lines if not line.strip().startswith("$ ")]
            found += [(block.path, line) for line in lines if line and not any(one in line for one in FROM_ELSEWHERE)]
    return found


@pytest.mark.parametrize(("path", "line"), outputs())
def test_every_line_of_output_in_a_document_is_what_the_program_can_say(path, line):
    assert said(line) >= 0.8, f"{path} shows what no text of the program makes: {line}"


def test_a_changed_message_is_found():
    assert said("site: created for north") == 1
    assert said("site: was generated on behalf of north") < 0.8


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
    for block in (one for one in blocks("python") if one.path != "CONTRIBUTING.md"):
        exec(compile(block.text, block.path, "exec"), {})


def test_sessions_stand_where_their_test_reads_them():
    """``tests/consilium/test_api.py`` runs them."""
    assert {one.path for one in blocks("pycon")} == {"docs/api.md"}


def test_the_rooms_on_the_map_are_there():
    (text,) = (one.text for one in blocks("text") if one.text.lstrip().startswith("a study is agreed"))
    rooms = re.findall(r"\b((?:server|client|common)/[\w{},]+)", text)
    assert len(rooms) > 10
    for room in rooms:
        top, _, names = room.partition("/")
        assert all(
            (ROOT / top / name).exists() or (ROOT / top / f"{name}.py").exists()
            for name in names.strip("{}").split(",")
        )
