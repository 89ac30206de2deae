"""Tests a hospital's own sign-in beside local users, with a small provider in this process, honest or hostile."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from common.errors import InvalidInput
from server.dashboard.app import Options, create_app
from server.dashboard.oidc import MOST_FINISHED, PENDING_S, Provider, load_settings
from server.dashboard.sign_in import WAITING_AT_ONCE
from tests.server.dashboard.conftest import PASSWORD, Clock, TestClient, until_followed

pytest.importorskip("authlib")

CLIENT, SECRET, KEY_ID = "consilium", "a secret of the client", "k1"


def b64(data: bytes | dict) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


class Idp:
    """Stands in for the provider: discovery document, keys and tokens. ``changes`` sets what it does wrong next."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.codes: dict[str, dict[str, str]] = {}
        self.claims: dict[str, object] = {"groups": ["staff", "consilium-operators"], "preferred_username": "grace"}
        self.changes: dict[str, object] = {}
        self.asked: list[str] = []
        idp = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self.answer({"/.well-known/openid-configuration": idp.document, "/keys": idp.keys}[self.path]())

            def do_POST(self) -> None:
                fields = dict(parse_qsl(self.rfile.read(int(self.headers["content-length"])).decode()))
                self.answer(idp.token(fields, self.headers.get("authorization", "")))

            def answer(self, body: dict[str, object] | None) -> None:
                idp.asked.append(self.path)
                self.send_response(400 if body is None else 200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body or {"error": "invalid_grant"}).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def document(self) -> dict[str, object]:
        found = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "id_token_signing_alg_values_supported": ["RS256", "none", "HS256"],
        }
        return {name: self.changes.get(name, value) for name, value in found.items()}

    def keys(self) -> dict[str, object]:
        public = self.key.public_key().public_numbers()
        return {"keys": [{"kty": "RSA", "kid": KEY_ID, "use": "sig", "n": number(public.n), "e": number(public.e)}]}

    def log_in(self, url: str, **more: str) -> str:
        """Return the address to which the provider sends the browser back after a sign-in."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert (asked["client_id"], asked["response_type"], asked["code_challenge_method"]) == (CLIENT, "code", "S256")
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        back = urlsplit(asked["redirect_uri"])
        assert back.path == "/login/oidc/back"
        return f"{back.path}?{urlencode({'state': asked['state'], 'code': code} | more)}"

    def token(self, fields: dict[str, str], authorization: str) -> dict[str, object] | None:
        asked = self.codes.pop(fields["code"], None)
        if asked is None or authorization != "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode():
            return None
        if b64(hashlib.sha256(fields["code_verifier"].encode()).digest()) != asked["code_challenge"]:
            return None
        now = int(time.time())
        claims = {"iss": self.url, "sub": "1", "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        claims = {**claims, **self.claims, **self.changes.get("claims", {})}  # type: ignore[dict-item]
        head = {"alg": "RS256", "kid": KEY_ID} | self.changes.get("head", {})  # type: ignore[operator]
        signed = f"{b64(head)}.{b64({k: v for k, v in claims.items() if v is not None})}"
        key = self.changes.get("key", self.key)
        signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())  # type: ignore[attr-defined]
        if head["alg"] == "none":
            signature = b""
        return {"access_token": "t", "token_type": "Bearer", "id_token": f"{signed}.{b64(signature)}"}


@pytest.fixture(scope="module")
def running() -> Iterator[Idp]:
    idp = Idp()
    yield idp
    idp.server.shutdown()
    idp.server.server_close()


@pytest.fixture
def idp(running: Idp) -> Iterator[Idp]:
    claims = dict(running.claims)
    yield running
    running.claims, running.changes = claims, {}


@pytest.fixture
def settings(idp: Idp, tmp_path: Path):
    (tmp_path / "secret").write_text(SECRET + "\n")
    file = tmp_path / "oidc.toml"
    file.write_text(
        f'issuer = "{idp.url}"\nclient_id = "{CLIENT}"\nclient_secret_file = "secret"\nrole_claim = "groups"\n'
        '[roles]\noperator = ["consilium-operators"]\nprivacy_officer = ["consilium-officers"]\n'
    )
    return load_settings(file)


@pytest.fixture
def door(collected, state, settings, clock) -> Iterator[TestClient]:
    """Yield a client of a dashboard with this provider, not signed in."""
    app = create_app(Options(study=collected.workspace.root, state=state, oidc=settings, clock=clock))
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as client:
        until_followed(client)
        yield client


def back(door: TestClient, idp: Idp, *, target: str = "/sites", **more: str):
    sent = door.get(f"/login/oidc?next={target}")
    assert sent.status_code == 303
    return door.get(idp.log_in(sent.headers["location"], **more))


@pytest.mark.parametrize(
    ("groups", "role"), [(["consilium-operators"], "operator"), (["x", "consilium-officers"], "privacy-officer")]
)
def test_a_person_whom_the_provider_authenticates_has_the_role_of_its_claim(door, idp, groups, role):
    idp.claims["groups"] = groups
    answer = back(door, idp)
    assert (answer.status_code, answer.headers["location"]) == (303, "/sites")
    me = door.get("/api/me").json()
    assert (me["user"], me["role"]) == ("oidc:grace", role)
    decided = door.post("/labels/decisions", data={"csrf": me["csrf"], "verdict": "accept"})
    assert decided.status_code == (400 if role == "operator" else 403)  # 400: allowed, but no label is chosen


def test_local_users_sign_in_as_ever_and_no_provider_can_speak_for_one(door, idp):
    assert "Sign in through 127.0.0.1" in door.get("/login").text
    idp.claims["preferred_username"] = "ada"
    back(door, idp)
    assert door.get("/api/me").json()["user"] == "oidc:ada"
    door.cookies.clear()
    assert door.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 303
    assert door.get("/api/me").json()["user"] == "ada"


LIES = {
    "another audience": {"claims": {"aud": "somebody else"}},
    "no audience": {"claims": {"aud": None}},
    "another issuer": {"claims": {"iss": "https://elsewhere.example.org"}},
    "another nonce": {"claims": {"nonce": "n"}},
    "no nonce": {"claims": {"nonce": None}},
    "out of date": {"claims": {"exp": 1_000_000_000}},
    "from tomorrow": {"claims": {"iat": int(time.time()) + 86_400, "nbf": int(time.time()) + 86_400}},
    "no subject": {"claims": {"sub": None}},
    "another key": {"key": rsa.generate_private_key(public_exponent=65537, key_size=2048)},
    "no signature": {"head": {"alg": "none"}},
    "a key that is public": {"head": {"alg": "HS256"}},
    "no role": {"claims": {"groups": ["staff"]}},
    "a role that is part of a text": {"claims": {"groups": "consilium-operators-not"}},
    "roles of another form": {"claims": {"groups": {"consilium-operators": True}}},
    "a role within a list": {"claims": {"groups": [["consilium-operators"], True, None, 10**300]}},
    "no name": {"claims": {"preferred_username": None}},
    "a name that is turned around": {"claims": {"preferred_username": "ada\u202e"}},
    "a name of other digits": {"claims": {"preferred_username": "ada\u0661"}},
    "a name of markup": {"claims": {"preferred_username": "<b>"}},
    "a name of another user of a provider": {"claims": {"preferred_username": "oidc:ada"}},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_invalid_token_lets_nobody_in(door, idp, lie):
    idp.changes = LIES[lie]
    answer = back(door, idp)
    assert answer.status_code == 401
    assert "The sign-in failed" in answer.text
    assert door.get("/api/me").status_code == 401


DOCUMENTS = {
    "another issuer": {"issuer": "https://elsewhere.example.org"},
    "a token address in the clear": {"token_endpoint": "http://elsewhere.example.org/token"},
    "keys in the clear": {"jwks_uri": "http://elsewhere.example.org/keys"},
    "no address": {"authorization_endpoint": None},
    "no signature but a public one": {"id_token_signing_alg_values_supported": ["none", "HS256"]},
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_nobody_is_sent_to_a_provider_with_a_wrong_description(door, idp, what):
    idp.changes = DOCUMENTS[what]
    answer = door.get("/login/oidc")
    assert answer.status_code == 503
    assert "Local users" in answer.text


def test_a_provider_that_does_not_answer_keeps_nobody_else_out(collected, state, settings, tmp_path):
    from dataclasses import replace

    options = Options(study=collected.workspace.root, state=state, oidc=replace(settings, issuer="http://127.0.0.1:9"))
    with TestClient(create_app(options), base_url="http://localhost", follow_redirects=False) as client:
        assert client.get("/login/oidc").status_code == 503
        assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 303


def test_an_answer_counts_once_for_the_browser_that_asked_and_for_ten_minutes(door, idp, settings):
    sent = door.get("/login/oidc").headers["location"]
    link = idp.log_in(sent)
    door.cookies.clear()  # the link of an attacker, opened by another browser
    assert door.get(link).status_code == 401
    assert door.get("/login/oidc/back?state=made-up&code=x").status_code == 401
    assert door.get("/login/oidc/back").status_code == 401
    sent = door.get("/login/oidc").headers["location"]
    link = idp.log_in(sent)
    assert door.get(link).status_code == 303
    assert door.get(link).status_code == 401, "twice"
    clock = Clock()
    provider = Provider(settings, clock=clock)
    url, word = provider.begin(redirect="http://localhost/login/oidc/back", target="/")
    state = parse_qs(urlsplit(url).query)["state"][0]
    clock.now += PENDING_S + 1
    with pytest.raises(InvalidInput, match="ten minutes"):
        provider.finish(state=state, code="c", browser=word)


@pytest.mark.slow
def test_a_flood_of_begun_sign_ins_takes_no_memory_asks_the_provider_once_and_ends_no_other_sign_in(door, idp):
    """Formerly 1,001 strangers who gave no name evicted every sign-in under way."""
    operators = door.get("/login/oidc?next=/sites").headers["location"]
    provider, before = door.app.state.sign_in.provider, len(idp.asked)
    redirect = "http://localhost/login/oidc/back"

    def flood(count: int) -> int:
        """Begin a number of sign-ins and complete none; return the bytes of memory that Python has allocated."""
        for _ in range(count):
            provider.begin(redirect=redirect, target="/")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = flood(300)
        assert flood(1_500) - held < 100_000
    finally:
        tracemalloc.stop()
    assert len(idp.asked) == before
    for _ in range(MOST_FINISHED + 100):  # complete each sign-in with an answer that the provider did not give
        url, word = provider.begin(redirect=redirect, target="/")
        provider._begun(state=parse_qs(urlsplit(url).query)["state"][0], browser=word)
    assert len(provider._finished) <= MOST_FINISHED
    assert door.get(idp.log_in(operators)).status_code == 303
    assert door.get("/api/me").json()["user"] == "oidc:grace"


@pytest.mark.slow
def test_a_flood_from_one_address_waits_for_itself_and_nobody_else_waits_for_it(
    collected, state, settings, idp, monkeypatch
):
    """The provider is asked about each made-up answer, four at a time; a crowd of them made everybody else wait."""
    app = create_app(Options(study=collected.workspace.root, state=state, oidc=settings))
    asked = Provider.finish

    def slowly(self, **answer):
        if answer["code"] == "made-up":
            time.sleep(0.2)
        return asked(self, **answer)

    monkeypatch.setattr(Provider, "finish", slowly)

    def browser(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600)

    async def attack() -> tuple[httpx.Response, int, list[int]]:
        async with app.router.lifespan_context(app), browser("192.0.2.6") as crowd, browser("192.0.2.7") as operator:
            made_up = [f"/login/oidc/back?state=s{number}&code=made-up" for number in range(120)]
            flood = [asyncio.create_task(crowd.get(address)) for address in made_up]
            await asyncio.sleep(0.05)
            sent = await operator.get("/login/oidc?next=/sites")
            answer = await operator.get(idp.log_in(sent.headers["location"]))
            still = sum(not one.done() for one in flood)
            return answer, still, [(await one).status_code for one in flood]

    answer, still, said = asyncio.run(attack())
    assert (answer.status_code, answer.headers["location"]) == (303, "/sites")
    assert said.count(401) == WAITING_AT_ONCE
    assert said.count(429) == 120 - WAITING_AT_ONCE
    assert still <= WAITING_AT_ONCE


def test_a_session_through_a_provider_ends_like_any_other(door, idp, clock):
    back(door, idp)
    assert door.get("/api/overview").status_code == 200
    clock.now += 12 * 3600 + 1
    assert door.get("/api/overview").status_code == 401


def test_without_an_oidc_provider_its_sign_in_routes_do_not_exist(client):
    assert client.get("/login/oidc").status_code == 404
    assert client.get("/login/oidc/back?state=a&code=b").status_code == 404
    assert "Sign in through" not in client.get("/login").text


@pytest.mark.parametrize("target", ["//elsewhere.example.org", "https://elsewhere.example.org", "/\\elsewhere"])
def test_nobody_is_redirected_to_another_host_after_signing_in(door, idp, target):
    assert back(door, idp, target=target).headers["location"] == "/"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("http://127.0.0.1", "http://login.example.org"),
        ("http://127.0.0.1", "ftp://127.0.0.1"),
        ('role_claim = "groups"\n', ""),
        ('role_claim = "groups"', 'role_claim = "groups"\nadmins = "x"'),
        ('["consilium-operators"]', '"consilium-operators"'),
        ('operator = ["consilium-operators"]\nprivacy_officer = ["consilium-officers"]\n', ""),
        ("issuer", "[issuer"),
    ],
)
def test_settings_that_are_wrong_are_refused_at_the_start(settings, tmp_path, old, new):
    file = tmp_path / "oidc.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(InvalidInput):
        load_settings(file)
