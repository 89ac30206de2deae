"""Tests that a study in memory equals a federation, has the calibrated noise, and states what it does not guarantee."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import exp, sqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

import consilium as c
from common.config import SEALED_SUM
from common.errors import BudgetExceeded, InvalidInput, QuorumNotReached
from common.models.unet import weights_to_bytes
from common.privacy.gaussian import rounded_gaussian
from common.protocol_terms import CODECS
from consilium.memory.asked import HELD, ask
from server.aggregation.aggregator import Aggregator
from server.ledger.server_ledger import Ledger
from server.postprocess.labels import labels_in
from server.postprocess.networks import load_control
from server.protocols.controls import CONTROLS
from server.protocols.query_protocol import STUDENT_SEED
from tests.dashboard_study import NoisyTruth, make_study_directory
from tests.federation import GRID, Federation, StubVoters, ball, make_codec, make_study
from tests.sensitivity.worlds import make_scan, write

SITES = 3


def volumes_of(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(5).normal(size=(count, *GRID)).astype(np.float32))


def says(stub: StubVoters) -> Callable[[np.ndarray], np.ndarray | None]:
    """Convert a stub of the federation to a callable."""
    answer = stub.answer()
    return lambda _image: answer


def stubs(count: int = SITES) -> list[Callable[[np.ndarray], np.ndarray | None]]:
    return [says(StubVoters(radius=1.5 + site / 4)) for site in range(count)]


def seeded() -> Callable[[int, Fraction], np.ndarray]:
    """Return a sampler of Gaussian noise that depends on the order of the calls."""
    rng = np.random.default_rng(1)
    return lambda size, noise_std: np.rint(rng.normal(0, float(noise_std), size)).astype(np.int64)


def alike(size: int, noise_std: Fraction) -> np.ndarray:
    """Return the same noise for every caller, because sites draw their shares in another order in a federation."""
    return np.arange(size) * int(noise_std) // 7


# ---- the same as the federation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "noise"),
    [({}, seeded), ({"quorum": 3, "aggregation": SEALED_SUM}, lambda: alike)],
    ids=["open", "sealed"],
)
def test_answers_equal_those_of_workers_and_core_for_the_same_teachers_and_noise(
    tmp_path: Path, terms: dict[str, Any], noise: Callable[[], Callable[[int, Fraction], np.ndarray]]
) -> None:
    study = make_study(planned_queries=3, **terms)
    world = Federation(tmp_path, study=study, sites=SITES, sampler=noise(), share_sampler=noise())
    world.core().run(world.transport)
    asked = ask(study, world.codec, volumes=volumes_of(3), teachers=stubs(), sampler=noise())
    expected = world.core().answers()
    assert [one.noisy_sum.tolist() for one in asked.answers] == [one.noisy_sum.tolist() for one in expected]
    assert [one.voters for one in asked.answers] == [one.voters for one in expected]
    assert len(expected) == 3
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"rounds": 2}, {"queries": 2, "protocol": "appearance"}], ids=str)
def test_a_whole_study_in_memory_equals_the_pipeline_to_the_last_weight(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Answers, labels, student and controls of every protocol are made twice: with workers, ledger and files, and
    without.
    """
    with patch.dict(Aggregator.__init__.__kwdefaults__, {"sampler": seeded()}):
        recorded = make_study_directory(tmp_path, volumes=4, steps=8, **kind)
        recorded.run()
    workspace = recorded.workspace
    public = workspace.public()
    images = {volume: public.image(volume) for volume in public.volumes}
    files = {image.tobytes(): public.objects.get(volume) for volume, image in images.items()}

    asked_about: list[bytes] = []

    def teacher(truth: NoisyTruth) -> Callable[[np.ndarray], np.ndarray]:
        return lambda image: asked_about.append(image.tobytes()) or truth.answer(files[image.tobytes()])

    codec = c.load_codec(public.objects.get(public.codec.sha256))
    teachers = [teacher(recorded.teachers[name]) for name in sorted(recorded.teachers)]
    asked = ask(public.study, codec, volumes=list(images.values()), teachers=teachers, sampler=seeded())
    assert sorted(asked_about) == sorted([*files] * len(teachers)), "each teacher once for each volume, in all rounds"
    with Ledger.open(workspace.ledger_file) as ledger:
        stored = ledger.answers(public.study.id)
    assert [one.noisy_sum.tolist() for one in asked.answers] == [one.noisy_sum.tolist() for one in stored]
    for label, volume in zip(asked.labels(), public.volumes, strict=True):
        assert np.array_equal(label, labels_in(workspace)[volume])
    assert weights_to_bytes(asked.student().model) == (workspace.student_dir / "weights.pt").read_bytes()
    controls = asked.controls()
    assert list(controls) == list(CONTROLS)
    for name, control in controls.items():
        kept = load_control(public.study, workspace.student_dir, name)
        assert weights_to_bytes(control.model) == weights_to_bytes(kept)
    if not kind:
        fresh = c.train_student(list(images.values()), asked.labels(), recipe=public.study.student)
        assert weights_to_bytes(fresh.model) == weights_to_bytes(asked.student().model)


# ---- the noise -------------------------------------------------------------------------------------------------------


def expected_std(*, epsilon: float, delta: float, releases: int) -> float:
    """Return σ on the integer sum, from the analytic Gaussian's curve (Balle & Wang 2018, Theorem 8) by SciPy alone."""

    def beyond(mu: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return 2 * 65536 * sqrt(releases) / float(brentq(beyond, 1e-3, 50))


def noise_in(study: c.Study, *, times: int, scale: Fraction = Fraction(1)) -> np.ndarray:
    """Return the noise in the answers of several runs: answers minus codes. ``scale`` multiplies the drawn noise."""
    codec, volumes = make_codec(study), volumes_of(study.privacy.planned_queries)

    def asked(sampler: Callable[[int, Fraction], np.ndarray]) -> np.ndarray:
        answers = ask(study, codec, volumes=volumes, teachers=stubs(), sampler=sampler).answers
        return np.concatenate([one.noisy_sum for one in answers])

    exact = asked(lambda size, _: np.zeros(size, dtype=np.int64))
    draws = [asked(lambda size, noise_std: rounded_gaussian(size, noise_std * scale)) for _ in range(times)]
    return np.concatenate(draws) - np.tile(exact, times)


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_the_noise_has_the_calibrated_standard_deviation_and_a_tenth_less_is_noticed(sealed: bool) -> None:
    """In a sealed sum of K sites, the shares of K − 1 sites have σ, so the sum has σ·√(K / (K − 1))."""
    terms = {"quorum": 3, "aggregation": SEALED_SUM} if sealed else {}
    study = make_study(planned_queries=24, **terms)
    expected = expected_std(epsilon=8.0, delta=1e-3, releases=24) * (sqrt(SITES / (SITES - 1)) if sealed else 1.0)
    found = noise_in(study, times=30)
    assert len(found) >= 30 * 24 * 4
    assert abs(found.mean()) < 5 * expected / sqrt(len(found))
    assert found.std() == pytest.approx(expected, rel=0.05)
    assert noise_in(study, times=30, scale=Fraction(9, 10)).std() != pytest.approx(expected, rel=0.05)


def test_by_default_noise_comes_from_the_operating_system_anew_in_every_asking() -> None:
    study = make_study(planned_queries=2)
    given: dict[str, Any] = {"volumes": volumes_of(2), "teachers": stubs()}
    first, second = (c.ask(study, make_codec(study), **given).answers for _ in range(2))
    assert all((a.noisy_sum != b.noisy_sum).any() for a, b in zip(first, second, strict=True))


# ---- what it promises ------------------------------------------------------------------------------------------------


def test_the_guarantee_states_its_terms_and_that_one_person_held_everything() -> None:
    study = make_study(planned_queries=2)
    asked = c.ask(study, make_codec(study), volumes=volumes_of(2), teachers=stubs())
    said = str(asked.guarantee)
    for fact in ("ε = 8 (exact)", "δ = 0.001", "unit hospital", "relation replace-one", "2 releases", "3 sites"):
        assert fact in said
    assert HELD in said
    assert "protects nobody" in said
    assert asked.guarantee.spent.epsilon == pytest.approx(8.0, abs=0.01)
    sealed = make_study(planned_queries=2, quorum=3, aggregation=SEALED_SUM)
    told = str(c.ask(sealed, make_codec(sealed), volumes=volumes_of(2), teachers=stubs()).guarantee)
    assert re.search("against the server .*1 of the sites", told)


def test_more_than_the_budget_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol that asked for a third sum of two would be refused before the noise is drawn."""
    study = make_study(planned_queries=2)
    larger = replace(study, privacy=replace(study.privacy, planned_queries=3))
    volumes, codec, drawn = volumes_of(3), make_codec(study), []

    def sampler(size: int, noise_std: Fraction) -> np.ndarray:
        drawn.append(noise_std)
        return np.zeros(size, dtype=np.int64)

    monkeypatch.setattr(
        "server.protocols.query_protocol.study_mechanism", lambda _study, **about: c.study_mechanism(study, **about)
    )
    with pytest.raises(BudgetExceeded):
        ask(larger, codec, volumes=volumes, teachers=stubs(), sampler=sampler)
    assert len(drawn) == 2


# ---- teachers --------------------------------------------------------------------------------------------------------


def test_a_label_map_counts_as_probabilities_of_0_and_1() -> None:
    study = make_study(planned_queries=2)
    hard = [lambda image, stub=stub: np.asarray(stub(image))[1].astype(bool) for stub in stubs()]
    soft = stubs()
    first, second = (
        ask(study, make_codec(study), volumes=volumes_of(2), teachers=given, sampler=alike).answers
        for given in (hard, soft)
    )
    assert [one.noisy_sum.tolist() for one in first] == [one.noisy_sum.tolist() for one in second]


def test_teachers_are_dealt_to_sites_in_order_and_a_missing_one_votes_zero() -> None:
    study, volumes = make_study(planned_queries=2, voters_per_site=2), volumes_of(2)
    one, two, three, four = stubs(4)
    silent = {"volumes": volumes, "sampler": lambda size, _: np.zeros(size, dtype=np.int64)}
    flat = ask(study, make_codec(study), teachers=[one, two, three, four], **silent).answers  # type: ignore[arg-type]
    grouped = ask(study, make_codec(study), teachers=[[one, two], [three, four]], **silent).answers  # type: ignore[arg-type]
    assert [a.noisy_sum.tolist() for a in flat] == [a.noisy_sum.tolist() for a in grouped]
    fewer = ask(study, make_codec(study), teachers=[[one, two], [three]], **silent).answers  # type: ignore[arg-type]
    alone = make_study(planned_queries=2, quorum=1)
    fourth = ask(alone, make_codec(alone), teachers=[four], **silent).answers  # type: ignore[arg-type]
    for all_four, three_alone, of_fourth in zip(flat, fewer, fourth, strict=True):
        assert np.array_equal(all_four.noisy_sum - three_alone.noisy_sum, of_fourth.noisy_sum)
        assert all_four.voters == three_alone.voters == 4


def test_a_teacher_that_writes_into_its_image_changes_nobody_elses() -> None:
    study, volumes = make_study(planned_queries=1), volumes_of(1)
    seen = []

    def writes(image: np.ndarray) -> object:
        seen.append(float(image.sum()))
        image[:] = 0
        return stubs(1)[0](image)

    ask(study, make_codec(study), volumes=volumes, teachers=[writes] * 3, sampler=alike)
    assert seen == [pytest.approx(float(volumes[0].sum()))] * 3


# ---- codecs and layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_asked_and_decoded_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero noise and unanimous teachers, the decoded label is the codec's own approximation of their answer."""
    monkeypatch.setattr("common.codecs.ball_autoencoder.STEPS", 3)
    study = make_study(planned_queries=1, epsilon=1000.0)
    study = replace(study, codec=replace(study.codec, name=name, radius=16.0, max_dimension=4))
    codec = c.fit_codec(study, [ball((3 + i / 5, 3 + (i % 3) / 2, 4), 1.5 + (i % 4) / 3) for i in range(10)], sites=3)
    mind = says(StubVoters(radius=2.0))
    asked = ask(study, codec, volumes=volumes_of(1), teachers=[mind] * 3, sampler=lambda n, _: np.zeros(n, np.int64))
    (label,) = asked.labels()
    prediction = np.asarray(mind(volumes_of(1)[0]), dtype=np.float32)
    noise = asked.answers[0].query.mechanism.mean_noise_std(voters=3)
    expected = codec.decode(codec.encode(prediction), noise_std=noise)
    assert label == pytest.approx(expected, abs=2e-2)
    assert label.sum(axis=0) == pytest.approx(1, abs=1e-5)


CHOICE: dict[str, Any] = {
    "DataConfig.labels": 3,
    "DataConfig.channels": 1,
    "DatasetSettings.labels": "",
    "DatasetSettings.layout": "msd",
}


@pytest.mark.parametrize("layout", ["msd", "nnunet", "bids", "table"])
def test_a_folder_of_every_layout_is_read_to_the_same_arrays(tmp_path: Path, layout: str) -> None:
    site = {f"p{number}": (make_scan(f"p{number}x0", seed=number, channels=1, labels=3),) for number in range(3)}
    terms = {**NEW, "labels": ["background", "front", "back"], "grid": (16, 8, 8), "channels": ["C0"]}
    study = c.Study.new(**terms)
    write(site, tmp_path / layout, CHOICE | {"DatasetSettings.layout": layout})
    images, label_maps, patients = c.read_cases(tmp_path / layout, study)
    write(site, tmp_path / "other", CHOICE)  # type: ignore[arg-type]
    others = c.read_cases(tmp_path / "other", study)
    assert np.array_equal(images, others[0])
    assert np.array_equal(label_maps, others[1])
    assert len(set(patients)) == 3
    assert (images[0].shape, label_maps[0].shape, label_maps[0].dtype) == ((1, 16, 8, 8), (16, 8, 8), np.uint8)


def test_a_scan_that_cannot_be_used_is_refused_and_not_left_out(tmp_path: Path) -> None:
    scans = [make_scan(f"p{number}x0", seed=number, channels=1, labels=3) for number in range(3)]
    site = {scan.stem: (scan,) for scan in (*scans[:2], replace(scans[2], damage="labels"))}
    write(site, tmp_path / "set", CHOICE)  # type: ignore[arg-type]
    study = c.Study.new(**NEW | {"labels": ["background", "front", "back"], "grid": (16, 8, 8), "channels": ["C0"]})
    with pytest.raises(InvalidInput, match=r"scan 3 of 3: .*site doctor"):
        c.read_cases(tmp_path / "set", study)
    with pytest.raises(InvalidInput, match="the data directory does not exist"):
        c.read_cases(tmp_path / "nowhere", study)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="the data directory is a file"):
        c.read_cases(tmp_path / "file", study)


# ---- bad input -------------------------------------------------------------------------------------------------------


def _answers(array: object) -> list[Callable[[np.ndarray], object]]:
    return [lambda _image: array] * SITES


MIDDLE = (3.5, 3.5, 3.5)
HALF = np.full((2, *GRID), 0.5, dtype=np.float32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "volumes of another shape": (
        {"volumes": [np.zeros((4, 8, 8))] * 2},
        InvalidInput,
        r"volume 1: got .*\(1, 8, 8, 8\)",
    ),
    "a volume with NaN": (
        {"volumes": [volumes_of(1)[0], np.full(GRID, np.nan)]},
        InvalidInput,
        "volume 2; allowed: finite",
    ),
    "a volume with infinities": ({"volumes": [np.full(GRID, np.inf)] * 2}, InvalidInput, "volume 1; allowed: finite"),
    "a volume beyond float32": ({"volumes": [np.full(GRID, 1e300)] * 2}, InvalidInput, "volume 1; allowed: finite"),
    "a volume twice": ({"volumes": volumes_of(1) * 2}, InvalidInput, "volume 2 is the same as volume 1"),
    "a volume too few": ({"volumes": volumes_of(1)}, InvalidInput, "public volumes: got 1"),
    "a volume too many": (
        {"volumes": volumes_of(3)},
        InvalidInput,
        "volumes: got 3; allowed: 2, the number that the study asks",
    ),
    "no volumes": ({"volumes": []}, InvalidInput, "volumes: got 0"),
    "one volume where a list is due": ({"volumes": 3.0}, InvalidInput, "volumes: got 'float'"),
    "volumes of text": ({"volumes": [np.full(GRID, "a")] * 2}, InvalidInput, "volume 1"),
    "fewer sites than the quorum": ({"teachers": stubs(1)}, QuorumNotReached, "1 sites were given .* quorum is 2"),
    "no teachers": ({"teachers": []}, InvalidInput, "teachers: got 0"),
    "a teacher that is no callable": (
        {"teachers": [stubs(1), [3]]},
        InvalidInput,
        r"teachers of site 2: got \['int'\]",
    ),
    "a number among teachers": ({"teachers": [*stubs(1), 3]}, InvalidInput, "teacher 2: got 'int'; allowed: only call"),
    "names of teachers": ({"teachers": ["a", "b"]}, InvalidInput, "teachers of site 1: got 'str'"),
    "more teachers than voters": ({"teachers": [stubs(2), stubs(1)]}, InvalidInput, "teachers of site 1: got 2"),
    "a site without a teacher": ({"teachers": [stubs(1), []]}, InvalidInput, "teachers of site 2: got 0"),
    "an answer with NaN": (
        {"teachers": _answers(HALF * np.nan)},
        InvalidInput,
        "answer of teacher 1 of site 1 on volume 1",
    ),
    "an answer that sums to 2": ({"teachers": _answers(HALF * 2)}, InvalidInput, "sum to 1 .*to fix: give a softmax"),
    "an answer of another shape": ({"teachers": _answers(HALF[:, :4])}, InvalidInput, r"\(2, 4, 8, 8\)"),
    "an answer of more classes": ({"teachers": _answers(np.full((3, *GRID), 1 / 3))}, InvalidInput, r"\(3, 8, 8, 8\)"),
    "a label outside": ({"teachers": _answers(np.full(GRID, 7))}, InvalidInput, "label: got 7; allowed: 0 to 1"),
    "a label below": ({"teachers": _answers(np.full(GRID, -1))}, InvalidInput, "label: got -1; allowed: 0 to 1"),
    "no answer": ({"teachers": _answers(None)}, InvalidInput, "answer of teacher 1"),
    "a tensor that torch still differentiates": (
        {"teachers": [lambda image: torch.tensor(image, requires_grad=True)] * SITES},
        InvalidInput,
        r"answer of teacher 1 .*to fix: .*\.detach\(\)\.cpu\(\)\.float\(\)\.numpy\(\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_drawn(name: str) -> None:
    changed, error, said = WRONG[name]
    study, drawn = make_study(planned_queries=2), []

    def sampler(size: int, noise_std: Fraction) -> np.ndarray:
        drawn.append(noise_std)
        return np.zeros(size, dtype=np.int64)

    given: dict[str, Any] = {"volumes": volumes_of(2), "teachers": stubs(), "sampler": sampler} | changed
    with pytest.raises(error, match=said):
        c.ask(study, make_codec(study), **given)
    assert not drawn


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"volumes": iter(volumes_of(2))}, r"list\(...\)"),
        ({"volumes": torch.tensor(np.stack(volumes_of(2)))}, r"list\(...\)"),
        ({"teachers": _answers(np.moveaxis(HALF, 0, -1))}, r"\[k, x, y, z\] with the classes first"),
        ({"teachers": _answers(HALF[None])}, "without a batch axis"),
        ({"teachers": _answers(HALF * 2)}, "give a softmax"),
    ],
    ids=["an iterator", "one tensor", "classes last", "a batch of one", "no softmax"],
)
def test_a_refusal_states_the_remedy_of_this_mistake(given: dict[str, Any], remedy: str) -> None:
    study = make_study(planned_queries=2)
    with pytest.raises(InvalidInput, match=f"to fix: .*{remedy}"):
        c.ask(study, make_codec(study), **{"volumes": volumes_of(2), "teachers": stubs()} | given)


def test_an_error_of_a_teacher_names_the_teacher_and_its_volume() -> None:
    def fails(_image: np.ndarray) -> None:
        raise ZeroDivisionError

    study = make_study(planned_queries=2)
    with pytest.raises(ZeroDivisionError) as caught:
        c.ask(study, make_codec(study), volumes=volumes_of(2), teachers=[*stubs(2), fails])
    assert caught.value.__notes__ == ["while waiting for the answer of teacher 1 of site 3 on volume 1 of the query"]


def test_a_flat_list_that_cannot_be_dealt_is_refused() -> None:
    study = make_study(planned_queries=2, voters_per_site=2)
    with pytest.raises(InvalidInput, match="teachers: got 5; allowed: a multiple of 2"):
        c.ask(study, make_codec(study), volumes=volumes_of(2), teachers=stubs(5))


def test_a_codec_of_another_study_is_refused() -> None:
    study = make_study(planned_queries=2)
    other = replace(study, codec=replace(study.codec, radius=0.5))
    with pytest.raises(InvalidInput, match="codec"):
        c.ask(other, make_codec(study), volumes=volumes_of(2), teachers=stubs())


@pytest.mark.parametrize("key", ["codec.paired", "data.finer"])
def test_a_study_that_needs_files_is_refused_by_name(key: str) -> None:
    study = make_study(planned_queries=2)
    joint = replace(study.codec, joint=True, paired=4 if key == "codec.paired" else 0)
    data = replace(study.data, finer=2 if key == "data.finer" else 1)
    with pytest.raises(InvalidInput, match=f"{key}.*consilium simulate"):
        c.ask(replace(study, codec=joint, data=data), make_codec(study), volumes=volumes_of(2), teachers=stubs())


NEW: dict[str, Any] = {
    "labels": ["background", "blob"],
    "grid": (16, 16, 16),
    "epsilon": 8,
    "delta": 1e-5,
    "unit": "patient",
    "quorum": 3,
    "queries": 2,
}


def test_a_new_study_is_the_one_that_its_file_would_give() -> None:
    new = c.Study.new(**NEW, voters=5, spacing_mm=(2, 2, 2))
    read = c.parse_study("""
schema = 1
name = "study"
[data]
labels = ["background", "blob"]
grid = [16, 16, 16]
spacing_mm = [2.0, 2.0, 2.0]
[privacy]
epsilon = 8.0
delta = 1e-5
unit = "patient"
quorum = 3
voters_per_site = 5
planned_queries = 2
aggregation = "sealed-sum"
""")
    assert (new, new.id) == (read, read.id)
    assert not c.Study.new(**NEW | {"quorum": 2}).privacy.sealed, "a sealed sum takes three"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": "ab"}, "data.labels"),
        ({"labels": ["background", 2]}, "data.labels"),
        ({"labels": ["background", ""]}, "data.labels.*none empty"),
        ({"grid": (16, 16, 15)}, "data.grid"),
        ({"grid": (16.0, 16, 16)}, "data.grid"),
        ({"epsilon": float("nan")}, "privacy.epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"unit": "person"}, "person"),
        ({"quorum": "3"}, "privacy.quorum"),
        ({"quorum": 0}, "privacy.quorum"),
        ({"queries": 2.5}, "privacy.planned_queries"),
        ({"voters": True}, "privacy.voters_per_site"),
        ({"relation": "zero-out"}, "zero-out"),
        ({"aggregation": "blind"}, "privacy.aggregation"),
    ],
    ids=str,
)
def test_impossible_terms_of_a_new_study_are_refused_by_their_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        c.Study.new(**NEW | change)


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        ([ball(MIDDLE, 2.0)], "public label maps: got 1; allowed: at least 2"),
        (
            [ball(MIDDLE, 2.0).astype(np.int64), ball(MIDDLE, 3.0)],
            r"label map 1: got .'int64'.*to fix: convert it .*np.asarray\(label_map, np.uint8\)",
        ),
        ([ball(MIDDLE, 2.0).tolist(), ball(MIDDLE, 3.0)], r"label map 1: got \('list', None\).*to fix: convert it "),
        ([ball(MIDDLE, 2.0)[:4], ball(MIDDLE, 3.0)], "label map 1: .*study's grid [^;]*$"),
        (iter([ball(MIDDLE, 2.0), ball(MIDDLE, 3.0)]), r"to fix: make a list of the items, as list\(...\) does"),
        ([np.ma.array(ball(MIDDLE, r), mask=ball(MIDDLE, 1.0)) for r in (2.0, 3.0)], "label map 1: got 'a masked arr"),
        ([ball(MIDDLE, 2.0), ball(MIDDLE, 3.0), ball(MIDDLE, 2.0)], "label map 3: got 'a copy of map 1'"),
    ],
    ids=["one map", "int64", "a list", "another grid", "an iterator", "masked", "a copy"],
)
def test_label_maps_that_do_not_fit_are_refused_with_what_helps(maps: list[np.ndarray], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        c.fit_codec(make_study(), maps, sites=3)


def test_a_seed_with_which_a_codec_could_not_be_read_again_is_refused() -> None:
    maps = [ball(MIDDLE, 2.0), ball(MIDDLE, 3.0)]
    for seed in (True, 1.0, -1, 2**32):
        with pytest.raises(InvalidInput, match=r"codec seed: .*an integer from 0 to"):
            c.fit_codec(make_study(), maps, sites=3, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: c.Study.new(**NEW | {"quorum": np.int64(3)}),
        lambda: c.Study.new(**NEW | {"epsilon": np.float32(8)}),
        lambda: c.Study.new(**NEW | {"grid": np.array([16, 16, 16])}),
        lambda: c.fit_codec(make_study(), [ball(MIDDLE, 2.0), ball(MIDDLE, 3.0)], sites=np.int64(4)),
        lambda: c.train_student(volumes_of(1), [np.zeros(GRID, np.uint8)], classes=np.uint8(1) + 1),
    ],
    ids=["quorum", "epsilon", "grid", "sites", "classes"],
)
def test_a_number_of_numpy_is_refused_with_the_way_to_convert_it(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match=r"to fix: give a Python value, as \.tolist\(\)"):
        call()


def test_a_float64_is_refused_for_its_value_and_not_for_its_type() -> None:
    with pytest.raises(InvalidInput, match=r"epsilon: got [^;]*; allowed: a finite number above 0$"):
        c.Study.new(**NEW | {"epsilon": np.float64(-1)})


def test_a_codec_is_fitted_for_the_noise_of_so_many_sites(tmp_path: Path) -> None:
    study = make_study()
    maps = [np.roll(np.pad(np.ones((3, 3, 3), np.uint8), (2, 3)), shift, axis=shift % 3) for shift in range(6)]
    per_site = float(c.study_mechanism(study, dimension=1).noise_std) / 2**16
    same = c.fit_codec(study, maps, sites=4), c.fit_codec(study, maps, noise_std=per_site / 4)
    assert same[0].to_bytes() == same[1].to_bytes()
    for wrong in ({}, {"sites": 4, "noise_std": 0.1}, {"sites": 1}, {"sites": 2.0}):
        with pytest.raises(InvalidInput):
            c.fit_codec(study, maps, **wrong)  # type: ignore[arg-type]


# ---- students --------------------------------------------------------------------------------------------------------

RECIPE = c.TrainingConfig(channels=(2, 4), steps=2)


def test_a_caller_who_writes_into_labels_or_an_answer_changes_no_release() -> None:
    study = make_study()
    volumes = volumes_of(study.privacy.planned_queries)
    asked = c.ask(study, make_codec(study), volumes=volumes, teachers=stubs())
    before = [label.copy() for label in asked.labels()]
    asked.labels()[0][:] = 0
    assert all(np.array_equal(*pair) for pair in zip(before, asked.labels(), strict=True))
    with pytest.raises(ValueError, match="read-only"):
        asked.answers[0].noisy_sum[0] += 1


def test_a_network_takes_images_like_those_it_was_trained_on_and_no_others() -> None:
    (image,) = volumes_of(1)
    network = c.train_student([image], [HALF], recipe=RECIPE)
    expected = network(image[None])
    for same in (image, image[::-1][::-1], image.astype(np.float64), np.asfortranarray(image[None])):
        assert np.array_equal(network(same), expected)
    assert network(image[::-1]).shape == expected.shape, "strides may be negative"
    for wrong, said in (
        (np.zeros((1, 4, 8, 8), np.float32), "shape"),
        (np.zeros((2, *GRID), np.float32), "shape"),
        (np.full(GRID, np.nan), "finite"),
        (image.astype(complex), "numbers"),
        (np.full(GRID, "a"), "numbers"),
        (np.ma.array(image), "masked"),
        (None, "numbers"),
    ):
        with pytest.raises(InvalidInput, match=f"image.*{said}"):
            network(wrong)  # type: ignore[arg-type]


def test_classes_that_a_label_map_cannot_hold_are_refused() -> None:
    for wrong in (257, 1, True, 2.0, "2", None):
        with pytest.raises(InvalidInput, match="classes"):
            c.train_student(volumes_of(1), [np.zeros(GRID, np.uint8)], recipe=RECIPE, classes=wrong)  # type: ignore[arg-type]


def controls_of(study: c.Study, *, recipe: c.TrainingConfig = RECIPE, seed: int = 0, fresh: bool = True) -> c.Controls:
    def made(name: str) -> c.Network:
        network = c.train_student(volumes_of(1), [HALF], recipe=recipe, seed=seed)
        return replace(network, fresh=fresh)

    return c.Controls(study, {name: made(name) for name in CONTROLS})


def test_a_comparison_is_dice_of_each_and_the_gain_over_the_best_control() -> None:
    study = make_study()
    truths = [np.asarray(stub(volumes_of(1)[0]))[1].astype(np.uint8) for stub in stubs(2)]
    held_out = list(zip(volumes_of(2), truths, strict=True))
    by_image = {image[None].tobytes(): truth for image, truth in held_out}
    nothing = c.Controls(study, {name: lambda image: np.zeros(GRID, np.uint8) for name in CONTROLS})  # type: ignore[dict-item, misc]
    compared = c.compare(lambda image: by_image[image.tobytes()], nothing, held_out=held_out)
    assert {name: score.mean for name, score in compared.scores.items()} == {"student": 1, **dict.fromkeys(CONTROLS, 0)}
    assert compared.gain is not None
    assert (compared.gain.gain, compared.gain.half_width) == (1.0, 0.0)
    for figure in ("zero code: +1.000 Dice", "95 % interval +1.000 to +1.000"):
        assert figure in str(compared)


def scored_against_a_control() -> tuple[c.Controls, list[tuple[np.ndarray, np.ndarray]]]:
    """Return a control that finds half of the first structure, and three cases, one of which lacks the second
    structure.
    """
    study = c.Study.new(**NEW | {"labels": ["background", "blob", "rim"], "grid": GRID})
    half = np.zeros(GRID, np.uint8)
    half[:2] = 1
    truths = [np.zeros(GRID, np.uint8) for _ in range(3)]
    for number, truth in enumerate(truths):
        truth[:4] = 1
        truth[6, : 2 * number] = 2
    controls = c.Controls(study, {"zero_code": lambda _image: half})  # type: ignore[dict-item]
    return controls, list(zip(volumes_of(3), truths, strict=True))


def test_both_lines_of_a_comparison_state_the_same_dice_if_a_case_lacks_a_structure() -> None:
    controls, held_out = scored_against_a_control()
    told = str(c.compare(lambda _image: held_out[2][1], controls, held_out=held_out))
    above, below = told.splitlines()
    for name in ("student", "zero code"):
        assert re.findall(rf"{name} (0\.\d+)", above) == re.findall(rf"{name} (0\.\d+)", below), told


def test_a_held_out_case_given_twice_is_refused_and_never_counted_as_two() -> None:
    controls, held_out = scored_against_a_control()
    copied = [*held_out, (held_out[1][0].astype(np.float64), held_out[1][1])]
    with pytest.raises(InvalidInput, match=r"held-out image 4: .*image 2"):
        c.compare(lambda _image: held_out[2][1], controls, held_out=copied)


@pytest.mark.slow
def test_an_image_that_a_compared_network_was_trained_on_is_not_held_out() -> None:
    study, volumes = make_study(planned_queries=2), volumes_of(3)
    asked = c.ask(study, make_codec(study), volumes=volumes[:2], teachers=stubs())
    truth = np.asarray(stubs(1)[0](volumes[0]))[1].astype(np.uint8)
    networks = {
        "student": asked.student(),
        "zero_code": c.train_student(volumes[:1], [HALF], recipe=study.student, seed=STUDENT_SEED),
    }
    for name, trained in networks.items():
        others = c.Controls(study, {} if name == "student" else {name: trained})
        student = trained if name == "student" else lambda _image: truth
        assert c.compare(student, others, held_out=[(volumes[2], truth)]).scores
        with pytest.raises(InvalidInput, match=f"held-out image 2: .* the network {name} was trained on.*hold out"):
            c.compare(student, others, held_out=[(volumes[2], truth), (volumes[0].astype(np.float64), truth)])


def test_held_out_cases_without_any_structure_are_refused() -> None:
    controls, held_out = scored_against_a_control()
    empty = [(held_out[0][0], np.zeros(GRID, np.uint8))]
    with pytest.raises(InvalidInput, match="held-out label maps"):
        c.compare(lambda _image: held_out[2][1], controls, held_out=empty)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"fresh": False}, "asked.student"), ({"seed": 1}, "seed"), ({"recipe": replace(RECIPE, steps=3)}, "recipe")],
    ids=["start", "seed", "recipe"],
)
def test_a_student_trained_otherwise_than_its_controls_is_not_compared(change: dict[str, Any], said: str) -> None:
    student = c.train_student(volumes_of(1), [HALF], recipe=RECIPE)
    with pytest.raises(InvalidInput, match=said):
        c.compare(student, controls_of(make_study(), **change), held_out=[(volumes_of(1)[0], np.zeros(GRID, np.uint8))])


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ([], "held-out cases: got 0"),
        ([volumes_of(1)[0]], "pair"),
        ([(volumes_of(1)[0], np.full(GRID, 5))], "label map 1: .*got 5"),
        ([(np.full(GRID, np.nan), np.zeros(GRID, np.uint8))], "held-out image 1"),
        ([(volumes_of(1)[0], np.zeros((4, 8, 8), np.uint8))], "held-out label map 1"),
    ],
    ids=["none", "no pair", "label", "nan", "shape"],
)
def test_held_out_cases_that_do_not_fit_are_refused(held_out: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        c.compare(lambda _image: HALF, c.Controls(make_study(), {}), held_out=held_out)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "said"),
    [
        (volumes_of(2), [HALF], None, "images and labels: got .2, 1."),
        ([np.full(GRID, np.nan)], [HALF], None, "image 1"),
        (volumes_of(1), [HALF * 3], None, "label 1: class probabilities"),
        (volumes_of(1), [np.zeros(GRID, np.uint8)], None, "give classes"),
        (volumes_of(1), [np.full(GRID, 2)], 2, "label 1: label: got 2"),
        ([volumes_of(1)[0], np.zeros((4, 8, 8))], [HALF, HALF], None, "image 2"),
        ([np.zeros(3)], [HALF], None, "image 1"),
        ([np.zeros((0, 8, 8))], [HALF], None, "shape of image 1"),
    ],
    ids=["counts", "nan", "sum", "classes", "outside", "shapes", "vector", "no voxel"],
)
def test_images_and_labels_that_do_not_fit_are_refused(images: Any, labels: Any, classes: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        c.train_student(images, labels, recipe=RECIPE, classes=classes)
