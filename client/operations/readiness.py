"""Whether a site can take part: its files, its keys, the way to the server, clock, disk and graphics memory.

Each check says what it found and, if something is wrong, the one thing to do. One signed request to the server settles
network, proxy, certificate, clock and admission. Looks, and changes nothing; the data have checks of their own.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from client.operations.findings import Finding, State
from client.policy import SiteConfig, load_site
from common.admission import read_request
from common.errors import ConsiliumError
from common.node_auth import MAX_AGE_S, MAX_LEAD_S, signed_headers
from common.pki import create_node_keys, expires, load_node_key, node_fingerprint, read_node_public_key, shared
from common.process import proxy_env

MIN_FREE_BYTES = 2 << 30
MIN_GPU_BYTES = 2 << 30
TIMEOUT_S = 15.0
_NO_OBJECT = "/public/" + "0" * 64


def check_site(directory: Path, *, now: datetime | None = None) -> tuple[Finding, ...]:
    """All checks in the order in which an administrator would make them; those that cannot be made are left out."""
    now = now or datetime.now(UTC)
    try:
        config = load_site(directory)
    except ConsiliumError as error:
        return (Finding("site.toml", State.FAIL, str(error), "correct it, or `consilium site init` from the kit"),)
    findings = [
        Finding("site.toml", State.OK, f"site {config.site}, patient pool {config.pool}"),
        _keys(directory / "node" / "keys"),
        _authority(config, now),
        _disk(directory),
        _gpu(),
    ]
    if (directory / "teachers" / "slots.json").exists():
        findings.append(_teachers(config))
    if all(finding.ok for finding in findings[:3]):
        findings[3:3] = _server(config, now)
    return tuple(findings)


def _keys(folder: Path) -> Finding:
    if not (folder / "node").exists():
        return Finding("keys", State.FAIL, f"{folder / 'node'} is missing", "put it back, or set the site up anew")
    try:
        public = read_node_public_key(create_node_keys(folder).public)  # both are there: it only compares them
    except (ConsiliumError, OSError) as error:
        return Finding("keys", State.FAIL, str(error), "put the key back with mode 0600, or set the site up anew")
    whose = f"its owner's and the group {(folder / 'node').group()}'s" if shared(folder) else "its owner's alone"
    return Finding("keys", State.OK, f"the node key {node_fingerprint(public)} is {whose}")


def _authority(config: SiteConfig, now: datetime) -> Finding:
    path = config.path(config.server.root_certificates)
    try:
        until = expires(path)
    except ConsiliumError as error:
        return Finding("authority", State.FAIL, str(error), "copy ca.crt from the kit again")
    if until < now:
        return Finding(
            "authority", State.FAIL, f"{path} ran out on {until:%Y-%m-%d}", "ask the consortium for a new kit"
        )
    return Finding("authority", State.OK, f"valid until {until:%Y-%m-%d}")


def _server(config: SiteConfig, now: datetime) -> list[Finding]:
    """Everything one signed request tells."""
    proxy = proxy_env().get("https_proxy", "")
    way = f"{config.server.superlink}" + (" through the proxy" if proxy else ", no proxy set")
    key = load_node_key(config.root / "node" / "keys" / "node")
    request = urllib.request.Request(
        config.server.objects_url.rstrip("/") + _NO_OBJECT,
        headers=signed_headers(key, method="GET", path=_NO_OBJECT, now=now),
    )
    context = ssl.create_default_context(cafile=str(config.path(config.server.root_certificates)))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            status, word, date = answer.status, "", answer.headers.get("date", "")
    except urllib.error.HTTPError as error:
        with error:
            status, date = error.code, error.headers.get("date", "")
            word = error.read(64).decode("ascii", "replace").strip()
    except (OSError, ValueError) as error:
        return [_unreachable(error, way, proxied=bool(proxy))]
    findings = [
        Finding("network", State.OK, way),
        Finding("certificate", State.OK, "the kit's authority vouches for the server"),
        _clock(date, now),
    ]
    match status, word:
        case 404, _:
            findings.append(Finding("admission", State.OK, "the server knows this site's key"))
        case 401, "unknown-key":
            findings.append(Finding("admission", State.FAIL, "the server does not know this site's key", _ask(config)))
        case 401, "clock":
            pass  # said already
        case _:
            remedy = "is something else answering at this address?"
            findings.append(Finding("admission", State.FAIL, f"answer {status} {word}".strip(), remedy))
    return findings


def _ask(config: SiteConfig) -> str:
    """What to do about not being admitted, with the words to read out."""
    try:
        words = read_request(config.root / "request.json").fingerprint
    except ConsiliumError:
        return "make a new directory from the kit and send its request.json; were you admitted, ask about it"
    return f"send request.json to the consortium and read out {words}; were you admitted, ask about it"


def _unreachable(error: Exception, way: str, *, proxied: bool) -> Finding:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    match reason:
        case ssl.SSLCertVerificationError():
            what = reason.verify_message
            if "expired" in what:
                return Finding("certificate", State.FAIL, what, "the consortium renews it: `consilium provision renew`")
            if "match" in what or "valid for" in what:
                return Finding("certificate", State.FAIL, what, "use the server's address as the kit has it")
            remedy = "if a proxy of yours inspects TLS, append its authority to node/ca.crt; else ask for a new kit"
            return Finding("certificate", State.FAIL, what, remedy)
        case socket.gaierror():
            return Finding("network", State.FAIL, f"{way}: unknown name", "ask for it in your DNS, or set HTTPS_PROXY")
        case ConnectionRefusedError():
            return Finding("network", State.FAIL, f"{way}: refused", "is the server up? Else open this port outbound")
        case TimeoutError():
            return Finding("network", State.FAIL, f"{way}: no answer", "open this port outbound, or set HTTPS_PROXY")
        case OSError() if "Tunnel connection failed" in str(reason):
            return Finding("network", State.FAIL, f"{way}: {reason}", "let the proxy pass CONNECT to this address")
        case _:
            remedy = "check HTTPS_PROXY" if proxied else "open this port outbound, or set HTTPS_PROXY"
            return Finding("network", State.FAIL, f"{way}: {type(reason).__name__}", remedy)


def _clock(date: str, now: datetime) -> Finding:
    try:
        ahead_s = (now - parsedate_to_datetime(date)).total_seconds()
    except ValueError:
        return Finding("clock", State.FAIL, "the answer has no date", "is something else answering at this address?")
    if -MAX_AGE_S < ahead_s < MAX_LEAD_S:
        return Finding("clock", State.OK, f"within {abs(ahead_s):.0f} s of the server's")
    word = "ahead of" if ahead_s > 0 else "behind"
    return Finding("clock", State.FAIL, f"{abs(ahead_s):.0f} s {word} the server's", "set the clock, best by NTP")


def _disk(directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    found = f"{free / 2**30:.1f} GiB free"
    if free < MIN_FREE_BYTES:
        return Finding("disk", State.FAIL, found, f"make room: at least {MIN_FREE_BYTES >> 30} GiB")
    return Finding("disk", State.OK, found)


def _teachers(config: SiteConfig) -> Finding:
    """Whether what a worker would load is there. It starts without, and each voter that is missing votes zero."""
    from client.teachers.teacher import Teachers
    from common.config import load_study

    try:
        study = load_study(config.path(config.study))
        voters = study.privacy.voters_per_site
        found = Teachers.load(config.path("teachers"), data=study.data, voters=voters, recipe=study.teacher)
    except ConsiliumError as error:
        return Finding("teachers", State.FAIL, str(error), "put the kit's study.toml back, then `consilium site train`")
    loaded = f"{sum(map(bool, found.served))} of {voters} voters have a teacher; the others vote zero"
    if not found.problems:
        return Finding("teachers", State.OK, loaded)
    reasons = "; ".join(f"voter {voter}: {problem}" for voter, problem in found.problems.items())
    return Finding("teachers", State.FAIL, f"{loaded} ({reasons})", "`consilium site train`, then restart the worker")


def _gpu(memory: Callable[[], tuple[int, int] | None] | None = None) -> Finding:
    """Free and total bytes by ``memory``; torch is asked if none is given."""
    found = (memory or _gpu_memory)()
    if found is None:
        return Finding("graphics memory", State.OK, "no GPU: teachers run on the processor, more slowly")
    free, total = found
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < MIN_GPU_BYTES:
        return Finding(
            "graphics memory", State.FAIL, text, "end what else uses the GPU, or hide it: CUDA_VISIBLE_DEVICES="
        )
    return Finding("graphics memory", State.OK, text)


def _gpu_memory() -> tuple[int, int] | None:
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
