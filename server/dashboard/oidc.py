"""Signs users in through a hospital's OpenID Connect provider, by the authorization code flow with PKCE.

The sign-in pages use it in addition to the file of local users. Authlib creates and verifies the state, the nonce, the
PKCE values and the ID token. A sign-in fails if the provider does not answer or states another issuer, if the token has
a wrong audience, key or time, or if the user has no role. Local users can sign in regardless. URLs must be https,
except on loopback.
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
"""Least number of seconds between a failed request for the provider's description and the next request."""
MAX_ADDRESS = 1_000
LEEWAY_S = 30
PREFIX = "oidc:"
"""Prefix of the names of users whom a provider authenticated; a local user's name cannot contain a colon."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Values of the ID token's role claim that give a user a role in the dashboard.

    A user with values for both roles is an operator.

    Attributes:
        operator: Values that make a user an operator.
        privacy_officer: Values that make a user a privacy officer.
    """

    operator: tuple[str, ...] = ()
    privacy_officer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The content of ``oidc.toml``.

    Attributes:
        issuer: URL of the provider.
        client_id: The dashboard's client id at the provider.
        client_secret_file: File that contains the client secret, relative to ``root``.
        role_claim: Claim of the ID token that contains the roles; ``a.b`` is the member b of the claim a.
        roles: Values of this claim that give a role here.
        name_claim: Claim that contains the user name.
        scopes: Scopes to request, separated by spaces; must contain ``openid``.
        root: Folder of the settings file.

    Raises:
        InvalidInput: If the issuer is not an https URL, no role has a value, or the scope ``openid`` is missing.
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
        _check_address("issuer in the OIDC settings", self.issuer)
        if not (self.roles.operator or self.roles.privacy_officer):
            raise InvalidInput(
                "[roles] in the OIDC settings", limit="at least one value for operator or privacy_officer"
            )
        if "openid" not in self.scopes.split():
            raise InvalidInput("scopes in the OIDC settings", value=self.scopes, limit="scopes that include openid")


def load_settings(path: Path) -> Settings:
    """Read the OIDC settings.

    Args:
        path: The TOML file.

    Returns:
        The settings.

    Raises:
        InvalidInput: If the file cannot be read, if a key is unknown or missing, or if a value is invalid.
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
        raise InvalidInput(
            "keys of the OIDC settings that are missing or not a text",
            value=missing or None,
            limit="a text for every key; issuer, client_id, client_secret_file and role_claim are required",
        )
    return Settings(**table, roles=roles, root=path.parent)


def _check_address(what: str, address: object) -> str:
    """Return the value if it is an https URL, or an http URL of this machine; refuse any other."""
    with parsing(what, value=address, limit="an https URL, or an http URL of this machine"):
        parts = urlsplit(address if isinstance(address, str) else "")
    loopback = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or loopback):
        raise InvalidInput(what, value=address, limit="an https URL, or an http URL of this machine")
    return str(address)


@dataclass(frozen=True, slots=True)
class AuthenticatedUser:
    """A user whom the provider authenticated.

    Attributes:
        name: The user's name with the prefix :data:`PREFIX`, so that no local user has it.
        role: The user's role.
    """

    name: str
    role: Role


class Provider:
    """A client of one OpenID Connect provider. Its methods use the network, so they must be called in threads.

    The state of a sign-in in progress is stored in the browser's cookie, encrypted with a key of this process.
    Therefore sign-ins in progress need no memory here, and a large number of them cannot displace those of other users.
    The provider's description (its discovery document) is requested at most once in :data:`DESCRIBED_S` seconds, or in
    :data:`FAILED_S` seconds after a failed request.

    Args:
        settings: The settings.
        clock: Monotonic clock in seconds.

    Raises:
        InvalidInput: If the client secret cannot be read, or Authlib is not installed.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float]) -> None:
        try:
            secret = (settings.root / settings.client_secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(
                "client_secret_file", value=settings.client_secret_file, limit="a readable text file"
            ) from error
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
            redirect: URL of the dashboard to which the provider sends the browser back.
            target: Path of the page to open after the sign-in.

        Returns:
            URL at the provider to which to send the browser, and a value to store in the browser's cookie.

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

    def finish(self, *, state: str, code: str, browser: str) -> tuple[AuthenticatedUser, str]:
        """Finish a sign-in.

        Args:
            state: The state that the provider's answer contains.
            code: The authorization code that the provider's answer contains.
            browser: The value in the browser's cookie.

        Returns:
            The user, and the path of the page to open.

        Raises:
            InvalidInput: If this browser did not begin the sign-in here, if it was finished already, if the token is
                invalid, or if the user has no role.
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
        except Exception as error:  # any error in processing untrusted input refuses the sign-in
            raise InvalidInput(
                "the ID token of the OIDC provider is missing or not valid",
                value=type(error).__name__,
                remedy="sign in again; if this fails again, compare the OIDC settings with those of the provider",
            ) from error
        if not claims:
            raise InvalidInput(
                "the OIDC provider sent no ID token",
                remedy="register the dashboard there as a client of OpenID Connect",
            )
        return self._vouched(claims), str(pending["target"])

    def _begun(self, *, state: str, browser: str) -> dict[str, Any]:
        """Return the stored values of the sign-in that this browser began with this state, and mark it as finished."""
        try:
            pending: dict[str, Any] = json.loads(self._sealed.decrypt(browser.encode()))
        except (InvalidToken, UnicodeEncodeError) as error:
            raise InvalidInput(
                "this browser did not begin this sign-in here", remedy="begin again on the sign-in page"
            ) from error
        if not hmac.compare_digest(str(pending["state"]).encode(), state.encode("utf-8", "replace")):
            raise InvalidInput("this browser did not begin this sign-in here", remedy="begin again on the sign-in page")
        now = self._clock()
        with self._lock:
            self._finished = {name: ends for name, ends in self._finished.items() if ends > now}
            if pending["ends"] <= now or state in self._finished:
                raise InvalidInput(
                    "this sign-in began more than ten minutes ago or is already finished",
                    remedy="begin again on the sign-in page",
                )
            while len(self._finished) >= MOST_FINISHED:  # safe to forget: the provider accepts no code twice
                self._finished.pop(next(iter(self._finished)))
            self._finished[state] = pending["ends"]
        return pending

    def _client(self) -> Any:
        """Return a client that has the provider's current description, and thus its URLs."""
        settings = self.settings
        client = self._client_of(
            None,
            client_id=settings.client_id,
            client_secret=self._secret,
            server_metadata_url=settings.issuer.rstrip("/") + "/.well-known/openid-configuration",
            client_kwargs={"scope": settings.scopes, "code_challenge_method": "S256", "default_timeout": ANSWER_S},
        )
        with self._lock:  # only one thread requests the description; the others wait
            asked_at, described = self._described
            kept_s = FAILED_S if isinstance(described, InvalidInput) else DESCRIBED_S
            if not 0 <= self._clock() - asked_at < kept_s:
                described = self._describe(client)
                self._described = (self._clock(), described)
        if isinstance(described, InvalidInput):
            raise described
        client.server_metadata = dict(described)  # without the keys, which are fetched at the end of each sign-in
        return client

    def _describe(self, client: Any) -> dict[str, Any] | InvalidInput:
        """Request and return the provider's description; return an error if it cannot be had or is unsuitable."""
        settings = self.settings
        try:
            found: dict[str, Any] = client.load_server_metadata()
            if found.get("issuer") != settings.issuer:
                raise InvalidInput(
                    "the OIDC provider states another issuer than the OIDC settings",
                    limit=settings.issuer,
                    remedy="set issuer to the text that the provider states",
                )
            for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                _check_address(f"{name} of the OIDC provider", found.get(name))
            offered = found.get("id_token_signing_alg_values_supported", ("RS256",))
            found["id_token_signing_alg_values_supported"] = [name for name in offered if name in SIGNED_BY]
            if not found["id_token_signing_alg_values_supported"]:
                raise InvalidInput(
                    "the OIDC provider offers no signature algorithm that is accepted here",
                    limit=", ".join(SIGNED_BY),
                    remedy="let the provider sign ID tokens with one of these",
                )
        except InvalidInput as error:
            return error
        except Exception as error:  # noqa: BLE001 - no answer, or not a description
            return InvalidInput(f"{self.host} does not answer", value=type(error).__name__, remedy="try again later")
        return {name: value for name, value in found.items() if name != "jwks"}

    def _vouched(self, claims: Any) -> AuthenticatedUser:
        name = claims.get(self.settings.name_claim)
        if not isinstance(name, str) or not USER_NAME.fullmatch(name):
            raise InvalidInput(
                f"claim {self.settings.name_claim} of the ID token",
                limit="a user name of 1 to 64 letters, digits, '.', '_', '@', '-'",
                remedy="set name_claim in the OIDC settings to a claim that contains such a name",
            )
        found: Any = claims
        for key in self.settings.role_claim.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        listed = found if isinstance(found, list) else [found]
        values = {value for value in listed if isinstance(value, str)}
        roles = self.settings.roles
        for role, given in ((Role.OPERATOR, roles.operator), (Role.PRIVACY_OFFICER, roles.privacy_officer)):
            if values & set(given):
                return AuthenticatedUser(PREFIX + name, role)
        raise InvalidInput(
            f"{name} has no role here",
            limit="a user with a role that [roles] in the OIDC settings lists",
            remedy="ask the consortium's operator for a role",
        )


def _client_class() -> Any:
    """Return Authlib's client class, changed to follow no redirection; raise InvalidInput if Authlib is missing."""
    try:
        from authlib.integrations.base_client.sync_app import OAuth2Mixin
        from authlib.integrations.base_client.sync_openid import OpenIDMixin
        from authlib.integrations.requests_client import OAuth2Session
    except ImportError as error:
        raise InvalidInput(
            "--oidc", limit="Authlib installed", remedy="install Authlib: pip install 'Authlib>=1.9,<1.10'"
        ) from error

    class ProviderSession(OAuth2Session):  # type: ignore[misc]
        def request(self, *args: Any, **kwargs: Any) -> Any:
            return super().request(*args, **{**kwargs, "allow_redirects": False})

    class Client(OAuth2Mixin, OpenIDMixin):  # type: ignore[misc]
        client_cls = ProviderSession

    return Client
