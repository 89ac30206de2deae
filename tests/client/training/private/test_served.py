"""Tests when a site's loss is the smaller of trainings and releases: only if all it served came from private
trainings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from client.ledger.site_ledger import SiteLedger
from client.operations.findings import State
from client.operations.readiness import _teachers
from client.operations.serve import open_worker
from client.operations.staff_decisions import consent, has_consented, withdraw_patient
from client.policy import load_site
from client.records.voter_files import voter_directory
from client.training.private.charge import record_trained, record_trainings
from client.training.private.settings import PrivateSettings
from client.training.site import plan_site
from client.training.task import SiteReport, VoterReport
from client.worker import Worker
from common.canonical import sha256_bytes
from common.config import Study, load_study
from common.data.msd import Case, Dataset, write_dataset
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.records import parse_body
from common.messages import CodesReply, CodesRequest, decode, encode
from common.pki import create_authority, create_node_keys
from common.privacy.mechanism import QuerySpec
from common.privacy.training import Neighbours
from common.study_mechanism import study_mechanism
from consilium.cli.site import site_app
from server.ledger.verify import verify
from tests.client.teachers.written import DATA, write_teacher
from tests.common.ledger.ledger_world import write_raw
from tests.worlds import site_toml, study_toml

LEDGER = "e" * 32
PRIVACY = {"delta": 1e-5, "planned_queries": 8, "voters_per_site": 2}
STUDY = study_toml("core", teacher="channels = [2, 4]\nsteps = 3", **PRIVACY)
PRIVATE = PrivateSettings("dp-sgd", 0.25, 1e-3, rate=Fraction(1, 2), steps=3)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """Set up a hospital with six patients and no training."""
    root = tmp_path_factory.mktemp("start")
    cases = []
    for number in range(6):
        image, label = root / f"p{number}.nii.gz", root / f"l{number}.nii.gz"
        nib.save(nib.Nifti1Image(np.full((8, 8, 8), number, np.int16), np.eye(4)), image)
        nib.save(nib.Nifti1Image(np.ones((8, 8, 8), np.uint8), np.eye(4)), label)
        cases.append(Case(f"p{number}", image, label))
    dataset = write_dataset(root / "set", name="n", labels=DATA.labels, channels=DATA.channels, cases=cases)
    site = root / "site"
    site.mkdir()
    (site / "study.toml").write_text(STUDY)
    (site / "site.toml").write_text(
        site_toml(pool="north-mri", sealing_key="1b" * 32, signing_key="ab" * 32, delta=1e-5)
    )
    shutil.copy(create_authority(root / "authority").certificate, site / "ca.crt")
    create_node_keys(site / "node" / "keys")
    return site, dataset


class Hospital:
    """Acts as a person at a hospital; its trainings only write files, since only their bytes count here."""

    def __init__(self, site: Path, dataset: Dataset) -> None:
        self.site, self.dataset, self.asked = site, dataset, 0
        self.study: Study = load_study(site / "study.toml")
        self.workers: list[Worker] = []

    def train(
        self, private: PrivateSettings | None, seeds: dict[int, int], *, posterior: bool = False, recorded: bool = True
    ) -> None:
        """Begin ``site train`` for both voters, and finish it for those in ``seeds``."""
        planned = plan_site(
            self.dataset,
            teachers=self.site / "teachers",
            data=self.study.data,
            recipe=self.study.teacher,
            voters=2,
            trainer="standard" if private is None else private.strategy,
            private=private,
        )
        record_trainings(self.site, planned, again=True)
        reports = []
        for voter, seed in seeds.items():
            weights = write_teacher(voter_directory(self.site / "teachers", voter), seed=seed, posterior=posterior)
            reports.append(VoterReport(voter, 3, 0, 0, weights, (), None, 3, None, 0.0))
        if recorded:
            record_trained(self.site, planned, SiteReport(tuple(reports), ()))

    def serve(self) -> Worker:
        if not has_consented(self.site):
            consent(self.site, by="Ada", sheet="")
        worker = open_worker(self.site, sleep=lambda _: None)
        self.workers.append(worker)
        return worker

    def answer(self, worker: Worker) -> None:
        """Offer the worker one more query and let it answer."""
        self.asked += 1
        query = QuerySpec(
            edition=1,
            codec="c" * 64,
            volumes=(sha256_bytes(b"%d" % self.asked),),
            round=1,
            centre="zero",
            weights="codec",
            mechanism=study_mechanism(self.study, dimension=4),
        )
        worker._fetch = _away
        key = worker._config.server.sealing_key
        worker._ledger.reserve(self.study.id, [query], ledger=LEDGER, sealing_key=key)
        request = CodesRequest(self.study.id, LEDGER, "b" * 64, 1, 60, (query.id,))
        reply = decode(worker.handle(encode(request)))
        assert isinstance(reply, CodesReply)
        assert len(reply.codes) == 1

    def covered(self) -> bool:
        path = self.site / "site-ledger.sqlite"
        assert verify(path).ok
        with SiteLedger.read(path) as ledger:
            covers = ledger.trainings().covers_every_release
            assert ledger.facts("site", present=()).trainings.covers_every_release == covers
        return covers

    def guaranteed(self) -> bool:
        with SiteLedger.read(self.site / "site-ledger.sqlite") as ledger:
            return ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.REPLACE_ONE) is not None


def _away(_: str) -> bytes:
    raise OSError("no public object here")


@pytest.fixture
def hospital(start: tuple[Path, Dataset], tmp_path: Path) -> Iterator[Hospital]:
    shutil.copytree(start[0], tmp_path / "site")
    made = Hospital(tmp_path / "site", start[1])
    yield made
    for worker in made.workers:
        worker._ledger.close()


def test_plain_teachers_served_after_a_private_training_was_interrupted_are_covered_by_nothing(
    hospital: Hospital,
) -> None:
    hospital.train(None, {0: 1, 1: 2})
    hospital.train(PRIVATE, {})  # begun and charged, but stopped before its first voter ended
    hospital.answer(hospital.serve())
    assert not hospital.covered()
    assert not hospital.guaranteed(), "a teacher without a guarantee was served"
    hospital.train(PRIVATE, {0: 3, 1: 4})
    hospital.answer(hospital.serve())
    assert not hospital.covered(), "what was served before stays served"


def test_plain_teachers_that_nobody_ever_put_on_record_are_covered_by_nothing(hospital: Hospital) -> None:
    for voter in range(2):  # trained before there was a ledger, or by hand
        write_teacher(voter_directory(hospital.site / "teachers", voter), seed=voter)
    hospital.train(PRIVATE, {})
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_a_private_training_of_every_voter_covers_what_is_served_from_it(hospital: Hospital) -> None:
    hospital.train(None, {0: 1, 1: 2})  # its teachers never answered, so later guarantees hold
    hospital.train(PRIVATE, {0: 3, 1: 4})
    assert not hospital.covered(), "nothing was answered yet"
    hospital.answer(hospital.serve())
    assert hospital.covered()
    assert hospital.guaranteed()


@pytest.mark.parametrize("before", [None, {0: 1, 1: 2}], ids=["nothing", "plain teachers"])
def test_a_private_training_of_some_voters_covers_only_if_the_others_are_empty_slots(
    hospital: Hospital, before: dict[int, int] | None
) -> None:
    if before is not None:
        hospital.train(None, before)
    hospital.train(PRIVATE, {0: 3})
    hospital.answer(hospital.serve())
    assert hospital.covered() == (before is None)


def test_a_plain_retraining_counts_from_the_moment_it_is_served(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    running = hospital.serve()
    hospital.answer(running)
    hospital.train(None, {0: 5, 1: 6})
    hospital.answer(running)
    assert hospital.covered(), "the running worker serves what it loaded"
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_a_plain_retraining_that_was_interrupted_takes_nothing(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    hospital.train(None, {})
    hospital.answer(hospital.serve())
    assert hospital.covered()


def test_weights_and_record_put_in_by_hand_come_from_no_training(hospital: Hospital, tmp_path: Path) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    write_teacher(tmp_path / "elsewhere", seed=99)
    shutil.copytree(tmp_path / "elsewhere", voter_directory(hospital.site / "teachers", 1), dirs_exist_ok=True)
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_for_unit_patient_no_worker_starts_on_a_teacher_that_no_training_under_this_deal_made(
    hospital: Hospital, tmp_path: Path
) -> None:
    of_patients(hospital.site)
    hospital.train(None, {0: 3, 1: 4}, recorded=False)
    refused = "got 'voter 0, voter 1'.*to fix: run `consilium site train`"
    with pytest.raises(InvalidInput, match=refused):
        hospital.serve()
    assert refused_by_the_doctor(hospital)
    hospital.train(None, {0: 3, 1: 4})  # the same again retrains nothing and records the teachers
    hospital.serve()
    assert not refused_by_the_doctor(hospital)
    write_teacher(voter_directory(hospital.site / "teachers", 1), seed=99)
    with pytest.raises(InvalidInput, match=r"got 'voter 1'.*site train"):
        hospital.serve()
    shutil.rmtree(voter_directory(hospital.site / "teachers", 1))  # a voter without a teacher votes zero
    hospital.serve()
    (hospital.site / "teachers" / "slots.json").unlink()
    with pytest.raises(InvalidInput, match="deal"):
        hospital.serve()


def of_patients(site: Path) -> None:
    study = site / "study.toml"
    study.write_text(study.read_text().replace("quorum = 2", 'quorum = 2\nunit = "patient"'))
    policy = site / "site.toml"
    policy.write_text(policy.read_text().replace("[caps]", '[caps]\nunit = "patient"'))


def refused_by_the_doctor(hospital: Hospital) -> bool:
    finding = _teachers(load_site(hospital.site), load=True)
    train = "run `consilium site train`"
    return finding.state is State.FAIL and "no training" in finding.text and finding.remedy.startswith(train)


def test_another_voters_private_teacher_is_not_this_voters(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    first, second = (voter_directory(hospital.site / "teachers", voter) for voter in range(2))
    shutil.copytree(first, second, dirs_exist_ok=True)
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_another_posterior_under_the_same_weights_is_another_teacher(hospital: Hospital) -> None:
    bbb = replace(PRIVATE, strategy="dp-bbb")
    hospital.train(bbb, {0: 3, 1: 4}, posterior=True)
    hospital.answer(hospital.serve())
    assert hospital.covered()
    directory = voter_directory(hospital.site / "teachers", 0)
    write_teacher(directory, seed=3)  # the same weights, now without their posterior
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_a_crash_before_the_end_is_on_record_is_no_training_until_it_is_run_again(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4}, recorded=False)
    hospital.train(PRIVATE, {0: 3, 1: 4})  # the earlier teachers are kept
    hospital.answer(hospital.serve())
    assert hospital.covered()


def test_what_was_served_between_such_a_crash_and_the_next_run_stays_unknown(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4}, recorded=False)
    hospital.answer(hospital.serve())
    hospital.train(PRIVATE, {0: 3, 1: 4})
    hospital.answer(hospital.serve())
    assert not hospital.covered()


def test_codes_of_an_older_version_are_of_unknown_teachers(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    worker = hospital.serve()
    hospital.answer(worker)
    assert hospital.covered()
    body = next(parse_body(row.body) for row in worker._ledger.rows() if row.kind == "code")
    ledger = worker._ledger
    ledger.withdraw_patient(slot=5, voter=7, subject="a" * 64, weights=None)
    with ledger._writing():  # as an older version wrote it, without the key `teachers`
        old = {name: value for name, value in body.items() if name != "teachers"}
        write_raw(ledger, "code", old, payload=(str(body["query_id"]), bytes(32)))
    with SiteLedger.read(hospital.site / "site-ledger.sqlite") as reader:
        assert not reader.trainings().covers_every_release


def test_rows_lost_with_an_older_copy_are_of_unknown_teachers(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    worker = hospital.serve()
    hospital.answer(worker)
    worker._ledger.charge_lost(None)
    assert not hospital.covered()


@pytest.mark.slow
def test_a_second_private_training_is_composed_whichever_is_served(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    hospital.answer(hospital.serve())
    with SiteLedger.read(hospital.site / "site-ledger.sqlite") as ledger:
        once = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.REPLACE_ONE)
    hospital.train(replace(PRIVATE, steps=4), {})
    with SiteLedger.read(hospital.site / "site-ledger.sqlite") as ledger:
        both = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.REPLACE_ONE)
    assert hospital.covered()
    assert once is not None
    assert both is not None
    assert both.epsilon > 1.2 * once.epsilon


def test_no_row_claims_a_training_that_did_not_make_the_bytes(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    ledger = hospital.serve()._ledger
    bodies = {row.kind: parse_body(row.body) for row in ledger.rows()}
    (first, training), (second, other) = bodies["teachers"]["voters"]
    for voters in (
        [["a" * 64, training]],
        [[second, training]],
        [[second, other]],
        [["", training]],
        [[first]],
        [[first, training, ""]],
        [[0, ""]],
    ):
        with pytest.raises((LedgerCorrupt, InvalidInput)), ledger._writing():
            write_raw(ledger, "teachers", {"voters": voters})
    with pytest.raises(LedgerCorrupt), ledger._writing():
        write_raw(ledger, "trained", bodies["trained"])
    with pytest.raises(InvalidInput):
        ledger.record_trained("d" * 64, first)


def test_a_worker_that_loads_what_the_last_one_did_adds_no_row(hospital: Hospital) -> None:
    hospital.train(PRIVATE, {0: 3, 1: 4})
    rows = hospital.serve()._ledger.row_count
    assert hospital.serve()._ledger.row_count == rows


def test_a_site_whose_trainings_all_crashed_serves_the_zero_code_and_starts(hospital: Hospital) -> None:
    hospital.train(None, {})
    worker = hospital.serve()
    hospital.answer(worker)
    (row,) = [parse_body(row.body) for row in worker._ledger.rows() if row.kind == "teachers"]
    assert row == {"voters": [["", ""], ["", ""]]}


def test_a_withdrawn_patients_teacher_is_silent_however_it_comes_back(hospital: Hospital) -> None:
    hospital.train(None, {0: 1, 1: 2})
    done = withdraw_patient(hospital.site, "p2")
    (place,) = done.places
    other = 1 - place.voter
    directory = voter_directory(hospital.site / "teachers", place.voter)
    assert [bool(served) for served in served_by(hospital.serve())] == [other == 0, other == 1]
    write_teacher(directory, seed=place.voter + 1)  # put back from a backup, with its record
    assert [bool(served) for served in served_by(hospital.serve())] == [other == 0, other == 1]
    (directory / "train.json").write_text("{")  # a record nobody can read stops neither worker nor withdrawal
    assert [bool(served) for served in served_by(hospital.serve())] == [other == 0, other == 1]
    assert withdraw_patient(hospital.site, "p2").repeated
    write_teacher(directory, seed=50)  # an unrecorded teacher, which may be older than the withdrawal
    assert [bool(served) for served in served_by(hospital.serve())] == [other == 0, other == 1]
    hospital.train(None, {place.voter: 50})  # trained anew, without the patient
    assert all(served_by(hospital.serve()))


def test_an_empty_slot_is_a_warning_on_the_sites_own_terminal_and_in_no_json(hospital: Hospital) -> None:
    hospital.train(None, {0: 1})
    hospital.serve()
    command = ["status", "--site-dir", str(hospital.site)]
    shown, told = CliRunner().invoke(site_app, command), CliRunner().invoke(site_app, [*command, "--json"])
    assert "voter 1 " in shown.stderr
    assert "voter 0" not in shown.stderr
    assert "voter" not in told.stdout
    found = _teachers(load_site(hospital.site), load=True)
    assert not found.ok
    assert "1 of 2 voters" in found.text
    hospital.train(None, {0: 1, 1: 2})
    assert _teachers(load_site(hospital.site), load=True).ok


def served_by(worker: Worker) -> tuple[str, ...]:
    stated = worker._ledger.books.teachers.newest
    assert stated is not None
    return tuple(served for served, _ in stated.voters)
