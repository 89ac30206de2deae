"""Sign-in through a hospital's OpenID Connect provider, beside the users file: code flow with state, nonce and PKCE.

Authlib makes and checks all three and the ID token. Everything fails closed: a provider that does not answer or says
another issuer, a token of another audience or key or time, a person without a role lets nobody in, and local users are
let in as ever. Refuses settings whose addresses are not https, a loopback host apart.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken

from common.errors import InvalidInput
from common.reading import MAX_TOML_BYTES, parse_toml, parsing, read_text
from common.sections import read_section
from server.dashboard.auth import USER_NAME, Role

SIGNED_BY = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
ANSWER_S = 10.0
PENDING_S = 600.0
MOST_FINISHED = 1_000
DESCRIBED_S = 300.0
FAILED_S = 5.0
"""How long a provider that does not answer is not asked again."""
MAX_ADDRESS = 1_000
LEEWAY_S = 30
PREFIX = "oidc:"
"""Of every name that a provider vouches for; no local user's name has a colon."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Values of the role claim, by the role each gives; who has several gets the first of these roles."""

    operator: tuple[str, ...] = ()
    privacy_officer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """``oidc.toml``: whom to ask, as which client, which claim (``a.b`` for b within a) says what role somebody has."""

    issuer: str
    client_id: str
    client_secret_file: str
    role_claim: str
    roles: Roles
    name_claim: str = "preferred_username"
    scopes: str = "openid profile"
    root: Path = field(default=Path())

    def __post_init__(self) -> None:
        check_address("issuer in the OIDC settings", self.issuer)
        if not (self.roles.operator or self.roles.privacy_officer):
            raise InvalidInput(
                "[roles] in the OIDC settings", limit="operator or privacy_officer with a value at least"
            )
        if "openid" not in self.scopes.split():
            raise InvalidInput("scopes in the OIDC settings", value=self.scopes, limit="openid among them")


def load_settings(path: Path) -> Settings:
    """Read the settings; unknown keys are refused."""
    remedy = "give a TOML file; see docs/dashboard.md"
    text = read_text(path, what="--oidc", most_bytes=MAX_TOML_BYTES, remedy=remedy)
    table = parse_toml(text, what="--oidc", value=str(path), remedy=remedy)
    roles = read_section(Roles, table.pop("roles", {}), where="roles")
    known = {"issuer", "client_id", "client_secret_file", "role_claim", "name_claim", "scopes"}
    if wrong := sorted(table.keys() - known):
        raise InvalidInput("keys of the OIDC settings", value=wrong, limit=", ".join(sorted(known)))
    missing = sorted({"issuer", "client_id", "client_secret_file", "role_claim"} - table.keys())
    if missing or not all(isinstance(value, str) for value in table.values()):
        raise InvalidInput("OIDC settings", value=missing or None, limit="a text for each key, none missing")
    return Settings(**table, roles=roles, root=path.parent)


def check_address(what: str, address: object) -> str:
    """``address`` if it is https, or http of this machine."""
    with parsing(what, value=address, limit="an https address"):
        parts = urlsplit(address if isinstance(address, str) else "")
    loopback = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or loopback):
        raise InvalidInput(what, value=address, limit="an https address")
    return str(address)


@dataclass(frozen=True, slots=True)
class Vouched:
    """Whom the provider vouches for: a name that no local user has, and a role."""

    name: str
    role: Role


class Provider:
    """One OpenID Connect provider. Calls go over the network: they are made in threads.

    What a sign-in needs at its end travels with the browser that began it, encrypted under a key of this process: a
    crowd that begins sign-ins takes no memory and ends nobody else's. The provider's description is asked for once in
    :data:`DESCRIBED_S`, however many begin.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float]) -> None:
        try:
            secret = (settings.root / settings.client_secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("client_secret_file", value=settings.client_secret_file, limit="readable") from error
        self.settings, self._clock = settings, clock
        self._client_of = _client_class()
        self._secret = secret
        self._sealed = Fernet(Fernet.generate_key())
        self._finished: dict[str, float] = {}
        self._described: tuple[float, dict[str, Any] | InvalidInput] = (-DESCRIBED_S, {})
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        """Whose page it is that people are sent to."""
        return str(urlsplit(self.settings.issuer).hostname)

    def begin(self, *, redirect: str, target: str) -> tuple[str, str]:
        """Where to send a browser, and a word it must bring back beside the answer."""
        asked = self._client().create_authorization_url(redirect)
        pending = {
            "state": asked["state"],
            "nonce": asked["nonce"],
            "verifier": asked["code_verifier"],
            "redirect": redirect[:MAX_ADDRESS],
            "target": target if len(target) <= MAX_ADDRESS else "/",
            "ends": self._clock() + PENDING_S,
        }
        return str(asked["url"]), self._sealed.encrypt(json.dumps(pending).encode()).decode()

    def finish(self, *, state: str, code: str, browser: str) -> tuple[Vouched, str]:
        """Who came back, and where they wanted to go. InvalidInput for an answer that nobody here asked for, that is
        not the browser's own, or comes twice; for a token that does not hold; and for a person without a role."""
        pending = self._begun(state=state, browser=browser)
        client = self._client()
        try:
            token = client.fetch_access_token(pending["redirect"], code=code, code_verifier=pending["verifier"])
            options = {
                "iss": {"essential": True, "values": [self.settings.issuer]},
                "aud": {"essential": True, "values": [self.settings.client_id]},
            }
            claims = client.parse_id_token(token, pending["nonce"], claims_options=options, leeway=LEEWAY_S)
        except InvalidInput:
            raise
        except Exception as error:  # whatever a library makes of what a stranger sent: nobody is let in
            raise InvalidInput(
                "answer of the provider", limit="a valid ID token", value=type(error).__name__
            ) from error
        if not claims:
            raise InvalidInput("answer of the provider", limit="with an ID token")
        return self._vouched(claims), str(pending["target"])

    def _begun(self, *, state: str, browser: str) -> dict[str, Any]:
        """What this browser began with this state, once."""
        try:
            pending: dict[str, Any] = json.loads(self._sealed.decrypt(browser.encode()))
        except (InvalidToken, UnicodeEncodeError) as error:
            raise InvalidInput("answer of the provider", limit="one that this browser asked for here") from error
        if not hmac.compare_digest(str(pending["state"]).encode(), state.encode("utf-8", "replace")):
            raise InvalidInput("answer of the provider", limit="one that this browser asked for here")
        now = self._clock()
        with self._lock:
            self._finished = {name: ends for name, ends in self._finished.items() if ends > now}
            if pending["ends"] <= now or state in self._finished:
                raise InvalidInput("answer of the provider", limit="one that was asked for here within ten minutes")
            while len(self._finished) >= MOST_FINISHED:  # the provider takes no code twice either
                self._finished.pop(next(iter(self._finished)))
            self._finished[state] = pending["ends"]
        return pending

    def _client(self) -> Any:
        """A client that knows the provider's addresses as it stated them lately."""
        settings = self.settings
        client = self._client_of(
            None,
            client_id=settings.client_id,
            client_secret=self._secret,
            server_metadata_url=settings.issuer.rstrip("/") + "/.well-known/openid-configuration",
            client_kwargs={"scope": settings.scopes, "code_challenge_method": "S256", "default_timeout": ANSWER_S},
        )
        with self._lock:  # one asks, the others wait for what it is told
            asked_at, described = self._described
            kept_s = FAILED_S if isinstance(described, InvalidInput) else DESCRIBED_S
            if not 0 <= self._clock() - asked_at < kept_s:
                described = self._describe(client)
                self._described = (self._clock(), described)
        if isinstance(described, InvalidInput):
            raise described
        client.server_metadata = dict(described)  # without the keys, which are asked for at every sign-in's end
        return client

    def _describe(self, client: Any) -> dict[str, Any] | InvalidInput:
        """The provider's description as it states it now, or why there is none."""
        settings = self.settings
        try:
            found: dict[str, Any] = client.load_server_metadata()
            if found.get("issuer") != settings.issuer:
                raise InvalidInput("issuer that the provider states", limit=settings.issuer)
            for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                check_address(f"{name} of the provider", found.get(name))
            offered = found.get("id_token_signing_alg_values_supported", ("RS256",))
            found["id_token_signing_alg_values_supported"] = [name for name in offered if name in SIGNED_BY]
            if not found["id_token_signing_alg_values_supported"]:
                raise InvalidInput("signatures of the provider", limit=", ".join(SIGNED_BY))
        except InvalidInput as error:
            return error
        except Exception as error:  # noqa: BLE001 - it does not answer, or not with its description
            return InvalidInput(
                f"{self.host} cannot be asked now", value=type(error).__name__, remedy="try again later"
            )
        return {name: value for name, value in found.items() if name != "jwks"}

    def _vouched(self, claims: Any) -> Vouched:
        name = claims.get(self.settings.name_claim)
        if not isinstance(name, str) or not USER_NAME.fullmatch(name):
            raise InvalidInput(f"claim {self.settings.name_claim}", limit="a user name")
        found: Any = claims
        for key in self.settings.role_claim.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        listed = found if isinstance(found, list) else [found]
        values = {value for value in listed if isinstance(value, str)}
        for role, given in ((Role.OPERATOR, self.settings.roles.operator), (Role.PRIVACY_OFFICER, self._officers)):
            if values & set(given):
                return Vouched(PREFIX + name, role)
        raise InvalidInput(f"{name}'s roles", limit="one that this dashboard knows")

    @property
    def _officers(self) -> tuple[str, ...]:
        return self.settings.roles.privacy_officer


def _client_class() -> Any:
    """Authlib's client over requests, which follows no redirection; InvalidInput where Authlib is not installed."""
    try:
        from authlib.integrations.base_client.sync_app import OAuth2Mixin
        from authlib.integrations.base_client.sync_openid import OpenIDMixin
        from authlib.integrations.requests_client import OAuth2Session
    except ImportError as error:
        raise InvalidInput("--oidc", limit="Authlib installed", remedy="pip install 'consilium[oidc]'") from error

    class ProviderSession(OAuth2Session):  # type: ignore[misc]
        def request(self, *args: Any, **kwargs: Any) -> Any:
            return super().request(*args, **{**kwargs, "allow_redirects": False})

    class Client(OAuth2Mixin, OpenIDMixin):  # type: ignore[misc]
        client_cls = ProviderSession

    return Client
