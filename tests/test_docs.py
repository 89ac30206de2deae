"""The documents say what the code does: every command in the README exists with the options it is given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from consilium.cli.main import app

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


def test_every_linked_document_exists():
    for target in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_epsilon_in_the_readme_has_its_delta_unit_and_relation_nearby():
    for match in re.finditer(r"ε = [\d.]+", README):
        around = README[match.start() - 400 : match.end() + 400]
        assert all(word in around for word in ("δ", "unit", "replace-one")), match.group()
