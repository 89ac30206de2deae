"""Receipts on their way to sites: who misses which, and whose record this ledger contradicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from common.events import EventLog
from common.ledger.rows import Position
from common.messages import MAX_RECEIPTS, MAX_RECEIPTS_BYTES, OfferReply, Part, Receipts, ReceiptsReply
from server.aggregation.exchange import Transport, exchange
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

Due = Sequence[Callable[[], str]]
"""Receipts that a site is owed, each as what makes its text."""

RECEIPTS_DEADLINE_S = 90.0
"""What filing receipts may take at most; whatever is late is sent with the next message."""


class ReceiptDelivery:
    """What each site is known to hold of its receipts, in one run; ``contradicted`` has the rows of sites whose head is
    not in the ledger, by name. Lost with the process, and then asked for again."""

    def __init__(
        self, ledger: Ledger, events: EventLog, *, keep_status: Callable[[Site, str], None] = lambda site, text: None
    ) -> None:
        self._ledger, self._events, self._keep_status = ledger, events, keep_status
        self._held: dict[str, int] = {}
        self.contradicted: dict[str, int] = {}

    def send(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float) -> None:
        """Bring sites the receipts they miss. A site of which it is not known what it holds is asked first."""
        missing = {site.node_id: self.missing(site) for site in sites}
        waiting = {site.node_id: site for site in sites if missing[site.node_id] != ()}
        timeout_s = min(timeout_s, RECEIPTS_DEADLINE_S)
        most = 0
        for attempt in count():
            most = max((most, *(len(receipts or ()) for receipts in missing.values())))
            if not waiting or attempt > 1 + most // MAX_RECEIPTS:  # what does not fit into one message takes several
                break
            online = transport.online() & waiting.keys()
            owed = {node: (waiting[node], partial(self._message, missing[node] or ())) for node in sorted(online)}
            for heard in exchange(transport, owed, sign=self._ledger.sign, timeout_s=timeout_s) if owed else ():
                site, message = heard.site, heard.message
                if not isinstance(message, ReceiptsReply):
                    continue
                self.note_held(site, message)
                missing[site.node_id] = self.missing(site)
                if missing[site.node_id] == () and waiting.pop(site.node_id, None) is not None:
                    self._events.emit("receipts-held", site=site.name, ledger_row=message.ledger_row)
        for site in waiting.values():
            self._events.emit("receipts-missing", site=site.name, reason="no-reply-or-refused")

    def owed(self, site: Site) -> list[Part]:
        """What travels along with another message: the receipts a site is known to miss, unless it disputes them."""
        receipts = None if site.name in self.contradicted else self.missing(site)
        return [self._message(receipts)] if receipts else []

    def missing(self, site: Site) -> Due | None:
        """Receipts past what the site holds; None where that is not known and there are some."""
        held = self._held.get(site.name)
        receipts = self._ledger.receipts_due(site.name, after=held or 0)
        return None if held is None and receipts else receipts

    def _message(self, due: Due) -> Receipts:
        return Receipts(self._ledger.ledger_id, _fitting(due))

    def note_held(self, site: Site, message: OfferReply | ReceiptsReply) -> bool:
        """Whether the head a site holds is in the ledger. If not, nothing is released with the site, and it is sent all
        the receipts there are for it: what contradicts the one it holds is the site's to keep as evidence."""
        if isinstance(message, ReceiptsReply) and message.status is not None:
            self._keep_status(site, message.status)
        position = Position(message.ledger_row, message.ledger_head)
        if self._ledger.contains(position):
            self._held[site.name] = position.seq
            self.contradicted.pop(site.name, None)
            return True
        if self.contradicted.get(site.name) != position.seq:
            self._events.emit("ledger-contradicted", site=site.name, ledger_row=position.seq)
        self._held[site.name], self.contradicted[site.name] = 0, position.seq
        return False

    def contradiction(self) -> str:
        """What to do about the sites whose heads this ledger does not contain."""
        held = ", ".join(f"{site} (row {row})" for site, row in sorted(self.contradicted.items()))
        return (
            f"this ledger does not contain signed heads that sites hold: {held}; it was rolled back or forked, and "
            "nothing is released with these sites; to fix: have them write their receipts (`consilium site heads "
            "--out`), enter the lost charges with `consilium ledger recover`, let each end its alarm (`consilium site "
            "recover`), then resume"
        )


def _fitting(due: Due) -> tuple[str, ...]:
    """The first of these receipts, as many as one message takes."""
    made: list[str] = []
    left = MAX_RECEIPTS_BYTES
    for render in due[:MAX_RECEIPTS]:
        text = render()
        left -= len(text)
        if left < 0:
            break
        made.append(text)
    return tuple(made)
