"""Segments NIfTI files with a student, on each file's own voxels, and scores the results if there are labels.

`consilium predict` calls it. A file is left out, with the reason, if it cannot be used, if it is unlike every public
volume that the student was trained on, or if its label map would overwrite that of another image or network. Refuses a
model that is neither a bundle nor a study with a student. Each result names its network. Results of earlier runs in the
same folder stay listed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib

from client.data.layouts import LAYOUTS, DatasetSettings, load_names, match_study, named_in_utf8, open_dataset
from common.calibration import NOTHING, Reliability
from common.canonical import sha256_bytes
from common.data.box import Box, Point
from common.data.dataset import Case, Dataset, Problem, left_out_lines
from common.data.input_ranges import odd_sizes
from common.data.msd import case_id, nifti_ending, other_files
from common.data.volume import Volume, save_label
from common.errors import InvalidInput
from common.metrics import mean_present
from common.models.bundle import Bundle, open_bundle
from common.models.fit import best_device
from common.models.native import predict_native
from common.models.unet import weights_to_bytes
from common.objects import write_atomically
from common.plain import RESEARCH_ONLY
from common.reading import parse_json, parsing
from server.postprocess.bundle import ranges_seen
from server.postprocess.networks import load_student
from server.study.workspace import Workspace

AXES = {
    "RAS": "RAS mm, as NIfTI: the patient's right, front and head are positive",
    "LPS": "LPS mm, as DICOM: the patient's left, back and head are positive",
}
"""Description of each coordinate system in which --centre can be given."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """The result of segmenting one case.

    Attributes:
        case: The case's id.
        file: The label map's file; empty if there is none.
        dice: Dice of each structure; empty without a true label map, nan for a structure in neither map.
        hd95_mm: HD95 in mm of each structure; nan for a structure in neither map, inf for one in only one map.
        problem: Why the case could not be used; empty otherwise.
        unlike: Description of how the volume differs from all training volumes of the student; empty if it is like
            them.
        centre: The point about which a box was segmented, in whole mm; empty if the whole file was.
        uncertainty: Name of the entropy map's file; empty if none was written.
        sure: How well the network's confidence is calibrated; see :class:`common.calibration.Reliability`.
        lesions: Lesion-wise Dice and HD95 of each structure, as in BraTS 2023; empty if not asked for.
        odd: Warnings of structures that are missing or far too small.
    """

    case: str
    file: str = ""
    dice: tuple[float, ...] = ()
    hd95_mm: tuple[float, ...] = ()
    problem: str = ""
    unlike: str = ""
    centre: str = ""
    uncertainty: str = ""
    sure: Reliability = NOTHING
    lesions: tuple[tuple[float, float], ...] = ()
    odd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Predictions:
    """The results of all cases.

    Attributes:
        text: The results as text.
        facts: The results as plain values for JSON.
        used: Number of files that could be used.
        left_out: Number of files that were left out, with their reasons in ``text`` and ``facts``.
    """

    text: str
    facts: dict[str, object]
    used: int
    left_out: int


def predict_images(
    images: Path,
    model: Path,
    out: Path,
    *,
    labels: Path | None,
    label_map: Path | None,
    uncertainty: bool = False,
    lesions: bool = False,
    even_if_unlike: bool = False,
    centre: Point | None = None,
    progress: Callable[[int, int], None],
) -> Predictions:
    """Segment images and write label maps and ``scores.json``.

    Args:
        images: A NIfTI file, or a folder in any layout.
        model: A bundle, or a study's directory with a student.
        out: Folder to write to.
        labels: True label maps, a file or folder; None for those of the layout.
        label_map: File that maps the dataset's labels to the student's.
        uncertainty: Also write an entropy map for each case.
        lesions: Also score each lesion.
        even_if_unlike: Also write label maps of images that differ from all training volumes of the student.
        centre: A point in mm of NIfTI's coordinates (RAS+). Only a box about it is segmented. None for whole files.
        progress: Called with the number of cases done and the number of all cases.

    Returns:
        The results.

    Raises:
        InvalidInput: If the model or the folder cannot be used, or a point is given for several images.
    """
    earlier = _read_earlier(out)
    bundle = load_model(model)
    settings = DatasetSettings() if label_map is None else load_names(label_map)
    cases, problems = find_cases(images, bundle, labels=labels, settings=settings)
    if centre is not None and len(cases) != 1:
        raise InvalidInput(
            "images for one --centre", value=len(cases), limit="one", remedy="run the command for each image"
        )
    box = None if centre is None else box_about(centre, bundle, axes="RAS")
    out.mkdir(parents=True, exist_ok=True)
    progress(0, len(cases))
    results = problems
    for number, case in enumerate(cases, start=1):
        try:
            done = _predict(
                case, bundle, out, uncertainty=uncertainty, lesions=lesions, even_if_unlike=even_if_unlike, box=box
            )
        except InvalidInput as error:
            done = Predicted(case.id, problem=str(error))
        results.append(done)
        progress(number, len(cases))
    written = {result.file for result in results}
    earlier = [entry for entry in earlier if entry["file"] not in written]
    facts = {**to_json(results, bundle), "earlier": earlier}
    write_atomically(out / "scores.json", (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode(), mode=None)
    used = sum(bool(result.file) for result in results)
    return Predictions(to_text(results, bundle, earlier=len(earlier)), facts, used, len(results) - used)


def _read_earlier(out: Path) -> list[dict[str, object]]:
    """Return the entries in ``scores.json`` of earlier runs whose label maps are still in the folder."""
    file = out / "scores.json"
    if not file.exists():
        return []
    with parsing(
        "this is no scores.json of an earlier run", value=str(file), remedy="choose another folder with --out"
    ):
        document = parse_json(
            file.read_bytes(), what="scores.json of an earlier run", remedy="choose another folder with --out"
        )
        entries: list[dict[str, object]] = [*document["cases"], *document.get("earlier", ())]
        return [entry for entry in entries if (name := str(entry["file"])) and (out / name).is_file()]


def load_model(directory: Path) -> Bundle:
    """Load the network of a bundle, or the student of a study's directory.

    Args:
        directory: The bundle or the study.

    Returns:
        The model.

    Raises:
        InvalidInput: If the directory is neither a bundle nor a study with a student.
    """
    if (directory / "study.toml").is_file():
        workspace = Workspace(directory)
        study = workspace.study()
        network = load_student(study, workspace.student_dir)
        bundle = Bundle(
            network,
            study.data.student,
            sha256_bytes(weights_to_bytes(network)),
            ranges_seen(workspace),
            study.student,
        )
    else:
        bundle = open_bundle(directory)
    bundle.network.to(best_device())
    return bundle


def box_about(centre: Point, bundle: Bundle, *, axes: str) -> Box:
    """Return a box about a point, of the mean size of the student's public training volumes.

    Args:
        centre: The point in mm.
        bundle: The model. If it does not state the size of the public volumes, the box has the size of its grid.
        axes: The point's coordinates, "RAS" or "LPS".

    Returns:
        The box.
    """
    if bundle.inputs is None:
        x, y, z = (n * size for n, size in zip(bundle.data.grid, bundle.data.spacing_mm, strict=True))
    else:
        x, y, z = ((low + high) / 2 for low, high in bundle.inputs.extent_mm)
    return Box(centre, (x, y, z), axes)


def unlike_remedy(choose: str, box: Box | None) -> str:
    """Return what to do about an image that differs from all training volumes of the student.

    Args:
        choose: The first option, such as to choose another image; the remedy begins with it.
        box: The part that was segmented; None for the whole file.

    Returns:
        The remedy.
    """
    centre = (
        "give --centre X,Y,Z to segment a box of the public images' size about a point of a larger scan"
        if box is None
        else f"check the point {box} of --centre, which is read as {AXES[box.axes]}"
    )
    return f"{choose}, {centre}, or give --even-if-unlike to segment it all the same"


def place_in_name(box: Box | None) -> str:
    """Return the part of a result's file name that says which box was segmented.

    Args:
        box: The box; None if the whole image was segmented.

    Returns:
        The part with the box's centre in mm; empty for the whole image.
    """
    return "" if box is None else "_at_" + "_".join(f"{value:.0f}" for value in box.centre_mm)


def find_cases(
    images: Path, bundle: Bundle, *, labels: Path | None, settings: DatasetSettings
) -> tuple[list[Case], list[Predicted]]:
    """Find the cases to segment, with their true label maps if there are any.

    Args:
        images: A NIfTI file, or a folder in any layout.
        bundle: The model.
        labels: True label maps, a file or folder; None for those of the layout.
        settings: Settings of the dataset.

    Returns:
        The cases, and one result with a problem for each case left out.

    Raises:
        InvalidInput: If there is no image, or if ``labels`` holds no label map of an image.
    """
    if images.is_dir() and any(layout.matches(images) for layout in LAYOUTS.values()):
        if labels is not None:
            raise InvalidInput(
                "--labels",
                value=str(labels),
                limit="not together with a dataset that names its own label maps",
                remedy="leave --labels out, or give the folder of the image files as IMAGES",
            )
        found = open_dataset(images, choice=settings.choice)
        dataset = match_study(
            found, bundle.data, labels=settings.labels, channels=settings.channels, absent=settings.absent
        )
        return list(dataset.cases), [Predicted(problem.case, problem=problem.reason) for problem in dataset.problems]
    files = sorted(images.iterdir()) if images.is_dir() else [images]
    files = [path for path in files if nifti_ending(path.name) and not path.name.startswith(".")]
    if not files:
        raise InvalidInput(
            "folder or file without a NIfTI image", value=str(images), limit="files that end in .nii or .nii.gz"
        )
    cases, problems = [], list(other_files(images) if images.is_dir() else ())
    named = _by_name(files)
    drawn = _by_name(sorted(labels.iterdir()) if labels is not None and labels.is_dir() else [])
    for path in files:
        name = case_id(path.name)
        maps = [labels] if labels is not None and labels.is_file() else drawn.get(name, [])
        if len(named[name]) > 1:
            reason = "two files of this name would have one result; to fix: rename one of them, or take it out"
            problems.append(Problem(path.name, reason))
        elif len(maps) > 1:
            problems.append(Problem(name, "two label maps have its name; to fix: keep only one of them"))
        else:
            cases.append(Case(id=name, image=path, label=maps[0] if maps else None))
    if labels is not None and cases and not any(case.label for case in cases):
        raise InvalidInput(
            "--labels",
            value=str(labels),
            limit="a label map, or a folder of label maps that have the names of the images",
            remedy="check the path and the names, or leave --labels out",
        )
    dataset = Dataset(images.name, labels=(), channels=("image",), cases=tuple(cases), problems=tuple(problems))
    dataset = match_study(named_in_utf8(dataset), bundle.data, labels=settings.labels, absent=settings.absent)
    return list(dataset.cases), [Predicted(problem.case, problem=problem.reason) for problem in dataset.problems]


def _by_name(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the NIfTI files by the name of their case."""
    found: dict[str, list[Path]] = {}
    for path in files:
        if (ending := nifti_ending(path.name)) and path.name != ending:
            found.setdefault(case_id(path.name), []).append(path)
    return found


def _predict(
    case: Case,
    bundle: Bundle,
    out: Path,
    *,
    uncertainty: bool,
    lesions: bool,
    even_if_unlike: bool,
    box: Box | None,
) -> Predicted:
    if Path(case.id).name != case.id:
        raise InvalidInput("case_id cannot name a file", value=case.id, remedy="choose a case_id without slashes")
    done = predict_native(
        case, bundle.network, bundle.data, patch=bundle.patch, uncertainty=uncertainty, lesions=lesions, box=box
    )
    unlike = "" if bundle.inputs is None else bundle.inputs.unlike(done.volume)
    if unlike and not even_if_unlike:
        remedy = unlike_remedy("choose an image like the public ones", box)
        reason = f"unlike every public volume that the student was trained on: {unlike}; to fix: {remedy}"
        return Predicted(case.id, problem=reason, unlike=unlike)
    name, unsure = f"{case.id}{place_in_name(box)}", ""
    path, where = out / f"{name}_seg.nii.gz", "" if box is None else str(box)
    made_of = _description(done.volume)
    network = f"network sha256 {bundle.weights}"
    _check_place(path, made_of, network)
    said = f"{made_of}; UNLIKE TRAINING DATA" if unlike else made_of
    comment = f"{network}; Consilium segmented only a box about {where}" if where else network
    save_label(path, done.label_map, done.volume, description=said, comment=comment)
    if done.uncertainty is not None:
        unsure = f"{name}_uncertainty.nii.gz"
        save_label(out / unsure, done.uncertainty, done.volume, description=said, comment=comment)
    return Predicted(
        case.id,
        path.name,
        done.dice,
        done.hd95_mm,
        unlike=unlike,
        centre=where,
        uncertainty=unsure,
        sure=done.sure,
        lesions=done.lesions,
        odd=odd_sizes(done.label_map, done.volume, bundle.data.labels[1:], bundle.inputs),
    )


def _description(volume: Volume) -> str:
    """Return the text for a label map's header: a statement, and a hash that identifies the image."""
    return f"Consilium, not for diagnosis; image {sha256_bytes(volume.image.tobytes())[:16]}"


def _check_place(path: Path, description: str, network: str) -> None:
    """Raise InvalidInput if a file exists and its header does not state the same image and network."""
    if not path.exists():
        return
    with contextlib.suppress(Exception):  # nibabel raises any type of exception for a file that is not NIfTI
        header = nib.load(path).header
        same_image = bytes(header["descrip"].tobytes()).startswith(description.encode())
        if same_image and any(one.get_content().startswith(network.encode()) for one in header.extensions):
            return
    raise InvalidInput(
        "the label map's file exists already and is not of this image and network",
        value=str(path),
        remedy="choose another folder with --out",
    )


def to_json(results: list[Predicted], bundle: Bundle) -> dict[str, object]:
    """Return the results as plain values for JSON; nan becomes null, an infinite distance the text "inf".

    Args:
        results: The results.
        bundle: The model.

    Returns:
        Plain values.
    """

    scored = [result for result in results if result.dice]
    names = bundle.data.structures
    columns = list(zip(*(result.dice for result in scored), strict=True))
    sure = _sure(results)
    return {
        "schema": 1,
        "statement": RESEARCH_ONLY,
        "used": sum(not result.problem for result in results),
        "left_out": sum(bool(result.problem) for result in results),
        "structures": list(names),
        "cases": [
            {
                "case": result.case,
                "file": result.file,
                "network": bundle.weights,
                "dice": [_number(value) for value in result.dice],
                "hd95_mm": [_number(value) for value in result.hd95_mm],
                "problem": result.problem,
                "unlike": result.unlike,
                "warnings": list(result.odd),
                **({"centre_mm": result.centre} if result.centre else {}),
                **({"uncertainty": result.uncertainty} if result.uncertainty else {}),
                **({"lesion_wise": [list(pair) for pair in result.lesions]} if result.lesions else {}),
            }
            for result in results
        ],
        "ece": _number(sure.error),
        "reliability": [list(point) for point in sure.points],
        "mean_dice": {name: _number(mean_present(column)) for name, column in zip(names, columns, strict=False)},
    }


def to_text(results: list[Predicted], bundle: Bundle, *, earlier: int = 0) -> str:
    """Return how many cases were used, one line for each case, and warnings.

    Args:
        results: The results.
        bundle: The model.
        earlier: Number of results of earlier runs in the same folder.

    Returns:
        The text.
    """
    lines = []
    for result in results:
        scores = ", ".join(
            f"{name} Dice {_shown(dice, '.3f')} HD95 {_shown(distance, '.1f')} mm"
            for name, dice, distance in zip(bundle.data.structures, result.dice, result.hd95_mm, strict=False)
        )
        scores += "".join(
            f", {name} lesion-wise Dice {dice:.3f} HD95 {far:.1f} mm"
            for name, (dice, far) in zip(bundle.data.structures, result.lesions, strict=False)
        )
        where = f"only a box about {result.centre} mm was segmented" if result.centre else ""
        if not result.problem:
            lines.append(f"{result.case}: {'; '.join(filter(None, (result.file, where, scores)))}")
    problems = [Problem(result.case, result.problem) for result in results if result.problem]
    lines += left_out_lines(len(results) - len(problems), problems)
    unscored = sum(not result.problem and not result.dice for result in results)
    if 0 < unscored < len(results) - len(problems):
        lines.append(f"not scored, because they have no label map: {unscored}")
    if not math.isnan(error := _sure(results).error):
        lines.append(f"expected calibration error in voxels of structures: {error:.3f}")
    if far := [result for result in results if result.unlike and not result.problem]:
        lines.append(
            f"warning: {len(far)} of {len(results)} differ from every public volume that the student was trained on; "
            "do not rely on their label maps:"
        )
        lines += [f"  {result.case}: {result.unlike}" for result in far]
    lines += [f"warning: {result.case}: {one}" for result in results for one in result.odd]
    if earlier:
        lines.append(f"results of earlier runs in this folder: {earlier}, listed under earlier in scores.json")
    return "\n".join([*lines, RESEARCH_ONLY])


def _sure(results: list[Predicted]) -> Reliability:
    return sum((result.sure for result in results), NOTHING)


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return "inf" if math.isinf(value) else value
