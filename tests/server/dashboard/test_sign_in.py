"""Tests that figures need a sign-in, guessing is slow, sessions end, and forms cannot be forged."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import HTTPException, Request
from fastapi.routing import iter_route_contexts

from common.errors import InvalidInput
from server.dashboard.auth import Role, Sessions, Throttle, UserFile
from server.dashboard.security import admitted, local_path
from tests.server.dashboard.conftest import PASSWORD, SCRYPT, Clock, Recorded, TestClient

PAGES = ("/", "/study", "/sites", "/ledger", "/labels", "/student", "/studies", "/planner")


def test_without_a_session_pages_lead_to_the_sign_in_and_the_api_says_401(client):
    for path in PAGES:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"].split("?")[0]) == (303, "/login"), path
    for path in ("/api/overview", "/api/openapi.json", "/api/live/overview", "/api/blocks/overview", "/metrics"):
        assert client.get(path).status_code == 401, path


ANYBODY = {("GET", "/login"), ("POST", "/login"), ("GET", "/healthz")}
ANYBODY |= {("GET", "/login/oidc"), ("GET", "/login/oidc/back")}  # 404 where no provider is set up


def routes(client: TestClient) -> list[tuple[str, str]]:
    """Return the method and path of every route of the application, with parameters filled in."""
    values = {"name": "sites", "seq": "7", "ending": "pdf", "volume": "a" * 64, "page": "overview"}
    found = [
        (method, re.sub(r"{(\w+)}", lambda name: values[name[1]], str(route.path)))
        for route in iter_route_contexts(client.app.routes)
        for method in sorted(getattr(route, "methods", None) or ())
    ]
    assert len(found) > 35
    return found


def test_every_route_refuses_a_request_without_a_session(client):
    for method, path in routes(client):
        answer = client.request(method, path)
        if (method, path) in ANYBODY:
            assert answer.status_code in (200, 404, 415), path
        elif path.startswith(("/api/", "/metrics")):
            assert answer.status_code == 401, (method, path)
        else:
            assert (answer.status_code, answer.headers["location"].split("?")[0]) == (303, "/login"), (method, path)


def test_no_route_changes_anything_without_the_sessions_token(signed_in):
    client = signed_in("ada")
    changing = [path for method, path in routes(client) if method != "GET" and path != "/login"]
    assert len(changing) >= 7
    for path in changing:
        for sent in ({}, {"data": {"csrf": "guess"}}, {"headers": {"x-csrf-token": "guess"}}):
            assert client.post(path, **{"data": {"x": "y"}, **sent}).status_code == 403, path


def test_decisions_of_an_operator_are_closed_to_a_privacy_officer_and_nothing_else_is(signed_in):
    client = signed_in("paul")
    token = client.get("/api/me").json()["csrf"]
    for method, path in routes(client):
        if method == "GET" or path in ("/login", "/logout"):
            continue
        sent = {"json": {"verdict": "reject"}} if path.startswith("/api/") else {"data": {"csrf": token}}
        answer = client.post(path, headers={"x-csrf-token": token}, **sent)
        assert (answer.status_code == 403) == path.endswith(("/decision", "/decisions", "/report")), path


@pytest.mark.parametrize("path", ["/new", "/api/new"])
def test_a_route_that_names_no_gate_is_closed(client, path):
    client.app.add_api_route(path, lambda: "a figure", methods=["GET", "POST"])
    assert client.get(path).status_code == (303 if path == "/new" else 401)
    assert client.post(path, data={"x": "y"}).status_code == (303 if path == "/new" else 401)


def test_the_host_a_caller_names_opens_no_path(client):
    scope = {"type": "http", "method": "GET", "path": "/api/overview", "query_string": b"", "app": client.app}
    with pytest.raises(HTTPException) as refused:
        asyncio.run(admitted(Request({**scope, "headers": [(b"host", b"localhost/login?")]})))
    assert refused.value.status_code == 401


def test_signing_in_leads_back_and_its_cookie_is_closed_to_scripts_and_not_to_links_in_mails(client):
    answer = client.post("/login", data={"name": "ada", "password": PASSWORD, "next": "/ledger?kind=release"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ledger?kind=release")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie  # a link in a mail leads to its page
    assert client.get("/").status_code == 200


def test_over_tls_the_cookie_travels_over_tls_only(collected, state):
    from server.dashboard.app import Options, create_app

    app = create_app(Options(study=collected.workspace.root, state=state, secure=True))
    with TestClient(app, base_url="https://localhost", follow_redirects=False) as client:
        answer = client.post("/login", data={"name": "ada", "password": PASSWORD})
        assert "secure" in answer.headers["set-cookie"].lower()
        assert "strict-transport-security" in answer.headers


@pytest.mark.parametrize(("name", "password"), [("ada", "wrong" * 4), ("nobody", PASSWORD), ("", "")])
def test_a_wrong_name_or_password_opens_nothing_and_both_read_the_same(client, name, password):
    answer = client.post("/login", data={"name": name, "password": password})
    assert answer.status_code == 401
    assert "Name or password" in answer.text
    assert "set-cookie" not in answer.headers
    assert password not in answer.text or not password


def test_guessing_is_slowed_down_and_the_right_password_waits_too(client, clock):
    for _ in range(Throttle.FREE):
        assert client.post("/login", data={"name": "ada", "password": "x" * 12}).status_code == 401
    answer = client.post("/login", data={"name": "ada", "password": PASSWORD})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    clock.now += 2
    assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 303


def test_guesses_that_come_together_are_no_cheaper_than_guesses_in_turn_and_lock_out_nobody_else(client, monkeypatch):
    """Of 60 guesses at once, no more are checked than in turn. Another user at the same address can sign in."""
    looked: list[str] = []

    def check(self: UserFile, name: str, password: str) -> None:
        looked.append(name)
        time.sleep(0.05)

    with monkeypatch.context() as patched:
        patched.setattr(UserFile, "check", check)
        with ThreadPoolExecutor(60) as pool:
            form = {"name": "ada", "password": "x" * 12}
            answers = list(pool.map(lambda _: client.post("/login", data=form).status_code, range(60)))
    assert 1 <= len(looked) <= Throttle.FREE
    assert answers.count(401) == len(looked)
    assert answers.count(429) == 60 - len(looked)
    assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 429
    assert client.post("/login", data={"name": "paul", "password": PASSWORD}).status_code == 303


def test_pauses_double_up_to_their_limit_and_another_address_is_not_slowed():
    clock = Clock()
    throttle = Throttle(clock=clock)
    pauses = []
    for _ in range(Throttle.FREE + 12):
        assert throttle.attempt(name="ada", address="10.0.0.1") == 0
        pauses.append(throttle.attempt(name="ada", address="10.0.0.1") if len(pauses) >= Throttle.FREE - 1 else 0)
        clock.now += pauses[-1]
    assert pauses[4:8] == [1, 2, 4, 8]
    assert max(pauses) == Throttle.LONGEST_S
    assert throttle.attempt(name="ada", address="10.0.0.1") == 0
    assert throttle.attempt(name="ada", address="10.0.0.2") == 0
    assert throttle.attempt(name="paul", address="10.0.0.1") == 0
    clock.now += Throttle.FORGET_S + 1
    assert throttle.attempt(name="ada", address="10.0.0.1") == 0


def test_guessing_from_many_addresses_is_slowed_down_and_the_user_is_not_where_she_signs_in():
    throttle = Throttle(clock=Clock())
    assert throttle.attempt(name="ada", address="home") == 0
    throttle.succeeded(name="ada", address="home")
    for number in range(Throttle.FREE_ELSEWHERE):
        assert throttle.attempt(name="ada", address=f"10.0.0.{number}") == 0
    assert throttle.attempt(name="ada", address="10.0.1.1") > 0
    assert throttle.attempt(name="ada", address="home") == 0


def test_a_form_sent_after_the_session_leads_back_to_its_page(client):
    form = {"verdict": "accept", "csrf": "x"}
    page = f"/labels/{'a' * 64}"
    answer = client.post(f"{page}/decision", data=form, headers={"referer": f"http://localhost{page}"})
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/login?next={page.replace('/', '%2F')}"
    assert client.post("/certificate", data=form).headers["location"] == "/login?next=%2F"


@pytest.mark.parametrize(
    "path", ["/login", "/api/ledger/verify", "/ledger/verify", "/api/labels/x/decision", "/", "/nowhere"]
)
@pytest.mark.parametrize("stated", [True, False], ids=["stated", "in pieces"])
def test_nobody_makes_the_dashboard_hold_a_large_body(client, path, stated):
    """A large body is refused as soon as its size is known, from every sender and on every path."""
    taken = 0

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1 << 16
            yield b"x" * (1 << 16)

    app = client.app

    async def ask() -> int:
        source = pieces()
        status = 0

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": next(source), "more_body": True}

        async def note(message: dict[str, object]) -> None:
            nonlocal status
            status = message.get("status", status)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers += [(b"content-length", b"65536000")] if stated else []
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {
            "headers": headers,
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("1.1.1.1", 1),
        }
        await app({**scope, "server": ("localhost", 80), "app": app}, receive, note)
        return status

    assert asyncio.run(ask()) == 413
    assert taken <= 3 << 16


def test_an_address_that_makes_no_sense_is_answered_in_words(signed_in):
    client = signed_in("paul")
    for path in ("/ledger/abc", "/ledger?before=x", "/ledger?text=" + "x" * 200, "/labels/x?axial=abc"):
        answer = client.get(path)
        assert answer.status_code in (400, 404)
        assert answer.headers["content-type"].startswith("text/html"), path
    assert client.get("/api/ledger/rows/abc").status_code == 422


def test_health_fails_while_a_broken_users_file_prevents_every_sign_in(client, state):
    assert client.get("/healthz").json()["users_readable"]
    (state / "users.json").write_text("{")
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()["users_readable"]) == (503, False)


def test_a_session_ends_after_its_time_and_the_sign_in_says_so(signed_in, clock):
    client = signed_in()
    assert client.get("/api/overview").status_code == 200
    clock.now += 12 * 3600 + 1
    assert client.get("/api/overview").status_code == 401
    answer = client.get("/")
    assert answer.status_code == 303
    assert "ended=1" in answer.headers["location"]
    assert "session has ended" in client.get(answer.headers["location"]).text


def test_a_new_password_another_role_or_a_removal_ends_open_sessions(tmp_path):
    users = UserFile(tmp_path / "users.json")
    for change in ("password", "role", "removal"):
        users.add("eve", Role.OPERATOR, PASSWORD)
        sessions = Sessions(users, clock=Clock(), lifetime_s=100)
        token, session = sessions.begin("eve", Role.OPERATOR, credential=users.users()["eve"].digest)
        assert sessions.get(token) == session
        if change == "removal":
            users.remove("eve")
        else:
            role = Role.PRIVACY_OFFICER if change == "role" else Role.OPERATOR
            users.add("eve", role, PASSWORD + "!", replace=True)
        assert sessions.get(token) is None
        users._path.unlink()
        users._stamp = None


def test_signing_out_needs_the_sessions_token_and_ends_it(signed_in):
    client = signed_in()
    assert client.post("/logout", data={"csrf": "guess"}).status_code == 403
    token = re.search(r'name="csrf" value="([^"]+)"', client.get("/").text)[1]
    assert client.post("/logout", data={"csrf": token}).status_code == 303
    assert client.get("/").status_code == 303


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
def test_a_form_sent_from_another_site_is_refused(client, headers):
    answer = client.post("/login", data={"name": "ada", "password": PASSWORD}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example/", "/\\evil.example", "", "/login", "x"])
def test_a_sign_in_never_leads_off_this_site(target):
    assert local_path(target) == "/"


@pytest.mark.slow
def test_passwords_are_kept_as_scrypt_and_the_file_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("server.dashboard.auth._SCRYPT", SCRYPT)
    users = UserFile(tmp_path / "users.json")
    users.add("ada", Role.OPERATOR, PASSWORD)
    assert (tmp_path / "users.json").stat().st_mode & 0o777 == 0o600
    text = (tmp_path / "users.json").read_text()
    assert PASSWORD not in text
    record = json.loads(text)["users"][0]
    expected = hashlib.scrypt(
        PASSWORD.encode(), salt=bytes.fromhex(record["salt"]), n=2**15, r=8, p=3, maxmem=2**26, dklen=32
    )
    assert record["scrypt"] == expected.hex()


@pytest.mark.parametrize(
    ("name", "password"), [("ada", "short"), ("", PASSWORD), ("a b", PASSWORD), ("x" * 65, PASSWORD)]
)
def test_short_passwords_and_odd_names_are_refused(tmp_path, name, password):
    with pytest.raises(InvalidInput) as refused:
        UserFile(tmp_path / "users.json").add(name, Role.OPERATOR, password)
    assert password not in str(refused.value) or password == ""
    assert not (tmp_path / "users.json").exists()


def test_every_answer_carries_a_policy_that_allows_nothing_from_outside(client):
    for path in ("/login", "/", "/healthz", "/static/dashboard.css", "/nowhere"):
        headers = client.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


def test_metrics_open_to_their_token_or_a_session_and_to_nothing_else(client, signed_in):
    assert client.get("/metrics", headers={"authorization": "Bearer guess"}).status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer " + "m" * 20}).status_code == 200
    assert signed_in("paul").get("/metrics").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "localhost/x", "localhost@evil.example", ""]
)
def test_a_page_of_another_name_that_leads_here_is_answered_nothing(client: TestClient, host: str) -> None:
    for path in ("/", "/login", "/healthz", "/metrics", "/api/openapi.json", "/static/dashboard.css"):
        answer = client.get(path, headers={"host": host})
        assert (answer.status_code, answer.text) == (421, "unknown host\n")
        assert answer.headers["content-security-policy"]
    assert client.get("/healthz").status_code == 200


def test_the_names_an_operator_gives_are_answered(collected: Recorded, state: Path) -> None:
    from server.dashboard.app import Options, create_app

    options = Options(study=collected.workspace.root, state=state, hosts=lambda: {"pate.example.org"})
    with TestClient(create_app(options), base_url="http://pate.example.org", follow_redirects=False) as client:
        assert client.get("/login").status_code == 200
        assert client.get("/login", headers={"host": "PATE.example.org:8050"}).status_code == 200
