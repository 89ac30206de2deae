"""Runs slow work, such as verifying the ledger, in a separate process at low priority.

The service has one :class:`Job` for each kind of work; a job runs at most once at a time. The output of a job goes to
the dashboard's state directory. Pages show whether the job runs, how it ended and its last error message.

``python -m server.dashboard.jobs`` does a task in its own process: ``verify LEDGER`` prints the report of a full
verification; ``pictures STUDY OUT`` writes volumes, labels and the student's predictions as small arrays for the slice
viewer. It reads the study and writes only below OUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConsiliumError, InvalidInput
from common.objects import write_atomically

TIMEOUT_S = 3600.0
NICE = 15
WORDS = 600


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a background job.

    Attributes:
        state: ``never`` (not run yet), ``running``, ``done`` or ``failed``.
        started: Time at which the newest run began; None before the first run.
        ended: Time at which that run ended; None until then.
        words: Error message of a failed job; otherwise empty.
    """

    state: str
    started: str | None = None
    ended: str | None = None
    words: str = ""


def lower_priority() -> None:
    """Lower this process's priority to :data:`NICE`, and no further if it was started with a low priority."""
    os.nice(max(0, NICE - os.nice(0)))


class Job:
    """One kind of background work, of which at most one run is active at a time.

    Args:
        out: File that receives the standard output of a successful run.
        command: Function that returns the command line to run; called at each start of the job.
        now: Returns the current time.

    Attributes:
        state: The state of the newest run.
    """

    def __init__(self, out: Path, command: Callable[[], Sequence[str]], *, now: Callable[[], datetime]) -> None:
        self._out, self._command, self._now = out, command, now
        self._lock = threading.Lock()
        self.state = JobState("never")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def result(self) -> Any:
        """JSON that the newest run printed; None unless it succeeded."""
        return json.loads(self._out.read_bytes()) if self.state.state == "done" else None

    def start(self) -> JobState:
        """Start the job unless it is running already, and return its state."""
        with self._lock:
            if self.state.state == "running":
                return self.state
            self.state = JobState("running", started=self._stamp())
            threading.Thread(target=self._run, name=self._out.name, daemon=True).start()
            return self.state

    def stop(self) -> None:
        """End the process if it is running."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def _run(self) -> None:
        started = self.state.started
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                list(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            out, err = self._process.communicate(timeout=TIMEOUT_S)
            if self._process.returncode == 0:
                write_atomically(self._out, out, mode=0o600)
                self.state = JobState("done", started, self._stamp())
            else:
                lines = err.decode("utf-8", "replace").strip().splitlines()
                words = lines[-1][:WORDS] if lines else f"it ended with status {self._process.returncode}"
                self.state = JobState("failed", started, self._stamp(), words.removeprefix("error: "))
        except (OSError, subprocess.SubprocessError) as error:
            if self._process is not None:
                self._process.kill()
            self.state = JobState("failed", started, self._stamp(), f"{type(error).__name__}: {error}"[:WORDS])

    def _stamp(self) -> str:
        return self._now().isoformat(timespec="seconds")


def work(*arguments: str) -> list[str]:
    """Return the command line that runs a task of this module, see :func:`main`.

    Args:
        arguments: Name of the task and its arguments.

    Returns:
        The command line.
    """
    return [sys.executable, "-P", "-m", "server.dashboard.jobs", *arguments]


def main(arguments: list[str]) -> None:
    """Do the task that the first argument names, and print its result as JSON.

    Args:
        arguments: Name of the task, then its arguments.

    Raises:
        InvalidInput: For unknown arguments.
    """
    lower_priority()
    match arguments:
        case ["verify", ledger]:
            from server.ledger.verify import verify

            print(json.dumps(verify(Path(ledger)).to_json()))
        case ["pictures", study, out]:
            from server.dashboard.pictures import make_pictures
            from server.study.workspace import Workspace

            print(json.dumps({"made": make_pictures(Workspace(Path(study)), Path(out))}))
        case _:
            raise InvalidInput(
                "arguments of server.dashboard.jobs", value=arguments, limit="verify LEDGER, or pictures STUDY OUT"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConsiliumError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
