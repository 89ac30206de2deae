"""Tests RT Structure Sets as labels of a case table: filled exactly, matched by name, and refused if unclear."""

from __future__ import annotations

import importlib.util
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.data.case_table import TableLayout
from client.data.layouts import match_study
from common.config import DataConfig
from common.data import dicom_header, dicom_structures
from common.data.contours import combine, fill
from common.data.dataset import Case
from common.data.dicom_structures import STRUCTURE_SET, is_structure_set, read_structures
from common.data.volume import Volume, load_example, load_label, load_native_label, load_volume
from common.errors import InvalidInput
from tests.dicom_files import FRAME, ORIGIN, STEP, STUDY, Contour, box, in_slice, write_series, write_structure_set

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("SimpleITK", "pydicom")), reason="needs the extra dicom"
)
SHAPE = (40, 36, 8)
DATA = DataConfig(labels=("background", "body", "core"), spacing_mm=STEP, grid=(48, 48, 16))
NAMES = {"background": 0, "body": 1, "core": 2}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    write_series(folder, np.random.default_rng(1).integers(10, 900, SHAPE).astype(np.uint16), uid=f"{STUDY}.4")
    return folder


@pytest.fixture(scope="module")
def volume(series: Path) -> Volume:
    return load_volume(series, DATA)


@pytest.fixture
def read(tmp_path: Path, volume: Volume) -> Callable[..., np.ndarray]:
    def label(*structures: tuple[str, Sequence[Contour]], names: dict[str, int] | None = None, **of: object):
        path = write_structure_set(tmp_path / "label.dcm", structures, **of)  # type: ignore[arg-type]
        return load_native_label(path, DATA, volume=volume, structures=names)

    return label


def block(i: slice, j: slice, k: slice, value: int = 1) -> np.ndarray:
    array = np.zeros(SHAPE, dtype=np.uint8)
    array[i, j, k] = value
    return array


def test_the_image_says_its_frame_of_reference(volume: Volume) -> None:
    assert volume.frame == FRAME


@pytest.mark.parametrize("implicit", [False, True])
def test_a_box_is_filled_exactly_on_its_slices(read: Callable[..., np.ndarray], implicit: bool) -> None:
    found = read(("body", [box(k, 4.5, 20.5, 2.5, 9.5) for k in (2, 3, 4)]), implicit=implicit)
    assert np.array_equal(found, block(slice(5, 21), slice(3, 10), slice(2, 5)))


def test_crossing_contours_are_refused_unless_their_type_defines_them(read: Callable[..., np.ndarray]) -> None:
    crossing = [box(3, 2.5, 12.5, 2.5, 12.5), box(3, 8.5, 20.5, 8.5, 20.5)]
    with pytest.raises(InvalidInput, match=r"contours .*cross"):
        read(("body", crossing))
    found = read(("body", [("CLOSEDPLANAR_XOR", corners) for _, corners in crossing]))
    expected = block(slice(3, 13), slice(3, 13), slice(3, 4))
    expected[9:21, 9:21, 3] ^= 1
    assert np.array_equal(found, expected)


def table(root: Path, series: Path, *labels: Path, tsv: str = "") -> Path:
    root.mkdir()
    (root / "series").symlink_to(series)
    rows = [f"series,{path.name},p{number},c{number}" for number, path in enumerate(labels)]
    for path in labels:
        path.rename(root / path.name)
    (root / "cases.csv").write_text("\n".join(["image,label,patient_id,case_id", *rows]) + "\n")
    if tsv:
        (root / "labels.tsv").write_text(tsv)
    return root


def test_structures_are_matched_by_name_as_labels_are(tmp_path: Path, series: Path) -> None:
    """Names match as the study's own, as a name of labels.tsv with its number, by a mapping, or as background."""
    drawn = [
        ("BODY ", [box(1, 1.5, 5.5, 1.5, 5.5)]),
        ("Left-Kidney", [box(1, 9.5, 12.5, 1.5, 5.5)]),
        ("GTV_1", [box(1, 19.5, 25.5, 1.5, 5.5)]),
        ("Bone", [box(1, 2.5, 25.5, 2.5, 5.5)]),
        ("empty", []),
    ]
    mapping = {"gtv 1": "core", "bone": "background", "7": "core", "empty": "background"}
    label = write_structure_set(tmp_path / "label.dcm", drawn)
    folder = table(
        tmp_path / "data", series, label, tsv="index\tname\n0\tbackground\n1\tbody\n2\tcore\n7\tleft kidney\n"
    )
    dataset = match_study(TableLayout().read(folder), DATA, labels=mapping)
    (case,) = dataset.labelled
    volume = load_volume(case.image, DATA)
    found = load_native_label(case.label, DATA, volume=volume, structures=dict(case.structures))
    expected = block(slice(2, 6), slice(2, 6), slice(1, 2))
    expected[10:13, 2:6, 1], expected[20:26, 2:6, 1] = 2, 2
    assert np.array_equal(found, expected)
    assert sorted(np.unique(load_example(case, DATA).label).tolist()) == [0, 1, 2]
    plain = match_study(TableLayout().read(folder), DATA, labels={"gtv_1": "core", "bone": "background", "7": "core"})
    with pytest.raises(InvalidInput, match=r"\['empty'\].*\[labels\] of site\.toml") as refused:
        load_example(plain.labelled[0], DATA)
    assert refused.value.value == ["empty"]  # a name that nobody mapped, though nothing is drawn of it


def test_without_a_table_of_labels_the_studys_names_and_the_mapped_ones_are_known(tmp_path: Path, series: Path) -> None:
    label = write_structure_set(tmp_path / "l.dcm", [("Tumour", [box(1, 1.5, 5.5, 1.5, 5.5)])])
    dataset = match_study(TableLayout().read(table(tmp_path / "data", series, label)), DATA, labels={"tumour": "core"})
    (case,) = dataset.labelled
    assert dict(case.structures) == {**NAMES, "tumour": 2}
    assert set(np.unique(load_example(case, DATA).label)) == {0, 2}


def test_two_structures_of_one_label_are_joined(read: Callable[..., np.ndarray]) -> None:
    found = read(
        ("left", [box(3, 2.5, 12.5, 2.5, 12.5)]),
        ("right", [box(3, 8.5, 20.5, 8.5, 20.5)]),
        names={"left": 1, "right": 1},
    )
    one, two = block(slice(3, 13), slice(3, 13), slice(3, 4)), block(slice(9, 21), slice(9, 21), slice(3, 4))
    assert np.array_equal(found, one | two)


def test_structures_of_two_labels_may_touch_and_not_overlap(read: Callable[..., np.ndarray]) -> None:
    found = read(("body", [box(3, 2, 12, 2, 12)]), ("core", [box(3, 12, 20, 2, 12)]))
    assert (found[2:12, 2:12, 3] == 1).all()
    assert (found[12:20, 2:12, 3] == 2).all()
    with pytest.raises(InvalidInput, match=r"body and core.*: got '10 voxels"):
        read(("body", [box(3, 2, 12, 2, 12)]), ("core", [box(3, 11, 20, 2, 12)]))


def test_a_structure_on_slices_with_another_step_or_one_gap_is_read(read: Callable[..., np.ndarray]) -> None:
    for slices in ((1, 2, 5, 6), (1, 4), (1, 3, 4), (1, 3, 6)):
        assert (read(("body", [box(k, 2.5, 9.5, 2.5, 9.5) for k in slices])) == 1).any(axis=(0, 1)).sum() == len(slices)
    with pytest.raises(InvalidInput, match=r"body .*one slice in 2"):
        read(("body", [box(k, 2.5, 9.5, 2.5, 9.5) for k in (1, 3, 5)]))


def test_points_within_the_tolerance_of_a_slice_lie_in_it(read: Callable[..., np.ndarray]) -> None:
    assert (read(("body", [box(3.08, 2.5, 9.5, 2.5, 9.5)]))[..., 3] == 1).sum() == 49
    with pytest.raises(InvalidInput, match="slices off"):
        read(("body", [box(3.12, 2.5, 9.5, 2.5, 9.5)]))


NAN, INFINITE = ("nan", "0", "0"), ("1e999", "0", "0")


def with_numbers(*numbers: str) -> Callable[[object], None]:
    def change(file) -> None:
        item = file.ROIContourSequence[0].ContourSequence[0]
        item.add_new("ContourData", "UT", "\\".join([*numbers, *["1", "1", "30"] * 3]))
        item.NumberOfContourPoints = len(numbers) // 3 + 3

    return change


def counted(number: int) -> Callable[[object], None]:
    def change(file) -> None:
        file.ROIContourSequence[0].ContourSequence[0].NumberOfContourPoints = number

    return change


def elsewhere(file) -> None:
    file.ROIContourSequence[0].ReferencedROINumber = 9


def unframed(file) -> None:
    del file.StructureSetROISequence[0].ReferencedFrameOfReferenceUID
    del file.FrameOfReferenceUID


GOOD = box(3, 2.5, 9.5, 2.5, 9.5)
REFUSED = {
    "another frame of reference": ({"frame": f"{STUDY}.10"}, [GOOD], "another frame of reference"),
    "no frame of reference": ({"change": unframed}, [GOOD], "another frame of reference than its image: got 'none'"),
    "between two slices": ({}, [box(3.5, 2.5, 9.5, 2.5, 9.5)], "plane of no slice"),
    "through the slices": ({}, [("CLOSED_PLANAR", [(2, 2, 1), (9, 2, 1), (9, 9, 5)])], "plane of no slice"),
    "below the image": ({}, [box(-2, 2.5, 9.5, 2.5, 9.5)], "outside its image"),
    "beside the image": ({}, [box(3, 2.5, 60, 2.5, 9.5)], "outside its image"),
    "far away": ({}, [box(3, 2.5, 1e30, 2.5, 9.5)], "outside its image"),
    "open": ({}, [("OPEN_PLANAR", GOOD[1])], "closed contours"),
    "open in space": ({}, [GOOD, ("OPEN_NONPLANAR", GOOD[1])], "closed contours"),
    "a point": ({}, [("POINT", [(3.0, 3.0, 3.0)])], "closed contours"),
    "two points": ({}, [("CLOSED_PLANAR", GOOD[1][:2])], "points of a contour"),
    "another number of points": ({"change": counted(5)}, [GOOD], "points of a contour"),
    "NaN": ({"change": with_numbers(*NAN)}, [GOOD], "NaN or infinite"),
    "infinite": ({"change": with_numbers(*INFINITE)}, [GOOD], "NaN or infinite"),
    "no number": ({"change": with_numbers("1", "two", "3")}, [GOOD], "cannot be read: got 'ValueError'"),
    "twice": ({}, [GOOD, ("CLOSED_PLANAR", [*GOOD[1][2:], *GOOD[1][:2]])], "occurs twice"),
    "undeclared": ({"change": elsewhere}, [GOOD], "does not declare"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_contour_that_is_unclear_is_refused(read: Callable[..., np.ndarray], kind: str) -> None:
    of, drawn, match = REFUSED[kind]
    with pytest.raises(InvalidInput, match=match) as refused:
        read(("body", drawn), **of)
    assert "Doe" not in str(refused.value)
    assert refused.value.limit or refused.value.remedy


def test_an_unknown_structure_is_refused_by_its_name_and_long_lists_are_cut(read: Callable[..., np.ndarray]) -> None:
    with pytest.raises(InvalidInput, match=r"\['spleen'\]; allowed: background, body, core"):
        read(("body", [GOOD]), ("spleen", []))
    with pytest.raises(InvalidInput, match="and 12 more"):
        read(*[(f"organ {number}", []) for number in range(20)])


def test_an_image_that_is_no_dicom_series_is_refused(tmp_path: Path, volume: Volume) -> None:
    path = write_structure_set(tmp_path / "label.dcm", [("body", [GOOD])])
    for other in (replace(volume, frame=""), None):
        with pytest.raises(InvalidInput, match=r"RT Structure Set.*series"):
            load_label(path, DATA, volume=other)


def test_slices_of_two_frames_of_reference_state_none(series: Path, tmp_path: Path) -> None:
    import pydicom

    for number, path in enumerate(sorted(series.iterdir())):
        file = pydicom.dcmread(path)
        file.FrameOfReferenceUID = f"{STUDY}.{9 + number % 2}"
        file.save_as(tmp_path / path.name)
    assert load_volume(tmp_path, DATA).frame == ""


def test_a_segmentation_is_still_read_as_one(tmp_path: Path, series: Path, volume: Volume) -> None:
    pytest.importorskip("highdicom")
    from common.data.dicom import slices_of
    from common.data.dicom_seg import Algorithm, write_segmentation

    drawn = block(slice(3, 9), slice(4, 12), slice(2, 5), 2)
    write_segmentation(
        path := tmp_path / "seg.dcm",
        drawn,
        slices_of(series),
        structures=("body", "core"),
        algorithm=Algorithm("by hand", "a" * 64),
    )
    assert not is_structure_set(path)
    assert np.array_equal(load_native_label(path, DATA, volume=volume, structures={"other": 1}), drawn)


def test_the_names_of_structures_are_part_of_what_a_teacher_was_trained_on(tmp_path: Path, series: Path) -> None:
    from client.training.task import VoterTask
    from client.training.voter import load_scans
    from common.config import TrainingConfig
    from common.data.volume_cache import VolumeCache

    label = write_structure_set(tmp_path / "l.dcm", [("tumour", [GOOD])])
    folder, found = table(tmp_path / "data", series, label), []
    for target in ("body", "core"):
        dataset = match_study(TableLayout().read(folder), DATA, labels={"tumour": target})
        (case,) = dataset.labelled
        task = VoterTask(
            voter=0,
            patients=(("p0", (case.id,)),),
            cases=(case,),
            known=(),
            directory=tmp_path / "voter",
            seed=0,
            data=DATA,
            recipe=TrainingConfig(),
            trainer="standard",
            deal="",
            absent=(),
        )
        with VolumeCache(tmp_path / "cache") as cache:
            usable, problems = load_scans(task, cache)
        assert problems == ()
        found.append(usable[case.id].hashes)
    assert found[0] != found[1]


# --- bombs


def refused_cheaply(path: Path, match: str, volume: Volume) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=match):
            load_native_label(path, DATA, volume=volume)
        assert tracemalloc.get_traced_memory()[1] < 96 << 20
    finally:
        tracemalloc.stop()


def test_too_many_contours_or_points_are_refused_before_a_number_is_read(
    tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dicom_structures, "_contours", lambda *given: pytest.fail("a number was read"))
    tiny = in_slice(1, [(1, 1), (2, 1), (2, 2)])
    many = write_structure_set(tmp_path / "many.dcm", [("body", [tiny] * 300)])
    long = write_structure_set(tmp_path / "long.dcm", [("body", [in_slice(1, [(1, 1)] * 900)])])
    monkeypatch.setattr(dicom_structures, "MAX_CONTOURS", 299)
    refused_cheaply(many, "contours of an RT Structure Set: got 300; allowed: at most 299", volume)
    monkeypatch.setattr(dicom_structures, "MAX_POINTS", 899)
    refused_cheaply(long, "points of an RT Structure Set: got 900; allowed: at most 899", volume)


def test_a_million_and_one_points_are_refused_in_little_memory(tmp_path: Path, volume: Volume) -> None:
    def change(file) -> None:
        item = file.ROIContourSequence[0].ContourSequence[0]
        item.add_new("ContourData", "UT", "\\".join(["1", "1", "9"] * (dicom_structures.MAX_POINTS + 1)))

    path = write_structure_set(tmp_path / "label.dcm", [("body", [GOOD])], implicit=True, change=change)
    refused_cheaply(path, "points of an RT Structure Set", volume)


def test_work_without_end_is_refused_before_anything_is_filled(
    tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave = in_slice(1, [(2, 2), (30, 30)] * 400 + [(3, 3)])
    path = write_structure_set(tmp_path / "label.dcm", [("body", [wave])])
    monkeypatch.setattr(dicom_structures, "MAX_EFFORT", 10_000)
    monkeypatch.setattr(dicom_structures, "_draw", lambda *given: pytest.fail("something was filled"))
    refused_cheaply(path, "voxels and edges to process for the contours of an RT Structure Set", volume)


def header(syntax: bytes, kind: str = STRUCTURE_SET) -> bytes:
    meta = b"".join(
        tag + b"UI" + len(value).to_bytes(2, "little") + value
        for tag, value in (
            (b"\x02\0\x02\0", kind.encode() + b"\0"),
            (b"\x02\0\x10\0", syntax),
        )
    )
    return bytes(128) + b"DICM" + b"\x02\0\0\0UL\x04\0" + len(meta).to_bytes(4, "little") + meta


SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"
EXPLICIT, DEFLATED = b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99"
BOMBS = {
    "deflated": (DEFLATED, lambda: zlib.compress(bytes(64 << 20))[2:], "deflated"),
    "sequences in sequences": (
        EXPLICIT,
        lambda: b"\x06\x30\x20\0SQ\0\0\xff\xff\xff\xff\xfe\xff\0\xe0\xff\xff\xff\xff" * 5_000,
        "depth of a DICOM file",
    ),
    "items without end": (
        EXPLICIT,
        lambda: b"\x06\x30\x39\0SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\0\xe0\0\0\0\0" * (1 << 14),
        "elements of a DICOM file",
    ),
}


@pytest.mark.parametrize("stored", [STRUCTURE_SET, SEGMENTATION], ids=["RT Structure Set", "Segmentation"])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_grows_is_refused_before_pydicom_reads_it(
    tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch, kind: str, stored: str
) -> None:
    import highdicom as hd
    import pydicom

    monkeypatch.setattr(pydicom, "dcmread", lambda *given, **named: pytest.fail("pydicom has seen the file"))
    monkeypatch.setattr(hd.seg, "segread", lambda *given, **named: pytest.fail("highdicom has seen the file"))
    monkeypatch.setattr(dicom_header, "MAX_LABEL_ELEMENTS", 1 << 13)
    syntax, made, match = BOMBS[kind]
    (path := tmp_path / "label.dcm").write_bytes(header(syntax, stored) + made())
    refused_cheaply(path, match, volume)


def test_a_file_of_too_many_bytes_is_refused_unread(
    tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "label.dcm").write_bytes(header(EXPLICIT))
    with path.open("r+b") as stream:
        stream.truncate(dicom_structures.MAX_BYTES + 1)
    monkeypatch.setattr(dicom_structures, "check_elements", lambda *given, **named: pytest.fail("read"))
    refused_cheaply(path, "bytes of an RT Structure Set", volume)


@pytest.mark.filterwarnings("ignore")  # pydicom's, about what was broken
@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_file_is_refused_or_read_and_nothing_else_happens(tmp_path: Path, volume: Volume, seed: int) -> None:
    path = write_structure_set(tmp_path / "label.dcm", [("body", [GOOD]), ("core", [box(3, 20, 30, 20, 30)])])
    whole, draws = path.read_bytes(), np.random.default_rng(seed)
    for _ in range(60):
        broken = bytearray(whole)
        for place in draws.integers(132, len(whole), draws.integers(1, 6)):
            broken[place] = draws.integers(256)
        if draws.random() < 0.4:
            del broken[draws.integers(132, len(whole)) :]
        path.write_bytes(broken)
        with suppress(InvalidInput):
            read_structures(path, names=NAMES, frame=FRAME, affine=volume.native_affine, shape=SHAPE)


def test_contours_are_placed_by_the_series_own_geometry(volume: Volume, tmp_path: Path) -> None:
    """By the standard's formulas, a box in mm contains exactly the voxels whose centres lie inside it."""
    path = write_structure_set(tmp_path / "label.dcm", [("core", [box(5, 3.5, 8.5, 6.5, 11.5)])])
    found = read_structures(path, names=NAMES, frame=FRAME, affine=volume.native_affine, shape=SHAPE).array[0]
    for i, j, k in np.argwhere(found == 2):
        x, y, z = ORIGIN[0] + i * STEP[0], ORIGIN[1] + j * STEP[1], ORIGIN[2] + k * STEP[2]
        assert ORIGIN[0] + 3.5 < x < ORIGIN[0] + 8.5
        assert ORIGIN[1] + 6.5 * 1.5 < y < ORIGIN[1] + 11.5 * 1.5
        assert z == ORIGIN[2] + 5 * 2.5
    assert (found == 2).sum() == 25
    assert (found == 0).sum() == found.size - 25


def test_a_case_without_a_dicom_label_names_no_structures() -> None:
    assert Case("c", Path("image.nii.gz")).structures == ()
    assert combine([fill(np.zeros((3, 2)), (4, 4))], (4, 4)).sum() == 0
