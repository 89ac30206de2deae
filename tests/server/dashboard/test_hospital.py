"""Tests a hospital's own page: its text in every state, who may read it, and that it writes nothing."""

from __future__ import annotations

import html
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from click import Group

from client.operations import staff_decisions
from client.policy import load_site
from client.site.books import open_books
from common.canonical import sha256_file
from common.config import load_study
from common.data.synthetic import write_phantoms
from common.hospital_page import (
    OfferedCase,
    OwnNetwork,
)
from common.supervision import FACTS, json_report, keeping
from common.witness.memory import FOLDER as WITNESSES
from common.witness.memory import HeadMemory
from common.witness.notes import CheckpointNote, origin_of
from consilium.cli.site import site_app, status_text
from server.dashboard.hospital import STATES, create_hospital_app
from server.dashboard.security import HEADERS
from tests.hospital_facts import KEY, Fixed, client_of, facts
from tests.own_site import make_own_site, page_of, queries_of
from tests.server.dashboard.conftest import TestClient


def test_the_page_says_what_staff_ask_for_and_escapes_it() -> None:
    text = client_of(Fixed(facts())).get("/").text
    for said in (
        "of 12 spent",
        "A. Noether",
        "consilium site pause trial --site-dir /srv/consilium",
        "SHA256:south",
        "not confirmed",
        "the study&#39;s budget does not cover the batch",
        "row 7 &lt;b&gt;contradicts&lt;/b&gt;",
        "<code>consilium site recover</code>",
        "WHAT IS ASKED OF YOU",
    ):
        assert said in text, said


def test_every_command_on_the_page_runs_with_the_directory_that_the_page_names() -> None:
    states = ({}, {"peers": ()}, {"state": "unconsented"}, {"state": "paused"}, {"left_out": 2, "alarms": ()})
    pages = [client_of(Fixed(facts(**one))).get("/").text for one in states]
    found = {html.unescape(one) for page in pages for one in re.findall(r">(consilium site [^<]*)<", page)}
    assert len(found) >= 8
    for typed in found:
        words = shlex.split(typed)[2:]
        command = typer.main.get_command(site_app)
        words += [] if "--site-dir" in words else ["--site-dir", "/srv/consilium"]
        while isinstance(command, Group):
            command = command.commands[words.pop(0)]
        command.make_context(typed, words)  # click refuses a missing or unknown option
    assert all(
        "Add <code>--site-dir /srv/consilium</code> to a command of this page that lacks it" in one for one in pages
    )


BAR = '<svg class="bar'
"""The start of the bar that shows the spent share."""

WORDS = {
    "alarm": ("Alarm: nothing", "An alarm has stopped every answer"),
    "away": ("Not connected: nothing", ">consilium site pause"),
    "unconsented": ("Nobody consented", "nothing to stop"),
    "paused": ("Paused", "End the pause"),
    "withdrawn": ("Withdrawn for good", "left the study"),
    "spent": ("Budget spent", ">consilium site pause"),
    "answering": ("Answering", ">consilium site pause"),
    "joined": ("Consented, nothing", ">consilium site pause"),
}
"""Texts of the page in each state, besides the state's name."""


def test_a_hospital_without_some_receipts_sees_how_many_answers_it_has_receipts_for() -> None:
    text = client_of(Fixed(facts(site=replace(facts().site, accepted=4, receipted=0)))).get("/").text
    assert "4 queries accepted, receipts for 0, 1 offer declined" in text
    assert "if none comes, ask the consortium" in text


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_its_words_and_no_other_states(state: str) -> None:
    text = client_of(Fixed(facts(state=state))).get("/").text
    for said in WORDS[state]:
        assert said in text, said
    chips = re.findall(r'<div class="status"><span class="tag (\w*)">([^<]*)</span></div>', text)
    assert chips == [STATES[state]]
    if state in ("unconsented", "withdrawn"):
        assert "<textarea" not in text


@pytest.mark.parametrize(
    ("decided", "doubt", "says", "command"),
    [
        ("pause", None, "End the pause", "consilium site resume trial"),
        ("open", None, "Stop", "consilium site pause trial"),
        ("withdraw", None, "left the study for good", ""),
        ("pause", "an older copy", "once the alarm is ended", ""),
        ("open", "an older copy", "once the alarm is ended", ""),
    ],
)
def test_during_an_alarm_the_command_shown_does_what_the_page_says_and_is_possible(
    decided: str, doubt: str | None, says: str, command: str
) -> None:
    """For example, the page of a paused study must not say of `site resume` that it "stops all further answers"."""
    given = facts(state="alarm")
    assert given.here is not None
    here = replace(given.here, state=decided)
    pause = f"consilium site {'resume' if decided == 'pause' else 'pause'} trial"
    shown = facts(state="alarm", here=here, site=replace(given.site, doubt=doubt, studies=(here,)), pause=pause)
    text = client_of(Fixed(shown)).get("/").text
    assert says in text
    assert re.findall(r"<textarea[^>]*>([^<]*)</textarea>", text) == ([command] if command else [])
    assert ("stops all further answers" in text) == (command.startswith("consilium site pause"))


def test_books_in_doubt_give_a_lower_bound_in_words_and_no_bar() -> None:
    whole = client_of(Fixed(facts())).get("/").text
    assert "at least" not in whole
    assert BAR in whole
    assert "The bar shows" in whole
    site = replace(facts().site, doubt="this ledger is an <older> copy")
    text = client_of(Fixed(facts(site=site, state="alarm"))).get("/").text
    assert "at least" in text
    assert "this ledger is an &lt;older&gt; copy" in text
    assert BAR not in text
    assert "The bar shows" not in text
    assert "at least 4 of 1,000 charged today" in text


def test_the_command_that_stops_the_site_wraps_and_is_read_whole_on_paper() -> None:
    text = client_of(Fixed(facts())).get("/").text
    (command,) = re.findall(r"<textarea[^>]* readonly [^>]*>([^<]*)</textarea>", text)
    assert command == facts().pause


def test_an_open_study_asks_nobody_to_read_out_a_key() -> None:
    assert "read this site's signing key out" in client_of(Fixed(facts())).get("/").text
    text = client_of(Fixed(facts(sealed=False, peers=()))).get("/").text
    assert "read out" not in text.lower()
    assert "signing key out" not in text
    assert "SHA256:own" in text


def test_each_hospital_and_each_study_heads_its_row() -> None:
    text = client_of(Fixed(facts())).get("/").text
    heads = re.findall(r'<th scope="row"[^>]*>([\w-]+)', text)
    assert heads == ["trial", "south"]


def test_a_site_where_nobody_consented_says_so_instead_of_names() -> None:
    site = replace(facts().site, studies=(), accepted=0)
    text = client_of(Fixed(facts(site=site, here=None, state="unconsented", answers=()))).get("/").text
    assert "consented yet" in text
    assert "No study" in text
    assert "Nothing was asked" in text
    assert "A. Noether" not in text


def test_cases_that_are_not_shown_are_counted_and_the_others_offered() -> None:
    networks = (OwnNetwork("student", "as it was pulled"),)
    cases = (OfferedCase(3, "mri_<3>", 0.25), OfferedCase(1, "mri_1", 0.5), OfferedCase(4, "mri_4"))
    offered = facts(networks=networks, cases=cases, evaluated="2026-11-25", withdrawn=2, left_out=1)
    text = client_of(Fixed(offered)).get("/").text
    assert re.findall(r'<option value="(\d+)">([^<]*)</option>', text) == [
        ("3", "mri_&lt;3&gt;: Dice 0.250"),
        ("1", "mri_1: Dice 0.500"),
        ("4", "mri_4"),
    ]
    assert "2026-11-25" in text
    assert "Not shown: 2 cases of withdrawn" in text
    assert re.search("Not shown: 1 case .*<code>consilium site cases</code>", text)
    text = (
        client_of(Fixed(facts(networks=networks, not_shown="the slots file is missing; `put` it back"))).get("/").text
    )
    assert "the slots file is missing; <code>put</code> it back" in text
    assert "Not shown" not in text


def test_every_networks_verdict_stands_beside_it_and_a_foreign_dataset_is_named() -> None:
    networks = (OwnNetwork("student", "as it was pulled", "Gain <proven>: run `it`"), OwnNetwork("own", "the mean"))
    text = client_of(Fixed(facts(networks=networks))).get("/").text
    assert text.count("<br><strong>") == 1
    assert "Gain &lt;proven&gt;: run <code>it</code>" in text
    assert "own dataset" not in text
    away = facts(networks=networks, elsewhere=True, cases=(OfferedCase(1, "mri_1"),))
    text = client_of(Fixed(away)).get("/").text
    assert "own dataset" in text
    assert "were trained on these cases" not in text


def test_nobody_without_the_key_sees_anything_and_the_key_is_new_at_each_start() -> None:
    for key in ("", "wrong", KEY[:-1]):
        client = client_of(Fixed(facts()), key=key)
        for path in ("/", "/api/labels/1/voxels", "/api/labels/1/slice.png?plane=axial&index=0"):
            answer = client.get(path)
            assert answer.status_code == 403
            assert "north" not in answer.text
    cookie = TestClient(create_hospital_app(Fixed(facts()), key=KEY), base_url="http://localhost").get(
        f"/?key={KEY}", follow_redirects=False
    )
    assert cookie.headers["location"] == "/"
    assert "HttpOnly; SameSite=Strict" in cookie.headers["set-cookie"]


def test_every_answer_has_the_dashboards_headers_and_another_name_is_answered_nothing() -> None:
    client = client_of(Fixed(facts()))
    for path in ("/", "/static/dashboard.css", "/nothing", "/api/labels/1/voxels"):
        assert HEADERS.items() <= dict(client.get(path).headers).items()
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421


def test_nothing_but_get_is_answered_and_no_page_needs_another_host_or_an_inline_script() -> None:
    client = client_of(Fixed(facts()))
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/").status_code == 405
    text = client.get("/").text
    assert not re.search(r"https?://|<script>|onclick|style=", text)
    assert "<form" not in text  # without networks there is no case to choose either


def files(folder: Path) -> dict[str, str]:
    """Return the hash of every file, except the two that SQLite makes while somebody reads a ledger."""
    there = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): sha256_file(path) for path in there if not path.name.endswith(("-shm", "-wal"))}


@pytest.mark.parametrize(("state", "word"), [("paused", "paused"), ("left", "withdrawn")])
def test_a_study_that_staff_stopped_is_shown_in_a_word_and_not_by_the_name_of_a_command(
    tmp_path: Path, state: str, word: str
) -> None:
    page = page_of(make_own_site(tmp_path, state))
    assert f'<td data-label="state">{word}</td>' in client_of(page).get("/").text
    assert f"): {word}\n" in status_text(page.facts().site)


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("joined", "unconsented"),
        ("consented", "joined"),
        ("answering", "answering"),
        ("paused", "paused"),
        ("left", "withdrawn"),
        ("spent", "spent"),
        ("alarm", "alarm"),
    ],
)
def test_a_sites_own_books_are_read_and_not_written(tmp_path: Path, state: str, shown: str) -> None:
    site = make_own_site(tmp_path, state)
    before = files(site)
    page = page_of(site)
    found = page.facts()
    text = client_of(page).get("/").text
    assert all(said in text for said in WORDS[shown])
    assert files(site) == before
    assert found.state == shown
    assert re.search(r"\btrial, 4 patients", found.sheet)
    if state == "consented":
        assert found.here is not None
        assert (found.site.accepted, found.answers) == (0, ())
        assert "A. Noether" in " ".join(found.here.consents)
    if state == "joined":
        assert (found.site.accepted, found.here, found.answers) == (0, None, ())
    if state in ("answering", "paused"):
        assert (found.site.accepted, found.site.refused) == (3, 1)
        assert {one.reason for one in found.answers} == {"", "not-allowed"}
        assert sum(one.queries for one in found.answers if not one.reason) == 3
        assert found.here is not None
        assert "A. Noether" in " ".join(found.here.consents)
        assert 0 < found.site.spent.epsilon < found.site.cap.epsilon
        assert f"site {'resume' if state == 'paused' else 'pause'} trial" in found.pause
    if state == "alarm":
        assert found.alarms[0].stops
        assert found.site.doubt
        assert "lower bound" in text
        assert re.search("at least 0 queries .*0 offers", text)
        assert "holds no answer" in text
        assert "Nothing was asked" not in text


def test_the_page_shows_no_case_of_a_withdrawn_patient_and_counts_it(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-withdrawal")
    before, client = files(site), client_of(page_of(site))
    text = client.get("/?case=1").text
    assert re.findall(r'<option value="(\d+)"', text) == ["1", "3", "4"]
    assert "Not shown: 1 case of withdrawn" in text
    assert "own teachers, without" in text
    for path in ("/?case=2", "/api/labels/2/voxels", "/api/labels/2/slice.png?plane=axial&index=0"):
        assert client.get(path).status_code == 400, path
    assert client.get("/api/labels/1/voxels").headers["x-arrays"] == "image,label,student"
    assert "withdrawn since" in text
    assert "<code>consilium site adapt --replace</code>" in text
    assert "adapted network was trained" not in text  # it is not shown
    assert files(site) == before


def test_a_change_of_the_sites_policy_shows_on_the_next_page_without_a_restart(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-student")
    page, policy = page_of(site), site / "site.toml"
    client, original = client_of(page), policy.read_text(encoding="utf-8")
    assert [one.number for one in page.facts().cases] == [1, 2, 3, 4]
    write_phantoms(tmp_path / "moved", cases=2, seed=6)
    policy.write_text(original.replace(str(tmp_path / "data"), str(tmp_path / "moved")), encoding="utf-8")
    assert [one.number for one in page.facts().cases] == [1, 2]
    assert client.get("/api/labels/3/voxels").status_code == 400
    policy.write_text("site = ", encoding="utf-8")
    answer = client.get("/")
    assert answer.status_code == 400
    assert "site.toml" in answer.text
    policy.write_text(original, encoding="utf-8")
    assert client.get("/").status_code == 200
    assert [one.number for one in page.facts().cases] == [1, 2, 3, 4]


def test_a_study_of_a_pool_is_not_called_answering_because_another_one_is(tmp_path: Path) -> None:
    """Answers and consent are counted by study, as the ledger keeps them."""
    site = make_own_site(tmp_path, "joined")
    other = replace(load_study(site / "study.toml"), name="older")
    with open_books(load_site(site)) as ledger:
        ledger.consent(other)
        ledger.reserve(other.id, queries_of(other, 3))
    found = page_of(site).facts()
    assert (found.state, found.here, found.site.accepted) == ("unconsented", None, 3)
    staff_decisions.consent(site, by="A. Noether", sheet="the sheet")
    assert page_of(site).facts().state == "joined"


@pytest.mark.parametrize(
    ("role", "state", "level"), [("site", "answering", "Warning"), ("server", "alarm", "Critical")]
)
def test_a_contradiction_in_a_peers_ledger_stops_nothing_and_one_in_the_servers_everything(
    tmp_path: Path, role: str, state: str, level: str
) -> None:
    site = make_own_site(tmp_path, "answering")
    memory = HeadMemory(load_site(site).books_dir / WITNESSES)
    memory.keep_conflict(CheckpointNote(origin_of(role, "a" * 32), 3, bytes(32)))
    page = page_of(site)
    found, text = page.facts(), client_of(page).get("/").text
    assert found.state == state
    (alarm,) = found.alarms
    assert "two histories" in alarm.text
    assert alarm.stops == ("no study of this pool is answered" in alarm.remedy) == (level == "Critical")
    assert f'<span class="level">{level}</span>' in text
    assert f'<span class="tag {STATES[state][0]}">{STATES[state][1]}</span>' in text
    assert "lower bound" not in text


@pytest.mark.parametrize(
    ("daemon", "state", "level"), [("log site", "answering", "Warning"), ("supernode north", "away", "Critical")]
)
def test_a_log_that_does_not_reach_its_target_is_reported_and_stops_nothing(
    tmp_path: Path, daemon: str, state: str, level: str
) -> None:
    site = make_own_site(tmp_path, "answering")
    with keeping(site / "logs"):
        report = json_report(site / "logs" / FACTS)
        report("daemon-ready", daemon=daemon, pid=1)
        assert page_of(site).facts().state == "answering"
        report("daemon-offline", daemon=daemon, pid=1, why="no answer; to fix: `start it`")
        page = page_of(site)
        found, text = page.facts(), client_of(page).get("/").text
    assert found.state == state
    (alarm,) = found.alarms
    assert "no answer" in alarm.text
    assert alarm.remedy == "`start it`"
    assert f'<span class="level">{level}</span>' in text
