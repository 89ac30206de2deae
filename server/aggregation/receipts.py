"""Delivers receipts to sites, and detects that this ledger lacks a row for which a site holds a receipt.

A *receipt* states what was charged to a site's pool. It contains the ledger's *head*, the signed hash of the row that
was the newest then. In every run the aggregator compares the head of each site's newest receipt with the ledger. If the
ledger does not contain this head, it was rolled back or forked, or the site's statement is false. Nothing is then
released with that site.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import count

from common.events import EventLog
from common.ledger.rows import Position
from common.messages import MAX_RECEIPTS, MAX_RECEIPTS_BYTES, AnyMessage, OfferReply, Part, Receipts, ReceiptsReply
from server.aggregation.exchange import Transport, VerifiedReply, exchange
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

Due = Sequence[Callable[[], str]]
"""Receipts that a site is owed, each as a function that renders its text."""

RECEIPTS_DEADLINE_S = 90.0
"""Longest wait for sites to confirm receipts; a site that is late gets them with its next message."""


class ReceiptDelivery:
    """Tracks, during one run, which receipts each site holds.

    The state is kept in memory only. A new process asks the sites again.

    Args:
        ledger: The server's ledger.
        events: The event log.
        keep_status: Stores the report that a site shares about itself.

    Attributes:
        contradicted: By site, the row number of a signed head that the site holds and the ledger does not contain.
    """

    def __init__(
        self, ledger: Ledger, events: EventLog, *, keep_status: Callable[[Site, str], None] = lambda site, text: None
    ) -> None:
        self._ledger, self._events, self._keep_status = ledger, events, keep_status
        self._held: dict[str, int] = {}
        self.contradicted: dict[str, int] = {}

    def send(
        self, sites: Sequence[Site], transport: Transport, *, timeout_s: float, silent: Container[str] = ()
    ) -> None:
        """Send the sites the receipts they lack.

        A site whose newest receipt is unknown is asked for it first. A site that has not confirmed all receipts at the
        end is logged as ``receipts-missing``.

        Args:
            sites: The sites.
            transport: Carries the messages.
            timeout_s: Longest wait for one attempt, in seconds.
            silent: Names of sites that are not asked, because they left their last message unanswered.
        """
        missing = {site.node_id: self.missing(site) for site in sites}
        waiting = {site.node_id: site for site in sites if missing[site.node_id] != ()}
        timeout_s = min(timeout_s, RECEIPTS_DEADLINE_S)
        most = 0
        for attempt in count():
            most = max((most, *(len(receipts or ()) for receipts in missing.values())))
            if not waiting or attempt > 1 + most // MAX_RECEIPTS:  # long receipts take several messages
                break
            asked = [waiting[node] for node in sorted(transport.online() & waiting.keys())]
            asked = [site for site in asked if site.name not in silent]
            for heard in self._replies(asked, transport, timeout_s=timeout_s):
                site, message = heard.site, heard.message
                if not isinstance(message, ReceiptsReply):
                    continue
                self.record_head(site, message)
                missing[site.node_id] = self.missing(site)
                if missing[site.node_id] == () and waiting.pop(site.node_id, None) is not None:
                    self._events.emit("receipts-held", site=site.name, ledger_row=message.ledger_row)
        for site in waiting.values():
            self._events.emit("receipts-missing", site=site.name, reason="no-reply-or-refused")

    def ask(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float) -> Iterator[VerifiedReply]:
        """Ask sites for their newest receipt, and send with it the receipts that a site is known to lack.

        Args:
            sites: The sites.
            transport: Carries the messages.
            timeout_s: Longest wait for the replies, in seconds.

        Yields:
            For each site its reply, which is recorded, or the reason why there is none.
        """
        for heard in self._replies(sites, transport, timeout_s=timeout_s):
            self.record_receipts(heard.site, heard.message)
            yield heard

    def _replies(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float) -> Iterator[VerifiedReply]:
        """Ask each site for its newest receipt, with the receipts that it is known to lack; yield the replies."""
        questions = {site.node_id: (site, partial(self._asked, site)) for site in sites}
        if questions:
            yield from exchange(transport, questions, sign=self._ledger.sign, timeout_s=timeout_s)

    def owed(self, site: Site) -> list[Part]:
        """Return the receipts to add to another message to a site.

        Args:
            site: The site.

        Returns:
            One message part with the receipts; an empty list if the site lacks none, if its newest receipt is unknown,
            or if it holds a head that the ledger does not contain.
        """
        receipts = None if site.name in self.contradicted else self.missing(site)
        return [self._message(receipts)] if receipts else []

    def missing(self, site: Site) -> Due | None:
        """Return the receipts that a site lacks.

        Args:
            site: The site.

        Returns:
            The receipts after the newest one that the site holds, oldest first. None if its newest receipt is unknown
            and the ledger has any receipt for it.
        """
        held = self._held.get(site.name)
        receipts = self._ledger.receipts_due(site.name, after=held or 0)
        return None if held is None and receipts else receipts

    def _asked(self, site: Site) -> Receipts:
        """Return the message that asks a site for its newest receipt, with the receipts that it is known to lack."""
        return self._message(self.missing(site) or ())

    def _message(self, due: Due) -> Receipts:
        return Receipts(self._ledger.ledger_id, _fitting(due))

    def record_receipts(self, site: Site, message: AnyMessage | None) -> None:
        """Record the newest receipt that a site states; ignore other messages.

        Log ``receipts-held``, or ``ledger-contradicted`` if this ledger does not contain the stated head.

        Args:
            site: The site.
            message: The message, or a part of it.
        """
        if isinstance(message, ReceiptsReply) and self.record_head(site, message):
            self._events.emit("receipts-held", site=site.name, ledger_row=message.ledger_row)

    def record_head(self, site: Site, message: OfferReply | ReceiptsReply) -> bool:
        """Record the newest signed head that a site reports.

        If the ledger does not contain this head, nothing is released with the site. The site is then sent all its
        receipts from this ledger. If the site also holds a receipt with the other head, both receipts together prove
        that the ledger was rolled back or forked.

        Args:
            site: The site.
            message: Its reply, which states the number and the hash of the newest ledger row that the site knows.

        Returns:
            True if the ledger contains the head.
        """
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
        """Return the error text, with its remedy, about sites that state a head which this ledger does not contain."""
        held = ", ".join(f"{site} (row {row})" for site, row in sorted(self.contradicted.items()))
        return (
            f"sites state ledger rows that this ledger does not contain, or contains with another hash: {held}; the "
            "ledger was restored from an older copy or altered, or a site's statement is false, and nothing is "
            "released with these sites; to fix: have them write their receipts (`consilium site heads --out`), enter "
            "the lost charges with `consilium ledger recover`, have each run `consilium site recover "
            "--server-restored`, then resume; a site that has no receipt for the row that it states made a false "
            f"statement: `consilium provision revoke`{self._charged_already()}"
        )

    def _charged_already(self) -> str:
        """Return a warning for the remedy if `consilium ledger recover` may have charged the missing rows already.

        Empty if it cannot have charged them.
        """
        recovered = self._ledger.charged_again_up_to()
        if recovered < max(self.contradicted.values()):
            return ""
        return (
            f". `consilium ledger recover` has already charged the rows up to row {recovered} by the standing file. If "
            "nothing was released since then, give it no receipts: they would charge these rows a second time. Only "
            "have each site run `consilium site recover --server-restored`"
        )


def _fitting(due: Due) -> tuple[str, ...]:
    """Render the first of these receipts, as many as fit into one message."""
    made: list[str] = []
    left = MAX_RECEIPTS_BYTES
    for render in due[:MAX_RECEIPTS]:
        text = render()
        left -= len(text)
        if left < 0:
            break
        made.append(text)
    return tuple(made)
