"""Tests, over random histories of a hospital's ledger, that every text about the site states what happened.

What is true is written down where it happens, and ε has formulas of its own (``tests/server/printed/truth.py``). A life
may end with an older copy of the ledger: then every text says ``at least``.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.operations import staff_decisions
from client.policy import load_site
from client.site.books import open_books
from client.worker import shared_status
from common.config import Study, load_study
from common.data.dataset import PatientIdentity
from common.ledger.teacher_records import TrainingRecord
from common.privacy.training import Sampling, TrainingEvent
from common.site_facts import SiteFacts
from consilium.cli.site import site_app
from consilium.reports.certificate import certificate_facts
from consilium.reports.certificate_paper import certificate_paper
from server.dashboard.app import Options
from server.dashboard.hospital import create_hospital_app
from server.study.workspace import Site, Workspace
from tests.own_site import make_own_site, page_of, queries_of
from tests.server.dashboard.conftest import TestClient, glance
from tests.server.printed.truth import ACCOUNTANTS, cost, epsilon

pytestmark = pytest.mark.slow

ACTS = ("accept", "accept", "accept", "decline", "pause", "resume", "train", "withdraw patient", "identify", "other")
DELTA, CAP, LIVES = 1e-3, 8.0, 3
STATES_PATIENTS = {"site status", "site status --json", "own page", "/api/sites"}
CALLS = CliRunner()


@dataclass
class Truth:
    """Holds what happened: Σμ² and answers by study, refusals, decisions, trainings of patients, withdrawals."""

    spent: dict[str, Fraction] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    paused: bool = False
    trained: Fraction = Fraction(0)
    trainings: int = 0
    patients: int = 0
    doubt: bool = False

    @property
    def total(self) -> Fraction:
        return sum(self.spent.values(), start=Fraction(0))

    @property
    def answers(self) -> int:
        return sum(self.accepted.values())


class Life:
    """Acts on a hospital's directory and on the study's directory at the consortium."""

    def __init__(self, seed: int, root: Path) -> None:
        root.mkdir()
        self.random, self.site, self.truth = random.Random(seed), make_own_site(root, "consented"), Truth()
        self.study = load_study(self.site / "study.toml")
        self.other = replace(self.study, name="older")
        self.workspace, self.root = Workspace(root / "study"), root
        self.workspace.save_sites((Site("north", "north", 7),))
        for act in (self.random.choice(ACTS) for _ in range(9)):
            self.act(act)
        if seed % 3 == 2:
            self.restore()

    def act(self, act: str) -> None:
        truth, books = self.truth, open_books(load_site(self.site))
        with books as ledger:
            if act == "accept" and not truth.paused:
                self.accept(self.study)
            elif act == "other":
                ledger.consent(self.other)
                self.accept(self.other)
            elif act == "decline":
                words = ("not-allowed", "daily-cap", "coordinates")  # one row a day for each
                if truth.refused < len(words):
                    ledger.refuse(self.study.id, queries_of(self.study, 1), words[truth.refused])
                    truth.refused += 1
            elif act in ("pause", "resume"):
                ledger.decide(self.study.id, act)
                truth.paused = act == "pause"
            elif act == "train":
                event = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1, 2), Fraction(4), 8)
                truth.trainings += 1
                name = f"{truth.trainings:064x}"
                ledger.record_training(TrainingRecord(name, 0, "d" * 64, "dp-sgd", (event,)))
                truth.trained += 4 * Fraction(8, 2) / 16  # E/z², at four times that for an exchanged patient
            elif act == "withdraw patient":
                truth.patients += 1
                ledger.withdraw_patient(slot=truth.patients, voter=0, subject=f"{truth.patients:064x}", weights=None)
            elif act == "identify":
                ledger.state_identity(PatientIdentity.TABLE)

    def accept(self, study: Study) -> None:
        """Accept one more query, while both budgets have room."""
        truth, of = self.truth, study.id
        query = queries_of(study, truth.answers + 1)[-1]
        one = cost(query.mechanism.to_json(), unit="hospital", relation="replace-one", study_unit="hospital")
        if truth.answers == 8:
            return
        with open_books(load_site(self.site)) as ledger:
            ledger.reserve(of, [query])
        truth.accepted[of] = truth.accepted.get(of, 0) + 1
        truth.spent[of] = truth.spent.get(of, Fraction(0)) + one

    def restore(self) -> None:
        """Put an older copy of the ledger back without recovering it."""
        path = load_site(self.site).ledger_file
        kept, truth = path.read_bytes(), copy.deepcopy(self.truth)
        with open_books(load_site(self.site)) as ledger:
            ledger.note("what the copy lacks")
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.write_bytes(kept)
        self.truth, self.truth.doubt = truth, True


# --- the texts, each as what it says


@dataclass(frozen=True)
class Told:
    """Holds the figures that a text states about a site; None for a figure that it does not state."""

    where: str
    spent: dict[str, str]
    cap: str
    least: bool
    accepted: str
    refused: str | None = None
    receipted: str | None = None
    withdrawn: str | None = None
    share: str | None = None
    state: str | None = None
    patient: str | None = None
    consented: bool | None = None


def found(pattern: str, text: str) -> tuple[str, ...]:
    got = re.search(pattern, text, re.DOTALL)
    assert got, f"{pattern} is not in: {text[:3000]}"
    return got.groups()


def command(*more: str, site: Path) -> str:
    done = CALLS.invoke(site_app, ["status", "--site-dir", str(site), *more])
    assert done.exit_code == 0, done.output
    return done.stdout


WORDS = {"paused": "pause", "withdrawn": "withdraw", "stopped by an alarm": "alarm"}
"""Words for each reason that stops a study (a decision of the staff or an alarm), by the reason's name in a report."""
STATE = "(stopped by an alarm|\\w+)"


def terminal(life: Life) -> Told:
    text = command(site=life.site)
    (cap,) = found(r"the pool's cap: ε = (\S+) \(exact\)", text)
    accepted, receipted, refused = found(r"queries accepted: (\d+),.* receipted (\d+), refusals (\d+)", text)
    spent = dict(re.findall(r"(?m)^  ε = \S+ \((\w+)\)()", text))
    spent = {name: found(rf"(?m)^  ε = (\S+) \({name}\) at δ = 0.001, unit hospital", text)[0] for name in spent}
    least, share = found(r"which is (at least )?(\S+)% of the cap", text)
    (withdrawn,) = found(r"patients withdrawn: (?:at least )?(\d+)", text)
    (state,) = found(rf"  trial \(\w+…\): {STATE}", text)
    patient = re.search(r"each patient: ε = (\S+) at δ = 0.001, unit patient, relation replace-one \(training\)", text)
    assert bool(least) == bool(re.search("spent.*at least:", text))
    return Told(
        "site status",
        spent,
        cap,
        bool(least),
        accepted,
        refused,
        receipted,
        withdrawn,
        share,
        state,
        patient and patient[1],
        "UTC: A. Noether" in text,
    )


def document(said: dict[str, Any], where: str) -> Told:
    whole = "trainings" in said
    guarantees = said["trainings"]["guarantees"] if whole and said["trainings"]["count"] else []
    patient = [one["epsilon"] for one in guarantees if one and one["relation"] == "replace-one"]
    return Told(
        where,
        {name: str(one["epsilon"]) for name, one in said["spent"].items()},
        str(said["cap"]["epsilon"]),
        "at_least" in said,
        str(said["queries_accepted"]),
        str(said["refusals"]),
        str(said["receipted"]),
        share=str(100 * said["share_spent"]) if whole else None,
        state=next(one["state"] for one in said["studies"] if one["name"] == "trial") if whole else None,
        patient=str(patient[0]) if patient else None,
    )


def shared(life: Life) -> Told:
    with open_books(load_site(life.site)) as ledger:
        return document(json.loads(shared_status("north", ledger)), "shared account")


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\u202f", " ").replace("\xa0", " ").split())


def own_page(life: Life) -> Told:
    client = TestClient(create_hospital_app(page_of(life.site), key="k" * 32), base_url="http://localhost")
    text = words(client.get(f"/?key={'k' * 32}").text)
    figure = r"(at least )?ε (\S+) of (\S+) spent (?:at least )?(\d+) quer(?:y|ies) accepted"
    least, spent, cap, accepted = found(figure, text)
    again, receipted, refused = found(
        r"(\d+) quer(?:y|ies) accepted, receipts for (?:at least )?(\d+), (\d+) offers? declined", text
    )
    assert again == accepted
    (withdrawn,) = found(r"(\d+) withdrawals? of patients on record", text)
    state, queries, _ = found(rf"trial \(this one\) {STATE} (?:at least )?(\d+) .*? (\d+(?:\.\d+)?) %", text)
    assert int(queries) == life.truth.accepted.get(life.study.id, 0)
    patient = re.search(r"Each patient: ε = (\S+) at δ = 0.001, unit patient, relation replace-one \(training\)", text)
    return Told(
        "own page",
        {"exact": spent},
        cap,
        bool(least),
        accepted,
        refused,
        receipted,
        withdrawn=withdrawn,
        state=state,
        patient=patient and patient[1],
        consented="UTC: A. Noether" in text,
    )


def handed_over(life: Life) -> Iterator[Told]:
    """Yield what the consortium shows of the site's printed report: on its Sites page, in its API, in its
    certificate.
    """
    life.workspace.reports_dir.mkdir(exist_ok=True)
    (life.workspace.reports_dir / "north.json").write_text(command("--json", site=life.site))
    client = glance(Options(study=life.workspace.root, state=life.root / "state"))
    least, spent, cap, accepted, receipted = found(
        r"Its own ledger (at least )?ε (\S+) spent of its cap (\S+) \(exact\), "
        r"(\d+) queries accepted, receipts for (\d+)",
        words(client.get("/sites").text),
    )
    yield Told("/sites", {"exact": spent}, cap, bool(least), accepted, receipted=receipted)
    (entry,) = client.get("/api/sites").json()
    report = entry["report"]
    yield Told(
        "/api/sites",
        {"exact": str(report["spent_epsilon"])},
        str(report["cap_epsilon"]),
        report["at_least"],
        str(report["queries_accepted"]),
        receipted=str(report["receipted"]),
        patient=next((found(r"ε = (\S+) ", line)[0] for line in report["patient"] if "one (training)" in line), None),
    )
    facts = certificate_facts(life.workspace)
    yield document(facts["sites"][0], "certificate.json")
    paper = certificate_paper(facts, document_sha256="0" * 64)
    (section,) = (one for one in paper.sections if one.heading == "The hospitals' own figures")
    _, row = section.rows
    least, spent, cap = found(r"(at least )?ε = (\S+) of (\S+) \(exact\)", row[1])
    accepted, _, receipted = row[2].partition(" / ")
    yield Told("certificate", {"exact": spent}, cap, bool(least), accepted, receipted=receipted)


# --- against what happened


def hold(life: Life) -> set[str]:
    truth, seen = life.truth, set()
    status = json.loads(command("--json", site=life.site))
    told = [terminal(life), document(status, "site status --json"), own_page(life), *handed_over(life)]
    told += [] if truth.doubt else [shared(life)]
    for one in told:
        seen.add(one.where)
        assert float(one.cap) == CAP, one
        assert one.least == truth.doubt, f"{one.where}: at least"
        for name, value in one.spent.items():
            close(float(value), epsilon(name, truth.total, DELTA), f"{one.where}: {name}")
        assert set(one.spent) in ({"exact"}, set(ACCOUNTANTS)), one
        assert int(one.accepted) == truth.answers, one
        assert one.refused in (None, str(truth.refused)), one
        assert one.receipted == "0", one
        assert one.withdrawn in (None, str(truth.patients)), one
        assert WORDS.get(one.state, one.state) in (None, standing(life)), one
        assert one.consented in (None, True), one
        if one.share is not None:
            limit = truth.total and truth.total / truth.answers * 8  # eight queries take the whole of either budget
            assert float(one.share) == pytest.approx(100 * float(truth.total / limit) if limit else 0, abs=0.011), one
        if one.patient is not None:
            close(float(one.patient), epsilon("exact", truth.trained, DELTA), f"{one.where}: each patient")
    if truth.trainings and not truth.doubt:
        assert {one.where for one in told if one.patient} == STATES_PATIENTS
    assert status.keys().isdisjoint({"withdrawn", "consents", "patients_withdrawn"})
    account = SiteFacts.from_json(status).account()
    assert account == {name: status[name] for name in account}
    return seen


def standing(life: Life) -> str:
    if life.truth.paused:
        return "pause"
    if life.truth.doubt:
        return "alarm"
    return "spent" if life.truth.answers == 8 and life.truth.accepted.get(life.study.id) else "open"


def close(said: float, true: float, where: str) -> None:
    assert true * (1 - 1e-6) <= said <= true * (1 + 2e-3) + 1e-3, f"{where}: {said} for {true}"


@pytest.mark.parametrize("seed", range(LIVES))
def test_every_text_about_a_site_says_what_its_books_come_to(tmp_path: Path, seed: int) -> None:
    assert len(hold(Life(seed, tmp_path / "life"))) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LIVES, LIVES + 20))
def test_every_text_about_a_site_says_so_over_many_more_lives(tmp_path: Path, seed: int) -> None:
    hold(Life(seed, tmp_path / "life"))


def test_a_text_that_counts_for_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(0, tmp_path / "life")
    monkeypatch.setattr(SiteFacts, "least", property(lambda self: "at least "))
    with pytest.raises(AssertionError):
        hold(life)


def test_consent_names_who_gave_it(tmp_path: Path) -> None:
    life = Life(0, tmp_path / "life")
    staff_decisions.consent(life.site, by="E. Artin", sheet="the sheet")
    text = command(site=life.site)
    assert len(re.findall(r"UTC: (?:A\. Noether|E\. Artin)", text)) == 2
