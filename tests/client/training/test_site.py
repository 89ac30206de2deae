"""Tests a site's training: voters depend on their own patients only, a bad case costs one slot, a stop loses
nothing.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.data.cases import load_cases
from client.data.layouts import DatasetSettings, open_for_training
from client.records.voter_files import voter_directory
from client.teachers.teacher import Teachers
from client.training import voter as voter_training
from client.training.contract import TrainedVoter
from client.training.private.settings import PrivateSettings
from client.training.site import plan_site
from client.training.standard import StandardTrainer
from client.training.task import SiteReport, held_out_count
from client.training.voter import TRAINERS
from common.canonical import sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.msd import Case, Dataset, read_dataset
from common.data.split import SplitCounts, plan_split, write_split
from common.data.synthetic import study_data, write_phantoms
from common.data.volume import load_volume
from common.errors import InvalidInput
from common.models.fit import NEAR, predict
from common.models.unet import build_unet, save_weights
from consilium.cli.train import app
from tests.trained_sites import one_after_another, train_site
from tests.worlds import DATA, STUDY, site_data

pytestmark = pytest.mark.slow

RECIPE = TrainingConfig(channels=(4, 8), steps=4, batch_size=2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return site_data(tmp_path)


def run(
    data: Dataset, teachers: Path, *, voters: int = 2, recipe: TrainingConfig = RECIPE, seed: int | None = 3
) -> SiteReport:
    return train_site(data, teachers=teachers, data=DATA, recipe=recipe, voters=voters, seed=seed)


def owner(teachers: Path, case: str) -> int:
    slots = json.loads((teachers / "slots.json").read_text())
    return int(slots["order"].index(case) % slots["voters"])


def test_teachers_begin_from_the_public_start_they_are_given(dataset: Dataset, tmp_path: Path) -> None:
    start = build_unet(RECIPE.channels, in_channels=1, out_channels=3, seed=77)
    save_weights(tmp_path / "start.pt", start)
    still = replace(RECIPE, learning_rate=1e-9)
    given = {"data": DATA, "recipe": still, "voters": 2, "seed": 3}
    train_site(dataset, teachers=tmp_path / "begun", start=tmp_path / "start.pt", **given)
    train_site(dataset, teachers=tmp_path / "random", **given)
    image = load_volume(dataset.cases[0].image, DATA).image
    for folder, same in (("begun", True), ("random", False)):
        for seen in Teachers.load(tmp_path / folder, data=DATA).predict(image):
            assert np.allclose(seen, predict(start, image), atol=1e-3) == same
    again = train_site(dataset, teachers=tmp_path / "random", start=tmp_path / "start.pt", **given)
    assert not any(voter.reused for voter in again.voters)  # another start is another training


def test_with_public_pairs_a_teacher_moves_partway_from_the_start_unless_held_out_patients_score_the_start_better(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = build_unet(RECIPE.channels, in_channels=1, out_channels=3, seed=77)
    save_weights(tmp_path / "start.pt", start)
    given = {"data": DATA, "recipe": RECIPE, "voters": 1, "seed": 3, "start": tmp_path / "start.pt"}
    train_site(dataset, teachers=tmp_path / "free", **given)
    scores = iter([(0.4, 0.4), (0.5, 0.5), (0.5, 0.5), (0.6, 0.6), (0.5, 0.5), (0.5, 0.5)])
    monkeypatch.setattr(voter_training, "_dice", lambda *_args, **_given: next(scores))
    train_site(dataset, teachers=tmp_path / "near", paired=True, **given)
    train_site(dataset, teachers=tmp_path / "kept", paired=True, **given)
    begun = start.state_dict()
    free, close, kept = (torch.load(tmp_path / name / "voter-000" / "weights.pt") for name in ("free", "near", "kept"))
    for name, weights in begun.items():
        torch.testing.assert_close(close[name], weights + NEAR * (free[name] - weights))
        torch.testing.assert_close(kept[name], weights)


def test_what_training_leaves_is_for_the_site_s_user_alone(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "t")
    files = [path for path in (tmp_path / "t").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"weights.pt", "train.json"}
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


def test_each_voter_trains_on_its_own_patients_and_answers_for_itself(dataset: Dataset, tmp_path: Path) -> None:
    report = run(dataset, tmp_path / "t")
    assert [(v.trained_on, v.held_out, v.empty_slots) for v in report.voters] == [(3, 0, 0), (3, 0, 0)]
    assert report.problems == ()
    teachers = Teachers.load(tmp_path / "t", data=DATA)
    image = load_volume(dataset.cases[0].image, DATA).image
    first, second = teachers.predict(image)
    assert first is not None
    assert second is not None
    assert first.shape == (3, 16, 16, 16)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first.sum(axis=0), 1, atol=1e-5)
    assert not np.array_equal(first, second)
    assert teachers.served == tuple(v.weights for v in report.voters)


def spoil(victim: Case, other: Case, change: str) -> bool:
    """Change one patient's files; return whether a usable scan is left."""
    assert victim.label is not None
    assert other.label is not None
    image = nib.load(victim.image)
    voxels = np.asarray(image.get_fdata(), dtype=np.float32)
    match change:
        case "other intensities":
            nib.save(nib.Nifti1Image(voxels**2 + 7, image.affine), victim.image)
        case "another scan":
            victim.image.write_bytes(other.image.read_bytes())
        case "another label":
            victim.label.write_bytes(other.label.read_bytes())
        case "truncated":
            victim.image.write_bytes(victim.image.read_bytes()[:-200])
        case "broken":
            victim.image.write_bytes(b"broken")
        case "NaN":
            voxels[3, 4, 5] = np.nan
            nib.save(nib.Nifti1Image(voxels, image.affine), victim.image)
        case "missing scan":
            victim.image.unlink()
        case "missing label":
            victim.label.unlink()
        case "label of another study":
            nib.save(nib.Nifti1Image(np.full(voxels.shape, 9, np.uint8), image.affine), victim.label)
    return change in ("other intensities", "another scan", "another label")


@pytest.mark.parametrize(
    "change",
    [
        "other intensities",
        "another scan",
        "another label",
        "truncated",
        "broken",
        "NaN",
        "missing scan",
        "missing label",
        "label of another study",
    ],
)
def test_one_changed_patient_leaves_every_other_voter_bit_identical(
    dataset: Dataset, tmp_path: Path, change: str
) -> None:
    before = run(dataset, tmp_path / "a", voters=3)
    victim, other = dataset.cases[0], dataset.cases[1]
    usable = spoil(victim, other, change)
    after = run(read_dataset(victim.image.parent.parent), tmp_path / "b", voters=3)
    changed = owner(tmp_path / "a", victim.id)
    first, second = (json.loads((tmp_path / name / "slots.json").read_text()) for name in "ab")
    assert (first["order"], first["seed"]) == (second["order"], second["seed"])
    for old, new in zip(before.voters, after.voters, strict=True):
        assert (old.weights == new.weights) == (old.voter != changed)
        files = [voter_directory(tmp_path / name, old.voter) / "weights.pt" for name in "ab"]
        assert (files[0].read_bytes() == files[1].read_bytes()) == (old.voter != changed)
    assert [problem.case for problem in after.problems] == ([] if usable else [victim.id])
    assert after.voters[changed].empty_slots == (0 if usable else 1)


def test_a_voters_task_names_the_scans_of_its_own_patients_and_no_other(dataset: Dataset, tmp_path: Path) -> None:
    dataset.cases[3].image.unlink()
    again = read_dataset(dataset.cases[3].image.parent.parent)
    tasks = plan_site(again, teachers=tmp_path / "t", data=DATA, recipe=RECIPE, voters=3, seed=3)
    named = [{scan for _, scans in task.patients for scan in scans} for task in tasks]
    assert sorted(name for names in named for name in names) == sorted(again.listed)
    for task, names in zip(tasks, named, strict=True):
        assert {case.id for case in task.cases} | {problem.case for problem in task.known} == names
    assert len({task.seed for task in tasks}) == 3


def test_all_scans_of_a_patient_lie_in_one_voter_and_a_bad_one_moves_nobody(dataset: Dataset, tmp_path: Path) -> None:
    folder = dataset.cases[0].image.parent.parent
    table = "".join(f"p{i}\tperson-{i // 2}\n" for i in range(6))
    (folder / "patients.tsv").write_text("case_id\tpatient_id\n" + table)
    before = run(read_dataset(folder), tmp_path / "a", voters=3)
    assert [(voter.trained_on, voter.empty_slots) for voter in before.voters] == [(1, 0)] * 3
    tasks = plan_site(read_dataset(folder), teachers=tmp_path / "a", data=DATA, recipe=RECIPE, voters=3)
    assert sorted(task.patients for task in tasks) == [
        ((f"person-{i}", (f"p{2 * i}", f"p{2 * i + 1}")),) for i in range(3)
    ]
    (folder / "imagesTr" / "p4.nii.gz").unlink()
    after = run(read_dataset(folder), tmp_path / "b", voters=3)
    hurt = owner(tmp_path / "b", "person-2")
    assert owner(tmp_path / "a", "person-2") == hurt
    assert [(v.trained_on, v.empty_slots) for v in after.voters] == [(1, 0)] * 3  # the other scan is still there
    for old, new in zip(before.voters, after.voters, strict=True):
        assert (old.weights == new.weights) == (old.voter != hurt)


def test_files_that_were_patients_of_their_own_are_not_regrouped_afterwards(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "t")
    folder = dataset.cases[0].image.parent.parent
    (tmp_path / "t" / "scans.json").unlink()  # version 0.2.0 wrote none
    (folder / "patients.tsv").write_text("case_id\tpatient_id\n" + "".join(f"p{i}\to{i // 2}\n" for i in range(6)))
    with pytest.raises(InvalidInput, match="another patient"):
        run(read_dataset(folder), tmp_path / "t")


def test_a_seed_is_refused_for_data_that_consilium_did_not_make(dataset: Dataset, tmp_path: Path) -> None:
    """The refusal comes before patients are assigned, because a known assignment would show who replaced whom."""
    real = replace(dataset, synthetic=False)
    with pytest.raises(InvalidInput, match="leave it out"):
        run(real, tmp_path / "t", seed=0)
    assert not (tmp_path / "t" / "slots.json").exists()
    assert all(voter.weights for voter in run(real, tmp_path / "t", seed=None).voters)


def test_phantoms_and_their_copies_are_marked_as_synthetic_and_nothing_else_is(
    dataset: Dataset, tmp_path: Path
) -> None:
    made = write_phantoms(tmp_path / "phantoms", cases=6, seed=1, hospitals=2)
    assert made.synthetic
    assert read_dataset(tmp_path / "phantoms").synthetic
    counts = SplitCounts(public_images=1, label_maps=1, validation=1, test=1)
    write_split(plan_split(made, counts, seed=0), made, tmp_path / "split")
    copies = [*(tmp_path / "split" / "sites").iterdir(), tmp_path / "split" / "test"]
    assert [read_dataset(folder).synthetic for folder in copies] == [True] * 3
    study = study_data()
    assert open_for_training(copies[0], study, DatasetSettings()).synthetic
    index = tmp_path / "phantoms" / "dataset.json"
    for mark in ("true", 1, None, False):
        index.write_text(json.dumps({**json.loads(index.read_text()), "synthetic": mark}))
        assert not read_dataset(tmp_path / "phantoms").synthetic


def test_one_scan_under_two_patients_changes_no_slot_and_only_the_voter_of_the_changed_file(
    dataset: Dataset, tmp_path: Path
) -> None:
    before = run(dataset, tmp_path / "a", voters=3)
    victim, other = dataset.cases[4], dataset.cases[0]
    victim.image.write_bytes(other.image.read_bytes())
    copied = open_for_training(tmp_path / "set", DATA, DatasetSettings())
    assert [(pair.same_as, pair.case) for pair in copied.doubled] == [(other.id, victim.id)]
    after = run(copied, tmp_path / "b", voters=3)
    assert [voter.trained_on for voter in after.voters] == [voter.trained_on for voter in before.voters]
    changed = owner(tmp_path / "a", victim.id)
    for old, new in zip(before.voters, after.voters, strict=True):
        assert (old.weights == new.weights) == (old.voter != changed)


def test_a_scan_over_which_this_software_stumbles_is_its_own_problem(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in one patient's file must not keep the site from taking part."""
    reading = voter_training.load_example

    def stumbling(case: Case, data: DataConfig) -> Any:
        if case.id == "p3":
            raise ZeroDivisionError("a header nobody thought of")
        return reading(case, data)

    monkeypatch.setattr(voter_training, "load_example", stumbling)
    report = run(dataset, tmp_path / "t")
    assert [problem.case for problem in report.problems] == ["p3"]
    assert "ZeroDivisionError" in report.problems[0].reason
    assert all(voter.weights for voter in report.voters)


@pytest.mark.parametrize(
    "lack",
    [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't allocate memory: 8 bytes")],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_memory_that_other_voters_take_leaves_no_scan_out(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: Exception, wrapped: bool
) -> None:
    """A scan that is left out for lack of memory would depend on patients of other voters."""
    reading = voter_training.load_example

    def crowded(case: Case, data: DataConfig) -> Any:
        if case.id == "p3" and wrapped:
            raise InvalidInput("volume file is damaged") from lack
        if case.id == "p3":
            raise lack
        return reading(case, data)

    monkeypatch.setattr(voter_training, "load_example", crowded)
    with pytest.raises(InvalidInput, match=r"too little memory to read a scan; to fix: .*--jobs 1"):
        run(dataset, tmp_path / "t")


def test_a_site_without_one_usable_case_ends_like_any_other(dataset: Dataset, tmp_path: Path) -> None:
    for case in dataset.cases:
        case.image.write_bytes(b"")
    report = run(dataset, tmp_path / "t")
    assert [(voter.trained_on, voter.weights) for voter in report.voters] == [(0, None), (0, None)]
    assert Teachers.load(tmp_path / "t", data=DATA).models == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("usable", [0, 2])  # a teacher of six patients keeps one for scoring
def test_the_command_fails_at_a_site_without_one_usable_case_and_names_the_cases(
    dataset: Dataset, tmp_path: Path, usable: int
) -> None:
    for case in dataset.cases[usable:]:
        case.image.write_bytes(b"")
    (tmp_path / "study.toml").write_text(STUDY)
    arguments = ["--data", str(tmp_path / "set"), "--study", str(tmp_path / "study.toml"), "--jobs", "1"]
    result = CliRunner().invoke(app, [*arguments, "--site-dir", str(tmp_path / "site")])
    problems = load_cases(tmp_path / "site").problems  # the record of cases lists them
    assert len(problems) == 6 - usable
    assert all(f"{problem.case}: {problem.reason}" in result.stdout for problem in problems)
    if usable:
        assert result.exit_code == 0
    else:
        assert isinstance(result.exception, InvalidInput)
        assert result.exception.exit_code == 2
        assert "6 of 6 cases" in str(result.exception)
        assert result.exception.remedy


@pytest.mark.slow
def test_the_command_says_that_the_only_usable_case_is_kept_for_scoring(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    arguments = ["--data", str(tmp_path / "set"), "--study", str(tmp_path / "study.toml"), "--jobs", "1"]
    command = [*arguments, "--site-dir", str(tmp_path / "site")]
    assert CliRunner().invoke(app, command).exit_code == 0
    [slots] = (tmp_path / "site").rglob("slots.json")
    scored = json.loads(slots.read_text())["order"][-1]
    for case in dataset.cases:
        if case.id != scored:
            case.image.write_bytes(b"")
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, InvalidInput)
    assert "5 of 6 cases" in str(refused)
    assert "1 usable" in str(refused)


def test_a_patient_who_is_no_longer_listed_leaves_the_other_voters_as_they_are(
    dataset: Dataset, tmp_path: Path
) -> None:
    """After the deal, a site with fewer listed patients than voters still trains: a voter without patients
    stays empty.
    """
    before = run(dataset, tmp_path / "t", voters=6)
    few = replace(dataset, cases=dataset.cases[:2], listed=dataset.listed[:2])
    after = run(few, tmp_path / "t", voters=6)
    kept = {owner(tmp_path / "t", name) for name in few.listed}
    for old, new in zip(before.voters, after.voters, strict=True):
        assert new.weights == (old.weights if old.voter in kept else None)


def test_a_voter_whose_training_diverges_is_silent_and_stops_nobody(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a site can take part must not depend on its data."""

    class Diverging(StandardTrainer):
        calls = 0

        def train(self, *arguments: Any, **options: Any) -> TrainedVoter:
            self.calls += 1
            if self.calls == 1:
                raise InvalidInput("training diverged", value=float("inf"))
            return super().train(*arguments, **options)

    diverging = Diverging()
    monkeypatch.setitem(TRAINERS, "standard", lambda _task: diverging)
    report = run(dataset, tmp_path / "t")
    assert report.voters[0].weights is None
    assert "diverged" in str(report.voters[0].problem)
    first, second = Teachers.load(tmp_path / "t", data=DATA).models
    assert first is None
    assert second is not None


def test_a_finished_voter_is_kept_and_only_a_changed_one_trained_again(dataset: Dataset, tmp_path: Path) -> None:
    first = run(dataset, tmp_path / "t")
    again = run(dataset, tmp_path / "t", seed=None)
    assert [v.reused for v in again.voters] == [True, True]
    victim = dataset.cases[0]
    victim.image.write_bytes(b"broken")
    third = run(dataset, tmp_path / "t")
    changed = owner(tmp_path / "t", victim.id)
    assert [v.reused for v in third.voters] == [v.voter != changed for v in first.voters]
    weights = voter_directory(tmp_path / "t", 1 - changed) / "weights.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert [v.reused for v in run(dataset, tmp_path / "t").voters] == [v.voter == changed for v in first.voters]


def test_an_interrupted_training_ends_with_the_weights_of_a_whole_one(dataset: Dataset, tmp_path: Path) -> None:
    recipe = TrainingConfig(channels=(4, 8), steps=54, batch_size=1)
    whole = run(dataset, tmp_path / "whole", recipe=recipe)

    def stop(voter: int, step: int, loss: float) -> None:
        if (voter, step) == (1, 51):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_site(dataset, teachers=tmp_path / "t", data=DATA, recipe=recipe, voters=2, seed=3, on_progress=stop)
    assert (voter_directory(tmp_path / "t", 1) / "checkpoint.pt").exists()
    steps: list[int] = []
    resumed = train_site(
        dataset,
        teachers=tmp_path / "t",
        data=DATA,
        recipe=recipe,
        voters=2,
        on_progress=lambda voter, step, loss: steps.append(step) if voter == 1 else None,
    )
    assert steps == [51, 52, 53, 54]
    assert [v.weights for v in resumed.voters] == [v.weights for v in whole.voters]
    assert [v.reused for v in resumed.voters] == [True, False]
    assert not (voter_directory(tmp_path / "t", 1) / "checkpoint.pt").exists()


def test_a_voter_without_a_usable_case_has_no_answer(dataset: Dataset, tmp_path: Path) -> None:
    slots_only = run(dataset, tmp_path / "t", voters=6)
    assert all(v.trained_on == 1 for v in slots_only.voters)
    dataset.cases[2].image.write_bytes(b"broken")
    report = run(dataset, tmp_path / "t", voters=6)
    lost = owner(tmp_path / "t", dataset.cases[2].id)
    assert report.voters[lost].weights is None
    predictions = Teachers.load(tmp_path / "t").predict(load_volume(dataset.cases[0].image, DATA).image)
    assert [p is None for p in predictions] == [voter == lost for voter in range(6)]


def test_held_out_patients_are_the_voters_own_and_not_trained_on(dataset: Dataset, tmp_path: Path) -> None:
    report = run(dataset, tmp_path / "t", voters=1)
    (voter,) = report.voters
    assert (voter.trained_on, voter.held_out) == (5, 1)
    assert len(voter.dice) == 2
    assert voter.mean_dice is not None
    assert [held_out_count(n) for n in (1, 4, 5, 14, 15, 25, 100)] == [0, 0, 1, 1, 2, 2, 10]


def test_what_cannot_be_trained_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="trainer"):
        train_site(dataset, teachers=tmp_path, data=DATA, recipe=RECIPE, voters=1, trainer="magic")
    with pytest.raises(InvalidInput, match="patients for training"):
        run(replace(dataset, cases=(), listed=()), tmp_path, voters=1)
    private = PrivateSettings("dp-sgd", 8.0, 1e-3)
    with pytest.raises(InvalidInput, match=r"patients .*: got 6; allowed: at least 7"):
        plan_site(dataset, teachers=tmp_path, data=DATA, recipe=RECIPE, voters=7, trainer="dp-sgd", private=private)
    other = DataConfig(labels=("background", "heart"), spacing_mm=(1, 1, 1), grid=(16, 16, 16))
    with pytest.raises(InvalidInput, match="labels"):
        train_site(dataset, teachers=tmp_path, data=other, recipe=RECIPE, voters=1)


def test_the_command_prints_json_and_names_a_bad_case_on_the_sites_own_terminal(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test trains in this process, since each new process takes seconds to load torch and has tests of its own."""
    monkeypatch.setattr("client.training.command.side_by_side", one_after_another)
    (tmp_path / "study.toml").write_text(STUDY)
    dataset.cases[0].image.write_bytes(b"broken")
    arguments = ["--data", str(tmp_path / "set"), "--study", str(tmp_path / "study.toml"), "--site-dir"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "site"), "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert [problem["case"] for problem in report["problems"]] == ["p0"]
    weights = tmp_path / "site" / "teachers" / "voter-000" / "weights.pt"
    assert report["voters"][0]["weights"] == sha256_file(weights)
    again = CliRunner().invoke(app, [*arguments, str(tmp_path / "site")], catch_exceptions=False)
    assert "kept from before" in again.stdout
    assert re.search("p0: .*NIfTI", again.stdout)
    (weights.parent / "train.json").unlink()
    anew = CliRunner().invoke(app, [*arguments, str(tmp_path / "site")], catch_exceptions=False)
    hint = "to make a running worker use the new teachers"
    assert [hint in done.stdout for done in (again, anew)] == [False, True]
