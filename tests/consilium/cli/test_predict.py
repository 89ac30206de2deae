"""Tests consilium predict: label maps on each file's own voxels, and scores that equal an independent computation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from nibabel.orientations import axcodes2ornt, ornt_transform
from scipy.ndimage import binary_dilation, binary_erosion
from typer.testing import CliRunner

from common.config import DataConfig, TrainingConfig
from common.data.input_ranges import InputRanges, input_ranges
from common.data.synthetic import write_phantoms
from common.data.volume import load_volume
from common.errors import InvalidInput
from common.models.bundle_facts import BundlePrivacy
from common.models.fit import fit, one_hot
from common.models.student_bundle import export_bundle
from common.models.unet import build_unet
from common.plain import RESEARCH_ONLY
from common.privacy.mechanism import AccountantName, Protection, Relation, Unit
from consilium.cli.predict import SOME_LEFT_OUT, app
from consilium.predict import AXES, load_model
from tests.commands import refusal_of
from tests.worlds import make_study

LABELS = ("background", "left", "right")
DATA = DataConfig(labels=LABELS, spacing_mm=(1, 1, 1), grid=(16, 16, 16))
RECIPE = TrainingConfig(channels=(4, 8), steps=80, batch_size=2, learning_rate=1e-2)


def drawing(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a bright ball on the patient's left and a dark one on the right, in RAS+ voxels of 1 mm."""
    rng = np.random.default_rng(seed)
    axes = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    labels = np.zeros((16, 16, 16), dtype=np.uint8)
    for value, x in ((1, 4.0), (2, 11.0)):
        labels[np.linalg.norm(axes - (x, *rng.uniform(6, 10, 2)), axis=-1) < 3.2] = value
    return rng.normal(np.choose(labels, [0.0, 3.0, -3.0]), 0.3).astype(np.float32), labels


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = [drawing(seed) for seed in range(4)]
    model = build_unet(RECIPE.channels, in_channels=1, out_channels=3, seed=1)
    images = np.stack([(image - image.mean()) / image.std() for image, _ in pairs])[:, None]
    fit(model, images, np.stack([one_hot(labels, 3) for _, labels in pairs]), RECIPE, seed=1)
    facts = BundlePrivacy(
        budget_epsilon=8.0,
        epsilon_exact=8.0,
        epsilon_rdp=9.0,
        delta=1e-3,
        protection=Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE),
        accountant=AccountantName.EXACT,
        noise_multiplier=2.0,
        queries=4,
        sites=3,
        voters_per_site=1,
        ledger_head="0" * 64,
        study="1" * 64,
        codec="2" * 64,
    )
    study = make_study(data=DATA, planned_queries=4, student=RECIPE)
    directory = tmp_path_factory.mktemp("model") / "bundle"
    export_bundle(directory, study=study, model=model, privacy=facts)
    return directory


def store(path: Path, array: np.ndarray, code: str, zooms: tuple[float, ...] = (1, 1, 1)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(array, np.diag([*zooms, 1.0]))
    nib.save(image.as_reoriented(ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(code))), path)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans")
    for seed, code in ((11, "RAS"), (12, "LPS"), (13, "SAR")):
        image, labels = drawing(seed)
        store(root / "images" / f"doe-{seed}.nii.gz", image, code)
        store(root / "labels" / f"doe-{seed}.nii.gz", labels, code)
    (root / "images" / "broken.nii.gz").write_bytes(b"nothing")
    return root


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    out = Path(str(arguments[arguments.index("--out") + 1]))
    left_out = json.loads((out / "scores.json").read_text())["left_out"]
    assert done.exit_code == (SOME_LEFT_OUT if left_out else 0)
    assert (f"{left_out} of " in done.stderr) == (left_out > 0)
    return done.stdout


def test_label_maps_lie_on_each_files_own_voxels_and_left_stays_left(bundle: Path, scans: Path, tmp_path: Path) -> None:
    facts = json.loads(
        run(scans / "images", "--model", bundle, "--out", tmp_path, "--labels", scans / "labels", "--json")
    )
    assert facts == json.loads((tmp_path / "scores.json").read_text())
    by_name = {case["case"]: case for case in facts["cases"]}
    assert "no NIfTI" in by_name["broken"]["problem"]
    for seed in (11, 12, 13):
        found = nib.load(tmp_path / f"doe-{seed}_seg.nii.gz")
        truth = nib.load(scans / "labels" / f"doe-{seed}.nii.gz")
        np.testing.assert_allclose(found.affine, truth.affine)
        p, t = (np.asarray(image.dataobj) for image in (found, truth))
        assert p.dtype == np.uint8
        dice = [2 * ((p == v) & (t == v)).sum() / ((p == v).sum() + (t == v).sum()) for v in (1, 2)]
        assert min(dice) > 0.8
        np.testing.assert_allclose(by_name[f"doe-{seed}"]["dice"], dice, atol=1e-6)
        places = {v: nib.affines.apply_affine(found.affine, np.argwhere(p == v)).mean(axis=0)[0] for v in (1, 2)}
        assert places[1] < places[2] - 4  # 1 lies towards the patient's left


def test_an_uncertainty_map_lies_on_the_files_voxels_and_is_largest_where_structures_end(
    bundle: Path, scans: Path, tmp_path: Path
) -> None:
    given = (scans / "images/doe-12.nii.gz", "--model", bundle, "--labels", scans / "labels")
    facts = json.loads(run(*given, "--out", tmp_path, "--uncertainty", "--lesion-wise", "--json"))
    found, drawn = (nib.load(tmp_path / f"doe-12_{what}.nii.gz") for what in ("uncertainty", "seg"))
    np.testing.assert_allclose(found.affine, drawn.affine)
    unsure, labels = (np.asarray(image.dataobj) for image in (found, drawn))
    assert unsure.shape == labels.shape
    assert 0 <= unsure.min() <= unsure.max() <= 1
    edge = binary_dilation(labels > 0) & ~binary_erosion(labels > 0)
    assert unsure[edge].mean() > 3 * unsure[~edge].mean()
    assert facts["cases"][0]["uncertainty"] == "doe-12_uncertainty.nii.gz"
    assert 0 < facts["ece"] < 0.5
    assert [pair[0] > 0.6 for pair in facts["cases"][0]["lesion_wise"]] == [True, True]
    assert "expected calibration error" in run(*given, "--out", tmp_path / "plain")
    assert not (tmp_path / "plain" / "doe-12_uncertainty.nii.gz").exists()


def test_one_file_and_one_label_map_do_too_and_the_text_names_every_structure(
    bundle: Path, scans: Path, tmp_path: Path
) -> None:
    text = run(
        scans / "images/doe-12.nii.gz", "--model", bundle, "--out", tmp_path, "--labels", scans / "labels/doe-12.nii.gz"
    )
    assert "doe-12: doe-12_seg.nii.gz; left Dice 0." in text
    assert "right Dice 0." in text
    assert (tmp_path / "doe-12_seg.nii.gz").exists()


def test_every_file_of_a_folder_is_used_or_named_with_the_reason_it_was_left_out(
    bundle: Path, scans: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(scans / "images", folder)
    (folder / "notes.txt").write_text("seen by two readers")
    (folder / "older").mkdir()
    (folder / "doe-13.nii.gz").rename(folder / "doe-13.NII.GZ")
    (scans / "labels" / "doe-13.nii.gz").rename(tmp_path / "kept.nii.gz")
    try:
        text = run(folder, "--model", bundle, "--out", tmp_path / "out", "--labels", scans / "labels")
    finally:
        (tmp_path / "kept.nii.gz").rename(scans / "labels" / "doe-13.nii.gz")
    lines = text.splitlines()
    assert "cases: 3 used, 3 left out" in lines
    assert any(line.startswith("left out notes.txt: ") and ".nii.gz" in line for line in lines)
    assert any(line.startswith("left out older: ") and "folder" in line for line in lines)
    assert any(line.startswith("left out broken: ") and "no NIfTI" in line for line in lines)
    assert any(re.search("^not scored.*: 1$", line) for line in lines)
    facts = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (facts["used"], facts["left_out"]) == (3, 3)
    assert {case["case"] for case in facts["cases"] if case["problem"]} == {"broken", "notes.txt", "older"}


def test_where_no_file_is_left_out_the_text_says_so(bundle: Path, scans: Path, tmp_path: Path) -> None:
    text = run(scans / "images/doe-11.nii.gz", "--model", bundle, "--out", tmp_path)
    assert "cases: 1 used, none left out" in text


def test_a_dataset_is_scored_by_its_own_label_maps(bundle: Path, scans: Path, tmp_path: Path) -> None:
    rows = ["image,label", *(f"images/doe-{seed}.nii.gz,labels/doe-{seed}.nii.gz" for seed in (11, 13))]
    (scans / "cases.csv").write_text("\n".join(rows) + "\n")
    facts = json.loads(run(scans, "--model", bundle, "--out", tmp_path, "--json"))
    (scans / "cases.csv").unlink()
    assert [case["case"] for case in facts["cases"]] == ["doe-11", "doe-13"]
    assert all(len(case["hd95_mm"]) == 2 for case in facts["cases"])
    assert facts["mean_dice"]["left"] > 0.8


def test_scores_are_of_the_files_own_voxels_in_their_own_mm(bundle: Path, tmp_path: Path) -> None:
    """For voxels of .5 × 1 × 1 mm, HD95 is computed by brute force over surface voxels, in mm."""
    image, labels = drawing(21)
    image, labels = image.repeat(2, axis=0), labels.repeat(2, axis=0)
    store(tmp_path / "i/x.nii.gz", image, "RAS", (0.5, 1, 1))
    store(tmp_path / "l/x.nii.gz", labels, "RAS", (0.5, 1, 1))
    facts = json.loads(
        run(tmp_path / "i", "--model", bundle, "--out", tmp_path / "o", "--labels", tmp_path / "l", "--json")
    )
    found = np.asarray(nib.load(tmp_path / "o/x_seg.nii.gz").dataobj)
    assert found.shape == (32, 16, 16)

    def surface(mask: np.ndarray) -> np.ndarray:
        padded = np.pad(mask, 1)
        inside = np.ones_like(padded)
        for axis in range(3):
            for step in (-1, 1):
                inside &= np.roll(padded, step, axis)
        return np.argwhere((padded & ~inside)[1:-1, 1:-1, 1:-1]) * (0.5, 1, 1)

    for value, score in zip((1, 2), facts["cases"][0]["hd95_mm"], strict=True):
        a, b = surface(found == value), surface(labels == value)
        distances = np.linalg.norm(a[:, None] - b[None], axis=-1)
        expected = max(np.percentile(distances.min(axis=1), 95), np.percentile(distances.min(axis=0), 95))
        assert score == pytest.approx(expected, abs=1e-4)


def test_other_label_numbers_are_mapped_and_unknown_names_refused(bundle: Path, scans: Path, tmp_path: Path) -> None:
    labels = np.asarray(nib.load(scans / "labels/doe-11.nii.gz").dataobj)
    store(tmp_path / "l/doe-11.nii.gz", np.array([0, 17, 53], dtype=np.int16)[labels], "RAS")
    names = tmp_path / "names.toml"
    names.write_text('[labels]\n17 = "left"\n53 = "right"\n')
    arguments = [scans / "images/doe-11.nii.gz", "--model", bundle, "--out", tmp_path / "o", "--labels", tmp_path / "l"]
    facts = json.loads(run(*arguments, "--label-map", names, "--json"))
    assert min(facts["cases"][0]["dice"]) > 0.8
    names.write_text('[labels]\n17 = "liver"\n')
    with pytest.raises(InvalidInput, match="label-map"):
        run(*arguments, "--label-map", names)


def test_a_file_that_is_no_model_or_no_scan_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no student bundle"):
        load_model(tmp_path)
    with pytest.raises(InvalidInput, match=r"allowed: .*.nii.gz"):
        run(tmp_path, "--model", bundle, "--out", tmp_path / "o")
    (tmp_path / "x.nii").write_bytes(b"junk")
    with pytest.raises(InvalidInput, match="no file"):
        run(tmp_path, "--model", bundle, "--out", tmp_path / "o")


@pytest.fixture(scope="module")
def seen(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> InputRanges:
    folder = tmp_path_factory.mktemp("public")
    for seed in range(20, 36):
        store(folder / f"{seed}.nii.gz", drawing(seed)[0], "RAS")
    return input_ranges(load_volume(path, DATA) for path in sorted(folder.iterdir()))


@pytest.fixture(scope="module")
def told(bundle: Path, seen: InputRanges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle with the stated ranges of its public volumes."""
    told = tmp_path_factory.mktemp("told") / "bundle"
    shutil.copytree(bundle, told)
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert "input_ranges" not in metadata  # like a bundle of an earlier version
    metadata["input_ranges"] = seen.to_json()
    (told / "configs" / "metadata.json").write_text(json.dumps(metadata))
    return told


def test_an_input_far_from_the_public_volumes_is_said_and_a_normal_one_is_not(
    bundle: Path, told: Path, scans: Path, tmp_path: Path
) -> None:
    phantoms = write_phantoms(tmp_path / "phantoms", cases=2, seed=1)
    images = tmp_path / "images"
    shutil.copytree(scans / "images", images)
    for number, case in enumerate(phantoms.cases):
        shutil.copy(case.image, images / f"phantom-{number}.nii.gz")

    facts = json.loads(run(images, "--model", told, "--out", tmp_path / "out", "--json"))
    unlike = {case["case"]: case["unlike"] for case in facts["cases"]}
    assert [name for name, said in unlike.items() if said] == ["phantom-0", "phantom-1"]
    assert [case["file"] for case in facts["cases"] if case["unlike"]] == ["", ""]  # not written, as with --dicom
    assert "give --even-if-unlike" in facts["cases"][-1]["problem"]
    text = run(images, "--model", told, "--out", tmp_path / "out", "--even-if-unlike")
    marked = [path.name for path in sorted((tmp_path / "out").iterdir()) if b"UNLIKE" in descrip(path)]
    assert marked == ["phantom-0_seg.nii.gz", "phantom-1_seg.nii.gz"]
    assert "warning: 2 of 6 " in text
    assert f"phantom-0: {unlike['phantom-0']}" in text
    assert "warning" not in run(images, "--model", bundle, "--out", tmp_path / "out")


def descrip(path: Path) -> bytes:
    return bytes(nib.load(path).header["descrip"].tobytes()) if path.name.endswith(".nii.gz") else b""


def test_one_patients_label_map_never_overwrites_anothers(bundle: Path, tmp_path: Path) -> None:
    """Folders of two patients have files of the same name."""
    for seed, patient in ((1, "a"), (2, "b")):
        store(tmp_path / patient / "t1.nii.gz", drawing(seed)[0], "RAS")
    out = tmp_path / "out"
    run(tmp_path / "a", "--model", bundle, "--out", out)
    first = (out / "t1_seg.nii.gz").read_bytes()
    with pytest.raises(InvalidInput, match="no file"):
        run(tmp_path / "b", "--model", bundle, "--out", out)
    assert (out / "t1_seg.nii.gz").read_bytes() == first
    assert "not of this image" in (out / "scores.json").read_text()
    (kept,) = json.loads((out / "scores.json").read_text())["earlier"]
    assert (kept["case"], kept["file"]) == ("t1", "t1_seg.nii.gz")
    run(tmp_path / "a", "--model", bundle, "--out", out)  # the same image again
    facts = json.loads((out / "scores.json").read_text())
    assert ([case["file"] for case in facts["cases"]], facts["earlier"]) == (["t1_seg.nii.gz"], [])


def test_results_of_two_runs_in_one_folder_all_stay_listed_with_their_network(
    bundle: Path, scans: Path, tmp_path: Path
) -> None:
    given = ("--model", bundle, "--out", tmp_path, "--labels", scans / "labels")
    scores = {}
    for name in ("doe-11", "doe-12", "doe-13"):
        run(scans / "images" / f"{name}.nii.gz", *given)
        facts = json.loads((tmp_path / "scores.json").read_text())
        scores[name] = facts["cases"][0]["dice"]
        assert {case["case"]: case["dice"] for case in [*facts["cases"], *facts["earlier"]]} == scores
        assert {case["network"] for case in [*facts["cases"], *facts["earlier"]]} == {load_model(bundle).weights}
    (tmp_path / "doe-11_seg.nii.gz").unlink()  # a result that is gone is no longer listed
    run(scans / "images/doe-13.nii.gz", *given)
    (left,) = json.loads((tmp_path / "scores.json").read_text())["earlier"]
    assert left["case"] == "doe-12"


def test_a_label_map_names_its_network_and_no_other_network_overwrites_it(
    bundle: Path, scans: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(bundle, tmp_path / "other")
    weights = torch.load(other / "models" / "model.pt", weights_only=True)
    next(value for value in weights.values() if value.is_floating_point()).add_(1e-3)
    torch.save(weights, other / "models" / "model.pt")
    image, out = scans / "images/doe-12.nii.gz", tmp_path / "out"
    run(image, "--model", bundle, "--out", out)
    first = (out / "doe-12_seg.nii.gz").read_bytes()
    header = nib.load(out / "doe-12_seg.nii.gz").header
    assert load_model(bundle).weights.encode() in header.extensions[0].get_content()
    with pytest.raises(InvalidInput, match="no file"):
        run(image, "--model", other, "--out", out)
    assert (out / "doe-12_seg.nii.gz").read_bytes() == first
    facts = json.loads((out / "scores.json").read_text())
    assert "another folder with --out" in facts["cases"][0]["problem"]
    assert facts["earlier"][0]["network"] == load_model(bundle).weights


@pytest.mark.parametrize("content", ["", "[]", '{"cases": [1]}'])
def test_a_folder_with_another_programs_scores_is_refused_unchanged(
    bundle: Path, scans: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "scores.json").write_text(content)
    given = [scans / "images" / "doe-12.nii.gz", "--model", bundle, "--out", tmp_path]
    refused = refusal_of(app, *given)
    assert "--out" in refused.remedy
    assert (tmp_path / "scores.json").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_a_place_unlike_the_training_data_is_refused_with_the_axes_of_the_point(told: Path, tmp_path: Path) -> None:
    store(tmp_path / "head.nii.gz", head_of(11, (4, 50, 30), fill=90.0)[0], "RAS")
    with pytest.raises(InvalidInput):
        run(tmp_path / "head.nii.gz", "--model", told, "--out", tmp_path / "out", "--centre", "50,10,10")
    problem = json.loads((tmp_path / "out" / "scores.json").read_text())["cases"][0]["problem"]
    assert "50,10,10 RAS" in problem
    assert AXES["RAS"] in problem


def test_every_prediction_is_marked_as_research(bundle: Path, scans: Path, tmp_path: Path) -> None:
    assert RESEARCH_ONLY in run(scans / "images/doe-12.nii.gz", "--model", bundle, "--out", tmp_path)
    assert b"not for diagnosis" in descrip(tmp_path / "doe-12_seg.nii.gz")
    assert RESEARCH_ONLY in (tmp_path / "scores.json").read_text()


def test_the_field_of_view_is_the_patients_whatever_the_order_of_axes(seen: InputRanges, tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(size=(16, 20, 24)).astype(np.float32)
    extents = set()
    for code in ("RAS", "SAR", "PIL"):
        store(tmp_path / f"{code}.nii.gz", image, code, zooms=(1, 2, 3))
        extents.add(input_ranges([load_volume(tmp_path / f"{code}.nii.gz", DATA)]).extent_mm)
    assert extents == {((16.0, 16.0), (40.0, 40.0), (72.0, 72.0))}


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {},
        {"volumes": 0},
        {"extent_mm": [[1, 2]]},
        {"intensity": [[[2, 1]] * 8]},
        {"intensity": [[[1, float("nan")]] * 8]},
    ],
)
def test_ranges_that_no_export_writes_are_refused(seen: InputRanges, bad: object) -> None:
    with pytest.raises(InvalidInput):
        InputRanges.from_json(seen.to_json() | bad if isinstance(bad, dict) and bad else bad, channels=1)
    assert InputRanges.from_json(json.loads(json.dumps(seen.to_json())), channels=1) == seen


def head_of(seed: int, corner: tuple[int, int, int], fill: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """Return a whole head: a drawing as above, in a much larger volume with bright noise around it."""
    image, labels = drawing(seed)
    whole = np.random.default_rng(seed).normal(fill, 4.0, (60, 72, 64)).astype(np.float32)
    truth = np.zeros(whole.shape, dtype=np.uint8)
    part = tuple(slice(at, at + 16) for at in corner)
    whole[part], truth[part] = image, labels
    return whole, truth


def test_a_box_about_a_chosen_point_segments_a_whole_head_on_the_heads_own_voxels(told: Path, tmp_path: Path) -> None:
    """The point is in RAS mm, also in a file with another order of axes. Without a point the head is refused."""
    whole, truth = head_of(11, (4, 50, 30))
    store(tmp_path / "head.nii.gz", whole, "LPS")
    store(tmp_path / "drawn.nii.gz", truth, "LPS")
    given = (tmp_path / "head.nii.gz", "--model", told, "--out", tmp_path / "out")
    with pytest.raises(InvalidInput):
        run(*given)
    assert "--centre X,Y,Z" in (tmp_path / "out" / "scores.json").read_text()
    labels = ("--labels", tmp_path / "drawn.nii.gz")
    (case,) = json.loads(run(*given, *labels, "--centre", "11.6,57.5,37.4", "--json"))["cases"]
    assert min(case["dice"]) > 0.8
    assert (case["file"], case["centre_mm"], case["unlike"]) == ("head_at_12_58_37_seg.nii.gz", "12,58,37 RAS", "")
    found = nib.load(tmp_path / "out" / case["file"])
    assert found.shape == whole.shape
    np.testing.assert_allclose(found.affine, nib.load(tmp_path / "head.nii.gz").affine)
    marked = nib.as_closest_canonical(found)
    assert np.asarray(marked.dataobj)[truth == 1].mean() > 0.5
    assert b"12,58,37 RAS" in found.header.extensions[0].get_content()
    elsewhere = run(*given, "--centre", "30,30,30", "--even-if-unlike", "--uncertainty")  # another file
    assert "head_at_30_30_30_uncertainty.nii.gz" in {path.name for path in (tmp_path / "out").iterdir()}
    assert "30,30,30 RAS mm" in elsewhere


@pytest.mark.parametrize(
    ("centre", "said"),
    [
        ("100,5,5", r"outside the volume: got .*100,5,5.*x -0.5 to 15.5, y -0.5 to 15.5"),
        ("5,5", "--centre.*: got"),
        ("a,b,c", "--centre.*: got"),
        ("nan,1,1", "--centre.*: got"),
    ],
)
def test_a_point_that_is_none_or_not_in_the_volume_is_refused(
    bundle: Path, scans: Path, tmp_path: Path, centre: str, said: str
) -> None:
    given = [scans / "images" / "doe-11.nii.gz", "--model", bundle, "--out", tmp_path, "--centre", centre]
    refused = refusal_of(app, *given)
    problems = (tmp_path / "scores.json").read_text() if (tmp_path / "scores.json").exists() else str(refused)
    assert re.search(said, problems)


def test_a_point_belongs_to_one_image(bundle: Path, scans: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--centre: got"):
        run(scans / "images", "--model", bundle, "--out", tmp_path, "--centre", "5,5,5")


def test_a_box_of_one_value_is_refused(bundle: Path, tmp_path: Path) -> None:
    whole, _ = head_of(11, (4, 50, 30))
    whole[40:] = 0
    store(tmp_path / "head.nii.gz", whole, "RAS")
    with pytest.raises(InvalidInput):
        run(tmp_path / "head.nii.gz", "--model", bundle, "--out", tmp_path, "--centre", "51,30,30")
    assert "--centre" in (tmp_path / "scores.json").read_text()
