"""Defines ``consilium study evaluate``: reads the student's scores that hospitals measured and consented to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.reading import naming_file
from consilium.cli.options import AsJson, StudyDir, read_file
from consilium.cli.say import json_text, say
from server.study.workspace import Workspace


def evaluate(
    directory: StudyDir,
    files: Annotated[list[Path] | None, typer.Argument(help="Scores that hospitals sent, one file each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read hospitals' signed scores of the student, and print their mean with its interval, and the worst one.

    A hospital makes them with `site evaluate --figures` and sends them if it consents; hospitals without scores are
    named. The scores appear in the model card of `student publish`.
    Example: consilium study evaluate trial north-figures.json south-figures.json
    """
    from server.aggregation.pipeline import locked_events
    from server.study.evaluated import evaluated, take_figures

    if files:
        with locked_events(Workspace(directory)) as (workspace, _):
            for path in files:
                with naming_file(path, remedy="give the file that the hospital wrote with `site evaluate --figures`"):
                    take_figures(workspace, read_file(path))
    found = evaluated(Workspace(directory))
    say(json_text(found.to_json()) if as_json else "\n".join(found.lines))
