"""Runs the security log as a process that follows a party's directory, and defines it as a daemon of the party."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConsiliumError
from common.plain import log_to_stderr
from common.process import DaemonSpec, base_env
from common.security_log.follow import LogFollower, Source
from common.security_log.sinks import open_sink

STATE = "security-log.state"
"""File in the folder ``logs`` that stores the place of the last event sent to each target."""

OpenSources = Callable[[Path], tuple[str, list[Source]]]
"""Returns the name of the party whose directory is given, and the sources of its security events."""


def follower(directory: Path, *, party: str, open_sources: OpenSources, targets: Sequence[str]) -> LogFollower:
    """Return the object that sends new entries of a party's records to the targets.

    Args:
        directory: The party's directory.
        party: ``site``, ``server`` or ``dashboard``.
        open_sources: Opens the directory's records.
        targets: The targets as given with ``--to``; see :data:`~common.security_log.sinks.TARGETS`.

    Returns:
        The follower.

    Raises:
        InvalidInput: If a target is invalid.
    """
    sinks = {target: open_sink(target) for target in targets}
    name, sources = open_sources(directory)
    return LogFollower(sources, sinks, party=party, name=name, state=directory / "logs" / STATE)


def follow_program(party: str, open_sources: OpenSources) -> None:
    """Run the program ``python -m MODULE DIR --to TARGET …``.

    Parse the command line, and send the new security events of the directory to the targets until SIGTERM or SIGINT.
    If the directory or a target is invalid, print the error in one line and exit.

    Args:
        party: ``site``, ``server`` or ``dashboard``.
        open_sources: Opens the directory's records.
    """
    parser = argparse.ArgumentParser(description=f"Consilium's security log of a {party}")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--to", action="append", required=True, dest="targets")
    arguments = parser.parse_args()
    log_to_stderr()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        found = follower(arguments.directory, party=party, open_sources=open_sources, targets=arguments.targets)
    except ConsiliumError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    found.run(stop=stop.wait)


def log_daemon(directory: Path, *, module: str, name: str, targets: Sequence[str]) -> DaemonSpec:
    """Return the definition of a party's log process as a daemon.

    Args:
        directory: The party's directory.
        module: Name of the module that runs the log program.
        name: Name of the daemon.
        targets: The targets as given with ``--to``.

    Returns:
        The daemon's command, environment, working directory and log file.

    Raises:
        InvalidInput: If a target is invalid.
    """
    folder = directory.absolute()
    for target in targets:
        open_sink(target)
    return DaemonSpec(
        role="log",
        name=name,
        argv=(sys.executable, "-P", "-m", module, str(folder), *(word for one in targets for word in ("--to", one))),
        env=base_env(),
        cwd=folder,
        log=folder / "logs" / "log.log",
    )
