"""Runs a study once with several faults: a lost draw, a restarted server, a restored site, reused answers.

A *draw* is one attempt at a sealed sum.

1. Run the study. One site's first codes are lost, and the server stops after one batch.
2. Restart the server twice until the study ends. Record all messages to the first site.
3. Ask for stored answers on behalf of another study of the same ledger.
4. Replace the first site's ledger by an older copy, recover it from its standing file by the documented steps, and send
   the site all messages again. This is done with two copies. One is from before the first query. The other is from the
   moment when the site had accepted a sum but not yet sent its masked code.
5. Replace both the first site's ledger and its standing file by copies from before the first query, and send the site
   all messages again. The site cannot notice this, and may send a second masked code in a draw, but under other masks.

In a study that needs every site, no draw is lost: step 1 ends at a draw that waits for the site.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from client.declined import DECLINED
from client.ledger.site_ledger import SiteLedger
from common.envelope import body_of
from common.errors import ConsiliumError
from common.ledger.rollback_guard import SiteLedgerStanding, standing_path
from common.messages import CodesReply, CodesRequest, Offer
from common.privacy.audit import AuditFinding
from common.sealing import SealContext, unseal
from common.sealing_rotation import load_sealing_keys
from consilium.audit.books import accepted_by_rows, apart, life_findings, spent_by_rows
from consilium.audit.sealed import READABLE_BITS, largest_bits
from consilium.audit.service import Service, parts_of, read_life, read_rows, read_site, vector
from consilium.in_process import Wire
from server.aggregation.exchange import Reply

DIFFERENCE = "restored site's difference"


class _Stopped(Exception):
    """Raised at the point where the server's process is meant to stop."""


@dataclass(slots=True)
class EventfulWire(Wire):
    """A transport that loses some sites' codes for the first batch, and can stop the server.

    Attributes:
        silent: Nodes whose codes for the first batch are lost.
        stop_after: Number of batches; stop when codes are requested for one batch more. None to never stop.
        recorded: Signed messages of each node, in order.
        before_codes: Called before codes of another batch are requested, when sites have accepted but not sent codes.
    """

    silent: frozenset[int] = frozenset()
    stop_after: int | None = None
    recorded: dict[int, list[bytes]] = field(default_factory=dict)
    before_codes: Callable[[], None] = lambda: None
    _asked: set[str] = field(default_factory=set)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Deliver the messages and return the replies that are not lost.

        Raises:
            _Stopped: If codes were requested in more than ``stop_after`` batches, as if the server had been killed.
        """
        asked = {part.batch for body in bodies.values() for part in parts_of(body_of(body), CodesRequest)}
        if asked - self._asked:
            self.before_codes()
        self._asked |= asked
        replies = [self._handled(node, body) for node, body in bodies.items()]
        for node, message in bodies.items():
            self.recorded.setdefault(node, []).append(message)
        if asked and self.stop_after is not None and len(self._asked) > self.stop_after:
            raise _Stopped
        lost = self.silent if asked and len(self._asked) == 1 else frozenset[int]()
        return iter([Reply(r.node_id, None, "deadline") if r.node_id in lost else r for r in replies])


def whole_life(service: Service) -> list[AuditFinding]:
    """Run a study with the faults that the module describes, and check the ledgers and the sites' masked codes.

    The server waits for a lost draw as long as the study's settings say.

    Args:
        service: A new server with its sites.

    Returns:
        The findings.
    """
    last = service.sites[-1].node_id
    copies = service.root / "at first", service.root / "in the middle"
    early: dict[int, list[bytes]] = {}
    since: dict[int, list[bytes]] = {}
    service.opened().close()  # creates the ledgers, with consent and confirmed peers
    shutil.copy(service.site_file(0), copies[0])
    standing = standing_path(service.site_file(0))
    shutil.copy(standing, _standing_of(copies[0]))
    first = service.sites[0].node_id
    done = 0

    def copied() -> None:
        nonlocal done
        _copy_open(service.site_file(0), copies[1])
        done = len(early.get(first, []))

    service.live(partial(EventfulWire, silent=frozenset({last}), stop_after=1, recorded=early, before_codes=copied))
    service.live(partial(EventfulWire, stop_after=0, recorded=since))
    service.live(partial(EventfulWire, recorded=since))
    everything = [*early.get(first, []), *since.get(first, [])]
    asked = everything, everything[done:]
    life = read_life(service)
    _, sent = read_rows(service.site_file(0), "codes")
    found = [*life_findings(service, life, ended=None), *_reused(service)]
    for copy, messages in zip(copies, asked, strict=True):
        if not copy.exists():  # no codes were requested in this study
            continue
        _put_back(service, copy)
        found += _asked_again(service, messages, sent=sent)
        told, own = read_site(service, 0).spent, accepted_by_rows(service, life, service.sites[0].name)
        share, what = told / own if own else 1.0, "its spent total, relative to the cost of all that it accepted"
        found.append(AuditFinding("restored site's sums", share, 1.0, told < own * (1 - 1e-9), f"{what}; at least"))
    _replace(service, copies[0])
    shutil.copy(_standing_of(copies[0]), standing)
    (standing.parent / DECLINED).unlink(missing_ok=True)
    found += [one for one in _asked_again(service, everything, sent=sent) if one.test == DIFFERENCE]
    return found


def _reused(service: Service) -> list[AuditFinding]:
    """Check that another study of the ledger gets the same stored answers, without a charge."""
    before = read_life(service)
    changed = service.ask_again(replace(service.study, name=f"{service.study.name[:56]}-reuse"))
    after = read_life(service)
    moved = [(after.spent[name], spent_by_rows(service, before, name)) for name in before.spent]
    return [
        AuditFinding.at_most("answers used again", changed, 0, "stored answers that changed for another study"),
        apart("sums after reuse", moved),
    ]


def _asked_again(service: Service, messages: Sequence[bytes], *, sent: Mapping[str, bytes]) -> list[AuditFinding]:
    """Ask the restored first site everything again, and compare its replies with ``sent``, its earlier replies."""
    rows, _ = read_rows(service.site_file(0), "codes")
    masked = {(body["query_id"], body["draw"]) for kind, body in rows if kind == "masked"}
    answered = changed = 0
    bits = 63.0
    with closing(service.opened()) as sites:
        worker = sites.workers[service.sites[0].node_id]
        for message in messages:
            body = body_of(message)
            requests = parts_of(body, CodesRequest)
            if not requests and not parts_of(body, Offer):
                continue
            try:
                reply = worker.handle(body)
            except ConsiliumError:
                continue
            for request, query, words in _opened(service, requests, reply):
                before = sent.get(query if request.draw is None else f"{query}/{request.draw}")
                if before is None:
                    continue
                if request.draw is not None and (query, request.draw) not in masked:
                    answered += 1
                    bits = min(bits, largest_bits(words - vector(before)))
                else:
                    changed += not np.array_equal(words, vector(before))
    difference = "bits of the difference of its words before and after"
    return [
        AuditFinding.at_most("restored site's words", answered, 0, "repeated sums to which it sent other words"),
        AuditFinding.at_least(DIFFERENCE, bits, READABLE_BITS, difference),
        AuditFinding.at_most("restored site's codes", changed, 0, "codes that differ from those it sent"),
    ]


def _copy_open(path: Path, copy: Path) -> None:
    """Copy a ledger while it is open, as a backup does."""
    with closing(sqlite3.connect(path)) as file, closing(sqlite3.connect(copy)) as other:
        file.backup(other)


def _put_back(service: Service, copy: Path) -> None:
    """Replace the ledger by an older copy, then recover the ledger as the documents say.

    The standing file beside the ledger is kept, because it shows which rows the copy lacks.
    """
    path, config = service.site_file(0), service.config(0)
    _replace(service, copy)
    with closing(SiteLedger.open(path, config.pool, caps=config.caps, site=config.site, restored=True)) as ledger:
        if ledger.forgotten() is None:  # the copy contains every charge
            return
        ledger.charge_lost(SiteLedgerStanding.load(standing_path(path)))
        ledger.decide(service.study.id, "resume")


def _replace(service: Service, copy: Path) -> None:
    path = service.site_file(0)
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    shutil.copy(copy, path)


def _standing_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}, standing")


def _opened(
    service: Service, requests: Sequence[CodesRequest], reply: bytes
) -> Iterator[tuple[CodesRequest, str, Int64[np.ndarray, "l"]]]:
    """Yield each request and query with the code or masked code that the first site sent, after decryption."""
    keys, site = load_sealing_keys(service.workspace.sealing_key_file), service.sites[0].name
    for request, said in zip(requests, parts_of(reply, CodesReply), strict=False):
        for query, data in said.codes:
            context = SealContext(study=service.study.id, query=query, site=site, attempt=request.attempt)
            yield request, query, unseal(data, private_key=keys, context=context, dimension=(len(data) - 48) // 8)
