"""The server's newest head, and the sites', countersigned: heads and proofs go to every site, signatures to all others.

A round asks every site that is there, up to three times, until nothing new is said: for its word on the server's head,
then with the others' signatures and heads. It charges nothing and holds nothing up: a site that is away or contradicts
is told as an event, and the heads with their signatures lie in the study's ``witnesses/``. Where no site has ever
answered, as sites of earlier versions do not, nothing is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from common.document import Document
from common.errors import InvalidInput
from common.events import EventLog
from common.objects import write_atomically
from common.reading import parse_json
from common.witness.memory import HeadMemory
from common.witness.merkle import prove_growth, prove_leaf, root
from common.witness.messages import MAX_SIZES, Growth, PeerHead, WitnessReply, WitnessRequest
from common.witness.notes import CheckpointNote, note_in, origin_of, parse_signature, witness_name
from server.aggregation.exchange import Transport, exchange
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

ASKED = 3
"""Times a site is asked in one round at most: for its word, with the others' heads, and with what they signed."""
DEADLINE_S = 30.0
_SITES = "sites.json"


@dataclass(frozen=True, slots=True)
class SiteKnown(Document):
    """What the server knows of a site as witness.

    ``own`` is the origin of its own ledger's head, empty where it shares none; ``sizes`` are the rows of the heads it
    countersigned last, by origin; ``held_row`` is the newest row it holds a receipt of.
    """

    own: str = ""
    held_row: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


class Witnesses:
    """One round of countersigning for a study's ledger; what is heard is on disk when :meth:`ask` returns."""

    def __init__(self, folder: Path, *, study: str, ledger: Ledger, events: EventLog) -> None:
        self._study, self._ledger, self._events = study, ledger, events
        self.memory = HeadMemory(folder)
        self._known = _load(self.memory)
        self._leaves = ledger.row_hashes()
        origin = origin_of("server", ledger.ledger_id)
        note = CheckpointNote(origin, len(self._leaves), root(self._leaves)).signed(ledger.sign, key=ledger.public_key)
        before = self.memory.note(origin)
        self._note = note.with_signatures(before.signatures) if before is not None and before.same_head(note) else note
        self._heads = {name: head for name, one in self._known.items() if (head := self.memory.note(one.own))}
        self._growths: dict[str, tuple[Growth, ...]] = {}
        self._said: dict[str, WitnessReply] = {}
        self._strays: set[str] = set()
        self._proofs: dict[int, tuple[str, ...]] = {}

    def ask(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float = DEADLINE_S) -> None:
        """Ask all that are there; an event for each site whose word is missing, or is against a head."""
        for _ in range(ASKED):
            before = self._state()
            online = transport.online()
            asked = {site.node_id: (site, partial(self._request, site)) for site in sites if site.node_id in online}
            for heard in exchange(transport, asked, sign=self._ledger.sign, timeout_s=timeout_s) if asked else ():
                if isinstance(heard.message, WitnessReply):
                    self._take(heard.site, heard.message, sites)
            if self._state() == before:
                break
        if not self._known:  # no site of this study knows of heads: all are of earlier versions
            return
        self._save()
        for site in sites:
            self._tell(site)

    def _request(self, site: Site) -> WitnessRequest:
        known = self._known.get(site.name, SiteKnown())
        since = known.sizes.get(self._note.origin, 0)
        own = self._heads.get(site.name)
        others = [(name, note) for name, note in sorted(self._heads.items()) if name != site.name]
        sizes = set() if own is None else {one.sizes.get(own.origin, 0) for one in self._known.values()}
        return WitnessRequest(
            study=self._study,
            ledger=self._ledger.ledger_id,
            note=self._note.render().encode(),
            growth=Growth(since, self._proof(since)),
            held_row=known.held_row,
            held=tuple(prove_leaf(self._leaves, known.held_row - 1)),
            heads=tuple(PeerHead(name, note.render().encode(), self._growths.get(name, ())) for name, note in others),
            own=b"" if own is None else own.render().encode(),
            own_since=tuple(sorted(sizes - {0})[-MAX_SIZES:]),
        )

    def _proof(self, since: int) -> tuple[str, ...]:
        """The Merkle proof that the newest head contains the first ``since`` rows; computed once for all sites."""
        if since not in self._proofs:
            self._proofs[since] = tuple(prove_growth(self._leaves, since))
        return self._proofs[since]

    def _take(self, site: Site, reply: WitnessReply, sites: Sequence[Site]) -> None:
        """Enter a site's reply.

        A countersignature counts only if it verifies under the site's registered key. So does the head of the site's
        own ledger.
        """
        self._said[site.name] = reply
        known = self._known.get(site.name, SiteKnown())
        sizes = {**known.sizes, self._note.origin: reply.size}
        if reply.line:
            self._note = _signed_by(site, self._note, reply.line)
        for said in reply.heads:
            if (head := self._heads.get(said.site)) is None or said.site == site.name:
                continue
            sizes[head.origin] = said.size
            if said.line:
                self._heads[said.site] = _signed_by(site, head, said.line)
        own = known.own
        note, before = _own_head(site, reply.own), self._heads.get(site.name)
        other = note is not None and before is not None and before.origin != note.origin
        if other and before is not None and before.is_signed(site.answer_key):
            self._strays.add(site.name)  # a key signs for one ledger: the head of another takes no head's place
        elif note is not None:
            own = note.origin
            same = before is not None and before.same_head(note)
            self._heads[site.name] = before if same and before is not None else note
            if reply.own_growths or not same:
                self._growths[site.name] = reply.own_growths
        self._known[site.name] = SiteKnown(own, reply.held_row, sizes)

    def _tell(self, site: Site) -> None:
        said, size = self._said.get(site.name), self._note.size
        if said is None or said.problem in ("gap", "stale", "unsigned"):
            reason = "no-reply" if said is None else said.problem
            self._events.emit("witness-missing", site=site.name, reason=reason, size=size)
        elif not said.problem:
            self._events.emit("witnessed", site=site.name, size=size)
        if said is None:
            return
        against = ["server"] if said.problem == "contradicts" else []
        against += [site.name] if site.name in self._strays else []
        against += [one.site for one in said.heads if one.problem == "contradicts"]
        if against:
            self._events.emit("witness-disagrees", site=site.name, ledgers=against, size=size)

    def _state(self) -> object:
        return self._note, dict(self._heads), dict(self._known)

    def _save(self) -> None:
        """A head that nobody countersigned takes no other's place: what was countersigned before is the evidence."""
        for note in (self._note, *self._heads.values()):
            if len(note.signatures) > 1 or self.memory.note(note.origin) is None:
                self.memory.keep(note)
        text = json.dumps({name: one.to_json() for name, one in sorted(self._known.items())}, indent=1)
        write_atomically(self.memory.folder / _SITES, (text + "\n").encode())


def _signed_by(site: Site, note: CheckpointNote, line: bytes) -> CheckpointNote:
    """The note with a site's signature, or as it was where that is none of its key."""
    try:
        signed = note.with_signatures((parse_signature(line.decode()),))
    except (InvalidInput, UnicodeDecodeError):
        return note
    return signed if signed.cosigned_at(name=witness_name(site.name), key=site.answer_key) is not None else note


def _own_head(site: Site, text: bytes) -> CheckpointNote | None:
    """The head of a site's own ledger, if its key signed it; without any other signature."""
    note = note_in(text)
    if note is None or not note.origin.startswith(origin_of("site", "")):
        return None
    alone = (replace(note, signatures=(one,)) for one in note.signatures)
    return next((one for one in alone if one.is_signed(site.answer_key)), None)


def _load(memory: HeadMemory) -> dict[str, SiteKnown]:
    """What is known of the sites; nothing, so that all is asked anew, where it cannot be read."""
    path = memory.folder / _SITES
    try:
        data: Mapping[str, object] = parse_json(path.read_bytes(), what="what is known of witnesses")
        return {str(name): SiteKnown.from_json(item) for name, item in data.items()}
    except (OSError, InvalidInput, AttributeError):
        return {}
