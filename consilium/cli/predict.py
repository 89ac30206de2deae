"""Defines ``consilium predict``: segments NIfTI files or DICOM series with a student, and scores the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import ResultAsJson, counting, folder_to_write, triple
from consilium.cli.say import say
from consilium.cli.site_student import check_student

SOME_LEFT_OUT = 12
"""Exit code if some files were left out and the label maps of all others were written."""

app = typer.Typer(add_completion=False)


@app.command()
def predict(
    model: Annotated[Path, typer.Option(help="Directory of a student's bundle, or of a study that has a student.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the label maps, CASE_seg.nii.gz, and scores.json. Earlier results in it are kept.",
            callback=folder_to_write,
        ),
    ],
    images: Annotated[
        Path | None, typer.Argument(help="A NIfTI file, a folder of them, or a dataset in any layout.")
    ] = None,
    dicom: Annotated[
        Path | None, typer.Option(help="Folder of one DICOM study, instead of images; a DICOM Segmentation is written.")
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            help="Series of the DICOM study, by UID, number or description; CHANNEL=SERIES for several channels."
        ),
    ] = None,
    even_if_unlike: Annotated[
        bool,
        typer.Option(
            "--even-if-unlike",
            help="Write the result, marked as unlike, even if an image differs from all public training volumes.",
        ),
    ] = False,
    centre: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,Z",
            help="Segment only a box of the training images' size about this point, as in a whole-head scan. Give mm "
            "in the patient's coordinates: LPS with --dicom, RAS for NIfTI.",
        ),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A label map, or a folder of label maps with the images' names.")
    ] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(
            help="TOML file that assigns the dataset's names of labels and channels to the model's, and chooses among "
            "several BIDS files: tables dataset, labels, channels and bids, as in site.toml."
        ),
    ] = None,
    uncertainty: Annotated[
        bool,
        typer.Option(
            "--uncertainty",
            help="Also write CASE_uncertainty.nii.gz, or with --dicom a Parametric Map. Values run from 0 (certain) to "
            "1 (nothing known).",
        ),
    ] = False,
    lesions: Annotated[
        bool, typer.Option("--lesion-wise", help="Also score Dice and HD95 lesion by lesion, as BraTS 2023 does.")
    ] = False,
    as_json: ResultAsJson = False,
) -> None:
    """Segment volumes with a student, or with a network that a hospital adapted from it.

    Each result is on the voxel grid of its input file. If labels are given, Dice and HD95 (mm) are computed on that
    grid, so structures outside the study's grid count as missed.
    Exit code 2: no file could be used, or the DICOM series was refused. 12: some files were left out, with a reason
    each; the results of all others were written.
    Example: consilium predict scans --model bundle --out predictions --labels drawn
    Example: consilium predict --dicom study --series 4 --model bundle --out segmentations
    Example: consilium predict head.nii.gz --centre -25,-18,-12 --model bundle --out segmentations
    """
    limit = "three numbers in mm, such as -25,-18,-12.5"
    point = None if centre is None else triple(centre, float, what="--centre", limit=limit, above=-1e6, below=1e6)
    if (images is None) == (dicom is None):
        raise InvalidInput("images to segment", limit="either IMAGES, or --dicom with the folder of a DICOM study")
    if dicom is not None:
        given = {"--labels": labels, "--label-map": label_map, "--lesion-wise": lesions}
        if unread := [name for name, value in given.items() if value]:
            remedy = "list series and labels in a table of cases, and give its folder as IMAGES"
            raise InvalidInput(", ".join(unread), limit="not together with --dicom", remedy=remedy)
        for what, folder in (("--dicom", dicom), ("--model", model)):
            if not folder.exists():
                raise InvalidInput(what, value=str(folder), limit="an existing folder")
        _check_pulled(model)
        from consilium.predict_dicom import predict_dicom

        written = predict_dicom(
            dicom,
            model,
            out,
            chosen=series or [],
            even_if_unlike=even_if_unlike,
            centre=point,
            uncertainty=uncertainty,
        )
        say(json.dumps(written.to_json()) if as_json else written.to_text())
        return
    if series:
        raise InvalidInput("--series", limit="only together with --dicom")
    assert images is not None
    for what, path in (("images", images), ("--model", model), ("--labels", labels), ("--label-map", label_map)):
        if path is not None and not path.exists():  # check before slow imports
            raise InvalidInput(what, value=str(path), limit="an existing file or folder", remedy="check the path")

    _check_pulled(model)
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
            even_if_unlike=even_if_unlike,
            centre=point,
            progress=on_case,
        )
    say(json.dumps(done.facts, allow_nan=False) if as_json else done.text)
    if not done.used:
        raise InvalidInput("no file could be used", remedy="see the reasons above")
    if done.left_out:
        files = f"{done.left_out} of {done.left_out + done.used} files were left out, the results of the others written"
        say(f"error: {files}; to fix: see the reasons above, or in {out / 'scores.json'}", err=True)
        raise typer.Exit(SOME_LEFT_OUT)


def _check_pulled(model: Path) -> None:
    """Check the signed statement beside a student, if the model is the one in a site's directory."""
    from client.teachers.pulled_student import STUDENT_DIR

    site_dir = model.absolute().parent.parent
    if model.absolute() == site_dir / STUDENT_DIR / "bundle" and (site_dir / "site.toml").is_file():
        check_student(site_dir, made="the result is")
