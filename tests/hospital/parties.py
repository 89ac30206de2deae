"""Runs each party's commands: one in the foreground, and others beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.process import executable
from tests.waiting import until


def consilium(*arguments: str) -> str:
    """Run a command as a person types it; return its output."""
    done = subprocess.run([executable("consilium"), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def up(log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a party's command in the foreground, as in a terminal of its own, until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [executable("consilium"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env={**os.environ, **(env or {})},
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)


def wait(log: Path, words: str, process: subprocess.Popen[bytes], *, timeout_s: float = 300.0) -> None:
    until(lambda: words in log.read_text(), log.read_text, timeout_s=timeout_s, alive=lambda: process.poll() is None)
