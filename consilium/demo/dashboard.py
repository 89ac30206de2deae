"""Starts the demo's dashboard as a further process beside the federation; the demo does not depend on it.

The dashboard shows the demo's study while the demo runs, and ends with it. If it does not start or dies, one line
reports this and the demo continues. Its only user and the password are created for this demo and stored in its state
directory.
"""

from __future__ import annotations

import secrets
import sys
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConsiliumError
from common.https import opener
from common.objects import write_atomically
from common.process import DaemonSpec, ProcessGroup, base_env
from common.sockets import free_ports
from server.dashboard.auth import Role, users_file

HOST = "127.0.0.1"
USER = "operator"
START_TIMEOUT_S = 120.0


@contextmanager
def dashboard(study: Path, state: Path, *, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Start the study's dashboard on a free loopback port, and stop it when the block ends.

    Enter the block in the main thread. The kernel then ends the dashboard if the demo is killed.

    Args:
        study: The study's directory.
        state: The dashboard's state directory.
        say: Called with the address and login, or with the reason why there is no dashboard.

    Returns:
        A context with a function that waits until the dashboard answers, and calls ``say``. Any thread may call it.
    """
    with ProcessGroup() as group:
        try:
            password = demo_password(state)
            (port,) = free_ports(1, host=HOST)
            daemon = group.begin(_daemon(study, state, port=port))
        except (ConsiliumError, OSError) as error:
            say(f"no dashboard: {error}")
            yield lambda: None
            return

        def wait() -> None:
            try:
                daemon.wait_ready()
            except (ConsiliumError, OSError) as error:
                group.stop(daemon)
                say(f"no dashboard: {error}")
                return
            say(f"dashboard: http://{HOST}:{port}/")
            say(f"sign in as {USER} with {password}")

        yield wait


def reopen(study: Path, state: Path) -> str:
    """Return the command that opens the dashboard after the demo has ended, with how to sign in.

    Args:
        study: The study's directory.
        state: The dashboard's state directory.

    Returns:
        The text.
    """
    return f"consilium dashboard --study {study} --state {state} (name {USER}, password in {_password_file(state)})"


def demo_password(state: Path) -> str:
    """Return the password of the demo's user. The first call creates it, in a file that only this user can read.

    Args:
        state: The dashboard's state directory.

    Returns:
        The password.
    """
    path = _password_file(state)
    if not path.exists():
        write_atomically(path, (secrets.token_urlsafe(12) + "\n").encode(), mode=0o600)
    password = path.read_text(encoding="utf-8").strip()
    users = users_file(state)
    if users.check(USER, password) is None:
        users.add(USER, Role.OPERATOR, password, replace=USER in users.users())
    return password


def _password_file(state: Path) -> Path:
    return state / "demo-password"


def _daemon(study: Path, state: Path, *, port: int) -> DaemonSpec:
    program = "from consilium.cli.main import main; main()"
    return DaemonSpec(
        role="dashboard",
        name="dashboard",
        argv=(
            *(sys.executable, "-P", "-c", program, "dashboard"),
            *("--study", str(study.absolute()), "--state", str(state.absolute()), "--port", str(port)),
        ),
        env=base_env(),
        cwd=study.absolute(),
        log=state.absolute() / "dashboard.log",
        ready=lambda: _answers(port),
        ready_timeout_s=START_TIMEOUT_S,
    )


def _answers(port: int) -> bool:
    try:
        with opener(plain=True, proxies=False).open(f"http://{HOST}:{port}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
