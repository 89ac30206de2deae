"""Writes the site that an adaptation reads: a pulled student, patients and public volumes, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from client.policy import load_site
from client.site.books import open_books
from common.config import Study, load_study
from common.data.msd import write_dataset
from common.models.bundle_facts import BundlePrivacy
from common.models.student_bundle import export_bundle
from common.models.unet import network_for
from common.objects import ObjectStore
from common.privacy.mechanism import AccountantName, Protection, Relation, Unit
from tests.common.ledger.ledger_world import make_mechanism, make_query
from tests.worlds import DATA, site_toml, study_toml, write_case

STUDY = study_toml("front", "back", grid=DATA.grid) + "[student]\nchannels = [4, 8]\nsteps = 4\nbatch_size = 1\n"


def facts_of(study: Study) -> BundlePrivacy:
    """Return the privacy facts that a bundle would state for the student of a study that was never run."""
    return BundlePrivacy(
        budget_epsilon=8.0,
        epsilon_exact=7.99,
        epsilon_rdp=8.87,
        delta=1e-3,
        protection=Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE),
        accountant=AccountantName.EXACT,
        noise_multiplier=1.92,
        queries=16,
        sites=8,
        voters_per_site=1,
        ledger_head="a" * 64,
        study=study.id,
        codec="c" * 64,
    )


def write_site(directory: Path, *, patients: int, scans: int = 1) -> Path:
    """Lay out a site in ``directory``: site.toml, study.toml, patients of so many scans each, and a student."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "site.toml").write_text(site_toml(data="set", delta=1e-5))
    (directory / "study.toml").write_text(STUDY)
    study = load_study(directory / "study.toml")
    names = [f"p{i}s{j}" for i in range(patients) for j in range(scans)]
    cases = [write_case(directory / "raw", name, seed) for seed, name in enumerate(names)]
    write_dataset(directory / "set", name="own", labels=DATA.labels, channels=("MRI",), cases=cases)
    table = ["case_id,patient_id", *(f"{name},{name.partition('s')[0]}" for name in names)]
    (directory / "set" / "patients.csv").write_text("\n".join(table) + "\n")
    export_bundle(directory / "student" / "bundle", study=study, model=student(study), privacy=facts_of(study))
    return directory


def student(study: Study) -> torch.nn.Module:
    """Return the student that :func:`write_site` stores."""
    return network_for(study.student, study.data, seed=5).eval()


def privacy_of(bundle: Path) -> dict[str, object]:
    """Return the privacy facts that a bundle states."""
    found: dict[str, object] = json.loads((bundle / "configs" / "privacy.json").read_text())
    return found


def ask(directory: Path, *, volumes: int, study: Study | None = None) -> list[str]:
    """Enter an accepted query about public volumes into the site's ledger, and put the volumes into its cache."""
    store = ObjectStore(directory / "cache")
    names = []
    for number in range(volumes):
        case = write_case(directory / "public", f"v{number}", 900 + number)
        names.append(store.put(case.image.read_bytes()))
    asked = study or load_study(directory / "study.toml")
    query = replace(make_query(1, make_mechanism(room_for=12)), volumes=tuple(names))
    with open_books(load_site(directory)) as ledger:
        ledger.consent(asked)
        ledger.reserve(asked.id, [query])
    return names
