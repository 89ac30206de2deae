"""Tests in every configuration that one patient's data moves one voter, by at most the charge, and nothing
public.

Everything between a file and the site's sum runs for real on tiny data (``worlds``), in configurations in which every
two values of every two options meet (``axes``). The bound is written out here and not taken from the code under test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from client.data import layouts
from client.masked import masked_code
from client.records.patient_deal import Slots, by_seed, deal
from client.teachers.teacher import Teachers
from client.training.private import mac
from client.training.private.blocks import Blocks
from client.training.private.gradients import Weights
from client.training.private.strategies_3d import Chunk, Patients
from client.worker import Ask, Worker
from common.config import Study
from common.data.dataset import Dataset
from common.data.patients import counted_once
from common.errors import InvalidInput
from common.messages import Offer, OfferReply
from common.privacy.mechanism import QuerySpec
from tests.client.training.private.one_at_a_time import one_at_a_time
from tests.sensitivity import worlds
from tests.sensitivity.axes import CLASSES, PLAIN_AXES, PRIVATE_AXES, Choice, covering, fields, placed
from tests.sensitivity.worlds import (
    EXCHANGES,
    PATIENTS,
    RADIUS,
    Observation,
    Site,
    World,
    alone,
    everything,
    make_site,
    nothing,
    run,
    slots_of,
)

pytestmark = pytest.mark.slow

PLAINLY = tuple(covering(PLAIN_AXES))
CONFIGURATIONS: tuple[Choice, ...] = (*PLAINLY, *covering(PRIVATE_AXES))
FAST = (0, len(PLAINLY))
"""The first configurations without and with private training, which meet every exchange; others meet a share."""

SHARE = 1 if os.environ.get("CONSILIUM_SENSITIVITY") == "all" else 16
"""Each slow configuration tries every sixteenth exchange; with `make test-sensitivity`, every exchange."""

GONE = {"cannot be read", "not finite", "labels of another study", "label elsewhere", "label gone", "not listed"}
"""Exchanges after which no data of the patient can be used."""

R = int(RADIUS * 2**16)
STEP_R = 2**24


def number(index: int, *, fast: tuple[int, ...] = FAST) -> object:
    marks = () if index in fast else pytest.mark.slow
    return pytest.param(index, marks=marks, id=f"{index:02d}")


FEWER = sorted({*FAST, *range(0, len(CONFIGURATIONS), SHARE)})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def allowed(choice: Choice) -> int:
    """Return Δ of the site's sum in grid steps, as docs/privacy.md states it for a unit and a relation."""
    voters = int(str(choice["PrivacyConfig.voters_per_site"]))
    reach = {"hospital/replace-one": 2 * voters, "hospital/zero-out": voters, "patient/replace-one": 2}
    return reach[str(choice["PrivacyConfig.unit+relation"])] * R


def norm(vector: np.ndarray) -> float:
    return float(np.sqrt(sum(int(value) ** 2 for value in vector.ravel())))


def moved(one: Observation, other: Observation) -> set[int]:
    """Return the voters whose votes, or steps of a private training, differ in a single bit."""
    return {
        voter
        for mine, theirs in ((one.votes, other.votes), (one.steps, other.steps))
        for voter, (own, its) in enumerate(zip(mine, theirs, strict=True))
        if len(own) != len(its) or not all(map(np.array_equal, own, its))
    }


def check(base: Observation, other: Observation, *, voter: int, choice: Choice, name: str) -> None:
    """Check that an exchange of one patient moved only ``voter``, no sum too far, and nothing public."""
    assert other.public == base.public, f"{name}: something public changed"
    assert moved(base, other) <= {voter}, f"{name}: voters {sorted(moved(base, other))} moved, not {voter} alone"
    for mine, theirs in zip(base.sums, other.sums, strict=True):
        assert norm(mine - theirs) <= 2 * R, f"{name}: the sum moved {norm(mine - theirs) / R:.2f} R"
        assert norm(mine - theirs) <= max(allowed(choice), 2 * R)


def check_steps(base: Observation, other: Observation, *, voter: int, name: str) -> None:
    """Check the same for every step of a private training, with the same weights in both worlds."""
    assert moved(base, other) <= {voter}, f"{name}: the steps of voters {sorted(moved(base, other))} moved"
    assert len(base.steps[voter]) == len(other.steps[voter]), f"{name}: another number of steps"
    reach = 1 if name in GONE else 2
    for mine, theirs in zip(base.steps[voter], other.steps[voter], strict=True):
        found = norm(mine - theirs) / STEP_R
        assert found <= reach, f"{name}: a step's sum moved {found:.2f} R"


def check_adds_up(base: Observation, gone: Observation, alone: Observation, *, voter: int) -> None:
    """Check that a patient's part of a step's sum is bit for bit the same, whichever other patients are in it."""
    for whole, others, own in zip(base.steps[voter], gone.steps[voter], alone.steps[voter], strict=True):
        assert np.array_equal(whole, others + own), "a patient's presence moves the parts of others"


def victim_of(index: int, site: Site, choice: Choice) -> tuple[str, int]:
    """Return a patient in the first slot of its voter, before others in every order, and that voter."""
    voter = index % int(str(choice["PrivacyConfig.voters_per_site"]))
    return slots_of(site)[voter], voter


def exchanges(index: int) -> list[str]:
    """Return the exchanges that make sense in a layout; where each file is a patient, none can have another scan."""
    choice = CONFIGURATIONS[index]
    layout = choice["DatasetSettings.layout"]
    idle = set() if layout == "bids" else {"names its labels otherwise"}
    idle |= set() if layout in ("bids", "nnunet") else {"a channel more"}
    if choice["scans of a patient"] == 1 and layout in ("msd", "nnunet"):
        idle |= {"a scan more", "filed under other names"}
    meant = [name for name in EXCHANGES if name not in idle]
    return meant if index in FAST else meant[index % min(SHARE, 4) :: SHARE]


@pytest.mark.parametrize("index", [number(index, fast=()) for index in range(len(CONFIGURATIONS))])
def test_one_patient_moves_one_voter_by_what_is_charged_and_nothing_public(index: int, tmp_path: Path) -> None:
    choice = CONFIGURATIONS[index]
    site = make_site(choice)
    victim, voter = victim_of(index, site, choice)
    private = "PrivateSettings.strategy" in choice
    base = run(World(site), site, tmp_path / "base", choice)
    looks = choice["CodecConfig.name+joint+protocol"] == "pca/appearance"
    # A privately trained teacher may see no structure; then it has no appearance to code.
    assert (private and looks) or all(norm(total) > 0 for total in base.sums)
    frozen = run(World(site), site, tmp_path / "frozen", choice, frozen=True) if private else None
    own: Observation | None = None
    for place, name in enumerate(exchanges(index)):
        world = EXCHANGES[name](site, victim)
        where = PATIENTS % len(base.votes) if name == "a newcomer" else voter
        other = run(world, site, tmp_path / f"{place}", choice)
        check(base, other, voter=where, choice=choice, name=name)
        if frozen is not None and name not in ("a newcomer", "another patient", "ends its training", "ends its answer"):
            met = run(world, site, tmp_path / f"{place}-frozen", choice, frozen=True)
            check_steps(frozen, met, voter=voter, name=name)
            if name in GONE:
                own = own or run(alone(site, victim), site, tmp_path / "alone", choice, frozen=True)
                check_adds_up(frozen, met, own, voter=voter)


@pytest.mark.parametrize("index", [number(index) for index in FEWER])
def test_a_whole_hospital_moves_its_sum_by_what_is_charged_and_nothing_public(index: int, tmp_path: Path) -> None:
    choice = CONFIGURATIONS[index]
    site = make_site(choice)
    voters = int(str(choice["PrivacyConfig.voters_per_site"]))
    base = run(World(site), site, tmp_path / "base", choice)
    for name, world in (("everything exchanged", everything(site)), ("nothing to read", nothing(site))):
        other = run(world, site, tmp_path / name, choice)
        assert other.public == base.public, name
        for mine, theirs in zip(base.sums, other.sums, strict=True):
            assert norm(mine - theirs) <= 2 * voters * R
            assert norm(mine) <= voters * R  # compared with the zero code, as in relation zero-out
            assert norm(theirs) <= voters * R


@pytest.mark.parametrize("index", [number(index, fast=()) for index in FEWER])
def test_a_training_stopped_at_any_step_and_begun_again_moves_no_other_voter(index: int, tmp_path: Path) -> None:
    choice = CONFIGURATIONS[index]
    site = make_site(choice)
    victim, voter = victim_of(index, site, choice)
    whole = run(World(site), site, tmp_path / "whole", choice)
    steps = 4 if "PrivateSettings.strategy" in choice else 3
    for stop in range(steps) if index in FAST else (index % steps,):
        base = run(World(site), site, tmp_path / f"base-{stop}", choice, interrupt=stop)
        assert [len(own) for own in base.steps] == [len(own) for own in whole.steps]  # exactly the planned steps
        other = run(EXCHANGES["exchanged"](site, victim), site, tmp_path / f"other-{stop}", choice, interrupt=stop)
        check(base, other, voter=voter, choice=choice, name=f"stopped after {stop} steps")


def test_every_option_of_study_and_site_has_a_place_in_the_check() -> None:
    assert fields() - set(placed()) == set(), "options that nobody has said of how they bear on the sum"
    assert set(placed()) - fields() == set(), "options that are no more"
    assert len(placed()) == len(set(placed()))
    assert len(CLASSES) == len(set(CLASSES))


# ---- former faults -------------------------------------------------------------------------------------------------


_found: dict[tuple[str, str], bool] = {}
"""By configuration and exchange: whether the check raises an alarm over unchanged production code."""


def passes(choice: Choice, name: str, root: Path, *, frozen: bool = False) -> bool:
    """Return whether the unchanged production code passes the check; cached for the process. Call it before a patch."""
    key = repr((sorted(choice.items()), frozen)), name
    if key not in _found:
        _found[key] = finds(choice, name, root, frozen=frozen)
    return not _found[key]


def finds(choice: Choice, name: str, root: Path, *, frozen: bool = False) -> bool:
    """Return whether the check raises its alarm over this exchange, or the site stops over it."""
    site = make_site(choice)
    victim, voter = victim_of(0, site, choice)
    base = run(World(site), site, root / "base", choice, frozen=frozen)
    try:
        other = run(EXCHANGES[name](site, victim), site, root / "other", choice, frozen=frozen)
        if frozen:
            check_steps(base, other, voter=voter, name=name)
            own = run(alone(site, victim), site, root / "alone", choice, frozen=True)
            check_adds_up(base, other, own, voter=voter)
        else:
            check(base, other, voter=voter, choice=choice, name=name)
    except (AssertionError, InvalidInput):
        return True
    return False


def chosen(index: int, **options: object) -> Choice:
    return CONFIGURATIONS[index] | {name.replace("__", "."): value for name, value in options.items()}


TWO = {"PrivacyConfig.voters_per_site": 2}
"""The fewest voters at which one can move another. If one silences both, the sum stays within the charge."""
PATCHED = chosen(FAST[1], TrainingConfig__patch=(8, 8, 8)) | {"scans of a patient": 3} | TWO
THREE = chosen(FAST[0])
PLAIN = THREE | TWO
MAC = chosen(FAST[1], PrivateSettings__strategy="dp-mac", PrivateSettings__chunk=4) | TWO
SEALED = chosen(FAST[0], PrivacyConfig__aggregation="sealed-sum", PrivacyConfig__voters_per_site=1)


def test_patches_drawn_by_row_number_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_row(self: Patients, turn: int, slot: int, scan: int) -> np.random.Generator:
        return np.random.default_rng([turn, self._rows[slot][scan % len(self._rows[slot])], scan])

    assert passes(PATCHED, "cannot be read", tmp_path / "true", frozen=True)
    monkeypatch.setattr(Patients, "_draws", by_row)
    assert finds(PATCHED, "cannot be read", tmp_path / "fault", frozen=True)


def test_chunks_as_large_as_the_filled_slots_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Patients.chunks

    def filled(self: Patients, batch: np.ndarray, size: int, *, turn: int = 0) -> Iterator[Chunk]:
        return real(self, batch, max(1, int(np.isin(batch, list(self._rows)).sum())), turn=turn)

    choice = PATCHED | {"TrainingConfig.patch": (), "PrivacyConfig.voters_per_site": 1}
    assert passes(choice, "not finite", tmp_path / "true", frozen=True)
    monkeypatch.setattr(Patients, "chunks", filled)
    assert finds(choice, "not finite", tmp_path / "fault", frozen=True)


def test_one_patient_moves_a_step_of_dp_mac_by_no_more_than_is_charged(tmp_path: Path) -> None:
    """Over all blocks, a removed patient moves the sum by R, an exchanged one by 2R. Other patients' vectors do not
    change.
    """
    site = make_site(MAC)
    victim, voter = victim_of(0, site, MAC)
    base, own = (
        run(world, site, tmp_path / name, MAC, frozen=True)
        for world, name in ((World(site), "base"), (alone(site, victim), "alone"))
    )
    assert any(norm(step) > 0 for step in base.steps[voter])
    for name in ("exchanged", "cannot be read"):
        other = run(EXCHANGES[name](site, victim), site, tmp_path / name.replace(" ", "-"), MAC, frozen=True)
        check_steps(base, other, voter=voter, name=name)
        if name in GONE:
            check_adds_up(base, other, own, voter=voter)


def test_coordinates_kept_from_one_patient_to_the_next_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Z-step that starts where the last patient's ended is faster, but one patient then moves the vectors
    of others.
    """
    real, kept = mac.coordinates, {}

    def warm(blocks: Blocks, each: mac.Each, weights: Weights, patches: torch.Tensor, *rest: object) -> object:
        z = real(blocks, each, weights, patches + 0.1 * kept.get("last", 0.0), *rest)  # type: ignore[arg-type]
        kept["last"] = patches.mean()
        return z

    choice = MAC | {"PrivacyConfig.voters_per_site": 1}
    assert passes(choice, "cannot be read", tmp_path / "true", frozen=True)
    monkeypatch.setattr(mac, "per_patient", one_at_a_time)
    monkeypatch.setattr(mac, "coordinates", warm)
    assert finds(choice, "cannot be read", tmp_path / "fault", frozen=True)


def test_one_voters_failure_that_silences_all_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Worker._code

    def unguarded(self: Worker, ask: Ask, *rest: object) -> object:
        try:
            return real(self, ask, *rest)  # type: ignore[arg-type]
        except Exception as error:
            raise SystemExit from error  # not caught by the handler of one voter

    def whole(self: Worker, query: QuerySpec) -> tuple[np.ndarray, str]:
        try:
            return answer(self, query)
        except SystemExit:
            return np.zeros(query.mechanism.dimension, dtype=np.int64), "zero-code"

    assert passes(THREE, "ends its answer", tmp_path / "true")
    answer = Worker._answer
    monkeypatch.setattr(Worker, "_code", unguarded)
    monkeypatch.setattr(Worker, "_answer", whole)
    assert finds(THREE, "ends its answer", tmp_path / "fault")


def test_a_copied_scan_that_stops_a_site_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(dataset: Dataset) -> Dataset:
        found = counted_once(dataset)
        if found.doubled:
            raise InvalidInput("one scan under two patients would count twice")
        return found

    assert passes(PLAIN, "a copy of another patient", tmp_path / "true")
    monkeypatch.setattr(layouts, "counted_once", strict)
    assert finds(PLAIN, "a copy of another patient", tmp_path / "fault")


def test_a_crashed_training_that_stops_a_site_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = worlds.load_teachers

    def strict(folder: Path, study: Study) -> Teachers:
        if len(list(folder.glob("voter-*/train.json"))) < study.privacy.voters_per_site:
            raise InvalidInput("teachers are not numbered from 0 without a gap")
        return real(folder, study)

    assert passes(PLAIN, "ends its training", tmp_path / "true")
    monkeypatch.setattr(worlds, "load_teachers", strict)
    assert finds(PLAIN, "ends its training", tmp_path / "fault")


def test_a_deal_by_a_known_seed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_known_seed(order: Sequence[str], *, voters: int) -> Slots:
        return deal(order, voters=voters, seed=3, shuffle=by_seed(3))

    assert passes(PLAIN, "another patient", tmp_path / "true")
    monkeypatch.setattr(worlds, "dealt", by_known_seed)
    assert finds(PLAIN, "another patient", tmp_path / "fault")


def test_a_share_of_noise_that_reads_the_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spared(code: np.ndarray, query: QuerySpec, share: Fraction, **rest: object) -> np.ndarray:
        return masked_code(code, query, share if code.any() else Fraction(0), **rest)  # type: ignore[arg-type]

    assert passes(SEALED, "ends its answer", tmp_path / "true")
    monkeypatch.setattr("client.worker.masked_code", spared)
    assert finds(SEALED, "ends its answer", tmp_path / "fault")


def test_a_code_that_grows_under_its_masks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(code: np.ndarray, query: QuerySpec, share: Fraction, **rest: object) -> np.ndarray:
        return masked_code(64 * code, query, share, **rest)  # type: ignore[arg-type]

    assert passes(SEALED, "exchanged", tmp_path / "true")
    monkeypatch.setattr("client.worker.masked_code", grown)
    assert finds(SEALED, "exchanged", tmp_path / "fault")


def test_a_word_on_an_offer_that_depends_on_a_voter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Worker._offered

    def after_a_look(self: Worker, offer: Offer) -> OfferReply:
        try:
            [ask() for volume in offer.queries[0].volumes for ask in self._voters.predict(self._fetch(volume))]
        except MemoryError:
            return replace(real(self, offer), last_draw=None)
        return real(self, offer)

    assert passes(SEALED, "ends its answer", tmp_path / "true")
    monkeypatch.setattr(Worker, "_offered", after_a_look)
    assert finds(SEALED, "ends its answer", tmp_path / "fault")
