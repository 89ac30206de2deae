"""A hospital's own page: what it says in five states, to whom, and that it writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.canonical import sha256_file
from common.errors import InvalidInput
from common.hospital_page import HospitalFacts, OwnAlarm, OwnAnswer, OwnPage, OwnPeer, OwnStudy, ShownCase
from server.dashboard.hospital import STATES, create_hospital_app
from server.dashboard.security import HEADERS
from tests.own_site import make_own_site, page_of
from tests.server.dashboard.conftest import TestClient

KEY = "k" * 32


def facts(**of: object) -> HospitalFacts:
    given: dict[str, object] = {
        "site": "north",
        "pool": "north/patients",
        "study": "trial",
        "state": "answering",
        "sheet": "WHAT IS ASKED OF YOU",
        "consented": ("2026-11-25 10:00 UTC: A. Noether",),
        "epsilon": 3.25,
        "cap": 12.0,
        "share": 0.2,
        "accountant": "exact",
        "delta": 1e-5,
        "unit": "patient",
        "relation": "replace-one",
        "doubt": "",
        "today": 4,
        "per_day": 1000,
        "studies": (OwnStudy("trial", "open", 4, 3.25, 0.2, True),),
        "trainings": (),
        "answers": (OwnAnswer("2026-11-25T10:00:00Z", 4, ""), OwnAnswer("2026-11-25T09:00:00Z", 1, "study-budget")),
        "accepted": 4,
        "refused": 1,
        "sealed": True,
        "own_fingerprint": "SHA256:own",
        "peers": (OwnPeer("south", "SHA256:south", "NOT CONFIRMED", False),),
        "alarms": (OwnAlarm("row 7 <b>contradicts</b>", "`consilium site recover`", True),),
        "networks": (),
        "pause": "consilium site pause trial --site-dir /srv/consilium",
        "cases": 0,
    }
    return HospitalFacts(**(given | of))  # type: ignore[arg-type]


class Fixed(OwnPage):
    def __init__(self, shown: HospitalFacts) -> None:
        self._shown = shown

    def facts(self) -> HospitalFacts:
        return self._shown

    def case(self, number: int) -> ShownCase:
        raise InvalidInput("case", value=number + 1, limit="1 to 0")


def client_of(page: OwnPage, *, key: str = KEY) -> TestClient:
    client = TestClient(create_hospital_app(page, key=KEY), base_url="http://localhost", follow_redirects=True)
    if key:
        assert client.get(f"/?key={key}").status_code in (200, 403)
    return client


def test_the_page_says_what_staff_ask_for_and_escapes_it() -> None:
    text = client_of(Fixed(facts())).get("/").text
    for said in (
        "of 12 spent",
        "A. Noether",
        "consilium site pause trial --site-dir /srv/consilium",
        "SHA256:south",
        "not confirmed",
        "the study&#39;s budget has no room for the batch",
        "row 7 &lt;b&gt;contradicts&lt;/b&gt;",
        "<code>consilium site recover</code>",
        "WHAT IS ASKED OF YOU",
    ):
        assert said in text, said


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_its_words(state: str) -> None:
    assert STATES[state][1] in client_of(Fixed(facts(state=state))).get("/").text


def test_nobody_without_the_key_sees_anything_and_the_key_is_for_one_start() -> None:
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
    """Every file's hash, without the two that SQLite keeps beside a ledger while somebody reads it."""
    there = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): sha256_file(path) for path in there if not path.name.endswith(("-shm", "-wal"))}


@pytest.mark.parametrize(
    ("state", "shown"),
    [("joined", "joined"), ("answering", "answering"), ("paused", "paused"), ("alarm", "alarm")],
)
def test_a_sites_own_books_are_read_and_not_written(tmp_path: Path, state: str, shown: str) -> None:
    site = make_own_site(tmp_path, state)
    before = files(site)
    page = page_of(site)
    found = page.facts()
    assert client_of(page).get("/").status_code == 200
    assert files(site) == before
    assert found.state == shown
    assert found.sheet == "sheet of trial, 4 patients"
    if state == "joined":
        assert (found.accepted, found.consented, found.answers) == (0, (), ())
    if state in ("answering", "paused"):
        assert (found.accepted, found.refused) == (3, 1)
        assert {one.reason for one in found.answers} == {"", "not-allowed"}
        assert sum(one.queries for one in found.answers if not one.reason) == 3
        assert "A. Noether" in " ".join(found.consented)
        assert found.studies[0].share == pytest.approx(found.share)
        assert 0 < found.epsilon < found.cap
        assert f"site {'resume' if state == 'paused' else 'pause'} trial" in found.pause
    if state == "alarm":
        assert found.alarms[0].stops
        assert found.doubt
