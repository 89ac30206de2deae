"""Continues a study of :mod:`tests.dashboard_study` with the version of Consilium that is on the path.

``python -P half_run.py FOLDER RELEASES`` makes the study in FOLDER, or opens the study that is there. It runs the study
until RELEASES further batches are released, and then ends in the middle of the run, like a killed process. With 0
releases it runs to the end. It uses only what release 0.2.0 has as well. It prints the study's id and its number of
answers.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.data.msd import read_dataset
from common.events import EventLog
from server.aggregation.pipeline import collect
from server.ledger.server_ledger import Ledger
from tests import dashboard_study


class Killed(BaseException):
    """Ends the server's process at this point."""


class UntilReleased(EventLog):
    """Ends the process after a number of released batches; 0 stands for never."""

    left = 0

    def emit(self, event: str, **facts: Any) -> None:
        super().emit(event, **facts)
        if event == "released":
            self.left -= 1
            if self.left == 0:
                raise Killed


def reopened() -> None:
    """Let ``make_study_directory`` use existing files and folders in place of new ones."""

    def there(*_: object, **__: object) -> None:
        return None

    made = Path.mkdir
    Path.mkdir = lambda path, *given, **named: made(path, *given, **{**named, "exist_ok": True})  # type: ignore[method-assign]
    dashboard_study.write_phantoms = lambda folder, **_: read_dataset(folder)  # release 0.2.0 draws the phantoms itself
    dashboard_study.phantoms = lambda folder, cases: read_dataset(folder).cases
    # Release 0.2.0 has no such function.
    dashboard_study.made_study = lambda folder, *_, **__: dashboard_study.Workspace(folder)
    for step in ("create_study", "publish_volumes", "fit_study_codec", "add_site"):
        setattr(dashboard_study.setup, step, there)


def main(root: Path, releases: int) -> None:
    if (root / "study").exists():
        reopened()
    recorded = dashboard_study.make_study_directory(root, batch_size=2)
    workspace = recorded.workspace
    events = UntilReleased(workspace.events_file, study=workspace.study().id)
    events.left = releases
    events.emit("run-started", run=str(releases), pid=1, resumed=True)
    with suppress(Killed):
        collect(workspace, recorded.transport, events=events)
    with Ledger.open(workspace.ledger_file) as ledger:
        print(workspace.study().id, len(ledger.answers(workspace.study().id)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
