"""``consilium study evaluate``: the student as hospitals measured it on their own cases, by their consent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import AsJson, StudyDir, read_file
from consilium.cli.say import say
from server.study.workspace import Workspace


def evaluate(
    directory: StudyDir,
    files: Annotated[list[Path] | None, typer.Argument(help="Figures that hospitals sent, a file each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take in hospitals' signed figures of the student, and say what they amount to: mean, worst hospital, interval.

    A hospital makes them with `site evaluate --figures` and sends them if it consents; those that sent none are named.
    They stand in the model card of `student publish`.
    Example: consilium study evaluate trial north-figures.json south-figures.json
    """
    from server.aggregation.pipeline import locked_events
    from server.study.evaluated import evaluated, take_figures

    if files:
        with locked_events(Workspace(directory)) as (workspace, _):
            for path in files:
                take_figures(workspace, read_file(path))
    found = evaluated(Workspace(directory))
    say(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines))
