"""The documents say what the code does: every command in the README exists with the options it is given."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
import typer

from consilium.cli.main import app
from tests import command_reference, module_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (consilium .*)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_in_the_readme_parses(line):
    command: click.Command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    context = click.Context(command, info_name="consilium")
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0))
        assert command is not None, line
        context = click.Context(command, parent=context)
    parser = command.make_context(command.name, words, resilient_parsing=True)
    given = {word for word in words if word.startswith("--")}
    known = {option for parameter in command.params for option in parameter.opts}
    assert given <= known, line
    assert parser is not None


def test_the_readme_has_its_two_commands_and_says_whom_it_trusts():
    assert "$ make demo" in README
    assert "$ make test" in README
    assert "is trusted to add the noise" in README
    assert len(COMMANDS) >= 15


def test_every_epsilon_in_the_readme_has_its_delta_unit_and_relation_nearby():
    for match in re.finditer(r"ε = [\d.]+", README):
        around = README[match.start() - 400 : match.end() + 400]
        assert all(word in around for word in ("δ", "unit", "replace-one")), match.group()


def test_the_command_reference_names_every_command_and_option_as_they_are_now():
    assert command_reference.DOCUMENT.read_text(encoding="utf-8") == command_reference.reference(), (
        "docs/commands.md is old: python -m tests.command_reference writes it anew"
    )
    assert len(list(command_reference.commands())) > 50


def test_the_architecture_names_every_module_and_none_that_is_gone():
    named = module_table.named(module_table.DOCUMENT.read_text(encoding="utf-8"))
    there = {folder: set(names) for folder, names in module_table.modules().items() if names}
    assert {folder: set(names) for folder, names in named.items() if names} == there, (
        "docs/architecture.md is old: python -m tests.module_table brings it up to date"
    )


def test_the_newest_release_in_the_changelog_is_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d\n\nTag `v\1`", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


ADRS = sorted(path for path in (ROOT / "docs" / "adr").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.name)
def test_every_decision_has_number_status_and_date_and_stands_in_the_index(path):
    form = r"# (\d+)\. (.+)\n\nStatus: ((?:accepted|proposed|replaced).*)\. Date: (\d{4}-\d\d-\d\d)\.\n"
    stated = re.match(form, path.read_text(encoding="utf-8"))
    assert stated is not None, "'# N. Title', an empty line, 'Status: … Date: YYYY-MM-DD.'"
    assert f"{int(stated[1]):04d}" == path.name.partition("-")[0]
    row = f"| [{stated[1]}]({path.name}) | {stated[2]} | {stated[3]} | {stated[4]} |"
    assert row in (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8").splitlines()


def test_decisions_are_numbered_one_after_the_other():
    assert [int(path.name.partition("-")[0]) for path in ADRS] == list(range(1, len(ADRS) + 1))


def test_every_link_between_documents_leads_somewhere():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
        for target in re.findall(r"`(docs/[\w/.-]+\.md)`", path.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_every_source_file_that_a_document_names_exists():
    """But for what is told as given up, and what the reader is to write."""
    given_up = {"common/privacy/ledger.py", "common/codecs/yours.py", "tests/contracts/test_codec_yours.py"}
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        tops = "server|client|common|consilium|tests|benchmarks|docker"
        for name in re.findall(
            rf"(?<![\w/.-])((?:{tops})/[\w/.-]+\.(?:py|sh|yml))\b", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists() or name in given_up, f"{path.name}: {name}"
