"""``consilium predict``: a student on any NIfTI file or folder, label maps on each file's own voxels, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import ResultAsJson, counting

app = typer.Typer(add_completion=False)


@app.command()
def predict(
    images: Annotated[Path, typer.Argument(help="A NIfTI file, a folder of them, or a dataset in any layout.")],
    model: Annotated[Path, typer.Option(help="A bundle's directory, or a study's with a student.")],
    out: Annotated[Path, typer.Option(help="Directory for the label maps, CASE_seg.nii.gz, and scores.json.")],
    labels: Annotated[
        Path | None, typer.Option(help="A label map, or a folder of label maps named as the images are.")
    ] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(help="TOML with the tables labels, channels and bids: a dataset's names = the model's."),
    ] = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Also write CASE_uncertainty.nii.gz: 0 certain, 1 nothing known.")
    ] = False,
    lesions: Annotated[
        bool, typer.Option("--lesion-wise", help="Also Dice and HD95 lesion by lesion, as BraTS 2023 scores.")
    ] = False,
    as_json: ResultAsJson = False,
) -> None:
    """Segment volumes with a student; write label maps on each file's own voxels; score them where labels are given.

    Dice and HD95 (mm) are taken on the file's own voxels, so what lies outside the study's grid counts as missed. Exit
    code 2: not one file could be used.
    Example: consilium predict scans --model bundle --out predictions --labels drawn
    """
    for what, path in (("images", images), ("--model", model), ("--labels", labels), ("--label-map", label_map)):
        if path is not None and not path.exists():  # before anything that takes long is loaded
            raise InvalidInput(what, value=str(path), limit="a file or folder that is there")

    from consilium.predict import predict_images

    with counting("predicting") as on_case:
        done = predict_images(
            images,
            model,
            out,
            labels=labels,
            label_map=label_map,
            uncertainty=uncertainty,
            lesions=lesions,
            progress=on_case,
        )
    typer.echo(json.dumps(done.facts, allow_nan=False) if as_json else done.text)
    if not done.used:
        raise InvalidInput("not one file could be used", remedy="see the reasons above")
