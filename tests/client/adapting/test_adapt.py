"""Tests the network that a hospital makes from the student: the chosen method, its scores, that it stays at the
hospital.
"""

from __future__ import annotations

import copy
import html
import json
import math
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.adapting import networks
from client.adapting.adapt import AdaptOptions, adapt, scored
from client.adapting.adapted import Adapted
from client.adapting.material import material_of, own_patients, public_material
from client.adapting.methods import LEAST_FOR_FOLDS, TEACHERS, Method, by_choice, choose, filled, fold_of, usual
from client.adapting.report import _shown_patients
from client.policy import load_site
from client.records.adapted_folder import seen_by
from client.records.lock import writing
from client.records.patient_deal import load_or_deal, load_slots
from client.site.books import open_books
from client.teachers.comparison import Reference
from client.teachers.evaluation_input import PARTS, parts_of
from client.teachers.teacher import Teachers
from client.training.voter import LabelledScan
from common.config import Study, TrainingConfig, load_study
from common.data.msd import read_dataset
from common.data.volume import load_example, load_volume, to_native, volume_from_bytes
from common.data.volume_cache import VolumeCache
from common.errors import InvalidInput, Refused
from common.metrics import dice_per_class, mean_present
from common.models.averaged import Averaged
from common.models.bundle import SEEN_WEIGHTS, open_bundle
from common.models.fit import Pull, fit, predict
from common.models.unet import build_unet, network_for
from common.objects import ObjectStore
from consilium.cli.site import site_app
from tests.client.adapting.written import ask, privacy_of, student, write_site
from tests.commands import refusal_of, typed
from tests.trained_sites import train_site
from tests.undrawn import leave_undrawn

pytestmark = pytest.mark.slow

RUN = CliRunner()


@contextmanager
def silent(total: int) -> Iterator[object]:
    yield lambda steps, loss: None


def adapted(site: Path, **options: object) -> Adapted:
    return adapt(AdaptOptions(site, **{"replace": True} | options), progress=silent)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = write_site(tmp_path_factory.mktemp("adapt") / "site", patients=6)
    ask(site, volumes=2)
    return site


@pytest.fixture(scope="module")
def result(site: Path) -> Adapted:
    """Return an adaptation whose pictures are drawn."""
    return adapted(site)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_undrawn(monkeypatch)


@pytest.fixture(scope="module")
def few_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(tmp_path_factory.mktemp("few"), patients=2)


@pytest.fixture
def few(few_written: Path, tmp_path: Path) -> Path:
    shutil.copytree(few_written, tmp_path / "few")
    return tmp_path / "few"


# --- the choice


def test_the_default_is_taken_unless_another_way_is_proven_better() -> None:
    close = {Method.AVERAGED: [0.6, 0.6, 0.6], Method.OWN: [0.9, 0.4, 0.7]}  # ahead by .067 ± .625
    assert choose(close, default=Method.AVERAGED) is Method.AVERAGED
    ahead = {Method.AVERAGED: [0.6, 0.6, 0.6], Method.OWN: [0.9, 0.8, 0.85], Method.STUDENT: [0.8, 0.9, 0.85]}
    assert choose(ahead, default=Method.AVERAGED) is Method.STUDENT  # the simplest of equal ones
    missing = {Method.AVERAGED: [math.nan, 0.6, 0.6], Method.OWN: [math.nan, 0.8, 0.81]}
    assert choose(missing, default=Method.AVERAGED) is Method.OWN
    assert (
        choose({Method.AVERAGED: [0.6], Method.OWN: [0.9]}, default=Method.AVERAGED) is Method.AVERAGED
    )  # one patient
    nothing = {Method.STUDENT: [math.nan], Method.OWN: [math.nan]}
    with pytest.raises(InvalidInput, match="cross-validation"):
        choose(nothing, default=Method.OWN)


def test_without_public_volumes_few_patients_go_half_way_and_more_average() -> None:
    assert {count: usual(count, public=False) for count in (1, 6, 7, 40)} == {
        1: Method.HALF_WAY, 6: Method.HALF_WAY, 7: Method.AVERAGED, 40: Method.AVERAGED
    }  # fmt: skip
    assert {count: usual(count, public=True) for count in (6, 7)} == {6: Method.MERGED, 7: Method.AVERAGED_REHEARSED}


def test_the_choice_is_scored_without_the_patients_that_made_it() -> None:
    """Each patient is scored by a choice that has not seen the patient's fold."""
    half = [0.5] * 6
    figures = {Method.HALF_WAY: half, Method.OWN: [0.9, 0.91, 0.92, 0.1, 0.1, 0.1]}
    assert by_choice(figures, [0, 0, 0, 1, 1, 1], default=Method.HALF_WAY) == [0.5, 0.5, 0.5, 0.1, 0.1, 0.1]


def test_folds_are_of_one_size_and_do_not_depend_on_the_order() -> None:
    names = [f"p{i}" for i in range(13)]
    of = dict(zip(names, fold_of(names, folds=5), strict=True))
    assert sorted(list(of.values()).count(fold) for fold in range(5)) == [2, 2, 3, 3, 3]
    assert dict(zip(names[::-1], fold_of(names[::-1], folds=5), strict=True)) == of
    with pytest.raises(InvalidInput):
        fold_of(names[:1], folds=5)


def test_a_structure_falsely_found_by_one_way_lowers_only_that_ways_dice() -> None:
    rows = filled({Method.STUDENT: (math.nan, 0.5, math.nan), Method.OWN: (0.0, math.nan, math.nan)})
    assert rows[Method.STUDENT][:2] == (1.0, 0.5)
    assert rows[Method.OWN][:2] == (0.0, 1.0)
    assert math.isnan(rows[Method.OWN][2])


def test_with_enough_patients_every_way_is_scored_on_patients_it_was_not_trained_on(
    site: Path, result: Adapted
) -> None:
    """The student is not trained again: its row must hold its Dice, computed here patient by patient."""
    assert result.folds == 5
    assert {one.way for one in result.figures} == set(Method)
    best = max(result.figures, key=lambda one: one.interval[0])
    assert result.way is best.way
    study = load_study(site / "study.toml")
    dice = []
    for i in range(6):
        image, truth = (
            np.pad(nib.load(site / "raw" / part / f"p{i}s0.nii.gz").get_fdata(), ((1, 1), (0, 0), (1, 0)))
            for part in ("", "labels")
        )
        inside = nib.load(site / "raw" / f"p{i}s0.nii.gz").get_fdata()
        image = np.pad((inside - inside.mean()) / inside.std(), ((1, 1), (0, 0), (1, 0)))
        found = predict(student(study), image[None]).argmax(axis=0)
        each = [2 * ((found == c) & (truth == c)).sum() / ((found == c).sum() + (truth == c).sum()) for c in (1, 2)]
        dice.append(np.mean(each))
    row = next(one for one in result.figures if one.way is Method.STUDENT)
    assert row.interval[0] == pytest.approx(np.mean(dice), abs=0.02)


def test_no_network_is_scored_on_a_patient_that_trained_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each patient has two scans. A network scored on one of them may have been trained on neither."""
    from client.adapting import adapt as module

    site = write_site(tmp_path / "site", patients=5, scans=2)
    trained: list[set[tuple[str, ...]]] = []
    real = networks.Networks

    def watched(terms, folder, scans, *, on_step):
        trained.append({scan.hashes for scan in scans})
        return real(terms, folder, scans, on_step=on_step)

    seen = []
    scored = module.scored

    def scoring(patient, models, terms, **known):
        seen.append((trained[-1], {scan.hashes for scan in patient.scans}))
        return scored(patient, models, terms, **known)

    monkeypatch.setattr(module, "Networks", watched)
    monkeypatch.setattr(module, "scored", scoring)
    found = adapted(site, steps=1)
    assert len(seen) == 5
    assert all(not training & own and len(own) == 2 and len(training) == 8 for training, own in seen)
    assert found.cases == 10


@pytest.fixture(scope="module")
def with_teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a site with two own teachers, each trained on half of the patients."""
    site = write_site(tmp_path_factory.mktemp("teachers") / "site", patients=5)
    study, dataset = load_study(site / "study.toml"), read_dataset(site / "set")
    recipe = TrainingConfig(channels=(4, 8), steps=2)
    train_site(dataset, teachers=site / "teachers", data=study.data, recipe=recipe, voters=2)
    return site


def test_own_teachers_stand_in_the_table_each_without_the_patients_that_trained_it(with_teachers: Path) -> None:
    """The oracle asks, for each patient, the teachers that did not train on this patient."""
    site, found = with_teachers, adapted(with_teachers, steps=1)
    study, dataset = load_study(site / "study.toml"), read_dataset(site / "set")
    slots, teachers = load_slots(site / "teachers" / "slots.json"), Teachers.load(site / "teachers", data=study.data)
    dice = []
    for case in dataset.labelled:
        example = load_example(case, study.data)
        name, part = dataset.patient_of(case.id), parts_of(site, dataset)[case.id]
        votes = [
            one
            for voter, one in enumerate(teachers.predict(example.volume.image))
            if name not in slots.part(voter) or part == (PARTS[1], voter)
        ]
        drawn = np.mean(votes, axis=0).argmax(axis=0)
        dice.append(mean_present(dice_per_class(drawn.astype(np.uint8), example.label, study.data.members)))
    (row,) = [one for one in found.figures if one.way == TEACHERS]
    assert row.patients == 5
    assert row.interval[0] == pytest.approx(np.mean(dice), abs=1e-6)
    assert TEACHERS in found.ahead
    assert found.way in tuple(Method)
    facts = json.loads((found.report / "adapted.json").read_text())
    assert facts["ahead"][TEACHERS]["mean"] == pytest.approx(found.ahead[TEACHERS][0])
    for text in ((found.report / "adapted.html").read_text(), (found.bundle / "docs" / "README.md").read_text()):
        assert row.what in html.unescape(text)


def test_own_teachers_that_all_saw_the_patients_are_left_out_with_the_reason(
    with_teachers: Path, tmp_path: Path
) -> None:
    shutil.copytree(with_teachers, tmp_path / "site")
    shutil.rmtree(tmp_path / "site" / "teachers" / "voter-001")
    slots = tmp_path / "site" / "teachers" / "slots.json"
    held = json.loads(slots.read_text())
    slots.write_text(json.dumps(held | {"voters": 1}))
    found = adapted(tmp_path / "site", steps=1)
    known = [one.patients for one in found.figures if one.way == TEACHERS]
    assert known == [1]  # the one that the voter held out
    shutil.rmtree(tmp_path / "site" / "teachers")
    found = adapted(tmp_path / "site", steps=1)
    assert TEACHERS not in found.ahead
    assert found.no_teachers
    assert found.no_teachers in html.unescape((found.report / "adapted.html").read_text())


def test_own_teachers_change_no_score_and_no_choice(with_teachers: Path, tmp_path: Path) -> None:
    shutil.copytree(with_teachers, tmp_path / "site")
    beside = adapted(tmp_path / "site", steps=1)
    shutil.rmtree(tmp_path / "site" / "teachers")
    alone = adapted(tmp_path / "site", steps=1)
    assert [one for one in beside.figures if one.way != TEACHERS] == list(alone.figures)
    assert (beside.way, beside.by_choice) == (alone.way, alone.by_choice)


@pytest.mark.parametrize(
    ("teachers", "student", "expected"),
    [((0.0,), (math.nan,), [0.0, math.nan]), ((math.nan,), (0.0,), [1.0, 0.0]), ((), (0.0,), [math.nan, 0.0])],
)
def test_a_structure_that_only_teachers_find_counts_against_them_and_for_nobody(
    teachers: tuple[float, ...], student: tuple[float, ...], expected: list[float]
) -> None:
    """Where the truth lacks a structure, teachers who find it get a Dice of 0, and all others still get none."""
    nothing = np.zeros((8, 8, 8), dtype=np.uint8)
    scan = SimpleNamespace(image=nothing[None].astype(np.float32), label=nothing)
    terms = SimpleNamespace(data=SimpleNamespace(members=((1,),)))
    patient = SimpleNamespace(scans=(scan,))
    rows = scored(patient, {}, terms, known={TEACHERS: [teachers], Method.STUDENT: [student]})
    assert [*rows[TEACHERS], *rows[Method.STUDENT]] == pytest.approx(expected, nan_ok=True)


def test_the_student_predicts_each_case_once_for_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from client.adapting import adapt as module

    site = write_site(tmp_path / "site", patients=5)
    asked, weights = (
        [],
        network_for(load_study(site / "study.toml").student, load_study(site / "study.toml").data, seed=5),
    )
    first = next(iter(weights.state_dict().values()))

    def counted(model: torch.nn.Module, image: np.ndarray, **how: object) -> np.ndarray:
        if not isinstance(model, Averaged) and torch.equal(next(iter(model.state_dict().values())).cpu(), first):
            asked.append(image.tobytes())
        return predict(model, image, **how)

    monkeypatch.setattr(module, "predict", counted)
    assert adapted(site, steps=1, way=Method.STUDENT).folds == 5
    assert len(asked) == len(set(asked)) == 5


def test_every_step_of_training_is_shown_once_and_no_more_than_were_announced(tmp_path: Path) -> None:
    """In each of five folds, four trainings give eight methods. A network that two methods share is trained once."""
    announced, shown = [], []

    @contextmanager
    def counting(total: int) -> Iterator[object]:
        announced.append(total)
        yield lambda steps, loss: shown.append(steps)

    site = write_site(tmp_path / "site", patients=5)
    ask(site, volumes=2)
    found = adapt(AdaptOptions(site, way=Method.AVERAGED, steps=2), progress=counting)
    assert found.folds == 5
    assert sum(shown) == announced[0] == 2 * (5 * 4 + 2)


def test_with_few_patients_the_default_is_taken_and_it_is_said_that_nothing_was_checked(few: Path) -> None:
    found = adapted(few)
    assert (found.way, found.folds, found.figures) == (Method.HALF_WAY, 0, ())
    assert any("NOT CHECKED: 2 patients" in warning for warning in found.warnings)
    assert "NOT CHECKED" in (found.report / "adapted.html").read_text()
    assert LEAST_FOR_FOLDS > 2


def test_less_than_the_student_or_the_own_network_is_never_handed_over_unsaid(site: Path, result: Adapted) -> None:
    """The warning appears exactly for networks with a lower mean Dice than the student or the own network."""
    means = {one.way: one.interval[0] for one in result.figures}
    best, worst = (choose(means, key=means.__getitem__) for choose in (max, min))
    for way in dict.fromkeys((best, worst, Method.STUDENT, Method.OWN)):
        found = adapted(site, way=way)
        behind = {other for other in (Method.STUDENT, Method.OWN) if means[other] - means[way] > 0.0005}
        assert sum("LESS" in warning for warning in found.warnings) == len(behind), way
        text = (found.bundle / "docs" / "README.md").read_text()
        assert text.count("LESS:") == len(behind)


def test_a_training_shorter_than_the_studys_recipe_is_reported_everywhere(few: Path) -> None:
    """The tests' study trains for 4 steps; `--steps 2` trains for 2."""
    words = ["adapt", "--site-dir", str(few), "--replace", "--steps", "2"]
    assert "2 of 4 steps" in RUN.invoke(site_app, words, catch_exceptions=False).stdout
    short = adapted(few, steps=2)
    facts = json.loads((short.report / "adapted.json").read_text())
    for one in (facts, privacy_of(short.bundle)):
        assert (one["steps"], one["recipe_steps"]) == (2, 4)
    for page in (short.report / "adapted.html", short.bundle / "docs" / "README.md"):
        assert "2 of 4 steps" in page.read_text()
    full = RUN.invoke(site_app, words[:-2], catch_exceptions=False).stdout
    assert "4 steps" in full
    assert "SHORT" not in full


# --- cases that do not fit


class ByBrightness:
    """Stands in for own teachers; it recognises the structures of the tests' cases by brightness."""

    models = (object(), object())

    @staticmethod
    def load(directory: Path, *, data: object) -> ByBrightness:
        return ByBrightness()

    def predict(self, image: np.ndarray) -> list[np.ndarray]:
        low, high = np.median(image), image.max()
        found = np.digitize(image[0], [low + 0.2 * (high - low), low + 0.6 * (high - low)])
        return [np.eye(3, dtype=np.float32)[found].transpose(3, 0, 1, 2)] * 2


def test_cases_that_the_own_teachers_do_not_fit_train_no_network_unless_a_person_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.teachers.comparison.Teachers", ByBrightness)
    home, other = (write_site(tmp_path / name, patients=3) for name in ("home", "other"))
    good = adapted(home, data=other / "set")
    assert not good.unfit
    for path in (other / "set" / "labelsTr").iterdir():
        label = nib.load(path)
        exchanged = np.array([0, 2, 1], dtype=np.uint8)[np.asarray(label.dataobj).astype(int)]
        path.unlink()  # it may be a link to the file of the other data set
        nib.save(nib.Nifti1Image(exchanged, label.affine), path)
    kept = {path: path.read_bytes() for path in good.bundle.rglob("*") if path.is_file()}
    words = ["adapt", "--site-dir", str(home), "--data", str(other / "set"), "--replace"]
    refused = RUN.invoke(site_app, words).exception
    assert isinstance(refused, InvalidInput)
    assert "--even-if-unfit" in str(refused)
    assert {path: path.read_bytes() for path in kept} == kept
    done = typed(site_app, *words, "--even-if-unfit")
    assert "--even-if-unfit" in done.stdout
    facts = json.loads((good.report / "adapted.json").read_text())
    assert facts["even_if_unfit"] is privacy_of(good.bundle)["even_if_unfit"] is True
    assert "do not fit" in (good.report / "adapted.html").read_text()


def test_cases_in_which_student_and_public_start_find_nothing_train_no_network(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = np.zeros((3, *load_study(few / "study.toml").data.grid), dtype=np.float32)
    nothing[0] = 1
    start = Reference("the public start", lambda image: nothing, public=True)
    monkeypatch.setattr("client.adapting.adapt.references", lambda *_, **__: ([start], []))
    monkeypatch.setattr("client.adapting.adapt.predict", lambda *_, **__: nothing)
    with pytest.raises(InvalidInput, match="fit no model"):
        adapted(few)
    assert adapted(few, even_if_unfit=True).unfit


# --- the networks


def test_half_way_merged_and_averaged_have_the_weights_that_their_names_state(few: Path) -> None:
    study = load_study(few / "study.toml")
    begun = student(study).state_dict()
    ask(few, volumes=3)
    networks_of = {way: open_bundle(adapted(few, way=way).bundle).network for way in Method}
    trained, half = networks_of[Method.TRAINED_ON].state_dict(), networks_of[Method.HALF_WAY].state_dict()
    for name, weights in half.items():
        torch.testing.assert_close(weights, (begun[name] + trained[name]) / 2)
    merged = networks_of[Method.MERGED].state_dict()
    rehearsed = _half_way_further(few, networks_of[Method.HALF_WAY], study)
    for name, weights in rehearsed.state_dict().items():
        torch.testing.assert_close(merged[name], (half[name] + weights) / 2)
    kept = networks_of[Method.STUDENT].state_dict()
    assert all(torch.equal(kept[name], begun[name]) for name in begun)
    image = np.random.default_rng(0).normal(size=(1, 16, 16, 16)).astype(np.float32)
    both = [predict(networks_of[way], image) for way in (Method.OWN, Method.TRAINED_ON)]
    np.testing.assert_allclose(predict(networks_of[Method.AVERAGED], image), np.mean(both, axis=0), atol=1e-5)
    both = [predict(network, image) for network in (networks_of[Method.OWN], rehearsed)]
    np.testing.assert_allclose(predict(networks_of[Method.AVERAGED_REHEARSED], image), np.mean(both, axis=0), atol=1e-5)


def _half_way_further(site: Path, half_way: torch.nn.Module, study: Study) -> torch.nn.Module:
    """Train the half-way network on the site's scans and on its public volumes with the half-way network's labels."""
    config, recipe = load_site(site), study.student
    found = own_patients(config, study, data=None)
    with VolumeCache(site / "other-cache") as cache:
        patients = material_of(found, study, folder=site, cache=cache).patients
        own = [scan for patient in patients for scan in patient.scans]
        volumes = public_material(config, study, cache=cache)
        labels = [predict(half_way, each).argmax(axis=0) for each in volumes.values()]
        public = [LabelledScan(*pair, ("public",)) for pair in zip(volumes.values(), labels, strict=True)]
        scans = networks.beside_public(own, public)
        images, maps = (np.stack([getattr(scan, part) for scan in scans]) for part in ("image", "label"))
        model = copy.deepcopy(half_way)
        fit(model, images, maps.astype(np.uint8), recipe, seed=1, classes=len(study.data.labels))
    return model


def test_a_rehearsal_sees_as_many_public_volumes_as_patients_scans() -> None:
    def scan(name: str) -> LabelledScan:
        return LabelledScan(np.zeros((1, 2, 2, 2)), np.zeros((2, 2, 2)), (name,))

    for patients, public, times in ((3, 30, 10), (4, 30, 8), (30, 4, 1), (1, 1, 1)):
        own = [scan(f"p{number}") for number in range(patients)]
        mixed = [each.hashes[0] for each in networks.beside_public(own, [scan("public")] * public)]
        assert (mixed.count("p0"), mixed.count("public")) == (times, public)


def test_the_studys_public_volumes_are_read_from_the_cache_alone(few: Path) -> None:
    study, config = load_study(few / "study.toml"), load_site(few)
    kept, lost, *_ = ask(few, volumes=2)
    ask(few, volumes=3, study=replace(study, name="another"))
    (few / "cache" / lost).unlink()  # as after a full cache; nothing is fetched
    with VolumeCache(few / "kept") as cache:
        found = public_material(config, study, cache=cache)
        image = volume_from_bytes(ObjectStore(few / "cache").get(kept), study.data.student).image
        with VolumeCache(few / "small", budget_bytes=0) as small:
            stored = public_material(config, study, cache=small)
            [labelled] = networks.labelled(stored, network := student(study), study.student)
            assert isinstance(stored[kept], Path)
            assert np.array_equal(labelled.label, predict(network, image).argmax(axis=0))
    assert list(found) == [kept]
    assert np.array_equal(found[kept], image)


def test_a_way_that_needs_public_volumes_is_refused_without_them(few: Path) -> None:
    for way in (Method.MERGED, Method.AVERAGED_REHEARSED):
        with pytest.raises(InvalidInput, match="public volumes"):
            adapted(few, way=way)


def test_many_patients_average_with_the_rehearsed_network_where_there_are_public_volumes(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.adapting.methods.MANY_PATIENTS", 2)
    ask(few, volumes=3)
    found = adapted(few)
    assert (found.way, found.public) == (Method.AVERAGED_REHEARSED, 3)


def test_a_pull_holds_the_weights_near_and_a_strong_one_at_the_student() -> None:
    """Without MR-MTL's λ the training is the plain one. A larger λ leaves the weights closer to the student."""
    draws = np.random.default_rng(0)
    images = draws.normal(size=(2, 1, 8, 8, 8)).astype(np.float32)
    labels = (images[:, 0] > 0).astype(np.uint8)
    recipe = TrainingConfig(channels=(2, 4), steps=12, batch_size=1)
    begun = build_unet((2, 4), in_channels=1, out_channels=2, seed=1).state_dict()
    far = []
    for strength in (None, 0.0, 10.0, 1000.0):
        model = build_unet((2, 4), in_channels=1, out_channels=2, seed=1)
        pull = None if strength is None else Pull(begun, strength)
        fit(model, images, labels, recipe, seed=1, classes=2, pull=pull)
        far.append(sum(float(((w - begun[n]) ** 2).sum()) for n, w in model.state_dict().items()))
    assert far[0] == far[1] > far[2] > far[3]
    for wrong in (math.nan, -1.0, math.inf):
        with pytest.raises(InvalidInput, match="pull"):
            Pull(begun, wrong)


def test_an_interrupted_adaptation_goes_on_and_ends_the_same(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_site(few.parent / "whole", patients=2)
    expected = (adapted(whole, way=Method.AVERAGED).bundle / SEEN_WEIGHTS).read_bytes()
    real, calls = networks.fit, []

    def failing(*args, **given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **given)

    monkeypatch.setattr(networks, "fit", failing)
    with pytest.raises(KeyboardInterrupt):
        adapted(few, way=Method.AVERAGED)
    found = adapted(few, way=Method.AVERAGED)
    assert len(calls) == 3  # the first training was not repeated
    assert (found.bundle / SEEN_WEIGHTS).read_bytes() == expected
    adapted(few, way=Method.AVERAGED, steps=2)
    assert len(calls) == 5  # another recipe is another training


# --- it stays at home


def test_the_bundle_says_in_name_and_statement_that_it_has_seen_patients(result: Adapted) -> None:
    assert result.bundle.name == "has-seen-patients-must-not-leave-north"
    assert not (result.bundle / "models" / "model.pt").exists()
    assert (result.bundle / "models" / "has-seen-patients-must-not-leave.pt").is_file()
    facts = privacy_of(result.bundle)
    assert facts["has_seen_patients"] is facts["must_not_leave"] is True
    metadata = json.loads((result.bundle / "configs" / "metadata.json").read_text())
    for text in (
        facts["statement"],
        metadata["description"],
        *((result.bundle / name).read_text() for name in ("docs/README.md", "LICENSE")),
    ):
        assert "must not leave" in text
    assert "guaranteed" not in metadata["description"]  # the student's (ε, δ) is not this network's


def test_everything_is_for_the_sites_user_alone(site: Path, result: Adapted) -> None:
    below = [path for path in (site / "adapted").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in below} == {0o600}
    for folder in (site / "adapted", result.bundle, result.report):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_sent_and_no_budget_is_spent(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    before = {path for path in few.iterdir() if "ledger" in path.name}
    done = typed(site_app, "adapt", "--site-dir", few, "--json")
    assert json.loads(done.stdout)["way"] == "half-way"
    assert {path for path in few.iterdir() if "ledger" in path.name} == before == set()


def test_an_adapted_network_is_never_the_student_of_another(few: Path) -> None:
    bundle = adapted(few).bundle
    with pytest.raises(InvalidInput, match=r"student .*adapted"):
        adapted(few, student=bundle)


def test_the_students_own_bundle_is_not_written_over(few: Path, tmp_path: Path) -> None:
    taken = tmp_path / "out" / "has-seen-patients-must-not-leave-north"
    shutil.copytree(few / "student" / "bundle", taken)
    with pytest.raises(InvalidInput, match="holds something else"):
        adapted(few, out=tmp_path / "out")
    assert (taken / "models" / "model.pt").is_file()


def test_a_finished_network_is_never_replaced_unasked(few: Path, tmp_path: Path) -> None:
    first = adapted(few)
    kept = {path: path.read_bytes() for path in (*first.bundle.rglob("*"), *first.report.rglob("*")) if path.is_file()}
    assert kept
    words = ["adapt", "--site-dir", str(few), "--steps", "2"]
    refused = refusal_of(site_app, *words)
    assert "--replace" in str(refused)
    beside = adapted(few, steps=2, replace=False, out=tmp_path / "second")
    assert (beside.bundle.parent, beside.report) == (tmp_path / "second", tmp_path / "second" / "report")
    assert {path: path.read_bytes() for path in kept} == kept
    assert RUN.invoke(site_app, [*words, "--replace"]).exit_code == 0
    assert {path: path.read_bytes() for path in kept if path.exists()} != kept


def test_a_training_that_goes_on_keeps_an_adaptation_out(few: Path) -> None:
    with writing(few / "teachers"), pytest.raises(Refused, match="is changing"):
        adapted(few)


def test_a_bad_case_is_left_out_and_counted(few: Path) -> None:
    (few / "set" / "imagesTr" / "p1s0.nii.gz").write_bytes(b"broken")
    found = adapted(few)
    assert (found.patients, [problem.case for problem in found.problems]) == (1, ["p1s0"])
    (few / "set" / "imagesTr" / "p0s0.nii.gz").write_bytes(b"broken")
    with pytest.raises(InvalidInput, match="doctor --data"):
        adapted(few)


def test_a_withdrawn_patient_is_in_no_adaptation_and_what_held_the_patient_is_named(few: Path) -> None:
    load_or_deal(few / "teachers" / "slots.json", ["p0", "p1"], voters=1)
    open_books(load_site(few)).close()
    bundle = adapted(few).bundle
    assert [len(subjects) for subjects in seen_by(bundle).values()] == [2]
    assert list((few / "adapted" / "trainings").iterdir())
    done = RUN.invoke(site_app, ["withdraw-patient", "p1", "--site-dir", str(few), "--yes"], catch_exceptions=False)
    assert f"{bundle} " in done.stdout
    assert not (few / "adapted" / "trainings").exists()
    assert adapted(few).patients == 1
    assert [len(subjects) for subjects in seen_by(bundle).values()] == [1]


@pytest.mark.parametrize("way", [Method.AVERAGED, Method.HALF_WAY])
def test_monai_runs_the_bundle_and_answers_as_we_do(few: Path, tmp_path: Path, way: Method) -> None:
    """MONAI reads only the bundle's configuration, which spells out the mean of two networks a second time."""
    bundle = adapted(few, way=way).bundle
    scan = few / "raw" / "p0s0.nii.gz"
    (tmp_path / "images").mkdir()
    shutil.copy(scan, tmp_path / "images")
    workflow = monai.bundle.ConfigWorkflow(
        config_file=str(bundle / "configs" / "inference.json"),
        meta_file=str(bundle / "configs" / "metadata.json"),
        logging_file=False,
        workflow_type="inference",
        bundle_root=str(bundle),
        dataset_dir=str(tmp_path / "images"),
        output_dir=str(tmp_path / "predictions"),
    )
    workflow.initialize()
    workflow.run()
    opened = open_bundle(bundle)
    volume = load_volume(scan, opened.data)
    ours = to_native(predict(opened.network, volume.image), volume).argmax(axis=0)
    written = np.asarray(nib.load(tmp_path / "predictions" / "p0s0_seg.nii.gz").dataobj)
    assert (written == ours).mean() > 0.99
    assert set(np.unique(ours)) > {0}


# --- for a person


def test_terminal_page_and_json_tell_the_same(site: Path, result: Adapted) -> None:
    done = typed(site_app, "adapt", "--site-dir", site, "--replace")
    facts = json.loads((result.report / "adapted.json").read_text())
    page = (result.report / "adapted.html").read_text()
    for row in facts["figures"]:
        figure = f"{row['dice']['mean']:.3f} ± {row['dice']['half_width']:.3f}"
        assert figure in done.stdout
        assert figure in page
    assert facts["what"] in done.stdout
    assert facts["what"] in page
    assert str(result.bundle) in done.stdout
    pictures = {path.name for path in result.report.glob("*.png")}
    assert pictures == {"worst.png", "best.png"}
    assert all(f'src="{name}"' in page for name in pictures)


def test_a_way_that_does_not_exist_is_refused(few: Path) -> None:
    refused = refusal_of(site_app, "adapt", "--site-dir", few, "--way", "best")
    assert "half-way" in str(refused)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((["--learning-rate", value], 1) for value in ("0", "-1", "1", "nan")),
        *((["--steps", value], 2) for value in ("0", "-1", "1000001")),
        *((["--lambda", value], 2) for value in ("-1", "1001", "inf")),
        *((["--threads", value], 2) for value in ("0", "1025")),
        (["--way", "own", "--lambda", "5"], 1),
        *(([option, "/nowhere"], 1) for option in ("--data", "--student")),
    ],
)
def test_a_wrong_value_is_refused_before_any_case_is_read(
    few: Path, words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main command refuses NaN, infinite and negative numbers of every option before this command sees them."""
    monkeypatch.setattr("client.adapting.adapt.material_of", Mock(side_effect=AssertionError("a case was read")))
    done = RUN.invoke(site_app, ["adapt", "--site-dir", str(few), *words])
    assert done.exit_code == code
    assert isinstance(done.exception, InvalidInput if code == 1 else SystemExit), done.output


def test_the_only_patient_with_a_score_is_the_one_in_the_picture():
    nan = math.nan
    assert _shown_patients([nan, nan, 0.4]) == {"worst": 2}
    assert _shown_patients([0.7, nan, 0.4, 0.5]) == {"worst": 2, "best": 0}
    assert _shown_patients([nan, nan]) == _shown_patients([]) == {"first": 0}
