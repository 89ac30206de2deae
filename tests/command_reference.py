"""Makes the command reference from the commands: ``python -m tests.command_reference`` writes docs/commands.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from consilium.cli.main import app

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "commands.md"

HEAD = """# Commands

For everybody who types commands. After this page you know every command with its options, as `--help` shows them.

Results go to stdout, progress and errors to stderr; `--verbose` shows the traceback of an error. The runbook lists the
[exit codes](runbook.md#exit-codes). Written by `python -m tests.command_reference`.
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Return every command that does something, by its full name, in alphabetical order."""
    yield from _below("consilium", typer.main.get_command(app))


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    if command.invoke_without_command or name == "consilium":
        yield name, command
    for word in sorted(command.list_commands(context)):
        below = command.get_command(context, word)
        assert below is not None
        yield from _below(f"{name} {word}", below)


def reference() -> str:
    """Return the whole document."""
    return HEAD + "".join(_section(name, command) for name, command in commands())


def _section(name: str, command: click.Command) -> str:
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden and p.name != "help"]
    usage = " ".join((name, *(p.make_metavar(click.Context(command)) for p in arguments)))
    text = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    rows = "".join(f"| `{_spelled(p)}` | {_cell(p)} |\n" for p in options)
    return f"\n## {usage}\n{text}\n" + (f"\n| option | what it says |\n|---|---|\n{rows}" if rows else "")


def _spelled(option: click.Option) -> str:
    names = "/".join((", ".join(option.opts), *option.secondary_opts))
    if option.is_flag:
        return names
    words = map(str, option.type.choices) if isinstance(option.type, click.Choice) else ()
    return f"{names} {'|'.join(words) or (option.metavar or option.type.name.split()[0]).upper()}".replace("|", "\\|")


def _cell(option: click.Option) -> str:
    words = [" ".join((option.help or "").replace("\\[", "[").replace("|", "\\|").split())]
    if option.required:
        words.append("Required.")
    elif option.default not in (None, False, "", (), []) and not option.is_flag and not callable(option.default):
        words.append(f"Default: {getattr(option.default, 'value', option.default)}.")
    return " ".join(filter(None, words))


if __name__ == "__main__":
    DOCUMENT.write_text(reference(), encoding="utf-8")
