"""Defines ``consilium codec …``: fit the study's codec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.data.msd import nifti_files
from consilium.cli.options import StudyDir
from consilium.cli.say import console, say
from consilium.cli.study_words import say_files, say_outlook, say_rooms
from server.study.workspace import Workspace

codec_app = typer.Typer(no_args_is_help=True, add_completion=False)


@codec_app.callback()
def _codec() -> None:
    """Fit the study's codec on public label maps."""


@codec_app.command("fit")
def fit(
    directory: StudyDir,
    label_maps: Annotated[
        Path,
        typer.Option(help="Folder of public label maps (.nii, .nii.gz) of people whose images are not in the study."),
    ],
    sites: Annotated[
        int,
        typer.Option(
            help="Expected number of sites in a release. It determines the planned noise on the mean code.",
            min=1,
            max=1 << 20,
        ),
    ],
    split: Annotated[
        Path | None,
        typer.Option(help="split.json of `consilium data split`; label maps of its private cases are refused."),
    ] = None,
) -> None:
    """Fit the study's codec on public label maps only, and publish it.

    Example: consilium codec fit trial --label-maps public/label-maps --sites 8
    """

    from common.data.split import private_label_hashes
    from server.aggregation.progress import bar_a_stage
    from server.study.create_study import fit_study_codec

    workspace = Workspace(directory)
    files = nifti_files(label_maps, what="folder of public label maps")
    say_files("public label maps", label_maps)
    private = private_label_hashes(split) if split else frozenset()
    with bar_a_stage(console(stderr=True)) as on_stage:
        record = fit_study_codec(workspace, files, sites=sites, private_hashes=private, on_stage=on_stage)
    say_outlook(workspace.study(), hospitals=sites, workspace=workspace)
    say_rooms(workspace)
    say(f"codec {record.sha256[:16]}… with {record.dimension} dimensions, fitted on {len(files)} public label maps")
