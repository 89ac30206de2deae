"""Tests that help and completion are fast: a command loads only what it needs, and all commands are in the help."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from consilium.cli.main import _GROUPS, _ROLES, app

HEAVY = {
    "torch",
    "monai",
    "scipy",
    "numpy",
    "nibabel",
    "matplotlib",
    "cryptography",
    "sqlite3",
    "flwr",
    "grpc",
    "fastapi",
}


@pytest.mark.slow
def test_no_command_s_help_and_no_completion_loads_anything_heavy() -> None:
    code = (
        "import sys, click; from consilium.cli.main import app; import typer\n"
        "def walk(command, context):\n"
        "    command.get_help(context)\n"
        "    for name in command.list_commands(context) if isinstance(command, click.Group) else ():\n"
        "        below = command.get_command(context, name)\n"
        "        walk(below, click.Context(below, info_name=name, parent=context))\n"
        "root = typer.main.get_command(app); walk(root, click.Context(root, info_name='consilium'))\n"
        f"print(*sorted({HEAVY!r} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.splitlines()[-1] == "", found.stdout.splitlines()[-1]


def test_every_command_stands_under_one_role_in_the_root_s_help() -> None:
    named = [name for names in _ROLES.values() for name in names]
    assert sorted(named) == sorted(_GROUPS)
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert [shown.index(role) for role in _ROLES] == sorted(shown.index(role) for role in _ROLES)
