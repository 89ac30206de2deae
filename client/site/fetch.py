"""Fetches public objects from the server by content hash, verifies and caches them.

The worker and `site student pull` call it. Requests are signed with the site's node key. An interrupted download
continues where it stopped, even after a restart of the program. If the cache is full, the objects unused for longest
are deleted; they are fetched again when needed. The module refuses an object with another SHA-256, a server certificate
that the authority in the startup kit did not sign, and redirects to another address.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from client.policy import SiteConfig
from common.canonical import check_hash, sha256_bytes
from common.errors import InvalidInput
from common.https import opener
from common.node_auth import MAX_AGE_S, MAX_LEAD_S, signed_headers
from common.objects import MAX_OBJECT_BYTES, ObjectStore
from common.peers import MAX_PEERS_BYTES, Peers
from common.pki import load_node_key
from common.plain import plain
from common.student_statement import MAX_STATEMENT_BYTES

MAX_CACHE_BYTES = 32 << 30
"""Largest size of the cache, including the object being fetched; a thousand volumes of 32 MiB fit."""

TIMEOUT_S = 30.0
"""Seconds without any byte from the server after which a try has failed."""
SLOWEST_BYTES = 64 << 10
"""A try has failed too if fewer than these bytes arrive in twice :data:`TIMEOUT_S`."""
TRIES = 5
PAUSE_S = 1.0
CHUNK_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Called with the number of bytes of an object fetched so far."""

_WHAT = {"students": "the statement about the student", "peers": "the list of sites"}

OnWait = Callable[[str], None]
"""Called with a sentence about each wait for the server: before the first try, and after each try that failed."""


class ObjectNotFound(InvalidInput):
    """The server answered that it does not have the object."""


class PublicObjects:
    """Fetches ``GET {objects_url}/public/{sha256}`` through the site's cache.

    Args:
        config: The site's policy.
        on_wait: Called with a sentence about each wait for the server.
    """

    def __init__(self, config: SiteConfig, *, on_wait: OnWait = lambda said: None) -> None:
        self._on_wait = on_wait
        self._cache = config.root / "cache"
        self._store = ObjectStore(self._cache)
        self._url = config.server.objects_url.rstrip("/")
        self._opener = opener(ssl.create_default_context(cafile=str(config.path(config.server.root_certificates))))
        self._key = load_node_key(config.root / "node" / "keys" / "node")

    def get(self, name: str, *, on_bytes: OnBytes = lambda count: None) -> bytes:
        """Return an object from the cache or the server.

        Args:
            name: SHA-256 of the object.
            on_bytes: Called with the number of bytes fetched so far.

        Returns:
            Its bytes.

        Raises:
            InvalidInput: If it cannot be fetched, or has another hash.
        """
        if name in self._store:
            with contextlib.suppress(OSError):
                os.utime(self._store.path(name))  # used now
            return self._store.get(name)
        partial = self._cache / f".part-{check_hash(name)}"
        self._make_room(keep=partial)
        self._download(f"/public/{name}", partial, on_bytes, limit=MAX_OBJECT_BYTES, what=f"object {name[:16]}…")
        data = partial.read_bytes()
        partial.unlink()
        if sha256_bytes(data) != name:
            raise InvalidInput("public object does not match its hash", value=name, remedy="tell the server's operator")
        self._store.put(data)
        return data

    def statement(self, study_id: str) -> bytes:
        """Fetch the server's statement about a study's student. It is neither verified nor cached here.

        Args:
            study_id: Id of the study.

        Returns:
            The statement's bytes.

        Raises:
            InvalidInput: If there is none yet, or it cannot be fetched.
        """
        try:
            return self._fetch_document("students", study_id, limit=MAX_STATEMENT_BYTES)
        except ObjectNotFound as error:
            raise InvalidInput(
                "this study has no student yet", remedy="pull again when the consortium's run has ended"
            ) from error

    def peers(self, study_id: str) -> Peers:
        """Fetch the server's list of a study's sites and their keys.

        The list is only shown to people. No key becomes trusted because it is in the list.

        Args:
            study_id: Id of the study.

        Returns:
            The list.

        Raises:
            InvalidInput: If it cannot be fetched or read.
        """
        data = self._fetch_document("peers", study_id, limit=MAX_PEERS_BYTES)
        return Peers.parse(data, origin=f"{self._url}/public/peers/{study_id}")

    def _fetch_document(self, what: str, study_id: str, *, limit: int) -> bytes:
        partial = self._cache / f".{what}-{check_hash(study_id)}"
        partial.unlink(missing_ok=True)
        self._download(f"/public/{what}/{study_id}", partial, lambda count: None, limit=limit, what=_WHAT[what])
        data = partial.read_bytes()
        partial.unlink()
        return data

    def _make_room(self, *, keep: Path) -> None:
        """Delete the objects unused for longest until the largest possible object fits, but never ``keep``."""
        found = []
        for path in self._cache.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process of this site may delete as well
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        size = sum(size for _, size, _ in found) + MAX_OBJECT_BYTES
        for _, freed, path in sorted(found):
            if size <= MAX_CACHE_BYTES:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                size -= freed

    def _download(self, path: str, partial: Path, on_bytes: OnBytes, *, limit: int, what: str) -> None:
        began, host = time.monotonic(), urllib.parse.urlsplit(self._url).netloc
        patience_s = TRIES * (TIMEOUT_S + PAUSE_S) - PAUSE_S
        self._on_wait(f"waiting for {what} from {host}; gives up after {patience_s:.0f} s without an answer")
        for remaining in reversed(range(TRIES)):
            try:
                self._continue(path, partial, on_bytes, limit=limit)
                return
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                status, word, clock = 0, "", ""
                if isinstance(error, urllib.error.HTTPError):
                    status, word = error.code, _refusal_word(error)
                    clock = _clock_off(error, datetime.now(UTC)) if (status, word) == (401, "clock") else ""
                    error.close()  # an unclosed error keeps the connection open
                if status == 416:  # the partial file is not a beginning of the object
                    partial.unlink(missing_ok=True)
                if status == 404:
                    raise ObjectNotFound(
                        "public object cannot be fetched", value=path, remedy="tell the server's operator"
                    ) from error
                if clock:
                    raise InvalidInput(
                        f"{host} refused the request because of this machine's clock",
                        value=clock,
                        limit=f"at most {MAX_AGE_S:.0f} s behind the server's clock, {MAX_LEAD_S:.0f} s ahead of it",
                        remedy="set the clock, for example by NTP; `consilium site doctor` compares it again",
                    ) from error
                if status == 401:
                    cause, remedy = _REFUSED.get(word, _REFUSED_ELSEWHERE)
                    raise InvalidInput(
                        f"{host} refused to send {what}, probably because {cause}",
                        value=f"HTTP 401 {word}".strip(),
                        limit="a request signed with the key of an admitted site",
                        remedy=remedy,
                    ) from error
                tried, waited_s = TRIES - remaining, time.monotonic() - began
                if remaining == 0 or 300 <= status < 400:
                    raise InvalidInput(
                        f"public object cannot be fetched ({_reason(error)}) from {host} in {waited_s:.0f} s, "
                        f"tries: {tried}",
                        value=path,
                        remedy="run `consilium site doctor`; the next fetch continues where this one stopped",
                    ) from error
                said = f"still waiting for {what} from {host} after {waited_s:.0f} s, {tried} of {TRIES} tries failed"
                self._on_wait(f"{said} ({plain(_reason(error))})")  # the reason may be the server's own text
                time.sleep(PAUSE_S)

    def _continue(self, path: str, partial: Path, on_bytes: OnBytes, *, limit: int) -> None:
        have = partial.stat().st_size if partial.exists() else 0
        headers = signed_headers(self._key, method="GET", path=path, now=datetime.now(UTC))
        if have:
            headers["Range"] = f"bytes={have}-"
        request = urllib.request.Request(self._url + path, headers=headers)
        with self._opener.open(request, timeout=TIMEOUT_S) as reply:
            missing = reply.length  # None if the server does not announce it
            with partial.open("ab" if reply.status == 206 else "wb") as stream:
                looked, seen = time.monotonic(), stream.tell()
                while missing != 0 and (chunk := reply.read1(CHUNK_BYTES)):  # read() would wait for the whole chunk
                    if stream.tell() + len(chunk) > limit:
                        raise InvalidInput(f"public object {path} is too large", limit=f"at most {limit} bytes")
                    stream.write(chunk)
                    missing = None if missing is None else missing - len(chunk)
                    on_bytes(stream.tell())
                    if time.monotonic() - looked > 2 * TIMEOUT_S:
                        if missing != 0 and stream.tell() - seen < SLOWEST_BYTES:
                            raise TimeoutError(f"fewer than {SLOWEST_BYTES >> 10} KiB in {2 * TIMEOUT_S:.0f} s")
                        looked, seen = time.monotonic(), stream.tell()
            if missing:  # some announced bytes were not received
                raise http.client.IncompleteRead(b"", missing)


_PROXY = "let no proxy change this machine's requests to the server; `consilium site doctor` names the proxy in use"
_REFUSED = {
    "unknown-key": (
        "this site is not admitted yet, or its key was revoked",
        "if the consortium has not admitted this site yet, send it request.json (`consilium site request` writes it); "
        "otherwise ask the consortium whether this site was revoked; a revoked key is never admitted again",
    ),
    "unsigned": ("a proxy removed the request's signature", _PROXY),
    "signature": ("a proxy changed the request", _PROXY),
    "replayed": ("a proxy sent the request twice", f"run the command again; if it is refused again, {_PROXY}"),
}
"""For each word with which the gateway refuses a request, the probable cause and the remedy."""
_REFUSED_ELSEWHERE = (
    "another service answers at this address, such as a proxy that asks for a login",
    "run `consilium site doctor`, which names the address and the proxy in use",
)


def _refusal_word(error: urllib.error.HTTPError) -> str:
    """Return the word with which the gateway refused a request; empty if another text was answered."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        word = error.read(64).strip().decode("ascii", "replace")
        return word if word == "clock" or word in _REFUSED else ""
    return ""


def _clock_off(error: urllib.error.HTTPError, now: datetime) -> str:
    """Return this machine's time, and by how much it differs from the time in the server's answer."""
    try:
        ahead_s = (now - parsedate_to_datetime(error.headers.get("date", ""))).total_seconds()
    except (ValueError, TypeError):  # no date, or one without a time zone
        return f"{now:%Y-%m-%d %H:%M} UTC"
    return f"{now:%Y-%m-%d %H:%M} UTC, {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"


def _reason(error: Exception) -> str:
    refused = isinstance(error, urllib.error.HTTPError)
    reason = error.reason if isinstance(error, urllib.error.URLError) and not refused else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return reason.verify_message
    return str(reason) or type(reason).__name__
