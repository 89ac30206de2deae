"""Authenticates dashboard users: scrypt-hashed passwords, sessions that expire, and a limit on guesses.

The sign-in pages and the application use it. Sessions are in memory only, so a restart signs everybody out. It refuses
short passwords, unknown roles, user names that are taken, and sign-ins too soon after failed ones. Clocks are
parameters. No password is stored or logged.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from common.canonical import sha256_bytes
from common.document import Document, Key
from common.errors import InvalidInput
from common.objects import read_regular, write_json
from common.reading import parse_json, parsing

USERS_SCHEMA = 1
MIN_PASSWORD_CHARACTERS = 12
MAX_PASSWORD_CHARACTERS = 1024
MAX_FILE_BYTES = 1 << 22
USER_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 3}
_SCRYPT_MEMORY = 1 << 26


class Role(StrEnum):
    """A user's role.

    Users of both roles may read everything, verify the ledger and issue certificates. Only an ``operator`` may, in
    addition, decide about labels and hand in sites' reports. A ``privacy-officer`` may not.
    """

    OPERATOR = "operator"
    PRIVACY_OFFICER = "privacy-officer"

    @property
    def may_decide(self) -> bool:
        """True if the role may decide about labels and hand in reports."""
        return self is Role.OPERATOR


@dataclass(frozen=True, slots=True)
class User(Document):
    """A local user.

    Attributes:
        name: The user's name.
        role: The user's role.
        salt: Salt of scrypt, in hexadecimal.
        digest: scrypt hash of the password with n = 2¹⁵, r = 8, p = 3, in hexadecimal.
    """

    name: str
    role: Role
    salt: Annotated[str, bytes.fromhex]
    digest: Annotated[str, bytes.fromhex, Key("scrypt")]

    def accepts(self, password: str) -> bool:
        """Check a password in constant time.

        Args:
            password: The password.

        Returns:
            True if it is the user's password.
        """
        return hmac.compare_digest(_scrypt(password, bytes.fromhex(self.salt)).hex(), self.digest)


@dataclass(frozen=True, slots=True)
class _Users(Document):
    """Content of ``users.json``."""

    SCHEMA: ClassVar = ("users file", USERS_SCHEMA)

    users: tuple[User, ...]


_NOBODY = User(name="", role=Role.PRIVACY_OFFICER, salt="00" * 16, digest="00" * 32)


class UserFile:
    """The file of local users: ``users.json`` in the dashboard's state directory, with mode 0600.

    The file is read again whenever it has changed.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._users: dict[str, User] = {}
        self._lock = threading.Lock()

    def users(self) -> dict[str, User]:
        """Return the local users by name; an empty dict if there is no file.

        Raises:
            InvalidInput: If the file is invalid.
        """
        with self._lock:
            try:
                stat = self._path.stat()
            except FileNotFoundError:
                return {}
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp != self._stamp:
                self._users, self._stamp = _parse(read_regular(self._path, most_bytes=MAX_FILE_BYTES)), stamp
            return dict(self._users)

    def check(self, name: str, password: str) -> User | None:
        """Check a name and a password.

        The check takes as long for an unknown name as for a wrong password.

        Args:
            name: The user's name.
            password: The password; only the first 1,024 characters are compared.

        Returns:
            The user; None if the name or the password is wrong.

        Raises:
            InvalidInput: If the file is invalid.
        """
        user = self.users().get(name, _NOBODY)
        right = user.accepts(password[:MAX_PASSWORD_CHARACTERS])
        return user if right and user is not _NOBODY else None

    def add(self, name: str, role: Role, password: str, *, replace: bool = False) -> None:
        """Add a user, or change the role and password of an existing user.

        Args:
            name: The user's name.
            role: The role.
            password: 12 to 1,024 characters.
            replace: True to change an existing user, False to add a new one.

        Raises:
            InvalidInput: If the name or the password is invalid, if a new user's name is taken, or if the user to
                change does not exist.
        """
        if not USER_NAME.fullmatch(name):
            raise InvalidInput("user name", value=name, limit="1 to 64 letters, digits, '.', '_', '@', '-'")
        if not MIN_PASSWORD_CHARACTERS <= len(password) <= MAX_PASSWORD_CHARACTERS:
            raise InvalidInput(
                "password",
                value=f"{len(password)} characters",
                limit=f"{MIN_PASSWORD_CHARACTERS} to {MAX_PASSWORD_CHARACTERS} characters",
            )
        users = self.users()
        if (name in users) != replace:
            remedy = (
                "use `consilium dashboard user password`" if name in users else "use `consilium dashboard user add`"
            )
            raise InvalidInput(
                "user name",
                value=name,
                limit="the name of an existing user" if replace else "a name that no user has yet",
                remedy=remedy,
            )
        salt = secrets.token_bytes(16)
        self._save({**users, name: User(name, Role(role), salt.hex(), _scrypt(password, salt).hex())})

    def remove(self, name: str) -> None:
        """Remove a user; the user's sessions end at their next request.

        Args:
            name: The user's name.

        Raises:
            InvalidInput: If there is no such user.
        """
        users = self.users()
        if users.pop(name, None) is None:
            raise InvalidInput(
                "user name",
                value=name,
                limit="the name of an existing user",
                remedy="see `consilium dashboard user list`",
            )
        self._save(users)

    def _save(self, users: dict[str, User]) -> None:
        record = _Users(tuple(user for _, user in sorted(users.items()))).to_json()
        write_json(self._path, record, mode=0o600)


@dataclass(frozen=True, slots=True)
class Session:
    """One sign-in.

    Attributes:
        user: The user's name.
        role: The user's role.
        csrf: Token that the session's forms must carry.
        ends: Time at which the session ends, in seconds of the sessions' clock.
        credential: The local user's password hash; None for a user whom an OpenID Connect provider authenticated.
    """

    user: str
    role: Role
    csrf: str
    ends: float
    credential: str | None


class Sessions:
    """The open sessions, stored by the SHA-256 of their token; the token itself is only in the browser's cookie.

    Args:
        users: The local users.
        clock: Monotonic clock in seconds.
        lifetime_s: Lifetime of a session in seconds.
    """

    def __init__(self, users: UserFile, *, clock: Callable[[], float], lifetime_s: float) -> None:
        self._users, self._clock, self.lifetime_s = users, clock, lifetime_s
        self._open: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, role: Role, *, credential: str | None) -> tuple[str, Session]:
        """Start a session.

        Args:
            name: The user's name.
            role: The user's role.
            credential: The local user's password hash; None for a user whom an OpenID Connect provider authenticated.

        Returns:
            The token for the browser's cookie, and the session.
        """
        token = secrets.token_urlsafe(32)
        session = Session(
            user=name,
            role=role,
            csrf=secrets.token_urlsafe(32),
            ends=self._clock() + self.lifetime_s,
            credential=credential,
        )
        with self._lock:
            now = self._clock()
            self._open = {key: kept for key, kept in self._open.items() if kept.ends > now}
            self._open[sha256_bytes(token.encode())] = session
        return token, session

    def get(self, token: str | None) -> Session | None:
        """Return the session of a token.

        A session ends after its lifetime. A local user's session also ends when the user is removed or the password or
        role changes.

        Args:
            token: The token from the cookie; None if there is no cookie.

        Returns:
            The session; None if the token is unknown or the session has ended.

        Raises:
            InvalidInput: If the users file is invalid.
        """
        if not token:
            return None
        key = sha256_bytes(token.encode())
        with self._lock:
            session = self._open.get(key)
        if session is None:
            return None
        user = self._users.users().get(session.user) if session.credential is not None else None
        same = user is not None and user.digest == session.credential and user.role == session.role
        if not (same or session.credential is None) or session.ends <= self._clock():
            with self._lock:
                self._open.pop(key, None)
            return None
        return session

    def end(self, token: str | None) -> None:
        """End the session of a token, if there is one.

        Args:
            token: The token from the cookie; None if there is no cookie.
        """
        if token:
            with self._lock:
                self._open.pop(sha256_bytes(token.encode()), None)


@dataclass(slots=True)
class _Tries:
    count: int
    last: float


class Throttle:
    """Limits password guesses by pauses that double with each failed attempt: 1, 2, 4, … up to 900 s.

    Two counts are kept for each user name: one for each client address, and one for all addresses from which this name
    has never signed in. Pauses begin after :data:`FREE` attempts from one address and after :data:`FREE_ELSEWHERE` from
    all those addresses together. This slows down guessing from one or many addresses. Guesses at one name do not delay
    other names at the same address. A user who has signed in from an address before is not delayed there by guesses
    from other addresses. An attempt is counted before its password is checked, so parallel attempts gain nothing; the
    count is corrected if the password was right. A count restarts after an hour without an attempt.

    Args:
        clock: Monotonic clock in seconds.
    """

    FREE = 5
    FREE_ELSEWHERE = 50
    LONGEST_S = 900.0
    FORGET_S = 3600.0
    MOST = 20_000

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries: dict[tuple[str, str], _Tries] = {}
        self._at_home: dict[tuple[str, str], None] = {}
        self._lock = threading.Lock()

    def attempt(self, *, name: str, address: str) -> float:
        """Count a sign-in attempt, or return how long the client must wait before the next one.

        Args:
            name: The user name that the client gave.
            address: The client's address.

        Returns:
            0 if the password may be checked now. Otherwise the seconds to wait; such an attempt is not counted.
        """
        now = self._clock()
        with self._lock:
            keys = self._keys(name, address)
            wait = max(self._pause(key, free, now) for key, free in keys)
            if wait > 0:
                return wait
            for key, _ in keys:
                known = self._tries.pop(key, None)
                fresh = known is None or now - known.last > self.FORGET_S
                self._tries[key] = _Tries(1 if fresh or known is None else known.count + 1, now)
            while len(self._tries) > self.MOST:
                self._tries.pop(next(iter(self._tries)))
        return 0.0

    def succeeded(self, *, name: str, address: str) -> None:
        """After a successful sign-in, forget the failed ones of this name from this address, and remember the address.

        Args:
            name: The user's name.
            address: The client's address.
        """
        with self._lock:
            self._tries.pop((name, address), None)
            elsewhere = self._tries.get((name, ""))
            if elsewhere is not None and (name, address) not in self._at_home:
                elsewhere.count -= 1
            self._at_home[name, address] = None
            while len(self._at_home) > self.MOST:
                self._at_home.pop(next(iter(self._at_home)))

    def _keys(self, name: str, address: str) -> list[tuple[tuple[str, str], int]]:
        keys = [((name, address), self.FREE)]
        return keys if (name, address) in self._at_home else [*keys, ((name, ""), self.FREE_ELSEWHERE)]

    def _pause(self, key: tuple[str, str], free: int, now: float) -> float:
        known = self._tries.get(key)
        if known is None or known.count < free or now - known.last > self.FORGET_S:
            return 0.0
        pause = min(self.LONGEST_S, 2.0 ** min(known.count - free, 20))
        return max(0.0, known.last + pause - now)


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, maxmem=_SCRYPT_MEMORY, dklen=32, **_SCRYPT)


def users_file(state: Path) -> UserFile:
    """Return the file of a dashboard's local users.

    Args:
        state: The dashboard's state directory.

    Returns:
        ``users.json`` in this directory; it need not exist.
    """
    return UserFile(state / "users.json")


def _parse(content: bytes) -> dict[str, User]:
    limit = "a file that `consilium dashboard user add` wrote"
    with parsing("users file", limit=limit):
        found = _Users.from_json(parse_json(content, what="users file", limit=limit))
        return {user.name: user for user in found.users}
