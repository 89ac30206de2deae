"""Tests that a pool has one ledger for life, at a hospital with several studies, directories and machines.

The oracle is the rows of the ledger, and the μ² of the accepted queries added up by hand.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.ledger.site_teachers import KeepsTeachers
from client.operations import staff_decisions as control
from client.operations.serve import open_worker
from client.policy import load_site
from client.records.journal import begun_trainings
from client.records.lock import writing
from client.records.patient_deal import load_or_deal, load_slots, save_slots
from client.records.served import found_in, retired_voters
from client.site.books import open_books, read_books, site_directories, slots_file, stated_books, writing_teachers
from client.site.deals import deal_for_training, present_teachers
from client.site.enrolment import create_site, join_site
from client.site.registry import Registry
from client.site.status import signed_status, site_status
from client.training.site import plan_site
from common.admission import JoinRequest, read_request
from common.clock import utc_now
from common.config import Study
from common.data.dataset import Case, Dataset, PatientIdentity
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.privacy.mechanism import QuerySpec
from common.privacy.patient_guarantee import Trainings
from common.process import base_env
from common.site_account import check_account
from common.study_mechanism import study_mechanism
from consilium.cli.site import site_app
from server.ledger.backup import backup
from server.ledger.verify import verify
from server.study.workspace import Workspace
from tests.backups import put_copy
from tests.federation import make_study
from tests.studies import kit_folder, kit_of, served_study

pytestmark = pytest.mark.slow

PATIENTS = tuple(f"p{i}" for i in range(8))


@pytest.fixture
def first(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "first", replace(make_study(), name="first"))


@pytest.fixture
def second(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "second", replace(make_study(planned_queries=3), name="second"))


@pytest.fixture
def north(first: Workspace, tmp_path: Path) -> Path:
    """Set up a hospital's directory for the first study."""
    (tmp_path / "data").mkdir()
    create_site(tmp_path / "north", pool="north/adults", data=tmp_path / "data", kit=kit_of(first))
    return tmp_path / "north"


@pytest.fixture
def joined(north: Path, second: Workspace) -> Path:
    """Set up the same hospital's directory for the second study."""
    directory, _ = join_site(None, kit=kit_of(second), existing=north)
    return directory


def site(*arguments: object):
    return CliRunner().invoke(site_app, [str(argument) for argument in arguments])


def queries(study: Study, *numbers: int) -> list[QuerySpec]:
    mechanism = study_mechanism(study, dimension=3)
    return [
        QuerySpec(
            edition=1,
            codec="c" * 64,
            volumes=(f"{number:064x}",),
            round=1,
            centre="zero",
            weights="codec",
            mechanism=mechanism,
        )
        for number in numbers
    ]


def accept(directory: Path, study: Study, *numbers: int) -> None:
    with open_books(load_site(directory)) as ledger:
        ledger.consent(study)
        ledger.reserve(study.id, queries(study, *numbers))


# --- the signed status report


def test_a_sites_printed_report_has_the_key_that_it_was_admitted_with(first, north: Path, joined: Path) -> None:
    accept(north, first.study(), 1)
    key = stated_books(load_site(north)).answer_key
    for directory in (north, joined):
        printed = json.loads(json.dumps(signed_status(directory, site_status(directory))))
        assert check_account(printed, key=key) <= utc_now()
        with pytest.raises(InvalidInput, match="signature"):
            check_account({**printed, "queries_accepted": 0}, key=key)
    (north / "site-ledger.key").chmod(0o644)  # others can read the key, so the report is printed without a signature
    assert "signature" not in signed_status(north, site_status(north))


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["site.toml", "study.toml"])
def test_a_site_shows_its_status_and_no_patient_guarantee_while_another_study_cannot_be_read(
    first: Workspace, north: Path, joined: Path, caplog: pytest.LogCaptureFixture, listed: bool, name: str
) -> None:
    accept(north, first.study(), 1)
    assert not present_in(north).untraced
    (joined / name).write_text("schema = ")
    if not listed:
        (north / "joined.json").unlink()
    assert site_status(north)["queries_accepted"] == 1
    assert "event=unreadable-study directory=second" in caplog.text
    assert present_in(north).untraced  # its teachers may have been trained without a record
    (north / name).write_text("schema = ")
    with pytest.raises(InvalidInput):
        site_status(north)


def present_in(directory: Path) -> Trainings:
    """Return the trainings that a site's status rests on."""
    config = load_site(directory)
    with read_books(config) as ledger:
        return ledger.trainings(present=present_teachers(config, ledger))


# --- joining


def test_a_second_study_goes_on_with_the_pools_sum(
    first: Workspace, second: Workspace, north: Path, joined: Path
) -> None:
    assert joined == north / "studies" / "second"
    one, two = first.study(), second.study()
    (north / "site.toml").write_text((north / "site.toml").read_text().replace("epsilon = 8.0", "epsilon = 20.0"))
    accept(north, one, 1, 2, 3)
    accept(joined, two, 4, 5)
    protection = one.privacy.protection
    expected = sum(
        (query.mechanism.mu_squared(protection) for query in (*queries(one, 1, 2, 3), *queries(two, 4, 5))),
        start=Fraction(0),
    )
    for directory in (north, joined):
        with read_books(load_site(directory)) as ledger:
            assert ledger.spent().mu_squared == expected
        assert site_status(directory)["queries_accepted"] == 5
    assert not (joined / "site-ledger.sqlite").exists()
    assert verify(north / "site-ledger.sqlite").ok


def test_the_pools_cap_binds_over_both_studies(first: Workspace, second: Workspace, north: Path, joined: Path) -> None:
    accept(north, first.study(), *range(1, 7))  # the whole of ε = 8
    with pytest.raises(Refused) as refused:
        accept(joined, second.study(), 10)
    assert refused.value.reason == "budget"


def test_a_joined_site_has_a_node_key_of_its_own_and_names_the_pools_books(north: Path, joined: Path) -> None:
    old, new = read_request(north / "request.json"), read_request(joined / "request.json")
    assert old.node_key != new.node_key
    assert (new.pool, new.books) == (old.pool, old.books)
    with read_books(load_site(north)) as ledger:
        assert new.books is not None
        assert new.books.ledger_id == ledger.head().ledger_id


def test_joining_from_a_joined_directory_leads_to_the_same_books(joined: Path, north: Path, tmp_path: Path) -> None:
    third = served_study(tmp_path / "third", replace(make_study(), name="third"))
    result = site("join", "--from", joined, "--kit", kit_folder(third), "--site-dir", tmp_path / "elsewhere")
    assert result.exit_code == 0, result.output
    assert load_site(tmp_path / "elsewhere").ledger_file.resolve() == (north / "site-ledger.sqlite").resolve()
    assert load_site(tmp_path / "elsewhere").caps == load_site(north).caps
    assert "SHA256:" in result.stdout


def test_a_study_is_joined_once_and_not_under_a_name_that_leads_elsewhere(
    north: Path, joined: Path, second: Workspace, tmp_path: Path
) -> None:
    kit = kit_of(second)
    with pytest.raises(InvalidInput, match="already"):
        join_site(tmp_path / "again", kit=kit, existing=north)
    text = kit.study_file.read_text()
    kit.study_file.write_text(text.replace('name = "second"', 'name = "../../second"'))
    with pytest.raises(InvalidInput):
        join_site(None, kit=kit, existing=north)
    assert sorted(path.name for path in (north / "studies").iterdir()) == ["second"]


@pytest.mark.parametrize("extra", ['pool = "north/children"\n', "[caps]\nepsilon = 50.0\ndelta = 0.001\n"])
def test_caps_and_pool_of_a_joined_site_stand_with_the_books_alone(joined: Path, extra: str) -> None:
    text = (joined / "site.toml").read_text()
    (joined / "site.toml").write_text(text.replace("[server]", f"{extra}[server]"))
    with pytest.raises(InvalidInput, match="beside books"):
        load_site(joined)


def test_opening_by_turns_from_both_directories_declares_nothing_anew(north: Path, joined: Path) -> None:
    for directory in (north, joined, north, joined):
        open_books(load_site(directory)).close()
    with read_books(load_site(north)) as ledger:
        assert [row.kind for row in ledger.rows()] == ["genesis", "pool"]


def test_no_directory_of_a_pool_begins_books_where_the_pools_are_gone(north: Path, joined: Path) -> None:
    (north / "site-ledger.sqlite").unlink()
    for directory in (joined, north):
        with pytest.raises(LedgerCorrupt, match=r"missing.*recover --own-ledger"):
            open_books(load_site(directory))
    (north / "site-ledger.standing").unlink()
    for directory in (joined, north):
        with pytest.raises(InvalidInput, match=r"ledger of this patient pool is missing.*site-ledger"):
            open_books(load_site(directory))
    assert not (north / "site-ledger.sqlite").exists()


def test_a_site_does_not_go_on_with_other_books_than_the_consortium_was_told_of(
    north: Path, joined: Path, first: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "else").mkdir()
    registry = Registry(tmp_path / "pools.json")
    create_site(
        tmp_path / "fresh",
        pool="north/adults",
        data=tmp_path / "else",
        kit=kit_of(first),
        registry=registry,
    )
    text = (joined / "site.toml").read_text()
    (joined / "site.toml").write_text(text.replace('books = "../.."', 'books = "../../../fresh"'))
    with pytest.raises(InvalidInput, match=r"ledger of.*join request"):
        open_books(load_site(joined))
    for suffix in ("sqlite", "key"):
        shutil.copy(tmp_path / "fresh" / f"site-ledger.{suffix}", north / f"site-ledger.{suffix}")
    with pytest.raises(LedgerCorrupt, match="another ledger"):
        open_books(load_site(north))
    shutil.copy(tmp_path / "fresh" / "site-ledger.standing", north / "site-ledger.standing")
    with pytest.raises(InvalidInput, match=r"ledger of.*join request"):
        open_books(load_site(north))


def test_a_copy_of_a_sites_directory_keeps_no_second_count_beside_the_original(
    north: Path, joined: Path, tmp_path: Path
) -> None:
    """Two ledgers would each count only their own queries, for instance those of two consortia."""
    shutil.copytree(north, tmp_path / "copy")
    for directory in (tmp_path / "copy", tmp_path / "copy" / joined.relative_to(north)):
        with pytest.raises(InvalidInput, match=re.escape(str(north))) as refused:
            open_books(load_site(directory))
        assert "site join --from" in (refused.value.remedy or "")
    for directory in (north, joined):
        open_books(load_site(directory)).close()
    with read_books(load_site(tmp_path / "copy")) as ledger:
        assert ledger.row_count, "a copy can be read"
    north.rename(tmp_path / "moved")
    for directory in (tmp_path / "moved", tmp_path / "copy"):
        open_books(load_site(directory)).close()


def test_the_error_for_a_second_path_to_one_ledger_names_the_first_path_and_nothing_to_delete(
    first: Workspace, north: Path, tmp_path: Path
) -> None:
    """``cp -al`` and a bind mount show the same files at another path."""
    accept(north, first.study(), 1)
    other = tmp_path / "other"
    shutil.copytree(north, other, copy_function=os.link)
    with pytest.raises(InvalidInput, match="two paths") as refused:
        accept(other, first.study(), 2)
    assert f"use {north}" in str(refused.value)
    assert "delete" not in str(refused.value)


def test_books_restored_from_an_older_copy_are_not_joined(
    first: Workspace, second: Workspace, north: Path, tmp_path: Path
) -> None:
    backup(north / "site-ledger.sqlite", tmp_path / "monday.sqlite")
    accept(north, first.study(), 1)
    put_copy(tmp_path / "monday.sqlite", north / "site-ledger.sqlite")
    with pytest.raises(LedgerCorrupt, match="recover --own-ledger"):
        join_site(None, kit=kit_of(second), existing=north)
    assert not (north / "studies").exists()


def _accept_many(directory: Path, study: Study, numbers: range, results: multiprocessing.Queue) -> None:
    done = 0
    for number in numbers:
        try:
            accept(directory, study, number)
            done += 1
        except Refused:
            break
    results.put(done)


def test_workers_of_two_studies_write_one_ledger_at_once_and_pass_no_cap(
    first: Workspace, second: Workspace, north: Path, joined: Path
) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    both = [(north, first.study(), range(1, 7)), (joined, second.study(), range(11, 14))]
    processes = [context.Process(target=_accept_many, args=(*one, results)) for one in both]
    for process in processes:
        process.start()
    accepted = sum(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    assert verify(north / "site-ledger.sqlite").kinds["reservation"] == accepted
    with read_books(load_site(north)) as ledger:
        assert ledger.facts("north").spent.epsilon <= 8.0
        assert ledger.forgotten() is None
    assert accepted < 9, "the cap is one study's budget"


# --- a pool is not begun twice


def test_no_second_books_for_a_pool_or_over_its_data(north: Path, second: Workspace, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "data" / "part").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for pool, data in (
        ("north/adults", "other"),
        ("another", "data"),
        ("another", "link"),
        ("another", "data/part"),
        ("another", "data/../data"),
        ("another", "."),
    ):
        result = site(
            "init",
            "--kit",
            kit_folder(second),
            "--data",
            tmp_path / data,
            "--pool",
            pool,
            "--site-dir",
            tmp_path / "twice",
        )
        assert isinstance(result.exception, InvalidInput), (pool, data)
        assert not (tmp_path / "twice").exists()
        printed = re.search(r"`consilium site (join --from [^`]+)`", str(result.exception))
    assert printed
    joined = site(*shlex.split(printed[1]))
    assert joined.exception is None, joined.output


def test_a_site_says_for_which_hospital_its_kit_was_made_and_what_to_do_with_another_s(
    first: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    done = site(
        "init", "--kit", kit_folder(first, "west"), "--data", tmp_path / "data", "--site-dir", tmp_path / "east"
    )
    assert done.exception is None, done.output
    assert "created for west" in done.stdout
    assert "another hospital's kit" in done.stdout


def test_a_second_set_up_for_the_same_study_is_sent_to_its_directory(
    north: Path, first: Workspace, tmp_path: Path
) -> None:
    refused = begin_again(north, kit_folder(first), tmp_path / "twice")
    assert str(north) in refused
    assert "use that directory" in refused
    assert "site join" not in refused


def begin_again(north: Path, kit: Path, place: Path, *options: object) -> str:
    """Set the site up in another directory; return the refusal, or an empty text."""
    words = ("init", "--kit", kit, "--data", north.parent / "data", "--pool", "north/adults", "--site-dir", place)
    result = site(*words, *options)
    assert result.exception is None or isinstance(result.exception, InvalidInput)
    return "" if result.exception is None else str(result.exception)


def test_a_site_set_up_in_the_wrong_place_and_deleted_is_forgotten_only_by_a_word_on_its_charges(
    north: Path, first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    kit, place, option = kit_folder(second), tmp_path / "right", ("--forget-charges-of", north)
    refused = begin_again(north, kit, place)
    assert "delete" in refused
    assert begin_again(north, kit, place, *option) == refused  # the new site's ledger exists
    accept(north, first.study(), 1)
    charged = begin_again(north, kit, place, *option)
    assert "--forget-charges-of" not in charged.partition("to fix: ")[2]
    (north / "site-ledger.sqlite").unlink()
    assert "site join" in begin_again(north, kit, place, *option)  # its standing shows what it charged
    shutil.rmtree(north)
    offered = begin_again(north, kit, place)
    assert f"--forget-charges-of {north}: whatever it charged" in offered
    assert "another" in begin_again(north, kit, place, "--forget-charges-of", tmp_path / "another")
    assert not place.exists()
    assert begin_again(north, kit, place, *option) == ""
    assert (place / "site-ledger.sqlite").exists()
    (tmp_path / "third").mkdir()
    assert f"ledger in {place};" in begin_again(north, kit, tmp_path / "third")  # the pool's ledger is now the new one


def test_a_site_corrects_a_wrong_data_folder_by_the_printed_remedy_and_holds_the_old_folder_no_longer(
    north: Path, first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "right").mkdir()
    again = ("init", "--kit", kit_folder(first), "--data", tmp_path / "right", "--pool", "north/adults")
    refused = str(site(*again, "--site-dir", north).exception)
    printed = re.search(r"write `(data = [^`]+)` in (\S+/site.toml)", refused)
    assert printed, refused
    policy = Path(printed[2])
    policy.write_text(re.sub(r"(?m)^data = .*$", lambda _: printed[1], policy.read_text()))
    init = ("init", "--kit", kit_folder(second), "--pool", "children")
    taken = site(*init, "--data", tmp_path / "right", "--site-dir", tmp_path / "b")
    assert "already have a ledger" in str(taken.exception), "the corrected folder is this pool's"
    free = site(*init, "--data", tmp_path / "data", "--site-dir", tmp_path / "b")
    assert free.exception is None, free.output
    assert site(*again, "--site-dir", north).exception is None, "the same command again goes through"


def test_a_folder_whose_patients_a_site_used_stays_that_pools_after_it_names_another(
    north: Path, first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    accept(north, first.study(), 1)
    policy = north / "site.toml"
    policy.write_text(re.sub(r"(?m)^data = .*$", f'data = "{tmp_path}/moved"', policy.read_text()))
    for folder in ("data", "moved"):
        (tmp_path / folder).mkdir(exist_ok=True)
        words = ("--data", tmp_path / folder, "--pool", "children", "--site-dir", tmp_path / "b")
        taken = site("init", "--kit", kit_folder(second), *words)
        assert "already have a ledger" in str(taken.exception), folder


def test_a_listed_folder_that_its_site_named_by_mistake_has_a_remedy_that_frees_it(
    north: Path, second: Workspace, tmp_path: Path
) -> None:
    words = ("init", "--kit", kit_folder(second), "--data", tmp_path / "data", "--pool", "children")
    refused = str(site(*words, "--site-dir", tmp_path / "b").exception)
    assert f"correct data in {north}/site.toml" in refused
    policy = north / "site.toml"
    policy.write_text(re.sub(r"(?m)^data = .*$", f'data = "{tmp_path}/adults"', policy.read_text()))
    assert site(*words, "--site-dir", tmp_path / "b").exception is None


def test_other_patients_get_books_of_their_own(north: Path, second: Workspace, tmp_path: Path) -> None:
    (tmp_path / "children").mkdir()
    create_site(tmp_path / "b", pool="north/children", data=tmp_path / "children", kit=kit_of(second))
    assert read_request(tmp_path / "b" / "request.json").books != read_request(north / "request.json").books


def test_a_registry_that_cannot_be_read_or_written_warns_and_stops_nobody(
    first: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    (tmp_path / "data").mkdir()
    registry = Registry(tmp_path / "state" / "pools.json")
    kit = kit_of(first)
    create_site(tmp_path / "a", pool="north", data=tmp_path / "data", kit=kit, registry=registry)
    assert "registry" in caplog.text
    (tmp_path / "pools.json").write_text("{no json")
    create_site(
        tmp_path / "b", pool="north", data=tmp_path / "data", kit=kit, registry=Registry(tmp_path / "pools.json")
    )
    assert (tmp_path / "pools.json").read_text() == "{no json", "what cannot be read is not overwritten"


@pytest.mark.parametrize("variable", ["CONSILIUM_STATE_DIR", "XDG_STATE_HOME"])
def test_a_daemon_looks_for_copies_in_the_list_of_books_that_the_commands_write(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker read another list, it would serve a copy of a site beside its original."""
    monkeypatch.delenv("CONSILIUM_STATE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    asked = "from client.site.registry import Registry; print(Registry.of_user().file)"
    daemon = subprocess.run([sys.executable, "-c", asked], env=base_env(), capture_output=True, text=True, check=True)
    assert daemon.stdout.strip() == str(Registry.of_user().file)


def test_deeply_nested_json_in_a_sites_files_counts_as_unreadable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nested = "[" * 100_000
    (tmp_path / "pools.json").write_text(nested)
    registry = Registry(tmp_path / "pools.json")
    registry.check(pool="north", data=tmp_path, directory=tmp_path / "a", kit=tmp_path)
    registry.check_no_copy("1" * 32, pool="north", directory=tmp_path)
    assert "registry-unreadable" in caplog.text
    voter = tmp_path / "teachers" / "voter-000"
    voter.mkdir(parents=True)
    (voter / "train.json").write_text(nested)
    (voter / "journal-1.jsonl").write_text(f"{nested}\n")
    assert retired_voters(tmp_path / "teachers") == frozenset()
    assert found_in(tmp_path / "teachers", voters=1) == ("",)
    assert len(begun_trainings(voter)) == 1


def test_the_registry_is_where_the_environment_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONSILIUM_STATE_DIR", str(tmp_path / "a"))
    assert Registry.of_user().file == tmp_path / "a" / "pools.json"
    monkeypatch.delenv("CONSILIUM_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))
    assert Registry.of_user().file == tmp_path / "b" / "consilium" / "pools.json"


def test_the_signature_of_a_join_request_covers_its_books_and_a_request_without_books_is_read(
    north: Path, first: Workspace, tmp_path: Path
) -> None:
    record = json.loads((north / "request.json").read_text())
    changed = {**record["books"], "ledger_id": "0" * 32}
    (tmp_path / "changed.json").write_text(json.dumps({**record, "books": changed}))
    with pytest.raises(InvalidInput, match="signature"):
        read_request(tmp_path / "changed.json")
    without = {key: value for key, value in record.items() if key != "books"}
    (tmp_path / "without.json").write_text(json.dumps(without))
    with pytest.raises(InvalidInput, match="signature"):
        read_request(tmp_path / "without.json")
    from common.admission import write_request

    key = north / "node" / "keys" / "node"
    write_request(tmp_path / "old.json", study=first.study().id, site="north", pool="north/adults", node_key=key)
    assert read_request(tmp_path / "old.json").books is None
    assert "books" not in json.loads((tmp_path / "old.json").read_text())


# --- one deal, one withdrawal


def dataset(folder: Path, names: tuple[str, ...] = PATIENTS) -> Dataset:
    cases = tuple(Case(name, (folder / name,), folder / name) for name in names)
    return Dataset(
        name="d",
        labels=("background", "body"),
        channels=("image",),
        cases=cases,
        listed=names,
        problems=(),
        patients={},
        patient_identity=PatientIdentity.FILE,
    )


def teach(directory: Path, slots: Path) -> None:
    """Write every voter's teacher files as training leaves them."""
    for voter in range(load_slots(slots).voters):
        folder = directory / "teachers" / f"voter-{voter:03d}"
        folder.mkdir(parents=True)
        (folder / "train.json").write_text(json.dumps({"identity": "i" * 64, "report": {"weights": "a" * 64}}))


@pytest.mark.parametrize("same", [True, False])
def test_a_withdrawal_in_one_study_silences_the_patient_in_every_study_of_the_pool(tmp_path: Path, same: bool) -> None:
    one = served_study(tmp_path / "one", replace(make_study(unit="patient", voters_per_site=2), name="one"))
    two = served_study(
        tmp_path / "two", replace(make_study(unit="patient", voters_per_site=2 if same else 4), name="two")
    )
    (tmp_path / "data").mkdir()
    create_site(tmp_path / "north", pool="north", data=tmp_path / "data", kit=kit_of(one))
    joined, _ = join_site(None, kit=kit_of(two), existing=tmp_path / "north")
    places = {}
    for directory, voters in ((tmp_path / "north", 2), (joined, 2 if same else 4)):
        path = slots_file(load_site(directory))
        places[directory] = load_or_deal(path, PATIENTS, voters=voters).place("p3")
        teach(directory, path)
    assert (slots_file(load_site(joined)) == slots_file(load_site(tmp_path / "north"))) is False or same
    if same:
        assert places[joined] == places[tmp_path / "north"], "the same voter in every study of this m"

    result = site("withdraw-patient", "p3", "--site-dir", joined, "--yes")
    assert result.exit_code == 0, result.output
    for directory, place in places.items():
        assert retired_voters(directory / "teachers") == {place.voter}
        assert "p3" not in load_slots(slots_file(load_site(directory))).order
    with read_books(load_site(tmp_path / "north")) as ledger:
        assert {place.voter for place in places.values()} <= ledger.withdrawn_voters()
        assert [row.kind for row in ledger.rows()].count("patient") == (1 if same else 2)
    assert "nothing changed" in site("withdraw-patient", "p3", "--site-dir", tmp_path / "north", "--yes").stdout


def test_a_withdrawal_that_cannot_reach_a_study_of_the_pool_does_nothing(north: Path, joined: Path) -> None:
    load_or_deal(slots_file(load_site(north)), PATIENTS, voters=1)
    joined.rename(joined.with_name("moved"))
    with pytest.raises(InvalidInput, match="is missing"):
        control.withdraw_patient(north, "p3")
    assert "p3" in load_slots(slots_file(load_site(north))).order
    with read_books(load_site(north)) as ledger:
        assert "patient" not in [row.kind for row in ledger.rows()]


def test_a_joined_study_that_the_list_lost_is_listed_again_when_it_opens_the_books(
    first: Workspace, second: Workspace, north: Path, tmp_path: Path
) -> None:
    elsewhere, _ = join_site(tmp_path / "elsewhere", kit=kit_of(second), existing=north)
    (north / "joined.json").unlink()
    open_books(load_site(elsewhere)).close()
    assert site_directories(north) == (north, north / "../elsewhere")


def test_a_withdrawal_reaches_a_joined_study_in_its_usual_place_that_the_list_lost(north: Path, joined: Path) -> None:
    path = slots_file(load_site(north))
    load_or_deal(path, PATIENTS, voters=1)
    teach(joined, path)
    (joined / "teachers" / "voter-000" / "checkpoint.pt").write_bytes(b"has seen p3")
    (north / "joined.json").unlink()
    assert control.withdraw_patient(north, "p3").directories == (north, joined)
    assert retired_voters(joined / "teachers") == {0}
    assert not (joined / "teachers" / "voter-000" / "checkpoint.pt").exists()


def test_a_withdrawal_that_missed_a_study_is_completed_there_by_repeating_it(
    second: Workspace, north: Path, tmp_path: Path
) -> None:
    path = slots_file(load_site(north))
    load_or_deal(path, PATIENTS, voters=1)
    elsewhere, _ = join_site(tmp_path / "elsewhere", kit=kit_of(second), existing=north)
    teach(elsewhere, path)
    checkpoint = elsewhere / "teachers" / "voter-000" / "checkpoint.pt"
    checkpoint.write_bytes(b"has seen p3")
    kept = (north / "joined.json").read_bytes()
    (north / "joined.json").unlink()
    control.withdraw_patient(north, "p3")
    (north / "joined.json").write_bytes(kept)
    result = site("withdraw-patient", "p3", "--site-dir", north, "--yes")
    assert "nothing changed" not in result.stdout
    assert retired_voters(elsewhere / "teachers") == {0}
    assert not checkpoint.exists()
    checkpoint.write_bytes(b"a training without p3 that was interrupted")
    assert "nothing changed" in site("withdraw-patient", "p3", "--site-dir", north, "--yes").stdout
    assert checkpoint.exists()


@pytest.mark.parametrize("busy", ["north", "joined"])
def test_a_withdrawal_waits_for_a_training_in_any_study_of_the_pool(north: Path, joined: Path, busy: str) -> None:
    load_or_deal(slots_file(load_site(north)), PATIENTS, voters=1)
    with writing({"north": north, "joined": joined}[busy] / "teachers"):
        with pytest.raises(Refused, match="wait"):
            control.withdraw_patient(north, "p3")
        with pytest.raises(Refused, match="wait"), writing_teachers({joined, north}):
            raise AssertionError("two studies would deal newcomers at once")
    assert "p3" in load_slots(slots_file(load_site(north))).order


# --- data carried over from an earlier ledger


def test_books_carried_to_a_new_machine_go_on_and_older_ones_are_refused(
    first: Workspace, north: Path, joined: Path, second: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(north, first.study(), 1)
    older = tmp_path / "older"
    older.mkdir()
    shutil.copytree(north, older / "north", symlinks=True)
    accept(joined, second.study(), 2)
    new = tmp_path / "machine" / "north"
    new.parent.mkdir()
    monkeypatch.setenv("CONSILIUM_STATE_DIR", str(tmp_path / "the other machine's"))
    shutil.copytree(north, new, symlinks=True)
    assert site_status(new)["queries_accepted"] == site_status(new / "studies" / "second")["queries_accepted"] == 2
    accept(new / "studies" / "second", second.study(), 3)
    shutil.copy(new / "site-ledger.standing", older / "north")
    with pytest.raises(LedgerCorrupt, match="recover --own-ledger"):
        accept(older / "north", first.study(), 4)
    assert control.recover_own(older / "north", standing=None, charge_all=False).releases == 2


def test_a_recovery_records_studies_and_consents_to_none(
    first: Workspace, north: Path, joined: Path, second: Workspace, tmp_path: Path
) -> None:
    """A study that nobody consented to answers nothing after the ledger was recovered and the study resumed."""
    control.consent(north, by="A. Noether", sheet="the sheet")
    accept(north, first.study(), 1)
    shutil.copy(north / "site-ledger.sqlite", tmp_path / "older.sqlite")
    accept(north, first.study(), 2)
    shutil.copy(tmp_path / "older.sqlite", north / "site-ledger.sqlite")
    control.recover_own(north, standing=None, charge_all=False)
    control.decide(joined, "second", "resume")
    assert control.has_consented(north)
    assert not control.has_consented(joined)
    with pytest.raises(InvalidInput, match=r"study second .*site consent"):
        open_worker(joined)


def test_a_recovery_needs_only_the_file_of_a_study_whose_directory_was_deleted(
    first: Workspace, second: Workspace, north: Path, tmp_path: Path
) -> None:
    accept(north, first.study(), 1)
    shutil.copy(north / "site-ledger.sqlite", tmp_path / "older.sqlite")
    joined, _ = join_site(None, kit=kit_of(second), existing=north)
    accept(joined, second.study(), 4, 5)
    shutil.rmtree(joined)
    (north / "joined.json").write_text("[]")
    shutil.copy(tmp_path / "older.sqlite", north / "site-ledger.sqlite")
    recover = ("recover", "--site-dir", north, "--own-ledger")
    assert "with --study FILE" in str(site(*recover).exception)
    result = site(*recover, "--study", second.study_file)
    assert result.exit_code == 0, result.output
    with read_books(load_site(north)) as ledger:
        assert ledger.spent().releases == 3
        assert not ledger.has_consent(second.study().id)
    assert "own-ledger" in str(site("recover", "--site-dir", north, "--study", second.study_file).exception)


def test_joinrequest_says_what_was_spent_so_far(first: Workspace, second: Workspace, north: Path) -> None:
    accept(north, first.study(), 1, 2)
    _, request = join_site(None, kit=kit_of(second), existing=north)
    assert isinstance(request, JoinRequest)
    assert request.books is not None
    mechanism = queries(first.study(), 1)[0].mechanism
    assert request.books.mu_squared == 2 * mechanism.mu_squared(first.study().privacy.protection)


@pytest.mark.parametrize("known", [PatientIdentity.TABLE, PatientIdentity.SUBJECT])
def test_a_withdrawn_patient_does_not_come_back_under_the_names_of_files(north: Path, known: PatientIdentity) -> None:
    """A dataset that was restored without its table of patients names every scan as a patient of its own."""
    config, files = load_site(north), [f"scan{number}" for number in range(9)]
    with open_books(config) as ledger:
        ledger.state_identity(known)
    assert deal_for_training(config, files, identity=PatientIdentity.FILE) == frozenset(), "nobody has a slot"
    load_or_deal(slots_file(config), PATIENTS, voters=1)
    with pytest.raises(InvalidInput, match="another way"):
        deal_for_training(config, files, identity=PatientIdentity.FILE)
    control.withdraw_patient(north, "p3")
    with pytest.raises(InvalidInput, match="another way"):
        deal_for_training(config, files, identity=PatientIdentity.FILE)
    assert deal_for_training(config, PATIENTS, identity=known) == {"p3"}


def test_a_patient_withdrawn_before_a_study_was_joined_is_dealt_in_none_of_its_voters(
    north: Path, tmp_path: Path
) -> None:
    load_or_deal(slots_file(load_site(north)), PATIENTS, voters=1)
    control.withdraw_patient(north, "p3")
    other = served_study(tmp_path / "other", replace(make_study(unit="patient", voters_per_site=2), name="other"))
    joined, _ = join_site(None, kit=kit_of(other), existing=north)
    config, study = load_site(joined), other.study()
    tasks = plan_site(
        dataset(tmp_path),
        teachers=joined / "teachers",
        data=study.data,
        recipe=study.teacher,
        voters=2,
        slots_file=slots_file(config),
        withdrawn=deal_for_training(config, PATIENTS),
    )
    dealt = {name for task in tasks for name, _ in task.patients}
    assert dealt == set(PATIENTS) - {"p3"}


def test_a_withdrawn_patient_whom_an_earlier_version_gave_a_second_slot_is_trained_on_no_more(
    north: Path, first: Workspace, tmp_path: Path
) -> None:
    """The earlier version did not recognise the name P3 after p3 was withdrawn."""
    path, study = slots_file(load_site(north)), first.study()
    load_or_deal(path, PATIENTS, voters=study.privacy.voters_per_site)
    control.withdraw_patient(north, "p3")
    slots = load_slots(path)
    save_slots(path, replace(slots, order=(*slots.order, "P3")))
    data = dataset(tmp_path, (*PATIENTS[:3], *PATIENTS[4:], "P3"))
    left = deal_for_training(load_site(north), data.listed)
    tasks = plan_site(
        data, teachers=path.parent, data=study.data, recipe=study.teacher, voters=slots.voters, withdrawn=left
    )
    assert left == {"P3"}
    assert "P3" not in {case.id for task in tasks for case in task.cases}


def test_a_standing_that_shows_no_loss_names_the_way_that_remains(
    first: Workspace, north: Path, tmp_path: Path
) -> None:
    accept(north, first.study(), 1)
    shutil.copy(north / "site-ledger.sqlite", tmp_path / "monday.sqlite")
    monday = shutil.copy(north / "site-ledger.standing", tmp_path / "monday.standing")
    accept(north, first.study(), 2)
    shutil.copy(tmp_path / "monday.sqlite", north / "site-ledger.sqlite")
    (north / "site-ledger.standing").unlink()
    with pytest.raises(InvalidInput, match="leave out --standing: --charge-all"):
        control.recover_own(north, standing=monday, charge_all=False)
    control.recover_own(north, standing=None, charge_all=True)
    with read_books(load_site(north)) as ledger:
        assert ledger.doubt() is None


def test_a_withdrawn_patient_is_recognised_after_a_recovery_or_nothing_is_trained(
    first: Workspace, north: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, files = load_site(north), ("scan1", "scan2")
    accept(north, first.study(), 1)
    shutil.copy(north / "site-ledger.sqlite", tmp_path / "monday.sqlite")
    load_or_deal(slots_file(config), PATIENTS, voters=1)
    with open_books(config) as ledger:
        ledger.state_identity(PatientIdentity.TABLE)
    control.withdraw_patient(north, "p3")
    kept = (north / "site-ledger.standing").read_bytes()
    for named in (True, False):
        shutil.copy(tmp_path / "monday.sqlite", north / "site-ledger.sqlite")
        (north / "site-ledger.standing").write_bytes(kept)
        if not named:  # as written by a version whose standing had no identity
            monkeypatch.setattr(KeepsTeachers, "_repeat", lambda *_: None)
        control.recover_own(north, standing=None, charge_all=False)
        if not named:
            deal_for_training(config, PATIENTS, identity=PatientIdentity.TABLE)  # withdrawals are in the slots file
        with pytest.raises(InvalidInput, match="put the table of patients"):
            deal_for_training(config, files, identity=PatientIdentity.FILE)
        assert deal_for_training(config, PATIENTS, identity=PatientIdentity.TABLE) == {"p3"}
