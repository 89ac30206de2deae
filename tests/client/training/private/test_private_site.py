"""Tests a site's private training: charged in its ledger first, resumed, and refused beyond what was charged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from client.ledger.site_ledger import SiteLedger
from client.policy import load_site
from client.records.journal import TrainingJournal
from client.site.books import open_books
from client.teachers.teacher import Teachers, averaged
from client.training.command import PrivateOptions
from client.training.contract import VoterData
from client.training.private import clipped_sums as sums
from client.training.private import engine
from client.training.private.charge import record_trained, record_trainings
from client.training.private.settings import OF_SOME, STRATEGIES, PrivateSettings, defaults, option_of
from client.training.private.teachers import train_privately
from client.training.private.trainer import planned_charge, private_trainer
from client.training.site import plan_site, site_report
from client.training.task import VoterTask
from client.training.voter import load_scans
from common.config import DataConfig, TrainingConfig
from common.data import memory, volume
from common.data.msd import Case, Dataset, write_dataset
from common.data.volume_cache import VolumeCache
from common.errors import InvalidInput
from common.ledger.teacher_records import TrainingRecord
from common.models.fit import predict
from common.models.unet import build_unet, save_weights
from common.privacy.training import Neighbours, Sampling, epsilon_of
from consilium.cli.train import summary
from tests.trained_sites import one_after_another, train_site
from tests.worlds import DATA, site_toml

RECIPE = TrainingConfig(channels=(4, 8))
MAC = ("mu", "mu_growth", "z_steps", "z_rate")
OPTIONS: dict[str, Any] = {
    "rate": "1/4",
    "steps": 7,
    "learning_rate": 0.02,
    "clip": 0.3,
    "per_layer": True,
    "scans": 3,
    "temperature": 0.01,
    "prior_std": 0.4,
    "mu": 90.0,
    "mu_growth": 2.0,
    "z_steps": 3,
    "z_rate": 0.25,
    "noise_multiplier": "5",
}
"""A value for every option of a private training that a recipe can state."""


def settings(strategy: str = "dp-sgd", **changed: object) -> PrivateSettings:
    return PrivateSettings(strategy, 0.25, 1e-3, rate=Fraction(1, 2), steps=3, **changed)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    cases = []
    for number in range(6):
        rng = np.random.default_rng(number)
        labels = np.zeros((14, 16, 15), dtype=np.uint8)
        labels[4:9, 4:8, 4:9], labels[4:9, 8:12, 4:9] = 1, 2
        folder = tmp_path / "raw"
        (folder / "labels").mkdir(parents=True, exist_ok=True)
        image, label = folder / f"p{number}.nii.gz", folder / "labels" / f"p{number}.nii.gz"
        nib.save(nib.Nifti1Image(rng.normal(labels * 3.0, 0.5).astype(np.float32), np.eye(4)), image)
        nib.save(nib.Nifti1Image(labels, np.eye(4)), label)
        cases.append(Case(f"p{number}", image, label))
    return write_dataset(
        tmp_path / "set", name="site", labels=DATA.labels, channels=DATA.channels, cases=cases, synthetic=True
    )


def tasks(
    dataset: Dataset,
    teachers: Path,
    private: PrivateSettings | None,
    *,
    voters: int = 2,
    data: DataConfig = DATA,
    recipe: TrainingConfig = RECIPE,
    start: Path | None = None,
) -> tuple[VoterTask, ...]:
    return plan_site(
        dataset,
        teachers=teachers,
        data=data,
        recipe=recipe,
        voters=voters,
        trainer="standard" if private is None else private.strategy,
        private=private,
        seed=1,
        start=start,
    )


@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
@pytest.mark.slow
def test_every_strategy_trains_a_teacher_that_answers_and_says_what_it_cost(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    teachers = tmp_path / "teachers"
    report = train_site(
        dataset, teachers=teachers, data=DATA, recipe=RECIPE, voters=1, trainer=strategy, private=settings(strategy)
    )
    (voter,) = report.voters
    assert voter.weights is not None
    assert voter.loss is None  # a loss on private patients was not paid for
    assert [text.split(", relation ")[1] for text in voter.guarantees] == [
        "add-remove (training)",
        "replace-one (training)",
    ]
    record = json.loads((teachers / "voter-000" / "train.json").read_text())
    assert record["event"]["steps"] == 3
    assert (record["posterior"] is not None) == (strategy == "dp-bbb")
    loaded = Teachers.load(teachers, data=DATA)
    image = np.random.default_rng(0).normal(size=(1, 16, 16, 16)).astype(np.float32)
    (first,), (again,) = loaded.predict(image), Teachers.load(teachers, data=DATA).predict(image)
    assert first is not None
    assert again is not None
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first.sum(axis=0), 1, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
def test_a_private_training_begins_from_the_public_start_and_another_start_is_another_training(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    start = build_unet(RECIPE.channels, in_channels=1, out_channels=3, seed=77)
    save_weights(tmp_path / "start.pt", start)
    still = settings(strategy, learning_rate=1e-9, initial_std=1e-9)
    given = {"data": DATA, "recipe": RECIPE, "voters": 1, "trainer": strategy, "private": still, "seed": 1}
    first = train_site(dataset, teachers=tmp_path / "t", start=tmp_path / "start.pt", **given).voters[0]  # type: ignore[arg-type]
    image = np.random.default_rng(0).normal(size=(1, 16, 16, 16)).astype(np.float32)
    (seen,) = Teachers.load(tmp_path / "t", data=DATA).predict(image)
    np.testing.assert_allclose(seen, predict(start, image), atol=1e-3)
    other = train_site(dataset, teachers=tmp_path / "t", **given).voters[0]  # type: ignore[arg-type]
    assert not other.reused
    assert other.weights != first.weights
    assert len(list((tmp_path / "t" / "voter-000").glob("journal-*.jsonl"))) == 2


def test_a_start_that_is_another_networks_is_refused_before_anything_is_charged(
    dataset: Dataset, tmp_path: Path
) -> None:
    save_weights(tmp_path / "start.pt", build_unet((4, 8, 16), in_channels=1, out_channels=3))
    with pytest.raises(InvalidInput, match="weights"):
        tasks(dataset, tmp_path / "t", settings(), voters=1, start=tmp_path / "start.pt")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "recipe",
    [replace(RECIPE, channels=(4, 4, 4, 4)), replace(RECIPE, channels=(4,) * 5), replace(RECIPE, patch=(32, 16, 16))],
    ids=["one voxel left", "less than one voxel", "patch beyond the grid"],
)
def test_a_grid_that_the_network_or_its_patch_does_not_fit_is_refused_before_anything_is_charged(
    dataset: Dataset, tmp_path: Path, recipe: TrainingConfig
) -> None:
    data = replace(DATA, grid=(16, 16, 16) if recipe.patch else (8, 8, 8))
    with pytest.raises(InvalidInput, match="training"):
        tasks(dataset, tmp_path / "t", settings(), voters=1, data=data, recipe=recipe)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("strategy", "name", "value"),
    [
        ("dp-bbb", "prior_std", 1e-200),
        ("dp-sgd", "clip", 5e-324),
        ("dp-sgd", "learning_rate", 1e-30),
        ("dp-mac", "mu", 1e-300),
        ("dp-mac", "mu_growth", 1e308),
    ],
)
def test_a_setting_with_which_a_training_would_learn_nothing_is_refused_before_its_charge(
    dataset: Dataset, site: Path, strategy: str, name: str, value: float
) -> None:
    planned = tasks(dataset, site / "teachers", settings(strategy, **{name: value}))
    with pytest.raises(InvalidInput, match=f"^{option_of(name)}: got "):
        record_trainings(site, planned, again=False)
    assert not (site / "site-ledger.sqlite").exists()


def test_a_finished_private_teacher_is_kept_when_a_scan_changes_and_spends_nothing_more(
    dataset: Dataset, tmp_path: Path
) -> None:
    teachers = tmp_path / "teachers"
    run = lambda: train_site(  # noqa: E731
        dataset, teachers=teachers, data=DATA, recipe=RECIPE, voters=1, trainer="dp-sgd", private=settings(), seed=1
    )
    before = run().voters[0]
    image = next(case.image for case in dataset.labelled)
    changed = nib.load(image)
    nib.save(nib.Nifti1Image(np.asarray(changed.dataobj) + 1, np.eye(4)), image)
    after = run().voters[0]
    assert after.reused
    assert after.weights == before.weights
    (journal,) = (teachers / "voter-000").glob("journal-*.jsonl")
    assert journal.read_text().count("\n") == 1 + 3


@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
@pytest.mark.slow
def test_a_private_voter_without_a_usable_scan_is_trained_on_noise_and_looks_like_any_other(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    given = {"data": DATA, "recipe": RECIPE, "voters": 2, "trainer": strategy, "private": settings(strategy), "seed": 1}
    full = train_site(dataset, teachers=tmp_path / "full", **given)  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "slots.json").write_bytes((tmp_path / "full" / "slots.json").read_bytes())
    order = json.loads((tmp_path / "full" / "slots.json").read_text())["order"]
    for case in dataset.cases:
        if case.id in order[1::2]:
            case.image.write_bytes(b"broken")
    bare = train_site(dataset, teachers=tmp_path / "empty", **given)  # type: ignore[arg-type]
    assert [voter.trained_on for voter in bare.voters] == [3, 0]
    assert bare.voters[1].weights is not None
    for field in ("steps", "loss", "guarantees", "problem"):
        assert getattr(bare.voters[1], field) == getattr(full.voters[1], field)
    names = [
        sorted(path.name for path in (tmp_path / world / "voter-001").iterdir() if "journal" not in path.name)
        for world in ("full", "empty")
    ]
    assert names[0] == names[1]
    (journal,) = (tmp_path / "empty" / "voter-001").glob("journal-*.jsonl")
    assert journal.read_text().count("\n") == 1 + 3
    image = np.zeros((1, 16, 16, 16), np.float32)
    assert all(seen is not None for seen in Teachers.load(tmp_path / "empty", data=DATA).predict(image))


def test_a_private_voter_left_without_weights_by_an_earlier_version_is_trained(
    dataset: Dataset, tmp_path: Path
) -> None:
    given = {"data": DATA, "recipe": RECIPE, "voters": 1, "trainer": "dp-sgd", "private": settings(), "seed": 1}
    train_site(dataset, teachers=tmp_path / "t", **given)  # type: ignore[arg-type]
    folder = tmp_path / "t" / "voter-000"
    record = json.loads((folder / "train.json").read_text())
    record["report"] |= {"weights": None, "steps": 0}
    (folder / "train.json").write_text(json.dumps(record))
    (folder / "weights.pt").unlink()
    next(folder.glob("journal-*")).unlink()
    (voter,) = train_site(dataset, teachers=tmp_path / "t", **given).voters  # type: ignore[arg-type]
    assert (voter.reused, voter.steps) == (False, 3)
    assert voter.weights is not None


@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
@pytest.mark.parametrize("voxel", [np.nan, np.inf, 3e38])
def test_no_voxel_can_end_a_private_training_without_weights(strategy: str, voxel: float) -> None:
    part = VoterData(np.full((3, 1, 16, 16, 16), voxel, np.float32), np.ones((3, 16, 16, 16), np.uint8), 3, (0, 1, 2))
    journal = TrainingJournal(settings(strategy).plan(patients=3))
    done = train_privately(part, RECIPE, settings(strategy), journal, seed=0)
    assert (done.steps, journal.left) == (3, 0)
    assert all(torch.isfinite(weight).all() for weight in done.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_training_stopped_after_any_step_ends_with_the_weights_of_a_whole_one(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, stop: int
) -> None:
    """The step number decides the noise. Patches, weight samples, turns and Adam's state continue after the stop."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (4, 16, 16, 16)).astype(np.uint8)
    part = VoterData(rng.normal(labels[:, None], 0.5).astype(np.float32), labels, 3, (0, 0, 1, 3))
    given = settings(strategy, scans=2, sampling=Sampling.FIXED_PARTITION)
    plan = replace(given, steps=4).plan(patients=4)
    recipe = replace(RECIPE, patch=(8, 8, 8))
    counted: list[int] = []

    def noise(size: int, std: Fraction) -> np.ndarray:
        counted.append(size)
        drawn = np.random.default_rng(journal.spent).normal(0, float(std), size)
        return np.rint(drawn).astype(np.int64)

    monkeypatch.setattr(sums.noised, "__kwdefaults__", {"noise": noise})
    monkeypatch.setattr(engine.run, "__kwdefaults__", {**engine.run.__kwdefaults__, "noise": noise})

    def interrupt(step: int, _loss: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    first = TrainingJournal.open(tmp_path / "journal", plan, identity="a")
    (tmp_path / "whole").write_bytes((tmp_path / "journal").read_bytes())
    journal = TrainingJournal.open(tmp_path / "whole", plan, identity="a")
    whole = train_privately(part, recipe, given, journal, seed=0)
    journal = first
    with pytest.raises(KeyboardInterrupt):
        train_privately(part, recipe, given, journal, seed=0, checkpoint=tmp_path / "c.pt", on_step=interrupt)
    journal = TrainingJournal.open(tmp_path / "journal", plan, identity="a")
    resumed = train_privately(part, recipe, given, journal, seed=0, checkpoint=tmp_path / "c.pt")
    assert len(counted) == 2 * 4
    assert resumed.event == whole.event
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_that_a_kill_lost_are_told_from_those_that_moved_the_weights(dataset: Dataset, tmp_path: Path) -> None:
    """A step between the last checkpoint and a kill is charged, but its weights are lost."""

    def kill(_voter: int, step: int, _loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    of: dict[str, Any] = {"teachers": tmp_path / "t", "data": DATA, "recipe": RECIPE, "voters": 1, "seed": 1}
    of |= {"trainer": "dp-sgd", "private": settings()}
    with pytest.raises(KeyboardInterrupt):
        train_site(dataset, on_progress=kill, **of)
    (tmp_path / "t" / "voter-000" / "checkpoint.pt").unlink()  # as if the kill had come before it was written
    report = train_site(dataset, **of)
    (voter,) = report.voters
    assert (voter.steps, voter.lost_steps) == (1, 2)
    assert "1 step, 2 further steps charged and lost to interruptions" in summary(report, DATA.structures)
    again = train_site(dataset, **of)
    assert "kept from before" in summary(again, DATA.structures)


def test_an_empty_slot_stays_in_n_and_two_scans_of_a_patient_are_one_example(dataset: Dataset, tmp_path: Path) -> None:
    task = tasks(dataset, tmp_path / "t", settings(), voters=1)[0]
    assert private_trainer(task).patients == task.training_slots == 5
    part = VoterData(np.zeros((3, 1, 16, 16, 16), np.float32), np.zeros((3, 16, 16, 16), np.uint8), 3, (0, 0, 4))
    assert part.slots == (0, 0, 4)
    journal = TrainingJournal(settings().plan(patients=5))
    done = train_privately(part, RECIPE, settings(), journal, seed=0)
    assert done.event.steps == journal.plan.event.steps


def test_memory_that_one_patients_scan_takes_leaves_out_no_other_patients_scan(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory limits a scan's size. Here none is left after the first measurement."""
    measured = iter([1 << 50])
    monkeypatch.setattr(volume, "SMALL_VOXELS", 1000)
    monkeypatch.setattr(memory, "_machine", lambda _meminfo, _what: next(measured, 1))
    (task,) = tasks(dataset, tmp_path / "t", settings(), voters=1)
    with VolumeCache(tmp_path / "cache") as cache:
        usable, problems = load_scans(task, cache)
    assert (len(usable), problems) == (6, ())


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "site.toml").write_text(site_toml(pool="north-mri", delta=1e-5))
    return tmp_path / "site"


def ledger_of(site: Path) -> SiteLedger:
    return SiteLedger.read(site / "site-ledger.sqlite")


def test_a_training_is_charged_before_its_first_step_and_only_once(dataset: Dataset, site: Path) -> None:
    planned = tasks(dataset, site / "teachers", settings())
    record_trainings(site, planned, again=False)
    with ledger_of(site) as ledger:
        charged = ledger.trainings()
        rows = ledger.head().seq
    assert [one.voter for one in charged.all] == [0, 1]
    assert all(one.event == planned_charge(task).event for one, task in zip(charged.all, planned, strict=True))
    one_after_another(planned, lambda place, step, loss: None)
    record_trainings(site, tasks(dataset, site / "teachers", settings()), again=False)
    with ledger_of(site) as ledger:
        assert ledger.head().seq == rows
        found = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.REPLACE_ONE)
        facts = ledger.facts("site", present=())
    assert found is not None
    event = planned[0].private.plan(patients=3).event  # type: ignore[union-attr]
    assert found.epsilon == epsilon_of(event, delta=1e-3, neighbours=Neighbours.REPLACE_ONE)
    assert facts.trainings.count == 2


def test_a_charged_training_that_made_no_teacher_yet_is_told_from_a_finished_one(dataset: Dataset, site: Path) -> None:
    """After a kill, `site status` must show that a charged training is still to be finished."""
    planned = tasks(dataset, site / "teachers", settings(), voters=1)
    record_trainings(site, planned, again=False)
    with ledger_of(site) as ledger:
        assert (
            ledger.facts("site", present=()).trainings.each[0].startswith("dp-sgd, 1 training (1 not finished): ε = ")
        )
    record_trained(site, planned, site_report(one_after_another(planned, lambda place, step, loss: None)))
    with ledger_of(site) as ledger:
        (line,) = ledger.facts("site", present=()).trainings.each
    assert line.startswith("dp-sgd, 1 training: ε = ")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": Sampling.FIXED_PARTITION}, "batches of a fixed partition"),  # 2 batches, voters of 2 and 1
        ({"rate": Fraction(1, 10**400)}, "sampling rate"),
    ],
)
def test_a_sampling_that_a_voter_cannot_run_is_refused_before_any_voter_is_charged(
    dataset: Dataset, site: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        record_trainings(site, tasks(dataset, site / "teachers", replace(settings(), **change), voters=4), again=False)
    assert not (site / "site-ledger.sqlite").exists()


def test_a_teacher_is_not_replaced_by_an_untrained_one_where_the_studys_data_settings_changed(
    dataset: Dataset, site: Path
) -> None:
    planned = tasks(dataset, site / "teachers", settings(), voters=1)
    record_trainings(site, planned, again=False)
    record_trained(site, planned, site_report(one_after_another(planned, lambda place, step, loss: None)))
    other = [replace(planned[0], data=replace(DATA, spacing_mm=(2.0, 2.0, 2.0)))]
    with pytest.raises(InvalidInput, match=r"other settings of the study's data.*--again"):
        record_trainings(site, other, again=False)
    record_trainings(site, planned, again=False)
    record_trainings(site, other, again=True)
    (outcome,) = one_after_another(other, lambda place, step, loss: None)
    assert outcome.report.steps == 3
    with ledger_of(site) as ledger:
        assert len(ledger.trainings().private) == 2, "charged again"


def test_a_second_training_on_the_same_patients_is_refused_unless_asked_for_and_then_adds_up(
    dataset: Dataset, site: Path
) -> None:
    record_trainings(site, tasks(dataset, site / "teachers", settings()), again=False)
    other = tasks(dataset, site / "teachers", settings("dp-bbb"))
    with pytest.raises(InvalidInput, match=r"already charged.*--again"):
        record_trainings(site, other, again=False)
    record_trainings(site, other, again=True)
    with ledger_of(site) as ledger:
        total = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
    assert total is not None
    assert total.epsilon > 0.3


def test_a_training_begun_before_its_settings_had_limits_continues_and_a_new_one_is_refused_before_its_charge(
    dataset: Dataset, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.2.0 had no upper limits."""
    planned = tasks(dataset, site / "teachers", settings("dp-bbb", prior_std=2000.0), voters=1)
    with pytest.raises(InvalidInput, match=r"--prior-std: got 2000.0; allowed: 1e-06 to 1000"):
        record_trainings(site, planned, again=False)
    assert not (site / "site-ledger.sqlite").exists()
    with monkeypatch.context() as of_before:
        of_before.setattr(PrivateSettings, "check_new", lambda settings: None)
        record_trainings(site, planned, again=False)
    one_after_another(planned, lambda place, step, loss: None)
    record_trainings(
        site, tasks(dataset, site / "teachers", settings("dp-bbb", prior_std=2000.0), voters=1), again=False
    )
    with ledger_of(site) as ledger:
        assert len(ledger.trainings().all) == 1, "charged once"


def test_a_dp_mac_training_of_an_earlier_version_stays_charged_and_a_new_one_is_charged_in_addition(
    dataset: Dataset, site: Path
) -> None:
    """In a row of version 0.2.0 the strategy is text. The ε counts both trainings, one after the other."""
    planned = tasks(dataset, site / "teachers", settings("dp-mac"), voters=1)
    event = planned_charge(planned[0]).event
    with open_books(load_site(site)) as ledger:
        ledger.record_training(TrainingRecord("0" * 64, 0, planned[0].deal, "dp-mac", (event,)))
    with pytest.raises(InvalidInput, match=r"already charged.*--again"):
        record_trainings(site, planned, again=False)
    record_trainings(site, planned, again=True)
    with ledger_of(site) as ledger:
        trainings = ledger.trainings()
    assert [one.strategy for one in trainings.all] == ["dp-mac", "dp-mac"]
    found = trainings.guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
    assert found is not None
    twice = replace(event, steps=2 * event.steps)
    assert found.epsilon == pytest.approx(epsilon_of(twice, delta=1e-3, neighbours=Neighbours.ADD_REMOVE), rel=1e-6)


def test_a_plain_training_is_on_record_too_and_costs_nothing_while_it_is_not_served(
    dataset: Dataset, site: Path
) -> None:
    plain = tasks(dataset, site / "teachers", None)
    record_trainings(site, plain, again=False)
    record_trainings(site, plain, again=False)
    with ledger_of(site) as ledger:
        trainings = ledger.trainings()
    assert [(one.voter, one.event) for one in trainings.all] == [(0, None), (1, None)], "once each"
    assert trainings.guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE) is None
    record_trainings(site, tasks(dataset, site / "teachers", settings()), again=False)  # nothing is charged yet
    with ledger_of(site) as ledger:
        trainings = ledger.trainings()
    assert trainings.guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE) is not None
    assert not trainings.covers_every_release, "no code is on record yet"


def test_a_private_training_without_a_ledger_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="ledger"):
        record_trainings(tmp_path, tasks(dataset, tmp_path / "teachers", settings()), again=False)


def test_a_lost_journal_is_another_training_to_the_ledger(dataset: Dataset, site: Path) -> None:
    planned = tasks(dataset, site / "teachers", settings())
    record_trainings(site, planned, again=False)
    for path in (site / "teachers").glob("voter-*/journal-*.jsonl"):
        path.unlink()
    with pytest.raises(InvalidInput, match="already"):
        record_trainings(site, planned, again=False)


def poisson_moments_epsilon(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """Return the ε of a Poisson-sampled Gaussian by Rényi DP at orders 2 to 64, an upper bound of the true ε.

    Source: Mironov et al. 2019 for the moments; Canonne et al. 2020, Proposition 12, for the conversion.
    """
    best = math.inf
    for order in range(2, 65):
        terms = [
            math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp(k * (k - 1) / (2 * multiplier**2))
            for k in range(order + 1)
        ]
        conversion = math.log(1 / delta) - math.log(order) + (order - 1) * math.log((order - 1) / order)
        best = min(best, (steps * math.log(sum(terms)) + conversion) / (order - 1))
    return best


@pytest.mark.parametrize("multiplier", ["2.449", "5"])
def test_a_stated_noise_is_used_and_costs_what_the_accountant_says(multiplier: str) -> None:
    """For σ² = 6, the event has this noise. Its ε lies below Rényi DP's and above four fifths of it."""
    options = PrivateOptions("dp-sgd", noise_multiplier=multiplier, delta=1e-3, rate="1/2", steps=50)
    made = options.settings(begun=False)
    assert made is not None
    plan = made.plan(patients=40)
    assert plan.event.noise_multiplier == Fraction(multiplier)
    bound = poisson_moments_epsilon(0.5, float(multiplier), 50, 1e-3)
    assert 0.8 * bound < plan.epsilon <= bound
    assert plan.epsilon == epsilon_of(plan.event, delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
    assert replace(options, epsilon=bound).settings(begun=False).plan(patients=40).event == plan.event  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match="epsilon"):
        replace(options, epsilon=plan.epsilon / 2).settings(begun=False).plan(patients=40)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "multiplier", ["nan", "inf", "0", "-1", "1/0", "much", "0.01", "1e999999999999", "", "2" * 200]
)
def test_a_noise_that_is_no_noise_is_refused(multiplier: str) -> None:
    options = PrivateOptions("dp-sgd", noise_multiplier=multiplier, delta=1e-3)
    with pytest.raises(InvalidInput):
        options.settings(begun=False).plan(patients=40)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "option", "value"),
    [
        *(("standard", name, value) for name, value in {**OPTIONS, "epsilon": 0.0}.items()),
        *(("standard", "delta", 1e-6), ("standard", "relation", "replace-one"), ("standard", "sampling", "?")),
        *(("dp-sgd", name, OPTIONS[name]) for name in ("temperature", "prior_std", *MAC)),
        *(("dp-bbb", name, OPTIONS[name]) for name in MAC),
        *(("dp-mac", name, OPTIONS[name]) for name in ("temperature", "prior_std", "per_layer")),
    ],
)
def test_an_option_that_the_strategy_does_not_read_is_refused_by_name(
    strategy: str, option: str, value: float | str
) -> None:
    """If `--noise-multiplier` were ignored without a strategy, the teacher would have no guarantee."""
    epsilon = {} if strategy == "standard" else {"epsilon": 8.0}
    with pytest.raises(InvalidInput, match=rf"--{option.replace('_', '-')}.*{strategy}"):
        PrivateOptions(strategy, **epsilon | {option: value}).settings(begun=False)


@pytest.mark.parametrize("option", OF_SOME)
def test_a_new_strategy_refuses_every_option_that_it_does_not_say_it_reads(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "plain", replace(STRATEGIES["dp-sgd"], reads=()))
    with pytest.raises(InvalidInput, match=f"--{option.replace('_', '-')} with strategy plain"):
        PrivateOptions("plain", 8.0, **{option: OPTIONS[option]}).settings(begun=False)


@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-bbb", "dp-mac"])
def test_every_option_that_a_strategy_reads_is_taken(strategy: str) -> None:
    others = {"dp-sgd": ("temperature", "prior_std", *MAC), "dp-bbb": MAC}.get(
        strategy, ("temperature", "prior_std", "per_layer")
    )
    given = {name: value for name, value in OPTIONS.items() if name not in others}
    made = PrivateOptions(strategy, **given | {"epsilon": 64.0}).settings(begun=False)
    assert {name: getattr(made, name) for name in given} == {
        name: Fraction(value) if name in ("rate", "noise_multiplier") else value for name, value in given.items()
    }


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_of_nothing_is_refused_and_not_taken_for_the_largest(epsilon: float) -> None:
    for noise in (None, "5"):
        with pytest.raises(InvalidInput, match=r"^epsilon"):
            PrivateOptions("dp-sgd", epsilon, noise_multiplier=noise).settings(begun=False)


def test_settings_that_protect_nobody_or_make_no_sense_are_refused() -> None:
    nonsense: tuple[dict[str, object], ...] = (
        *({"epsilon": 1000.0}, {"epsilon": float("nan")}, {"delta": 0.0}, {"strategy": "dp-magic"}),
        *({"scans": count} for count in (0, 65, 1 << 40)),
        *({"learning_rate": 1.1}, {"clip": 1.1e6}, {"temperature": 1e300}),
        *({"prior_std": 1001.0}, {"initial_std": 1e300}),
    )
    for bad in nonsense:
        with pytest.raises(InvalidInput):
            PrivateSettings(**{"strategy": "dp-sgd", "epsilon": 8.0, "delta": 1e-5, **bad}).check_new()  # type: ignore[arg-type]
    assert {defaults(name, epsilon=8, delta=1e-5).strategy for name in ("dp-sgd", "dp-bbb")} == {
        "dp-sgd",
        "dp-bbb",
    }


def test_where_the_samples_disagree_the_prediction_moves_to_the_images_own_mean() -> None:
    sure = np.zeros((2, 2, 2, 2, 2), np.float32)
    sure[:, 0] = 1
    sure[:, :, 0, 0, 0] = [0, 1]
    np.testing.assert_allclose(averaged(sure), sure.mean(axis=0), atol=1e-6)
    split = sure.copy()
    split[0, :, 1, 1, 1], split[1, :, 1, 1, 1] = [1, 0], [0, 1]
    result = averaged(split)
    np.testing.assert_allclose(result.sum(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(result[:, 1, 1, 1], split.mean(axis=0).mean(axis=(1, 2, 3)), atol=1e-5)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--rate", {"rate": "1,5"}),
        ("--rate", {"rate": "1e-300"}),
        ("--rate", {"rate": "1_0"}),
        ("--rate", {"rate": "１/４"}),
        ("--noise-multiplier", {"noise_multiplier": "1/0"}),
        ("--relation", {"relation": "both"}),
        ("--sampling", {"sampling": "all"}),
    ],
)
def test_a_refused_option_of_a_private_training_is_named_alone_with_its_value(
    option: str, given: dict[str, str]
) -> None:
    with pytest.raises(InvalidInput) as refused:
        PrivateOptions("dp-sgd", epsilon=8.0, **given).settings(begun=False)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"{option}: got {next(iter(given.values()))!r}; allowed: ")


@pytest.mark.parametrize(
    ("named", "given"),
    [
        (("--epsilon", "--noise-multiplier"), {"noise_multiplier": "0.1"}),
        (("--learning-rate",), {"epsilon": 8.0, "learning_rate": math.nan}),
        (("--learning-rate",), {"epsilon": 8.0, "learning_rate": 2.0}),
        (("--steps",), {"epsilon": 8.0, "steps": 0}),
        (("--mu-growth",), {"epsilon": 8.0, "mu_growth": 0.5}),
    ],
)
def test_an_error_about_a_private_training_names_the_options_to_change(
    named: tuple[str, ...], given: dict[str, Any]
) -> None:
    def new() -> None:
        made = PrivateOptions("dp-mac", **given).settings(begun=False)
        assert made is not None
        made.check_new()

    with pytest.raises(InvalidInput) as refused:
        new()
    assert all(name in str(refused.value) for name in named)
    assert refused.value.remedy


def test_an_error_shows_a_fraction_as_people_write_it() -> None:
    assert str(InvalidInput("sampling rate q", value=Fraction(3, 2))) == "sampling rate q: got 3/2"
