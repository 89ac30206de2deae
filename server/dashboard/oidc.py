"""Signs users in through a hospital's OpenID Connect provider, by the code flow with state, nonce and PKCE.

The sign-in pages use it, besides the users file. Authlib creates and verifies state, nonce, PKCE and the ID token.
Nobody is let in by a provider that does not answer or states another issuer, by a token of another audience, key or
time, or without a role; local users are not affected. It refuses settings whose addresses are not https, except on
loopback.
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
"""How long to wait before asking a provider again that did not answer."""
MAX_ADDRESS = 1_000
LEEWAY_S = 30
PREFIX = "oidc:"
"""Prefix of the names of users whom a provider authenticated; no local user's name contains a colon."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Values of the role claim that give each role; a user with several gets the first of these roles."""

    operator: tuple[str, ...] = ()
    privacy_officer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The content of ``oidc.toml``.

    Attributes:
        issuer: Address of the provider.
        client_id: The dashboard's id at the provider.
        client_secret_file: File of its secret, relative to ``root``.
        role_claim: Claim that holds the roles; ``a.b`` is b within a.
        roles: Values of that claim.
        name_claim: Claim that holds the user name.
        scopes: Scopes to request; must contain ``openid``.
        root: Folder of the settings.

    Raises:
        InvalidInput: If the issuer is not https, no role has a value, or ``openid`` is missing.
    """

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
    """Read the settings.

    Raises:
        InvalidInput: For unknown or missing keys, or a value that is not text.
    """
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
    """Return the address if it is https, or http on this machine.

    Args:
        what: What it is, for the error.
        address: The address.

    Raises:
        InvalidInput: Otherwise.
    """
    with parsing(what, value=address, limit="an https address"):
        parts = urlsplit(address if isinstance(address, str) else "")
    loopback = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or loopback):
        raise InvalidInput(what, value=address, limit="an https address")
    return str(address)


@dataclass(frozen=True, slots=True)
class Vouched:
    """A user whom the provider authenticated: a name that no local user has, and a role."""

    name: str
    role: Role


class Provider:
    """One OpenID Connect provider. Its methods use the network and are called in threads.

    What the end of a sign-in needs is kept in the browser's cookie, encrypted under a key of this process. Many
    sign-ins begun at once therefore take no memory and do not end those of others. The provider's description is
    requested at most once in :data:`DESCRIBED_S`.

    Args:
        settings: The settings.
        clock: Returns seconds.

    Raises:
        InvalidInput: If the secret cannot be read, or Authlib is not installed.
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
        """Host name of the provider."""
        return str(urlsplit(self.settings.issuer).hostname)

    def begin(self, *, redirect: str, target: str) -> tuple[str, str]:
        """Begin a sign-in.

        Args:
            redirect: Address to which the provider sends the browser back.
            target: Page to open afterwards.

        Returns:
            Address to send the browser to, and a value that it must bring back in its cookie.

        Raises:
            InvalidInput: If the provider does not answer as expected.
        """
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
        """Finish a sign-in.

        Args:
            state: State in the provider's answer.
            code: Code in the provider's answer.
            browser: Value of the browser's cookie.

        Returns:
            The user, and the page to open.

        Raises:
            InvalidInput: For an answer that this browser did not request here or that comes twice, for an invalid
                token, or for a user without a role.
        """
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
        except Exception as error:  # any error in handling a stranger's input: nobody is let in
            raise InvalidInput(
                "answer of the provider", limit="a valid ID token", value=type(error).__name__
            ) from error
        if not claims:
            raise InvalidInput("answer of the provider", limit="with an ID token")
        return self._vouched(claims), str(pending["target"])

    def _begun(self, *, state: str, browser: str) -> dict[str, Any]:
        """Return what this browser began with this state; each can be finished once."""
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
            while len(self._finished) >= MOST_FINISHED:  # safe to forget: the provider accepts no code twice
                self._finished.pop(next(iter(self._finished)))
            self._finished[state] = pending["ends"]
        return pending

    def _client(self) -> Any:
        """Return a client that knows the provider's addresses from its recent description."""
        settings = self.settings
        client = self._client_of(
            None,
            client_id=settings.client_id,
            client_secret=self._secret,
            server_metadata_url=settings.issuer.rstrip("/") + "/.well-known/openid-configuration",
            client_kwargs={"scope": settings.scopes, "code_challenge_method": "S256", "default_timeout": ANSWER_S},
        )
        with self._lock:  # one thread asks the provider, the others wait for its answer
            asked_at, described = self._described
            kept_s = FAILED_S if isinstance(described, InvalidInput) else DESCRIBED_S
            if not 0 <= self._clock() - asked_at < kept_s:
                described = self._describe(client)
                self._described = (self._clock(), described)
        if isinstance(described, InvalidInput):
            raise described
        client.server_metadata = dict(described)  # without the keys, which are fetched at the end of every sign-in
        return client

    def _describe(self, client: Any) -> dict[str, Any] | InvalidInput:
        """Return the provider's current description, or the reason why there is none."""
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
        except Exception as error:  # noqa: BLE001 - no answer, or none that is a description
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
    """Return Authlib's client over requests, set to follow no redirection; InvalidInput if Authlib is not installed."""
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
