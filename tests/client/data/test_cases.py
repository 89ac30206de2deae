"""Tests one bad case in a hundred: the site trains on ninety-nine, and its administrator sees which failed and why."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from client.data.cases import counts_for_server, load_cases, record_cases
from client.ledger.site_ledger import SiteLedger
from client.operations.serve import open_worker
from client.operations.staff_decisions import consent
from client.policy import load_site
from common.data.dataset import Dataset, DuplicateCases, PatientIdentity
from common.data.msd import Case, write_dataset
from common.errors import InvalidInput, Refused
from common.pki import create_authority, create_node_keys
from consilium.cli.main import app
from consilium.cli.site import site_app
from server.dashboard.reports import read_reports
from server.ledger.verify import verify
from tests.commands import typed
from tests.trained_sites import one_after_another
from tests.worlds import site_toml, study_toml

pytestmark = pytest.mark.slow

TEACHER = "channels = [2, 4]\nsteps = 2\nbatch_size = 1"
STUDY = study_toml("core", teacher=TEACHER)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    """Train all voters in this process; other tests cover a process for each voter, which must load torch anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("client.training.command.side_by_side", one_after_another)
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    cases = []
    for i in range(100):
        rng = np.random.default_rng(i)
        labels = np.zeros((8, 8, 8), dtype=np.uint8)
        labels[2:6, 2:6, 2:5] = 1
        paths = [root / "raw" / f"doe-{i:03d}-{kind}.nii.gz" for kind in ("image", "label")]
        for path, array in zip(paths, (rng.integers(20, 90, (8, 8, 8)).astype(np.int16), labels), strict=True):
            path.parent.mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(f"doe-{i:03d}", *paths))
    dataset = write_dataset(root / "set", name="n", labels=["background", "core"], channels=["MRI"], cases=cases)
    whole = dataset.cases[41].image.read_bytes()
    dataset.cases[41].image.write_bytes(whole[: len(whole) // 2])
    (root / "study.toml").write_text(STUDY)
    (root / "site.toml").write_text(site_toml())
    consent(root, by="Ada", sheet="")
    done = typed(site_app, "train", "--site-dir", root, "--jobs", "1")
    (root / "train.out").write_text(done.stdout)
    return root


def run(*arguments: str) -> str:
    return CliRunner().invoke(site_app, [*arguments], catch_exceptions=False).stdout


def test_the_site_trains_on_the_other_ninety_nine(site: Path) -> None:
    report = json.loads((site / "teachers" / "voter-000" / "train.json").read_text())["report"]
    assert report["trained_on"] + report["held_out"] == 99
    assert report["empty_slots"] == 1


def test_the_administrator_sees_which_case_and_why(site: Path) -> None:
    for text in (run("cases", "--site-dir", str(site)), (site / "train.out").read_text()):
        assert re.search(r"doe-041: .*damaged.*; to fix: ", text)
        assert text.count("doe-") == 1
    facts = json.loads(run("cases", "--site-dir", str(site), "--json"))
    assert [problem["case"] for problem in facts["left_out"]] == ["doe-041"]
    assert (site / "teachers" / "cases.json").stat().st_mode & 0o077 == 0


def test_the_record_states_what_counts_as_one_patient(site: Path) -> None:
    record = load_cases(site)
    assert (record.listed, record.patients, record.left_out) == (100, 100, 1)
    assert record.patient_identity == "file"
    assert PatientIdentity.FILE.sentence in run("cases", "--site-dir", str(site))


def test_where_every_file_is_a_patient_the_sites_ledger_says_so_before_it_accepts_anything(
    site: Path, tmp_path: Path
) -> None:
    place = tmp_path / "site"
    shutil.copytree(site, place)
    shutil.copy(create_authority(tmp_path / "authority").certificate, place / "ca.crt")
    create_node_keys(place / "node" / "keys")
    open_worker(place)._ledger.close()
    with SiteLedger.read(place / "site-ledger.sqlite") as ledger:
        kinds = [row.kind for row in ledger.rows()]
    assert kinds == ["genesis", "pool", "study", "note", "identity", "deal", "training", "trained", "teachers"]
    assert verify(place / "site-ledger.sqlite").ok
    (stated,) = json.loads(run("status", "--site-dir", str(place), "--json"))["patient_identity"]
    assert (stated["row"], stated["identity"]) == (5, "file")
    shown = run("status", "--site-dir", str(place))
    assert re.search(r"daemons: `consilium site up` .*none", shown)
    assert "row 5 " in shown


def test_a_table_of_patients_given_later_adds_one_row_and_the_same_again_none(site: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    shutil.copytree(site, place, ignore=shutil.ignore_patterns("*.sqlite*", "*.key", "*.standing"))
    with SiteLedger.open(place / "site-ledger.sqlite", "north", caps=load_site(place).caps, site="north") as ledger:
        ledger.state_identity(PatientIdentity.FILE)
        ledger.state_identity(PatientIdentity.FILE)
    table = ["case_id,patient_id", *(f"doe-{i:03d},doe-{i:03d}" for i in range(100))]
    (place / "set" / "patients.csv").write_text("\n".join(table))
    consent(place, by="Ada", sheet="")
    run("train", "--site-dir", str(place), "--jobs", "1")
    stated = json.loads(run("status", "--site-dir", str(place), "--json"))["patient_identity"]
    assert [one["identity"] for one in stated] == ["file", "table"]


def test_the_operator_sees_a_count_only_where_the_policy_shares_it_and_never_a_name(site: Path) -> None:
    with pytest.raises(Refused, match="does not share"):
        counts_for_server(site)
    own = (site / "site.toml").read_text()
    (site / "site.toml").write_text(own + "[share]\ncase_counts = true\n")
    counts = json.loads(run("cases", "--site-dir", str(site), "--for-server"))
    (site / "site.toml").write_text(own)
    assert counts == {
        "site": "north",
        "cases_listed": 100,
        "cases_left_out": 1,
        "patients": 100,
        "patient_identity": "file",
    }


def test_the_status_a_hospital_hands_over_carries_the_counts_only_where_its_policy_shares_them(site: Path) -> None:
    own = (site / "site.toml").read_text()
    SiteLedger.open(site / "site-ledger.sqlite", "north", caps=load_site(site).caps, site="north").close()
    silent = run("status", "--site-dir", str(site), "--json")
    (site / "site.toml").write_text(own + "[share]\ncase_counts = true\n")
    told = run("status", "--site-dir", str(site), "--json")
    (site / "site.toml").write_text(own)
    assert "cases" not in silent
    assert json.loads(silent)["shared"] == {}
    assert json.loads(told)["shared"]["cases_left_out"] == 1
    assert "doe-" not in told
    reports = site / "site-reports"
    reports.mkdir()
    (reports / "north.json").write_text(told)
    shown = {figure.name: figure.value for figure in read_reports(reports)["north"].shared}
    assert (shown["cases_listed"], shown["cases_left_out"]) == ("100", "1")


def test_one_scan_under_two_patients_stands_in_the_record_until_it_is_repaired(tmp_path: Path) -> None:
    dataset = Dataset(
        name="n",
        labels=("background", "core"),
        channels=("MRI",),
        cases=(),
        listed=("p0", "p1"),
        doubled=(DuplicateCases("p1", same_as="p0"),),
    )
    written = record_cases(tmp_path / "teachers", dataset, [])
    assert load_cases(tmp_path) == written
    for option in ([], ["--json"]):
        told = run("cases", "--site-dir", str(tmp_path), *option)
        assert "p0" in told
        assert "p1" in told
    path = tmp_path / "teachers" / "cases.json"
    document = json.loads(path.read_text())
    del document["doubled"]  # as an earlier version wrote it
    path.write_text(json.dumps(document))
    assert load_cases(tmp_path) == replace(written, doubled=())


def test_the_cases_without_a_label_map_are_named_by_site_cases_and_not_only_by_the_doctor(tmp_path: Path) -> None:
    cases = (Case("p0", tmp_path / "i", tmp_path / "l"), Case("p1", tmp_path / "j"))
    dataset = Dataset("n", ("background", "core"), ("MRI",), cases, listed=("p0",))
    record = record_cases(tmp_path / "teachers", dataset, [])
    assert load_cases(tmp_path) == record
    assert (record.listed, record.left_out) == (1, 0), "they count as cases of the training no more than before"
    assert "no label map: p1" in run("cases", "--site-dir", str(tmp_path))
    assert json.loads(run("cases", "--site-dir", str(tmp_path), "--json"))["unlabelled"] == ["p1"]


def test_a_site_is_told_if_delta_is_large_for_its_patients_and_its_status_file_does_not_tell_how_many(
    site: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "study.toml").write_text(study_toml("core", teacher=TEACHER, delta=1e-2, unit="patient"))
    caps = site_toml(delta=1e-2, more="unit = 'patient'")
    (large / "site.toml").write_text(caps.replace('"set"', json.dumps(str(site / "set"))))
    consent(large, by="Ada", sheet="")
    warning = "δ = 0.01 is above 1/(10 · 100 patients)"
    trained = CliRunner().invoke(site_app, ["train", "--site-dir", str(large), "--jobs", "1"], catch_exceptions=False)
    assert f"warning, releases: {warning}" in trained.stderr
    SiteLedger.open(large / "site-ledger.sqlite", "north", caps=load_site(large).caps, site="north").close()
    assert f"warning: {warning}" in run("status", "--site-dir", str(large))
    assert not re.search(r"(?<![\w.-])100(?!\w)", run("status", "--site-dir", str(large), "--json"))
    assert "is above" not in run("status", "--site-dir", str(site))  # in unit hospital, δ has no such bound


def test_a_hospital_reads_the_plain_sentence_where_it_joins_before_it_sends_its_request(
    site: Path, tmp_path: Path
) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    addresses = {"objects_url": "https://pate.example.org", "superlink": "pate.example.org:9092"}
    keys = dict.fromkeys(("sealing_key", "signing_key"), "1" * 64)
    (kit / "kit.json").write_text(json.dumps({"site": "north", **keys, **addresses}))
    (kit / "study.toml").write_text(STUDY)
    shutil.copy(create_authority(tmp_path / "authority").certificate, kit / "ca.crt")
    said = run("init", "--kit", str(kit), "--data", str(site / "set"), "--site-dir", str(tmp_path / "new"))
    promise, request = said.index("right at most 85.2 % of the time"), said.index("request.json")
    assert promise < request
    for fact in ("ε = 8 (exact)", "δ = 0.001", "unit hospital", "relation replace-one", "50 %"):
        assert fact in said
    assert said.splitlines()[-1].startswith("SHA256:")
    pointed = re.search(r"how long it lasts, how to withdraw\).*`consilium (study show .* --for-site)`", said)
    assert pointed is not None
    shown = CliRunner().invoke(app, shlex.split(pointed[1])).stdout
    agreed = run("consent", "--site-dir", str(tmp_path / "new"), "--by", "Ada", "--yes")
    for words in ("WHO SEES WHAT", "Duration", "Withdrawal", "Kept", "`consilium site pause` at any time"):
        assert words in shown
        assert words in agreed
    (uncounted,) = (line for line in shown.splitlines() if line not in agreed.splitlines())
    assert uncounted.startswith("  Patients ")
    assert "--patients" in uncounted
    assert "`consilium site consent`" in uncounted


def test_without_a_training_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="site train"):
        load_cases(tmp_path)


def test_site_toml_says_how_the_data_is_to_be_read(site: Path, tmp_path: Path) -> None:
    more = '[dataset]\nlayout = "bids"\npatients = "p.csv"\n[labels]\n"17" = "core"\n[channels]\nT1w = "T1"\n'
    (tmp_path / "site.toml").write_text((site / "site.toml").read_text() + more)
    dataset = load_site(tmp_path).dataset
    assert (dataset.layout, dataset.patients) == ("bids", tmp_path / "p.csv")
    assert (dataset.labels, dataset.channels) == ({"17": "core"}, {"T1w": "T1"})
    for wrong, word in [
        ('[dataset]\nlayout = "x"\n', "layout"),
        ("[dataset]\ncolour = 1\n", "dataset"),
        ('[dataset]\ncolour = "1"\n', "unknown key"),
        ("[labels]\nx = 3\n", "labels"),
        ("[share]\neverything = true\n", "unknown key"),
    ]:
        (tmp_path / "site.toml").write_text((site / "site.toml").read_text() + wrong)
        with pytest.raises(InvalidInput, match=word):
            load_site(tmp_path)


def test_a_record_of_cases_that_is_not_there_or_not_readable_names_both_remedies(tmp_path: Path) -> None:
    """`site train` would not help against a mistyped path."""
    with pytest.raises(InvalidInput, match=r"check the path and who may read it.*site train"):
        load_cases(tmp_path / "typo")
