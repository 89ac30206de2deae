"""Tests the utility benchmark: it has every arm, a second run trains nothing, and the table states all results."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from client.adapting import adapt
from client.adapting.methods import Method
from client.training.voter import LabelledScan
from common.config import DataConfig, TrainingConfig
from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from common.intervals import mean_interval
from common.models.fit import FitResult, fit, one_hot
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.study_mechanism import study_mechanism
from research import bench as shared
from research import utility
from research.ablation import VARIANTS, ablate, likeness, student
from research.asked import noised
from research.bench import Bench
from research.home import CHOSEN, HOME, patients_of
from research.roles import Cases
from research.scores import at_site, named
from research.setting import (
    ARMS,
    BOUNDS,
    CENTRAL,
    CENTRAL_PAPER,
    SHARED,
    SILOS,
    SILOS_MEAN,
    Setting,
    mean_noise,
    study_of,
)
from research.stored_results import array_hash
from research.table import ablation_summary, render, render_ablation, summary
from research.tests.patients import DATA, balls, deal
from research.utility import OFFSETS, BenchAnswers, run, run_part
from server.planning.recommend import OCTAVES, PAIRS, Recommendation, predicted_gain, recommend, recovered_share
from server.protocols import public_start as joint
from server.protocols.controls import CONTROLS
from server.protocols.decode import decode_answer
from server.protocols.query_protocol import WHOLE_VOXELS
from server.protocols.stored_labels import StoredLabels, as_stored
from server.protocols.student_fit import train_student
from tests.consilium import balls as made

SMALL = TrainingConfig(channels=(4, 8), steps=9, learning_rate=5e-3)
SETTING = Setting("joint", 2, 2, 8.0, 1e-3, Unit.PATIENT, 4, SMALL, SMALL)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    roles = deal(balls(42), hospitals=2)
    return Bench(SETTING, roles, DATA, seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_a_bench_has_every_arm_and_a_second_run_trains_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    first = run(bench, stages.append)
    arms = {*ARMS, *BOUNDS, "labels"} - {CENTRAL, CENTRAL_PAPER, SILOS, SILOS_MEAN}
    assert {name for name in first if "|" not in name and "@" not in name} == arms
    assert {name for name in run_part(bench, OFFSETS, stages.append) if "|" not in name and "@" not in name} == {SHARED}
    assert all(0 <= first[arm] <= 1 and first[arm] == first[named(arm, "dice", "core")] for arm in arms)
    alone = bench.at(replace(SETTING, voters=1)).teachers(bench.start())
    for site, teacher in zip(bench.roles.sites, alone, strict=True):
        assert first[at_site("teacher", site)] == bench.dice(teacher, bench.roles.held_out)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    for module, name in ((shared, "fit"), (shared, "refine"), (shared, "public_start"), (joint, "refine")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(utility, "fit", never)
    monkeypatch.setattr(utility, "train_student", never)
    assert json.dumps(run(bench, stages.append)) == json.dumps(first)


@pytest.mark.slow
def test_all_arms_of_a_paired_bench_have_one_network_of_its_pairs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network trained on the public pairs is trained once, then read from its file by every arm.

    ``Bench.refined`` works outside a study, so it trains and stores this network once more.
    """
    other = Bench(
        replace(SETTING, paired=3),
        replace(bench.roles, paired=bench.roles.maps[np.arange(3)]),
        DATA,
        seed=0,
        cache=tmp_path,
    )
    start, trained = other.start(), []

    def counted(model: torch.nn.Module, images: np.ndarray, *rest: Any, **more: Any) -> FitResult:
        steps: list[int] = []
        done = fit(model, images, *rest, **more | {"on_step": lambda step, _loss: steps.append(step)})
        trained.extend([len(images)] if steps else [])
        return done

    monkeypatch.setattr(joint, "fit", counted)
    asked = BenchAnswers(other, start, other.codes(other.teachers(start)))
    found = [asked.arm(name) for name in ("student", "zero_code", "public_only")]
    both = len(other.images) + 3
    assert trained == [3, both, both]
    assert found[2] == other.scored("public_only", other.alone(start))
    for _ in range(2):
        other.refined(start, start.codes)
    assert trained == [3, both, both, 3, both, both]


@pytest.mark.slow
def test_what_is_measured_is_what_a_study_makes_of_the_same_answers(bench: Bench) -> None:
    """The student of a study with one release for each volume learns from the float16 labels that the study stores."""
    other = bench.at(replace(SETTING, recipe="pca", voters=1))
    asked = BenchAnswers(other, None, other.codes(other.teachers(None)))
    dice = asked.arm("student")["student"]
    labels = []
    for number, answer in enumerate(asked.answers):
        assert answer.query.volumes == (asked.public.volumes[number],)
        decoded = decode_answer(other.codec, answer.noisy_sum, voters=2, mechanism=answer.query.mechanism)
        labels.append(as_stored(decoded))
        found = StoredLabels(asked.folder / "labels", answer.query.volumes)
        np.testing.assert_array_equal(found[answer.query.volumes[0]], labels[-1])
    model, _ = train_student(other.images, np.stack(labels), SMALL, seed=other.seed)
    assert other.dice(model, other.roles.held_out) == dice
    true = np.stack([one_hot(label, other.classes) for label in other.roles.public.labels[: len(labels)]])
    model, _ = train_student(other.images, true, SMALL, seed=other.seed)
    assert other.dice(model, other.roles.held_out) == asked.arm("true_labels")["true_labels"]


@pytest.mark.slow
def test_the_command_scores_on_a_second_dataset_and_finds_its_cells_again_with_other_processes(tmp_path: Path) -> None:
    """After two processes have trained everything, one process trains nothing and prints the same."""
    write_phantoms(tmp_path / "data", cases=44, seed=1)
    write_phantoms(tmp_path / "test", cases=2, seed=2)
    program = (sys.executable, "-P", "-c", "from consilium.cli.main import main; main()")
    words = shlex.split(
        "bench utility --data data --test test --recipe pca --queries 2 --hospitals 2 --voters 1"
        " --teacher-steps 1 --student-steps 8 --seeds 2 --grid 16,16,16 --spacing 3,3,3 --json --jobs"
    )
    texts, kept = [], []
    for jobs in "21":
        typed = [*program, *words, jobs, "--out", str(tmp_path / "found.json")]
        done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=True)
        texts.append(done.stdout)
        kept.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "bench-cache").iterdir()})
    assert texts[0] == texts[1]
    assert kept[0] == kept[1]
    assert json.loads(texts[0])["dice"].keys() >= {"student", "labels", *CONTROLS, "non_private", "ensemble"}
    found = json.loads((tmp_path / "found.json").read_text())
    made_by = {name: found.pop(name) for name in ("data", "command", "commit")}
    assert found == json.loads(texts[1])
    assert made_by["data"] == "data"
    assert made_by["command"] == shlex.join(["consilium", *words, "1", "--out", "found.json"])


@pytest.mark.slow
def test_one_query_a_volume_has_its_own_controls_and_no_offsets_to_deal(bench: Bench) -> None:
    row = run(bench.at(replace(SETTING, recipe="pca", voters=1)), lambda _stage: None)
    assert {"student", *CONTROLS} <= row.keys()
    assert SHARED not in row


@pytest.mark.slow
def test_looks_are_asked_for_with_their_own_controls_and_a_student_without_noise(bench: Bench) -> None:
    row = run(bench.at(replace(SETTING, recipe="appearance", voters=1)), lambda _stage: None)
    assert {"student", *CONTROLS, "non_private", "labels", "ensemble"} <= row.keys()
    assert SHARED not in row


@pytest.mark.slow
def test_each_hospital_adapts_the_student_in_every_way_and_as_the_product_chooses(bench: Bench) -> None:
    """A hospital of six patients chooses by cross-validation; for one of three the way is fixed."""
    roles = deal(balls(46), hospitals=2)
    enough = Bench(
        SETTING,
        replace(roles, private=(roles.private[0], roles.private[1][np.arange(3)])),
        DATA,
        seed=0,
        cache=bench.kept.folder,
    )
    row = run(enough, lambda _stage: None)
    chosen = run_part(enough, CHOSEN, lambda _stage: None)
    assert chosen.items() > run_part(enough, HOME, lambda _stage: None).items()
    row |= chosen
    document = summary(SETTING, [row, row])
    large, small = document["home"].values()
    assert (large["patients"], small["patients"]) == (6, 3)
    for site in (large, small):
        assert site["ways"].keys() == {*Method, "chosen"}
        assert site["ways"]["student"]["each"] == [row["student"]] * 2
        assert site["ways"]["own"]["over_own"] == {"mean": 0.0, "half_width": 0.0}
    assert small["ways"]["chosen"]["each"] == small["ways"]["merged"]["each"]
    assert large["ways"]["chosen"]["mean"] in [large["ways"][way]["mean"] for way in Method]
    text = io.StringIO()
    render(document, Console(file=text, width=200))
    assert "at home: Dice" in text.getvalue()


def test_the_scans_of_a_patient_are_in_one_fold_at_home() -> None:
    """Scans of one patient in two folds would score a network on a patient that trained it."""
    images, labels = made.balls(14)
    cases = Cases(images, labels, tuple(f"p{row // 2}" for row in range(14)))
    trained: list[list[str]] = []

    def make(scans: list[LabelledScan]) -> SimpleNamespace:
        trained.append([scan.hashes[0] for scan in scans])
        return SimpleNamespace(of=lambda way: None)

    patients = patients_of(cases[np.arange(14)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapt, "scored", lambda patient, models, terms, known: dict.fromkeys(models, (0.5,)))
        folds = adapt.cross_validated(patients, make, SimpleNamespace(public={}))
    assert [len(patient.scans) for patient in patients] == [2] * 7
    assert [patient.name for patient in patients] == [array_hash(images[row], labels[row]) for row in range(0, 14, 2)]
    for fold, seen in enumerate(trained):
        own = {
            scan.hashes[0]
            for patient, of in zip(patients, folds.of, strict=True)
            for scan in patient.scans
            if of == fold
        }
        assert own
        assert own.isdisjoint(seen)
    alone = patients_of(Cases(images, labels))
    assert [patient.name for patient in alone] == [array_hash(*pair) for pair in zip(images, labels, strict=True)]


@pytest.mark.slow
def test_dp_sgd_on_pooled_patients_is_run_only_when_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def trained(part, recipe, settings, journal, **_):  # type: ignore[no-untyped-def]
        seen.append((len(part.images), settings.neighbours, settings.epsilon, settings.per_layer and settings.clip))
        return type("Trained", (), {"model": bench.empty(SMALL)})

    monkeypatch.setattr("research.bench.train_privately", trained)
    row = run(bench.at(replace(SETTING, voters=1, central=True)), lambda _stage: None)
    assert {CENTRAL, CENTRAL_PAPER, SILOS, SILOS_MEAN} <= row.keys()
    assert seen == [(8, "replace-one", 8.0, False), (8, "replace-one", 8.0, 4.0)]


@pytest.mark.slow
def test_an_ablation_has_every_variant_and_the_recipe_itself(bench: Bench) -> None:
    row = ablate(bench, lambda _stage: None)
    assert row.keys() == VARIANTS.keys()
    assert student(bench, "recipe") == row["recipe"]
    document = ablation_summary(SETTING, [row, row])
    assert document["variants"]["recipe"]["recipe_over_it"] == {"mean": 0.0, "half_width": 0.0}
    text = io.StringIO()
    render_ablation(document, Console(file=text, width=160))
    assert all(variant.what in text.getvalue() for variant in VARIANTS.values())
    with pytest.raises(InvalidInput, match="joint"):
        student(bench.at(replace(SETTING, recipe="pca")), "recipe")


def test_likeness_leads_with_the_images_first_direction() -> None:
    images = balls(6).images.astype(np.float64)
    flat = images.reshape(6, -1) - images.reshape(6, -1).mean(axis=0)
    first = np.linalg.svd(flat.astype(np.float64))[0][:, 0]
    found = np.linalg.eigh(likeness(images))[1][:, -1]
    assert abs(first @ found) == pytest.approx(1, abs=1e-9)
    assert np.trace(likeness(images)) == pytest.approx(1)


def row(student: float, control: float) -> dict[str, float]:
    return (
        dict.fromkeys([*ARMS, SHARED, *BOUNDS, "labels"], 0.5) | dict.fromkeys(CONTROLS, control) | {"student": student}
    )


def test_gains_are_paired_and_the_best_control_is_named() -> None:
    rows = [row(0.80, 0.70), row(0.84, 0.73), row(0.79, 0.71)]
    for each in rows:
        each["zero_code"] += 0.02
    document = summary(SETTING, rows)
    gains = [0.08, 0.09, 0.06]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(gains), scale=stats.sem(gains))
    best = document["gain"]["best_control"]
    assert best["name"] == "zero_code"
    assert (best["mean"] - best["half_width"], best["mean"] + best["half_width"]) == pytest.approx((low, high))
    assert mean_interval([0.1]) == (0.1, None)


@pytest.mark.parametrize(("student", "nothing"), [(0.701, True), (0.80, False)])
def test_the_table_says_where_nothing_was_gained(student: float, nothing: bool) -> None:
    text = io.StringIO()
    document = summary(SETTING, [row(student, 0.70), row(student + 0.01, 0.715)])
    render(document, Console(file=text, width=160))
    assert ("Nothing gained" in text.getvalue()) == nothing
    assert f"predicts: {document['predicted_gain']:+.3f}" in text.getvalue()


def test_no_gain_is_predicted_beside_pairs_where_the_planner_advises_against_asking() -> None:
    rows = [row(0.8, 0.7)]
    assert summary(replace(SETTING, paired=PAIRS - 1), rows)["predicted_gain"] is not None
    assert summary(replace(SETTING, paired=PAIRS), rows)["predicted_gain"] is None


def test_more_noise_recovers_less_and_predicts_less() -> None:
    shares = [recovered_share(noise) for noise in (1e-6, 0.03, 0.12, 0.5, 2.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(sum(OCTAVES), abs=1e-3)
    assert shares[-1] < 1e-3
    assert predicted_gain(0.12) < predicted_gain(0.03)
    for noise in (0.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            recovered_share(noise)


def test_the_noise_of_a_setting_is_that_of_its_release() -> None:
    """The exact accountant gives μ = 1.666 for ε = 8, δ = 1e-5, one release, and one replaced patient.

    For 40 voters, μ = 2 / (40·σ/C), where σ is the noise on each coordinate of the mean code and C the clipping norm.
    """
    assert mean_noise(replace(SETTING, hospitals=8, voters=5, delta=1e-5)) == pytest.approx(2 / (40 * 1.666), rel=1e-3)


def advised(epsilon: float, *, unit: Unit = Unit.PATIENT, patients: int | None = 15) -> Recommendation:
    protection = Protection(unit, Relation.REPLACE_ONE)
    return recommend(
        budget=Budget(epsilon, 1e-5),
        accountant=AccountantName.EXACT,
        protection=protection,
        hospitals=8,
        patients=patients,
    )


def test_voters_are_bought_with_patients_only_where_the_noise_asks_for_it() -> None:
    assert advised(8.0).voters == 5  # three patients a teacher
    assert advised(8.0, patients=None).voters <= 5
    assert advised(0.5).voters > 5
    assert advised(0.01).voters == 15  # one patient a teacher, and still not worth it
    assert not advised(0.01).worth_asking
    assert advised(8.0, patients=1).voters == 1
    with pytest.raises(InvalidInput, match="patients"):
        advised(8.0, patients=0)


def test_a_hospitals_voters_share_its_sensitivity_so_one_is_advised() -> None:
    assert advised(8.0, unit=Unit.HOSPITAL).voters == 1
    assert "Do not spend" in advised(1.0, unit=Unit.HOSPITAL).summary
    assert advised(8.0).worth_asking
    assert "5 teachers a site" in advised(8.0).summary


@pytest.mark.parametrize("colluders", [None, 2])
def test_a_benchmark_of_a_sealed_sum_uses_the_noise_of_all_shares_together(colluders: int | None) -> None:
    sealed = replace(SETTING, hospitals=4, colluders=2)
    data = DataConfig(labels=("background", "body"), spacing_mm=(1.0, 1.0, 1.0), grid=(8, 8, 8))
    mechanism = study_mechanism(study_of(replace(sealed, colluders=colluders), data), dimension=40_000)
    votes = [np.zeros(40_000, dtype=np.int64)] * 8
    assert noised(votes, mechanism).std() == pytest.approx(mechanism.noise_in_sum(4), rel=0.02)
    assert mean_noise(sealed) == pytest.approx(2**0.5 * mean_noise(replace(sealed, colluders=None)))
    assert study_of(replace(sealed, colluders=None), data).privacy.aggregation == "open"


def test_a_joint_setting_on_a_grid_too_fine_for_it_is_refused_as_a_study_is() -> None:
    huge = DataConfig(labels=("background", "body"), spacing_mm=(1.0, 1.0, 1.0), grid=(256, 256, 256))
    with pytest.raises(InvalidInput, match=f"got {256**3}; allowed: at most {WHOLE_VOXELS}"):
        study_of(replace(SETTING, recipe="joint"), huge)
