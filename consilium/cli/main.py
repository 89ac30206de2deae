"""Defines the ``consilium`` command with all groups of commands, and prints every expected error as one line.

Results go to stdout (``--json`` for machines), progress and errors to stderr. ``common.errors`` lists the exit codes.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from copy import copy
from functools import cache
from importlib.metadata import packages_distributions
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from common import __version__
from common.canonical import MAX_INTEGER
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt, StorageFailed
from common.plain import plain
from common.system_errors import DISK, explain
from consilium.cli.say import ignore_interrupts, interrupt_once, interruptible, say, say_unexpected

_GROUPS: dict[str, tuple[str, str, str]] = {
    "study": ("consilium.cli.study", "study_app", "Define, publish, run and follow a study."),
    "provision": (
        "consilium.cli.provision",
        "provision_app",
        "Make certificates and startup kits; admit and revoke sites.",
    ),
    "server": ("consilium.cli.provision", "server_app", "Run and watch the consortium's daemons."),
    "codec": ("consilium.cli.codec", "codec_app", "Fit the study's codec on public label maps."),
    "student": ("consilium.cli.student", "student_app", "Train the student and export it as a MONAI bundle."),
    "site": ("consilium.cli.site", "site_app", "Take part as a hospital: train teachers, answer queries."),
    "predict": ("consilium.cli.predict", "app", "Segment volumes with a student, on their own voxels."),
    "data": ("consilium.cli.data", "app", "Make synthetic data, split a dataset."),
    "demo": ("consilium.cli.demo", "app", "Run a whole study on this machine, with real daemons."),
    "simulate": ("consilium.cli.simulate", "app", "Simulate a whole study on your own data, without daemons."),
    "plan": ("consilium.cli.privacy", "plan_app", "Show what a privacy budget buys, before it is spent."),
    "audit": (
        "consilium.cli.audit",
        "audit_app",
        "Attack a study as it runs, and compare the result with the ε it claims.",
    ),
    "ledger": ("consilium.cli.ledger", "app", "Read, back up and recover a privacy ledger."),
    "governance": (
        "consilium.cli.governance",
        "app",
        "Write documents to file: impact assessment, checklist, registry, egress, record.",
    ),
    "certificate": ("consilium.cli.certificate", "app", "Write a study's privacy certificate, as PDF and JSON."),
    "dispute": ("consilium.cli.dispute", "app", "Let an auditor find out who spoiled a draw of a sealed sum."),
    "bench": (
        "consilium.cli.bench",
        "app",
        "Compare training recipes on benchmarks; reproduce the tables of papers.",
    ),
    "dashboard": ("consilium.cli.dashboard", "app", "Serve a study's dashboard for browsers, read only."),
    "verify": ("consilium.cli.ledger", "verify_app", "Check a ledger offline: chain, signatures, sums, budget."),
}


_ROLES = {
    "The consortium": ("study", "codec", "provision", "server", "student", "dashboard", "certificate", "governance"),
    "A hospital": ("site",),
    "A privacy officer or an auditor": ("verify", "ledger", "plan", "audit", "dispute"),
    "Anybody": ("demo", "simulate", "predict", "data", "bench"),
}
"""The commands that each role needs, in the order of the main help."""


_TAG = re.compile(r"\[(?=[a-zA-Z#/@])")
"""Matches an opening bracket that rich would read as markup and not print."""


_CLICK_SUGGESTS = hasattr(click.exceptions, "NoSuchCommand")
"""True if click itself suggests commands (from 8.4 on). Typer would then suggest the same ones again."""


_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def _bounded(kind: Any) -> Any:
    """Return a numeric option's type with limits: it refuses NaN, infinity, negative and huge numbers.

    No command uses such numbers, and huge ones fit neither torch nor a ledger. A single option may have a narrower
    range. 1_0 is refused: Python reads it as 10, but it may be a mistyped 1.0, and a wrong ε is a wrong guarantee.
    """
    whole = kind.name.startswith("integer")
    written, limit = (_WHOLE, "a whole number such as 8") if whole else (_NUMBER, "a number such as 8, 0.5 or 1e-5")

    def convert(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        shown = plain(value if len(str(value)) <= 40 else f"{str(value)[:40]}…")
        if isinstance(value, str) and not written.fullmatch(value.strip()):
            kind.fail(f"{shown!r} is not {limit}.", param, ctx)
        number = kind.convert(value, param, ctx)
        if not 0 <= number <= MAX_INTEGER:  # also true for NaN
            kind.fail(
                f"{shown} is too large: no option takes a number above {MAX_INTEGER}."
                if number > 0
                else f"{shown} is not a number of 0 or more.",
                param,
                ctx,
            )
        return number

    made = copy(kind)
    made.convert = convert
    return made


def _checked(kind: Any) -> Any:
    """Return a copy of an option's type that refuses unusable paths and texts.

    An unset shell variable gives a blank path, which would mean the current folder. A link that leads to itself, or a
    text that is not UTF-8, would end the command in a traceback.
    """

    def convert(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and kind.name == "path":
            if not value.strip():
                kind.fail("the path is empty: give a path, or . for the current folder.", param, ctx)
            try:
                os.stat(value)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    kind.fail(f"{plain(value)} is a symbolic link that leads to itself: give another path.", param, ctx)
            if os.path.exists(value) and not os.access(value, os.R_OK):  # click's message has no remedy
                reason, remedy = explain(OSError(errno.EACCES, os.strerror(errno.EACCES), value))
                kind.fail(f"{reason}; to fix: {remedy}.", param, ctx)
        elif isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
            kind.fail(f"{plain(value)} is not UTF-8: type it in UTF-8.", param, ctx)
        return kind.convert(value, param, ctx)

    made = copy(kind)
    made.convert = convert
    return made


def _prepare(command: click.Command) -> None:
    """Check numbers, paths and texts, escape brackets in the help, and suggest each command name only once."""
    for parameter in command.params:
        if parameter.type.name.split()[0] in ("integer", "float"):
            parameter.type = _bounded(parameter.type)
        elif parameter.type.name in ("path", "text"):
            parameter.type = _checked(parameter.type)
    if isinstance(command, TyperGroup):
        command.suggest_commands = not _CLICK_SUGGESTS
    if getattr(command, "rich_markup_mode", None) is not None:
        for parameter in command.params:
            if words := getattr(parameter, "help", None):
                parameter.help = _TAG.sub(r"\\[", words)
    for below in getattr(command, "commands", {}).values():
        _prepare(below)


@cache
def _group(name: str) -> click.Command:
    """Import a group's module and build its commands, which takes about 15 ms."""
    module, attribute, text = _GROUPS[name]
    app: typer.Typer = getattr(importlib.import_module(module), attribute)
    command = typer.main.get_command(app)
    command.name, command.help = name, command.help or text
    _prepare(command)
    return command


class _LazyGroup(TyperGroup):
    """Imports a group's module when it is used, so that ``consilium --version`` does not import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_GROUPS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _group(cmd_name) if cmd_name in _GROUPS else super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        with interruptible("interrupted"):  # click would exit with 130 without a message
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for role, names in _ROLES.items():
            with formatter.section(role):
                formatter.write_dl([(name, _GROUPS[name][2]) for name in names])


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # pretty exceptions print local variables
    help="Consilium: federated PATE for 3D MRI segmentation, with a ledger that enforces the privacy budget.",
)


def _print_version(value: bool) -> None:
    if value:
        say(f"consilium {__version__}")
        if shared := _others_with_our_names():
            say(
                f"warning: {', '.join(shared)} has packages with the same names as Consilium's; to fix: install "
                "Consilium into a virtual environment of its own",
                err=True,
            )
        raise typer.Exit


def _others_with_our_names() -> list[str]:
    """Return the other installed distributions that have a package with the same name as one of ours.

    pip lets the distribution that is installed later overwrite the files of the earlier one.
    """
    owners = packages_distributions()
    claims = {owner for name in ("client", "common", "consilium", "server") for owner in owners.get(name, ())}
    return sorted(claims - {"consilium"})


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an expected error prints one line and ends with its own exit code."""
    interrupt_once()
    sys.excepthook = say_unexpected
    if sys.stdin is None:  # closed: a command that asks reads its end
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  stays open as standard input does
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # not every encoding has ε; JSON reads the escape back
    arguments = sys.argv[1:]
    verbose = "--verbose" in arguments
    try:
        app(args=[a for a in arguments if a != "--verbose"], prog_name="consilium", standalone_mode=True)
    except ConsiliumError as error:
        _fail(error, verbose=verbose)
    except OSError as error:
        if not verbose and _working_folder_is_gone():
            say("error: the folder in which this command was started is gone; to fix: `cd` into another one", err=True)
            raise SystemExit(1) from None
        if verbose or (error.filename is None and error.errno not in (*DISK, errno.ENOLCK)):
            raise
        reason, remedy = explain(error)
        say(f"error: {reason}; to fix: {remedy}", err=True)
        raise SystemExit(StorageFailed.exit_code if error.errno in DISK else 1) from None
    except UnicodeEncodeError as error:
        if verbose or sys.getfilesystemencoding() == "utf-8":
            raise
        limit = f"a name that this locale's encoding, {sys.getfilesystemencoding()}, can express"
        remedy = "set LC_ALL=C.UTF-8 for all commands of this site, and where you start its daemons"
        _fail(InvalidInput("name of a file", value=ascii(error.object), limit=limit, remedy=remedy), verbose=False)
    except Exception as error:
        sqlite3 = sys.modules.get("sqlite3")  # help and completion do not import it
        if sqlite3 is None or not isinstance(error, sqlite3.Error):
            raise
        from common.ledger.sqlite_file import ledger_error

        # The user named a file as a ledger that is not a ledger.
        refused = ledger_error(error, "not a ledger, or damaged; to fix: give a ledger's file, NAME.sqlite")
        _fail(refused, verbose=verbose)
    finally:
        ignore_interrupts()  # the command has ended; its exit code and output stand


def _working_folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _fail(error: ConsiliumError, *, verbose: bool) -> None:
    if verbose:
        raise error
    text = str(error)
    if isinstance(error, LedgerCorrupt) and "; to fix: " not in text:
        text += f"; to fix: {error.remedy}"
    say(f"error: {text}", err=True)
    raise SystemExit(error.exit_code)
