"""Runs the security log as a process that follows a party's directory, and defines it as a daemon of the party."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.errors import ConsiliumError, InvalidInput
from common.objects import write_atomically
from common.plain import log_to_stderr
from common.process import DaemonSpec, base_env, stop_on_signals
from common.reading import parse_json
from common.security_log.follow import LogFollower, Source, failing_targets
from common.security_log.sinks import open_sink, remedy_of
from common.supervision import DaemonStanding, KeptRunning

ROLE = "log"
STATE = "security-log.state"
"""File in the folder ``logs`` that stores the place of the last event sent to each target."""

TARGETS_FILE = "security-log.targets"
"""File in the folder ``logs`` that stores the targets with which the log process started last."""

OpenSources = Callable[[Path], tuple[str, list[Source]]]
"""A function that opens the directory of a site or a study. It returns the name of the site or study, and the sources
of its security events."""


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
    stop = stop_on_signals()
    try:
        found = follower(arguments.directory, party=party, open_sources=open_sources, targets=arguments.targets)
    except ConsiliumError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    with contextlib.suppress(OSError):  # the targets are only shown to people
        text = json.dumps(arguments.targets)
        write_atomically(arguments.directory / "logs" / TARGETS_FILE, text.encode(), mode=0o640)
    found.run(stop=stop.wait)


def recorded_targets(directory: Path) -> tuple[str, ...]:
    """Return the targets with which a party's log process started last.

    Args:
        directory: The party's directory.

    Returns:
        The targets; none if they are not recorded or cannot be read.
    """
    with contextlib.suppress(OSError, InvalidInput, TypeError):
        return tuple(map(str, parse_json((directory / "logs" / TARGETS_FILE).read_bytes(), what="targets of the log")))
    return ()


def not_accepted_of(state: Path) -> str:
    """Describe the targets of a security log that did not accept the last line sent to them.

    Args:
        state: The file in which the log's program stores how far each target has received the events.

    Returns:
        A sentence for each such target, then the remedies; empty if there is no such target.
    """
    found = failing_targets(state)
    remedies = "; ".join(remedy_of(one.target) for one in found)
    return f"{'; '.join(one.sentence for one in found)}; to fix: {remedies}" if found else ""


def kept_log(directory: Path, *, module: str, name: str, targets: Sequence[str]) -> KeptRunning:
    """Return a party's log process as a daemon that is restarted whenever it ends.

    While a target does not accept lines, the daemon is reported as offline, but it is never restarted for that reason.

    Args:
        directory: The party's directory.
        module: Name of the module that runs the log program.
        name: Name of the daemon.
        targets: The targets as given with ``--to``.

    Returns:
        The daemon.

    Raises:
        InvalidInput: If a target is invalid.
    """
    spec = partial(log_daemon, directory, module=module, name=name, targets=targets)
    spec()
    return KeptRunning(spec=spec, offline=partial(not_accepted_of, directory / "logs" / STATE), offline_s=math.inf)


def with_backlog(found: Iterable[DaemonStanding], directory: Path) -> tuple[DaemonStanding, ...]:
    """Return the states of a party's daemons, with the current reason why the log process is offline.

    The recorded reason of an offline log process is that of the first failure. It is replaced by the targets that fail
    now, if any. The reason of a stopped log process is removed, because it says that waiting lines will be sent, which
    a stopped process does not do.

    Args:
        found: The daemons' recorded states.
        directory: The party's directory.

    Returns:
        The states.
    """
    now = not_accepted_of(directory / "logs" / STATE)
    return tuple(
        replace(one, why=now if one.state == "offline" else "")
        if one.daemon.partition(" ")[0] == ROLE and (one.state == "stopped" or (now and one.state == "offline"))
        else one
        for one in found
    )


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
        role=ROLE,
        name=name,
        argv=(sys.executable, "-P", "-m", module, str(folder), *(word for one in targets for word in ("--to", one))),
        env=base_env(),
        cwd=folder,
        log=folder / "logs" / "log.log",
    )
