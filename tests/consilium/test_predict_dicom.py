"""Tests segmenting a DICOM study: other programs read the Segmentation, and an unsuitable series is refused by name."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from client.data.case_table import TableLayout
from common.config import DataConfig, load_study
from common.data.dicom import slices_of
from common.data.dicom_seg import Algorithm, concept, write_segmentation
from common.data.input_ranges import InputRanges, input_ranges
from common.data.volume import load_example, load_native_label, load_volume
from common.errors import InvalidInput
from common.models.bundle import SEEN_WEIGHTS
from common.models.student_bundle import export_bundle
from consilium.cli.predict import app
from tests.client.adapting.written import facts_of
from tests.commands import refusal_of, typed
from tests.dicom_files import ORIGIN, STEP, write_series
from tests.worlds import study_toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("SimpleITK", "pydicom", "highdicom")),
        reason="needs the extra dicom",
    ),
]
RUN = CliRunner()
SHAPE = (14, 12, 10)  # columns, rows, slices


def voxels(seed: int = 1) -> np.ndarray:
    """Return a bright block off the centre, so that a turned or shifted map shows."""
    array = np.random.default_rng(seed).integers(10, 60, SHAPE)
    array[3:8, 2:9, 4:7] += 600
    return array.astype(np.uint16)


UID = "1.2.826.0.1.3680043.8.498.4"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Write a study with one MR series, one CT series, and a file that is not DICOM."""
    write_series(tmp_path / "study" / "a", voxels(), uid=UID)
    write_series(tmp_path / "study" / "b", voxels(2), uid=UID[:-1] + "5", number=5, description="Thorax", modality="CT")
    (tmp_path / "study" / "README").write_text("no DICOM")
    return tmp_path / "study"


def write_bundle(root: Path, *, inputs: InputRanges | None = None, channels: str = "") -> Path:
    """Write a student of two structures, whose answers the tests define."""
    from common.models.unet import network_for

    text = study_toml("hippocampus", "my structure", grid=(16, 16, 16)) + "[student]\nchannels = [4, 8]\n"
    (root / "study.toml").write_text(text.replace("[data]", f"[data]\n{channels}"))
    terms = load_study(root / "study.toml")
    export_bundle(
        root / "bundle",
        study=terms,
        model=network_for(terms.student, terms.data),
        privacy=facts_of(terms),
        inputs=inputs,
    )
    return root / "bundle"


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def bright(model: object, image: np.ndarray, *, patch: object = ()) -> np.ndarray:
        """Label the bright block as structure 1, and its upper part (towards the head) as structure 2."""
        block = (image[0] > 1).astype(np.float32)
        upper = block.copy()
        middle = int(np.argwhere(block)[:, 2].mean())
        upper[:, :, : middle + 1] = 0
        return np.stack([1 - block, block - upper, upper])

    monkeypatch.setattr("common.models.native.predict", bright)
    return write_bundle(tmp_path)


def segment(study: Path, bundle: Path, out: Path, *more: str) -> Path:
    done = typed(app, "--dicom", study, "--model", bundle, "--out", out, "--json", *more)
    return Path(json.loads(done.stdout)["file"])


def test_the_segmentation_refers_to_its_series_and_names_segments_and_student(
    study: Path, bundle: Path, tmp_path: Path
) -> None:
    """pydicom reads the file by the standard's attributes."""
    import pydicom

    from common.canonical import sha256_file

    found = pydicom.dcmread(segment(study, bundle, tmp_path / "out"))
    source = [pydicom.dcmread(path, stop_before_pixels=True) for path in sorted((study / "a").iterdir())]
    assert found.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.4"
    assert found.Modality == "SEG"
    for tag in ("PatientID", "PatientName", "StudyInstanceUID", "FrameOfReferenceUID"):
        assert found[tag].value == source[0][tag].value
    (reference,) = found.ReferencedSeriesSequence
    assert reference.SeriesInstanceUID == UID
    assert {one.ReferencedSOPInstanceUID for one in reference.ReferencedInstanceSequence} == {
        one.SOPInstanceUID for one in source
    }
    segments = found.SegmentSequence
    assert [one.SegmentLabel for one in segments] == ["hippocampus", "my structure"]
    known, own = (one.SegmentedPropertyTypeCodeSequence[0] for one in segments)
    assert (known.CodingSchemeDesignator, own.CodingSchemeDesignator) == ("SCT", "99CONSILIUM")
    student = sha256_file(bundle / "models" / "model.pt")
    for one in segments:
        assert one.SegmentAlgorithmType == "AUTOMATIC"
        assert one.SegmentationAlgorithmIdentificationSequence[0].AlgorithmVersion == student


def test_another_reader_finds_every_voxel_of_the_label_map_at_its_place_in_space(
    study: Path, bundle: Path, tmp_path: Path
) -> None:
    """The block must be where it was put, both by SimpleITK's reader and by the standard's positions of the frames."""
    import pydicom
    import SimpleITK

    path = segment(study, bundle, tmp_path / "out")
    head = pydicom.dcmread(path)
    frames = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))  # frames, rows, columns
    seen = {1: set(), 2: set()}
    for frame, facts in zip(frames, head.PerFrameFunctionalGroupsSequence, strict=True):
        x, y, z = facts.PlanePositionSequence[0].ImagePositionPatient
        segment_number = facts.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        for row, column in np.argwhere(frame > 0):
            seen[segment_number].add((x + column * STEP[0], y + row * STEP[1], z))
    block = {
        (ORIGIN[0] + i * STEP[0], ORIGIN[1] + j * STEP[1], ORIGIN[2] + k * STEP[2])
        for i in range(3, 8)
        for j in range(2, 9)
        for k in range(4, 7)
    }
    both = seen[1] | seen[2]
    assert not seen[1] & seen[2]
    assert len(both & block) / len(both | block) > 0.8  # resampling to the study's grid and back blurs the rim
    assert min(z for _, _, z in seen[2]) > max(z for _, _, z in seen[1]) - 2.5
    assert np.mean([z for _, _, z in seen[2]]) > np.mean([z for _, _, z in seen[1]])


def test_a_validator_of_the_standard_finds_no_error(study: Path, bundle: Path, tmp_path: Path) -> None:
    program = shutil.which("dciodvfy")
    if program is None:
        pytest.skip("needs dciodvfy (Debian: dicom3tools)")
    path = segment(study, bundle, tmp_path / "out")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if line.startswith("Error")] == []


def test_a_series_of_another_modality_is_refused_by_its_name(study: Path, bundle: Path, tmp_path: Path) -> None:
    for name in ("Thorax", "5", UID[:-1] + "5"):
        refused = refusal_of(app, "--dicom", study, "--model", bundle, "--out", tmp_path / "o", "--series", name)
        assert "Thorax (number 5, CT)" in str(refused)
        assert "MR" in str(refused)
    assert not (tmp_path / "o").exists()


def test_two_series_that_fit_are_named_and_one_is_to_be_chosen(study: Path, bundle: Path, tmp_path: Path) -> None:
    write_series(study / "c", voxels(3), uid=UID[:-1] + "6", number=6, description="T2 axial")
    words = ["--dicom", str(study), "--model", str(bundle), "--out", str(tmp_path / "out")]
    done = RUN.invoke(app, words)
    assert "T1 axial (number 4, MR); T2 axial (number 6, MR)" in str(done.exception)
    assert "--series" in str(done.exception)
    assert segment(study, bundle, tmp_path / "out", "--series", "t2 AXIAL").name == f"6-{UID[:-1]}6-seg.dcm"
    assert "no such" not in str(RUN.invoke(app, [*words, "--series", "7"]).exception)
    assert "T2 axial (number 6, MR)" in str(RUN.invoke(app, [*words, "--series", "7"]).exception)


def test_a_series_unlike_the_students_training_is_refused_by_its_name(
    study: Path, tmp_path: Path, bundle: Path
) -> None:
    """The stated ranges are those of volumes with a hundred times smaller steps, far from this series."""
    import pydicom

    shutil.rmtree(bundle)
    data = DataConfig(labels=("background", "hippocampus", "my structure"), spacing_mm=(1, 1, 1), grid=(16, 16, 16))
    from tests.worlds import write_case

    like = [load_volume(write_case(tmp_path / "like", f"v{i}", i).image, data) for i in range(4)]
    other = write_bundle(tmp_path, inputs=input_ranges(like))
    words = ["--dicom", str(study), "--model", str(other), "--out", str(tmp_path / "out")]
    refused = refusal_of(app, *words)
    assert "T1 axial (number 4, MR)" in str(refused)
    assert "--even-if-unlike" in str(refused)
    assert not (tmp_path / "out").exists()
    found = pydicom.dcmread(segment(study, other, tmp_path / "out", "--even-if-unlike"))
    assert "UNLIKE TRAINING DATA" in found.SeriesDescription
    assert "UNLIKE TRAINING DATA" in found.ContentDescription


def test_a_box_about_a_point_in_dicoms_coordinates_refers_to_the_whole_series(bundle: Path, tmp_path: Path) -> None:
    """The block lies in a corner of a large series, 7 mm from its first voxel; the student's grid is 16 mm wide."""
    import pydicom

    whole = np.random.default_rng(4).integers(10, 60, (50, 40, 30)).astype(np.uint16)
    whole[3:8, 2:9, 4:7] += 600
    write_series(tmp_path / "whole", whole, uid=UID)
    middle = [ORIGIN[i] + STEP[i] * at for i, at in enumerate((5, 5, 5))]
    centre = ",".join(f"{value:g}" for value in middle)
    path = segment(tmp_path / "whole", bundle, tmp_path / "out", "--centre", centre)
    assert path.name == f"4-{UID}_at_-5_28_42-seg.dcm"
    found = pydicom.dcmread(path)
    (reference,) = found.ReferencedSeriesSequence
    assert len(reference.ReferencedInstanceSequence) == 30
    assert (found.Columns, found.Rows) == (50, 40)
    assert "box about -5,28,42 LPS" in found.ContentDescription
    (named,) = {
        str(s.SegmentationAlgorithmIdentificationSequence[0].AlgorithmParameters) for s in found.SegmentSequence
    }
    assert "-5,28,42 LPS" in named
    frames = found.pixel_array
    seen = set()
    for frame, facts in zip(frames, found.PerFrameFunctionalGroupsSequence, strict=True):
        k = round((facts.PlanePositionSequence[0].ImagePositionPatient[2] - ORIGIN[2]) / STEP[2])
        seen |= {(column, row, k) for row, column in np.argwhere(frame)}
    block = {(i, j, k) for i in range(3, 8) for j in range(2, 9) for k in range(4, 7)}
    assert len(seen & block) / len(seen | block) > 0.8

    words = ["--dicom", str(tmp_path / "whole"), "--model", str(bundle), "--out", str(tmp_path / "out")]
    outside = RUN.invoke(app, [*words, "--centre", "5,-28,42"])  # RAS, not LPS
    assert "outside the volume" in str(outside.exception)
    assert "x -10.5 to 39.5, y 19.2 to 79.2" in str(outside.exception)
    assert "LPS" in str(outside.exception)


def test_the_uncertainty_is_a_parametric_map_on_the_series_that_a_validator_takes(
    study: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a slab all probabilities are a half, so the entropy over log 3 is known there; it is 0 elsewhere."""
    import pydicom

    def unsure(model: object, image: np.ndarray, *, patch: object = ()) -> np.ndarray:
        half = np.zeros(image.shape[1:], np.float32)
        half[:, :, image.shape[3] // 2 :] = 0.5
        return np.stack([1 - half, half, np.zeros_like(half)])

    monkeypatch.setattr("common.models.native.predict", unsure)
    out = tmp_path / "out"
    assert segment(study, bundle, out, "--uncertainty").name == f"4-{UID}-seg.dcm"
    path = out / f"4-{UID}-uncertainty.dcm"
    found = pydicom.dcmread(path)
    assert found.SOPClassUID == "1.2.840.10008.5.1.4.1.1.30"
    values = np.frombuffer(found.FloatPixelData, np.float32).reshape(SHAPE[::-1])  # slices, rows, columns
    assert values.min() == pytest.approx(0, abs=1e-6)
    assert values.max() == pytest.approx(np.log(2) / np.log(3), abs=1e-5)
    places = [
        facts.PlanePositionSequence[0].ImagePositionPatient[2] for facts in found.PerFrameFunctionalGroupsSequence
    ]
    higher = [float(z) for z, frame in zip(places, values, strict=True) if frame.max() > 0.5]
    assert sorted(higher) == [42.5, 45.0, 47.5]  # the upper half of the grid's 16 mm about the series' middle, 41.25
    (reference,) = found.ReferencedSeriesSequence
    assert reference.SeriesInstanceUID == UID
    if program := shutil.which("dciodvfy"):
        done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
        assert [line for line in done.stderr.splitlines() if line.startswith("Error")] == []
    segment(study, bundle, out, "--uncertainty")  # the same series and network again
    path.write_bytes(b"a letter")
    words = ["--dicom", str(study), "--model", str(bundle), "--out", str(out), "--uncertainty"]
    assert "--out" in str(RUN.invoke(app, words).exception)


@pytest.mark.parametrize("centre", ["", "-123,-145,-178 LPS"])
@pytest.mark.parametrize("unlike", [True, False])
def test_a_description_fits_dicoms_64_characters_and_says_all(centre: str, unlike: bool) -> None:
    said = Algorithm("Consilium adapted network", "a" * 64, unlike, centre).describe()
    assert centre in said
    assert ("UNLIKE TRAINING DATA" in said) == unlike
    assert len(said) < 64


def test_one_patients_segmentation_never_overwrites_anothers(study: Path, bundle: Path, tmp_path: Path) -> None:
    """Scanners number series alike, so both patients have a series 4."""
    import pydicom

    write_series(tmp_path / "second", voxels(9), uid=UID + ".9", study=UID + ".8", patient="1971")
    out = tmp_path / "out"
    first, second = segment(study, bundle, out), segment(tmp_path / "second", bundle, out)
    assert first != second
    assert pydicom.dcmread(first).PatientID != pydicom.dcmread(second).PatientID == "1971"
    assert segment(study, bundle, out) == first  # the same series and network again

    shutil.copy(second, first)
    taken = first.read_bytes()
    words = ["--dicom", str(study), "--model", str(bundle), "--out", str(out)]
    assert "not of this series" in str(RUN.invoke(app, words).exception)
    first.write_bytes(b"a letter")
    assert "--out" in str(RUN.invoke(app, words).exception)
    assert first.read_bytes() == b"a letter"
    assert second.read_bytes() == taken


def test_a_series_uid_that_is_no_uid_leads_to_no_other_folder(study: Path, bundle: Path, tmp_path: Path) -> None:
    import pydicom

    for path in (study / "a").iterdir():
        image = pydicom.dcmread(path)
        image["SeriesInstanceUID"]._value = "../../elsewhere"
        image.save_as(path)
    done = RUN.invoke(app, ["--dicom", str(study), "--model", str(bundle), "--out", str(tmp_path / "out")])
    assert not list(tmp_path.glob("**/elsewhere*"))
    assert done.exception is None or isinstance(done.exception, InvalidInput)


@pytest.mark.parametrize(
    ("name", "scheme", "value", "category"),
    [
        ("hippocampus", "SCT", "5366008", "Anatomical Structure"),
        ("Anterior", "99CONSILIUM", "ANTERIOR", "Anatomical Structure"),  # SNOMED's 255549009 only says where
        ("right", "99CONSILIUM", "RIGHT", "Anatomical Structure"),
        ("edema", "SCT", "79654002", "Morphologically Abnormal Structure"),
    ],
)
def test_only_names_of_what_can_be_segmented_have_a_snomed_code(
    name: str, scheme: str, value: str, category: str
) -> None:
    kind, found = concept(name)
    assert (found.scheme_designator, found.value) == (scheme, value)
    assert kind.meaning == category


def test_an_adapted_network_is_not_called_the_student(study: Path, bundle: Path, tmp_path: Path) -> None:
    import pydicom

    shutil.copytree(bundle, tmp_path / "adapted")
    weights = tmp_path / "adapted" / "models" / "model.pt"
    weights.rename(tmp_path / "adapted" / SEEN_WEIGHTS)
    student, adapted = (pydicom.dcmread(segment(study, b, tmp_path / b.name)) for b in (bundle, tmp_path / "adapted"))
    for found, name in ((student, "Consilium student"), (adapted, "Consilium adapted network")):
        assert found.ContentDescription == name
        (one,) = {s.SegmentationAlgorithmIdentificationSequence[0].AlgorithmName for s in found.SegmentSequence}
        assert one == name


def test_a_missing_or_tiny_structure_is_a_warning(study: Path, bundle: Path, tmp_path: Path) -> None:
    """The block has 105 voxels, whereas the stated structures are a thousand times as large, or absent."""
    metadata = bundle / "configs" / "metadata.json"
    ranges = InputRanges(1, (((-1e6, 1e6),) * 8,), ((0, 1e6),) * 3)
    voxel = float(np.prod(STEP))

    def warned(*sizes: float) -> list[str]:
        told = json.loads(metadata.read_text())
        told["input_ranges"] = replace(ranges, structures_mm3=sizes).to_json()
        metadata.write_text(json.dumps(told))
        words = ["--dicom", str(study), "--model", str(bundle), "--out", str(tmp_path / "out"), "--json"]
        return json.loads(RUN.invoke(app, words, catch_exceptions=False).stdout)["warnings"]

    assert warned(100 * voxel, 50 * voxel) == []
    (said,) = warned(1e5 * voxel, 50 * voxel)
    assert said.startswith("hippocampus has ")
    assert "hundredth" in said


def test_a_folder_without_mr_says_what_to_give(study: Path, bundle: Path, tmp_path: Path) -> None:
    shutil.rmtree(study / "a")
    done = RUN.invoke(app, ["--dicom", str(study), "--model", str(bundle), "--out", str(tmp_path / "out")])
    assert "allowed: one of Thorax" not in str(done.exception)
    assert "MR" in done.exception.remedy


def test_several_patients_studies_or_none_are_refused(study: Path, bundle: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        done = refusal_of(app, "--dicom", folder, "--model", bundle, "--out", tmp_path / "out")
        return str(done)

    (tmp_path / "empty").mkdir()
    assert "no DICOM series" in refused(tmp_path / "empty")
    write_series(study / "d", voxels(), uid=UID[:-1] + "7", study="1.2.826.0.1.3680043.8.498.2")
    assert "studies" in refused(study)
    shutil.rmtree(study / "d")
    write_series(study / "d", voxels(), uid=UID[:-1] + "7", patient="1971")
    assert "patients" in refused(study)
    assert "Jane" not in refused(study)


def test_a_missing_slice_is_refused_by_the_series_name(study: Path, bundle: Path, tmp_path: Path) -> None:
    sorted((study / "a").iterdir())[4].unlink()
    done = RUN.invoke(app, ["--dicom", str(study), "--model", str(bundle), "--out", str(tmp_path / "out")])
    assert "T1 axial (number 4, MR)" in str(done.exception)
    assert "evenly spaced" in str(done.exception)


def test_a_map_without_any_structure_is_written_too(
    study: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pydicom

    nothing = np.stack([np.ones((16, 16, 16)), *np.zeros((2, 16, 16, 16))]).astype(np.float32)
    monkeypatch.setattr("common.models.native.predict", lambda *given, **named: nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pydicom.dcmread(segment(study, bundle, tmp_path / "out"))
    assert not found.pixel_array.any()


@pytest.mark.parametrize("more", [["images"], ["--labels", "drawn"], ["--lesion-wise"]])
def test_options_for_image_files_are_refused_with_a_dicom_study(
    study: Path, bundle: Path, tmp_path: Path, more: list[str]
) -> None:
    refusal_of(app, *more, "--dicom", study, "--model", bundle, "--out", tmp_path / "out")


DRAWN = DataConfig(labels=("background", "body", "core"), spacing_mm=STEP, grid=(16, 16, 16))


def drawn() -> np.ndarray:
    """Return two structures on three of the ten slices; the file has no frames for the other slices."""
    label = np.zeros(SHAPE, dtype=np.uint8)
    label[3:8, 2:9, 4:6], label[4:7, 3:5, 6] = 1, 2
    return label


def labelled(root: Path, study: Path, label: np.ndarray) -> Path:
    """Write a case table whose label is a Segmentation of the series."""
    shutil.copytree(study / "a", root / "series")
    write_segmentation(
        root / "label.dcm",
        label,
        slices_of(root / "series"),
        structures=("body", "core"),
        algorithm=Algorithm("by hand", "a" * 64),
    )
    (root / "cases.csv").write_text("image,label,patient_id\nseries,label.dcm,p1\n")
    return root


def test_a_segmentation_in_a_case_table_is_the_label_map_that_was_drawn(study: Path, tmp_path: Path) -> None:
    (case,) = TableLayout().read(labelled(tmp_path / "data", study, drawn())).labelled
    assert case.label is not None
    volume = load_volume(case.image, DRAWN)
    found = load_native_label(case.label, DRAWN, volume=volume)
    assert np.array_equal(found, drawn())
    assert sorted(np.unique(load_example(case, DRAWN).label).tolist()) == [0, 1, 2]


def test_a_segmentation_of_another_place_and_what_is_no_segmentation_are_refused(study: Path, tmp_path: Path) -> None:
    data = labelled(tmp_path / "data", study, drawn())
    volume = load_volume(data / "series", DRAWN)
    for shift in ((0.0, 0.0, 1.0), (0.0, 30.0, 0.0)):
        moved = volume.native_affine.copy()
        moved[:3, 3] += shift
        with pytest.raises(InvalidInput, match="other voxels"):
            load_native_label(data / "label.dcm", DRAWN, volume=replace(volume, native_affine=moved))
    shutil.copy(next((data / "series").iterdir()), data / "slice.dcm")
    (data / "noise.dcm").write_bytes(b"no DICOM" * 40)
    for name in ("slice.dcm", "noise.dcm"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            load_native_label(data / name, DRAWN, volume=volume)
