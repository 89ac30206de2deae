import json

import nibabel as nib
import numpy as np
import pytest

from common.canonical import sha256_file
from common.data.msd import Case, read_dataset, write_dataset
from common.data.split import SplitPlan, deal, split_dataset
from common.errors import InvalidInput

PLAN = SplitPlan(sites=3, public_images=4, label_maps=3, validation=2, test=2)


def make(tmp_path, *, cases=20, hospitals=None):
    made = []
    for i in range(cases):
        paths = []
        for kind in ("image", "label"):
            path = tmp_path / "raw" / f"{kind}-{i:02d}.nii.gz"
            path.parent.mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(np.full((4, 4, 4), i, dtype=np.uint8), np.eye(4)), path)
            paths.append(path)
        hospital = None if hospitals is None else f"hospital-{i % hospitals:02d}"
        made.append(Case(id=f"case_{i:02d}", image=paths[0], label=paths[1], hospital=hospital))
    write_dataset(tmp_path / "all", name="all", labels=["background", "a"], channels=["MRI"], cases=made)
    return tmp_path / "all"


def test_every_case_has_one_role_and_files_are_copied_unchanged(tmp_path):
    source = make(tmp_path)
    counts = split_dataset(source, tmp_path / "out", plan=PLAN, seed=1)
    assert sum(counts.values()) == 20
    record = json.loads((tmp_path / "out" / "split.json").read_text())
    assert len(record["cases"]) == 20
    images = list((tmp_path / "out").rglob("imagesTr/*.nii.gz")) + list((tmp_path / "out/public/images").iterdir())
    names = [path.name for path in images]
    assert len(set(names)) == len(names) == 20 - PLAN.label_maps
    for path in images:
        assert sha256_file(path) == record["cases"][path.name.removesuffix(".nii.gz")]["image_sha256"]


def test_no_case_gives_both_a_public_image_and_a_public_label_map(tmp_path):
    split_dataset(make(tmp_path), tmp_path / "out", plan=PLAN, seed=1)
    images = {path.name for path in (tmp_path / "out/public/images").iterdir()}
    maps = {path.name for path in (tmp_path / "out/public/label-maps").iterdir()}
    assert (len(images), len(maps), images & maps) == (4, 3, set())
    assert not list((tmp_path / "out/public").rglob("labelsTr"))


def test_the_seed_decides_and_another_seed_deals_otherwise(tmp_path):
    dataset = read_dataset(make(tmp_path))
    assert deal(dataset, plan=PLAN, seed=1) == deal(dataset, plan=PLAN, seed=1)
    assert deal(dataset, plan=PLAN, seed=1) != deal(dataset, plan=PLAN, seed=2)


def test_sites_share_evenly_and_keep_their_own_hospitals_cases(tmp_path):
    even = deal(read_dataset(make(tmp_path)), plan=PLAN, seed=1)
    sizes = [list(even.values()).count(f"hospital-{i:02d}") for i in (1, 2, 3)]
    assert sizes == [3, 3, 3]
    (tmp_path / "named").mkdir()
    dataset = read_dataset(make(tmp_path / "named", cases=30, hospitals=3))
    own = deal(dataset, plan=PLAN, seed=1)
    of = {case.id: case.hospital for case in dataset.labelled}
    assert all(role == of[case] for case, role in own.items() if role.startswith("hospital"))


def test_too_few_cases_are_refused_with_the_number_needed(tmp_path):
    with pytest.raises(InvalidInput, match="at least 14"):
        split_dataset(make(tmp_path, cases=13), tmp_path / "out", plan=PLAN, seed=0)


def test_an_existing_directory_is_never_touched(tmp_path):
    source = make(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(InvalidInput, match="exists"):
        split_dataset(source, tmp_path / "out", plan=PLAN, seed=0)
    assert (tmp_path / "out" / "precious").read_text() == "x"
