"""Checks whether a site can take part: files, keys, teachers, daemons, network, clock, disk, GPU memory.

`site doctor` and `site up` call it. Each check states what it found and, if something is wrong, one thing to do. One
signed request to the server tests network, proxy, certificate, clock, admission and revocation. Nothing is changed.
Cases are checked in ``client.operations.doctor``.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from client.data.cases import check_index
from client.operations.daemons import DOCTOR, daemon_standings, no_daemons, trouble, was_let_in
from client.operations.findings import TROUBLE, CheckResult, State, fail, failure, fine, note, unnamed_failure
from client.operations.staff_decisions import has_consented
from client.policy import SiteConfig, load_site
from client.records.served import retired_voters
from client.site.books import check_no_copy, joined_study, read_books
from client.site.deals import check_trained, silent_voters
from client.site.enrolment import check_data_folder
from client.site.peers import PeerTrust, peers_view
from common.admission import read_request
from common.config import Study
from common.errors import ALARM_REMEDY, ConsiliumError, InvalidInput, LedgerCorrupt
from common.https import opener
from common.node_auth import MAX_AGE_S, MAX_LEAD_S, signed_headers
from common.objects import shared
from common.pki import create_node_keys, load_node_key, node_fingerprint, read_node_public_key, validity
from common.process import proxy_env

MIN_FREE_BYTES = 2 << 30
MIN_GPU_BYTES = 2 << 30
TIMEOUT_S = 15.0
RENEW_DAYS = 21
"""A certificate that is valid for fewer days than this gives a note."""
_RENEW = "ask the consortium to renew it with `consilium provision renew`"
_NOT_NOW = (
    "if this time is wrong, set the clock, for example by NTP; if it is right, the certificate of the server{proxy} "
    f"has to be renewed: {_RENEW}"
)
_RECOVER = (
    "put the newest copy of the ledger back; if it is lost, run `consilium site recover --own-ledger`, which charges "
    "the patients' budget for what this copy lacks"
)
_HERE = "the line `network` or `admission` of this report names the cause; the SuperNode tries on"
_NO_OBJECT = "/public/" + "0" * 64


def check_site(directory: Path, *, now: datetime | None = None, starting: bool = False) -> tuple[CheckResult, ...]:
    """Run all checks of a site's directory; checks that are not possible are left out.

    Args:
        directory: The site's directory.
        now: Time; by default the current time.
        starting: True if the daemons are about to start. Then they are not checked, and nothing slow is loaded.

    Returns:
        The findings, in the order in which an administrator should read them.
    """
    now = now or datetime.now(UTC)
    try:
        config = load_site(directory)
    except TROUBLE as error:
        return (failure("site.toml", error, "correct it, or run `consilium site init` with the kit again"),)
    findings = [
        fine("site.toml", f"site {config.site}, patient pool {config.pool}"),
        _keys(directory / "node" / "keys"),
        _authority(config, now),
        _data(config),
        _disk(directory),
        _teachers(config, load=not starting),
    ]
    findings += _peers(directory)
    if not starting:
        findings += [*_ledger(config), _gpu(), *_daemons(directory)]
    if all(finding.state is not State.FAIL for finding in findings[:3]):
        findings[3:3] = _server(config, now)
    return tuple(findings)


def _data(config: SiteConfig) -> CheckResult:
    path, remedy = config.path(config.data), "put the data back, or correct `data` in site.toml"
    try:
        check_data_folder(path)
        data = joined_study(config).data
    except TROUBLE as error:
        return failure("data", error, remedy)
    try:
        check_index(config, data)
    except InvalidInput as error:
        return unnamed_failure("data", error, remedy)
    except TROUBLE as error:
        return failure("data", error, remedy)
    return fine("data", str(path))


def check_newest(directory: Path) -> None:
    """Refuse a site whose ledger is an older copy, or a copy of one in another directory; its worker could not start.

    Args:
        directory: The site's directory.

    Raises:
        InvalidInput: If the original of the ledger is in another directory of this machine.
        LedgerCorrupt: If the ledger is an older copy.
    """
    config = load_site(directory)
    if config.ledger_file.exists():
        with read_books(config) as ledger:
            check_no_copy(config, ledger)
            if lost := ledger.forgotten():
                raise LedgerCorrupt(f"{lost}; to fix: {_RECOVER}")


def _ledger(config: SiteConfig) -> list[CheckResult]:
    """Check that the ledger is new, no copy and not contradicted; report consent, pause or withdrawal."""
    try:
        study = joined_study(config)
        if not config.ledger_file.exists():
            return [_unconsented(study)]
        with read_books(config) as ledger:
            check_no_copy(config, ledger)
            doubt, older = ledger.doubt(), ledger.forgotten() is not None
            agreed, stopped = ledger.has_consent(study.id), ledger.stopped(study.id)
    except TROUBLE as error:
        return [failure("ledger", error, "put study, ledger, the ledger's key and its standing file back")]
    remedy = _RECOVER if older else ALARM_REMEDY
    found = [fail("ledger", doubt, remedy)] if doubt else [fine("ledger", "as last written")]
    if stopped == "withdraw":
        return [*found, note("consent", f"this site has left study {study.name} for good")]
    if not agreed:
        return [*found, _unconsented(study)]
    if stopped == "pause":
        paused = f"study {study.name} is paused: every request of the server is declined"
        resume = f"`consilium site resume {study.name}`, once a person here decides so"
        return [*found, note("consent", paused, resume)]
    return [*found, fine("consent", f"on record for study {study.name}")]


def _unconsented(study: Study) -> CheckResult:
    text = f"no consent to study {study.name} is on record: this site trains and answers nothing"
    return fail("consent", text, "`consilium site consent`")


def _daemons(directory: Path) -> list[CheckResult]:
    found = []
    for one in daemon_standings(directory):
        state = {"ready": State.OK, "ended": State.FAIL, "offline": State.FAIL}.get(one.state, State.NOTE)
        said, remedy = trouble(one, directory)
        found.append(CheckResult("daemon", state, said, _HERE if remedy == DOCTOR else remedy))
    return found or [note("daemons", no_daemons(directory), "`consilium site up`")]


def _keys(folder: Path) -> CheckResult:
    try:
        if not (folder / "node").exists():
            return fail("keys", f"{folder / 'node'} is missing", "put it back, or set the site up again")
        public = read_node_public_key(create_node_keys(folder).public)  # both keys exist, so this only compares them
    except TROUBLE as error:
        return failure("keys", error, "put the key back with mode 0600, or set the site up again")
    whose = f"its owner and the group {(folder / 'node').group()}" if shared(folder) else "its owner only"
    return fine("keys", f"the node key {node_fingerprint(public)} is readable by {whose}")


def _authority(config: SiteConfig, now: datetime) -> CheckResult:
    path = config.path(config.server.root_certificates)
    try:
        since, until = validity(path)
    except TROUBLE as error:
        return failure("authority", error, "copy ca.crt from the kit again")
    if now < since:
        text = f"{path.name} is valid from {since:%Y-%m-%d} on, but this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
        return fail("authority", text, "set the clock, for example by NTP")
    return _valid("authority", path.name, until, now, remedy="ask the consortium for a new kit")


def _valid(check: str, what: str, until: datetime, now: datetime, *, remedy: str) -> CheckResult:
    if until < now:
        return fail(check, f"{what} expired on {until:%Y-%m-%d}", remedy)
    if until - now < timedelta(days=RENEW_DAYS):
        return note(check, f"{what} is only valid until {until:%Y-%m-%d}", remedy)
    return fine(check, f"{what} is valid until {until:%Y-%m-%d}")


def _server(config: SiteConfig, now: datetime) -> list[CheckResult]:
    """Check everything that one signed request to the server shows."""
    proxy = proxy_env().get("https_proxy", "")
    way = f"{config.server.superlink}" + (f" through the proxy {proxy_name(proxy)}" if proxy else ", no proxy set")
    key = load_node_key(config.root / "node" / "keys" / "node")
    request = urllib.request.Request(
        config.server.objects_url.rstrip("/") + _NO_OBJECT,
        headers=signed_headers(key, method="GET", path=_NO_OBJECT, now=now),
    )
    context = ssl.create_default_context(cafile=str(config.path(config.server.root_certificates)))
    seen: list[datetime] = []

    class Noting(ssl.SSLSocket):
        """A TLS socket that records the date until which the server's certificate is valid."""

        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            shown = self.getpeercert() or {}
            seen.append(datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC))

    context.sslsocket_class = Noting
    try:
        with opener(context).open(request, timeout=TIMEOUT_S) as answer:
            status, word, date = answer.status, "", answer.headers.get("date", "")
    except urllib.error.HTTPError as error:
        with error:
            status, date = error.code, error.headers.get("date", "")
            word = error.read(64).decode("ascii", "replace").strip()
    except (OSError, ValueError) as error:
        host = urllib.parse.urlsplit(config.server.objects_url).hostname or ""
        return [_unreachable(error, way, proxy=proxy_name(proxy), host=host)]
    findings = [
        fine("network", way),
        _valid("certificate", "the server's certificate, signed by the kit's authority,", seen[-1], now, remedy=_RENEW),
        _clock(date, now),
    ]
    match status, word:
        case 404, _:
            findings.append(fine("admission", "the server knows this site's key"))
        case 401, "unknown-key":
            findings.append(_unknown(config))
        case 401, "clock":
            pass  # the clock's own finding reports it
        case _:
            remedy = "check whether another service answers at this address"
            findings.append(fail("admission", f"answer {status} {word}".strip(), remedy))
    return findings


def _unknown(config: SiteConfig) -> CheckResult:
    """Report a key that was not admitted yet, with the fingerprint to read out, or one that was revoked."""
    if was_let_in(config.root):
        return fail(
            "admission",
            "the server has revoked this site's key",
            "ask the consortium why; a revoked key is never admitted again",
        )
    try:
        words = read_request(config.root / "request.json").fingerprint
        remedy = (
            f"send request.json to the consortium and read out {words}; if you were admitted, ask the consortium why"
        )
    except ConsiliumError:
        remedy = (
            "run `consilium site init` as before and send its request.json; if you were admitted, ask the consortium "
            "why"
        )
    return fail("admission", "the server does not know this site's key", remedy)


def proxy_name(proxy: str) -> str:
    """Return host and port of a proxy's address, without user and password.

    Args:
        proxy: The proxy's URL.

    Returns:
        ``host:port``.

    >>> proxy_name("http://ward:secret@proxy.hospital.example:3128")
    'proxy.hospital.example:3128'
    """
    return proxy.rpartition("//")[2].rpartition("@")[2].strip("/")


def _unreachable(error: Exception, way: str, *, proxy: str, host: str) -> CheckResult:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    match reason:
        case ssl.SSLCertVerificationError():
            what = reason.verify_message
            if "expired" in what or "not yet valid" in what:
                seen = f"{what}, by this machine's clock of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
                seen += f", through the proxy {proxy}" if proxy else ""
                return fail("certificate", seen, _NOT_NOW.format(proxy=f" or of {proxy}" if proxy else ""))
            if "match" in what or "valid for" in what:
                remedy = (
                    "if kit.json has another address, use it for objects_url and superlink in site.toml; else ask the "
                    "consortium to run `consilium provision server` again with the same --host and --port and "
                    f"--more-names {host}"
                )
                return fail("certificate", what, remedy)
            remedy = (
                "if your own proxy inspects TLS, append the certificate of its authority to node/ca.crt; else ask for "
                "a new kit"
            )
            return fail("certificate", f"{what}, through the proxy {proxy}" if proxy else what, remedy)
        case socket.gaierror():
            remedy = "have the server's name added to your DNS, or set HTTPS_PROXY"
            if proxy:
                remedy = f"correct HTTPS_PROXY, or have the proxy's name {proxy} added to your DNS"
            return fail("network", f"{way}: unknown name", remedy)
        case ConnectionRefusedError() if proxy:
            remedy = f"check that {proxy} is running, and that HTTPS_PROXY is right"
            return fail("network", f"{way}: the proxy refused the connection", remedy)
        case ConnectionRefusedError():
            remedy = "ask the consortium whether the server is running; if it is, open this port outbound"
            return fail("network", f"{way}: connection refused", remedy)
        case TimeoutError():
            remedy = (
                "ask the consortium whether the server answers other hospitals; if it does, open this port outbound, "
                "or set HTTPS_PROXY"
            )
            return fail("network", f"{way}: no answer", remedy)
        case OSError() if "Tunnel connection failed" in str(reason):
            return fail("network", f"{way}: {reason}", f"allow CONNECT to this address at {proxy}")
        case _:
            remedy = "check HTTPS_PROXY" if proxy else "open this port outbound, or set HTTPS_PROXY"
            return fail("network", f"{way}: {type(reason).__name__}", remedy)


def _clock(date: str, now: datetime) -> CheckResult:
    try:
        ahead_s = (now - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError):  # no date, or one without a time zone
        remedy = "check whether another service answers at this address"
        return fail("clock", "the answer has no date", remedy)
    if -MAX_AGE_S < ahead_s < MAX_LEAD_S:
        return fine("clock", f"within {abs(ahead_s):.0f} s of the server's")
    word = "ahead of" if ahead_s > 0 else "behind"
    return fail("clock", f"{abs(ahead_s):.0f} s {word} the server's", "set the clock, for example by NTP")


def _disk(directory: Path) -> CheckResult:
    if not os.access(directory, os.W_OK):
        return fail("disk", f"user {os.getuid()} cannot write here", "run the command as the site's own user")
    free = shutil.disk_usage(directory).free
    found = f"{free / 2**30:.1f} GiB free"
    if free < MIN_FREE_BYTES:
        return fail("disk", found, f"free at least {MIN_FREE_BYTES >> 30} GiB")
    return fine("disk", found)


def check_teachers(config: SiteConfig) -> None:
    """Refuse a site without any teacher, because its worker could not start.

    Args:
        config: The site's policy.

    Raises:
        InvalidInput: If no teacher was trained or added.
    """
    if not _has_teachers(config):
        raise InvalidInput("teachers", value=0, limit="at least one", remedy="run `consilium site train`")


def _has_teachers(config: SiteConfig) -> bool:
    folder = config.path("teachers")
    return (folder / "slots.json").exists() or bool(list(folder.glob("voter-*")))


def _teachers(config: SiteConfig, *, load: bool) -> CheckResult:
    """Check the teachers that a worker would load.

    A voter without a teacher sends the zero code; if no voter has one, no worker starts.
    """
    from client.records.declared import has_foreign

    folder = config.path("teachers")
    try:
        if not _has_teachers(config):
            remedy = f"{_consent_first(config)}`consilium site train`"
            return fail("teachers", "none is trained yet", remedy)
        if not load:
            return fine("teachers", "trained")
        from client.teachers.teacher import Teachers

        study = config.load_study()
        voters = study.privacy.voters_per_site
        found, retired = Teachers.load(folder, data=study.data, voters=voters, recipe=study.teacher), frozenset[int]()
        if config.ledger_file.exists():
            with read_books(config) as ledger:
                check_trained(config, study, ledger, found.served)
                retired = retired_voters(folder) | silent_voters(config, ledger, found.served)
                found = found.without(retired)
    except TROUBLE as error:
        return failure("teachers", error, "put the kit's study.toml back, then `consilium site train`")
    brought = sum(has_foreign(folder, voter) for voter in range(voters))
    have = sum(map(bool, found.served)) + brought
    loaded = f"{have} of {voters} voters have a teacher" if have else f"none of {voters} voters has a teacher"
    loaded += "; the others send the zero code" if 0 < have < voters else ""
    if found.problems:
        told = {voter: problem.partition("; to fix: ") for voter, problem in found.problems.items()}
        reasons = "; ".join(f"voter {voter}: {reason}" for voter, (reason, _, _) in told.items())
        remedies = dict.fromkeys(remedy or "`consilium site train`" for _, _, remedy in told.values())
        return fail("teachers", f"{loaded} ({reasons})", f"{', '.join(remedies)}; restart the worker")
    if have:
        return fine("teachers", loaded)
    if retired:
        text = f"{loaded}: the teachers of {len(retired)} of them have to be trained again"
        return fail("teachers", text, "`consilium site train`")
    remedy = "`consilium site doctor --data FOLDER` names the problem of each case; then `consilium site train`"
    return fail("teachers", loaded, remedy)


def _consent_first(config: SiteConfig) -> str:
    try:
        return "" if has_consented(config.root) else "`consilium site consent`, then "
    except TROUBLE:  # another check reports it
        return ""


def _peers(directory: Path) -> list[CheckResult]:
    """Check that enough other hospitals are confirmed for a sealed sum, and that none of their keys has changed."""
    try:
        view = peers_view(directory)
    except TROUBLE as error:
        return [failure("peers", error, "restore the site's files, then run `consilium site peers`")]
    if not view.sealed:
        return []
    found = [CheckResult("peers", State.FAIL if it.stops else State.NOTE, it.text, it.remedy) for it in view.problems()]
    return found or [fine("peers", f"{len(view.with_trust(PeerTrust.CONFIRMED))} confirmed")]


def _gpu(memory: Callable[[], tuple[int, int] | None] | None = None) -> CheckResult:
    """Check free GPU memory; ``memory`` returns free and total bytes, by default as torch reports them."""
    found = (memory or _gpu_memory)()
    if found is None:
        return fine("graphics memory", "no GPU: teachers run on the processor, more slowly")
    free, total = found
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < MIN_GPU_BYTES:
        return fail("graphics memory", text, "end other programs on the GPU, or hide it with CUDA_VISIBLE_DEVICES=")
    return fine("graphics memory", text)


def _gpu_memory() -> tuple[int, int] | None:
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
