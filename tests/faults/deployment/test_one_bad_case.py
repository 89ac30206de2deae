"""Tests a site with one bad case in a hundred, over the real commands and daemons.

The site trains on the other ninety-nine cases and takes part. Its administrator sees which case is bad, and why. The
server learns neither the case's name nor the number of bad cases. It learns the number only if the site's policy shares
it and the administrator hands it over.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.config import CodecConfig, TrainingConfig
from common.data.dataset import PatientIdentity
from common.data.msd import Case, write_dataset
from common.data.synthetic import study_data, write_phantoms
from consilium.demo.federation import write_server, write_sites
from server.dashboard.app import Options
from server.dashboard.auth import Role, users_file
from server.ledger.server_ledger import Ledger
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.commands import run_here
from tests.e2e.daemons import running
from tests.server.dashboard.conftest import PASSWORD, looked_at
from tests.studies import made_study
from tests.worlds import make_study

pytestmark = pytest.mark.faults

CASES, QUERIES, BAD = 100, 2, "doe-041"


def write_data(root: Path) -> tuple[list[Case], tuple[str, ...], tuple[str, ...]]:
    """Write a hundred patients at north, one of them with half a file, and two at south; the others are public."""
    made = write_phantoms(root / "all", cases=CASES + 2 + QUERIES + 6, seed=3)
    named = [Case(f"doe-{i:03d}", case.image, case.label) for i, case in enumerate(made.cases)]
    for site, part in (("north", named[:CASES]), ("south", named[CASES : CASES + 2])):
        write_dataset(root / "data" / site, name=site, labels=made.labels, channels=made.channels, cases=part)
    image = root / "data" / "north" / "imagesTr" / f"{BAD}.nii.gz"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    return named[CASES + 2 :], made.labels, made.channels


def test_one_bad_case_in_a_hundred_stops_nothing_and_is_known_to_its_site_only(tmp_path: Path) -> None:
    public, _, _ = write_data(tmp_path)
    recipe = TrainingConfig(channels=(4, 8), steps=4)
    codec = CodecConfig(augmentations=20, max_dimension=8)
    study = make_study(data=study_data(2), planned_queries=QUERIES, codec=codec, teacher=recipe, student=recipe)
    workspace = made_study(tmp_path / "server", study)
    setup.publish_volumes(workspace, [case.image for case in public[:QUERIES]])
    setup.fit_study_codec(workspace, [case.label for case in public[QUERIES:] if case.label is not None], sites=2)
    write_server(workspace)
    sites = write_sites(workspace, tmp_path / "sites", names=["north", "south"], data=tmp_path / "data")
    north = str(sites["north"])

    doctor = run_here("site", "doctor", "--site-dir", north, "--data", str(tmp_path / "data" / "north"))
    assert re.search(rf"\({BAD}\): .*damaged", doctor.stdout)
    for directory in sites.values():
        agreed = run_here("site", "consent", "--site-dir", str(directory), "--by", "Ada", "--yes")
        assert agreed.returncode == 0, agreed.stderr
        trained = run_here("site", "train", "--site-dir", str(directory), "--jobs", "1")
        assert trained.returncode == 0, trained.stderr
        if directory == sites["north"]:
            assert re.search(f"{BAD}: .*damaged; to fix: ", trained.stdout)
    report = json.loads((sites["north"] / "teachers" / "voter-000" / "train.json").read_text())["report"]
    assert (report["trained_on"] + report["held_out"], report["empty_slots"]) == (CASES - 1, 1)
    shown = json.loads(run_here("site", "cases", "--site-dir", north, "--json").stdout)
    assert [one["case"] for one in shown["left_out"]] == [BAD]

    with running(workspace, sites):
        done = run_here("study", "run", str(workspace.root), "--json")
        assert done.returncode == 0, done.stderr
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
        assert len(answers) == QUERIES
        assert all(ledger.spent(f"{site}/patients").releases == QUERIES for site in sites)

    refused = run_here("site", "cases", "--site-dir", north, "--for-server")
    assert (refused.returncode, refused.stdout) == (6, "")
    status = run_here("site", "status", "--site-dir", north, "--json").stdout
    assert json.loads(status)["shared"] == {}
    for path in (path for path in tmp_path.joinpath("server").rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert b"doe-0" not in content, path
        # The app's code has these names without numbers.
        assert not re.search(rb'cases_[a-z_]+"?: *[0-9]', content), path
    assert "cases_left_out" not in sites_page(workspace, tmp_path / "before", status)

    with (sites["north"] / "site.toml").open("a") as policy:
        policy.write("\n[share]\ncase_counts = true\n")
    told = json.loads(run_here("site", "cases", "--site-dir", north, "--for-server").stdout)
    assert (told["cases_listed"], told["cases_left_out"]) == (CASES, 1)
    status = run_here("site", "status", "--site-dir", north, "--json").stdout
    page = sites_page(workspace, tmp_path / "after", status)
    assert "<dt>cases_left_out</dt><dd>1</dd>" in page
    assert PatientIdentity.FILE.sentence in page
    assert "doe-" not in page + status


def sites_page(workspace: Workspace, state: Path, status: str) -> str:
    """Return the operator's page about the sites, after north has handed over this status."""
    (workspace.root / "site-reports").mkdir(exist_ok=True)
    (workspace.root / "site-reports" / "north.json").write_text(status)
    state.mkdir()
    users_file(state).add("ada", Role.OPERATOR, PASSWORD)
    with looked_at(Options(study=workspace.root, state=state)) as client:
        return client.get("/sites").text
