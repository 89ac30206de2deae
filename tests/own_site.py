"""Makes a hospital's directory for the tests of its own page: a site of a phantom study, in any of its states."""

from __future__ import annotations

import shutil
from pathlib import Path

from client.operations import staff_decisions
from client.operations.own_page import SitesOwnPage
from client.policy import load_site
from client.records.adapted_folder import FOLDER, NAME
from client.site.books import open_books
from client.site.enrolment import SiteKit, create_site
from client.teachers.pulled_student import STUDENT_DIR
from common.config import CodecConfig, Study, TrainingConfig, load_study
from common.data.msd import read_dataset
from common.data.synthetic import study_data
from common.models.bundle import SEEN_WEIGHTS
from common.models.bundle_facts import BundlePrivacy
from common.models.student_bundle import WEIGHTS, export_bundle
from common.models.unet import build_unet
from common.privacy.mechanism import AccountantName, QuerySpec
from server.protocols.query_protocol import query_about
from tests.dashboard_study import phantoms
from tests.studies import kit_without_keys, made_study
from tests.trained_sites import train_site
from tests.worlds import make_study

STATES = (
    "joined",
    "consented",
    "answering",
    "paused",
    "left",
    "spent",
    "alarm",
    "after-a-student",
    "after-a-withdrawal",
)
"""``joined`` without consent; ``left`` withdrew from the study; ``spent`` has no room for a query like its newest;
``alarm`` has an older copy of its ledger."""


def make_own_site(root: Path, state: str) -> Path:
    """Make the directory of a site in this state."""
    recipe = TrainingConfig(channels=(4, 8), steps=2)
    terms = {"planned_queries": 8, "quorum": 3, "codec": CodecConfig(), "teacher": recipe, "student": recipe}
    study = make_study(name="trial", data=study_data(2), **terms)
    workspace = made_study(root / "study", study)
    kit = SiteKit.load(kit_without_keys(workspace, root))
    phantoms(root / "data", 4, seed=5)
    site = root / "site"
    create_site(site, pool="north", data=root / "data", kit=kit)
    if state == "joined":
        return site
    staff_decisions.consent(site, by="A. Noether", sheet="the sheet")
    if state == "consented":
        return site
    ledger_file = load_site(site).ledger_file
    older = ledger_file.read_bytes()
    with open_books(load_site(site)) as ledger:
        asked = study.privacy.planned_queries if state == "spent" else 3
        ledger.reserve(study.id, queries_of(study, asked))
        ledger.refuse(study.id, queries_of(study, asked + 1)[asked:], "not-allowed")
        if state in ("paused", "left"):
            ledger.decide(study.id, {"paused": "pause", "left": "withdraw"}[state])
    if state == "alarm":
        ledger_file.write_bytes(older)
    if state.startswith("after-"):
        add_networks(site, load_study(site / "study.toml"))
    if state == "after-a-withdrawal":
        staff_decisions.withdraw_patient(site, read_dataset(root / "data").labelled[1].id)
    return site


def add_networks(site: Path, study: Study) -> None:
    """Add a student, an adapted network and teachers, with little or no training."""
    student = site / STUDENT_DIR / "bundle"
    privacy = BundlePrivacy(
        budget_epsilon=8.0,
        epsilon_exact=7.9,
        epsilon_rdp=8.4,
        delta=1e-3,
        protection=study.privacy.protection,
        accountant=AccountantName.EXACT,
        queries=8,
        noise_multiplier=1.0,
        sites=3,
        voters_per_site=1,
        ledger_head="a" * 64,
        study=study.id,
        codec="c" * 64,
    )
    export_bundle(
        student, study=study, model=build_unet((4, 8), in_channels=1, out_channels=3, seed=1), privacy=privacy
    )
    adapted = site / FOLDER / f"{NAME}-north"
    shutil.copytree(student, adapted)
    (adapted / WEIGHTS).rename(adapted / SEEN_WEIGHTS)
    train_site(
        read_dataset(site.parent / "data"), teachers=site / "teachers", data=study.data, recipe=study.teacher, voters=1
    )


def page_of(site: Path) -> SitesOwnPage:
    """Return the page of this site, with a sheet of one line."""
    return SitesOwnPage(site, sheet=lambda study, patients: f"sheet of {study.name}, {patients} patients")


def queries_of(study: Study, count: int) -> list[QuerySpec]:
    """Return queries about volumes that nobody has."""
    return [query_about(study, [f"{number:064x}"], codec="c" * 64, dimension=4) for number in range(count)]
