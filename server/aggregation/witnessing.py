"""Has the sites countersign the heads of the server's ledger and of each other's ledgers.

A *head* is the signed hash of a ledger's newest row. A site that has countersigned a head notices if rows up to this
row change later. ``pipeline.countersign`` runs one round in each run, after the queries are answered and while the
student is trained. A round asks every site that is online up to three times, until no site reports anything new. The
first request asks for the site's signature on the server's head. The later requests also contain the other sites' heads
and their signatures. A round charges nothing, and delays neither a query nor the student. A site that is offline or
contradicts a head is logged as an event.

The heads and their signatures are stored in the study's folder ``witnesses/``. Sites of earlier versions do not answer
these requests. If no site has ever answered, nothing is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from common.document import Document
from common.errors import InvalidInput
from common.events import EventLog
from common.objects import write_json
from common.reading import parse_json
from common.witness.memory import HeadMemory, apart
from common.witness.merkle import prove_growth, prove_leaf, root
from common.witness.messages import MAX_SIZES, ConsistencyProof, PeerHead, WitnessReply, WitnessRequest
from common.witness.notes import CheckpointNote, note_in, origin_of, parse_signature, witness_name
from server.aggregation.exchange import Transport, exchange
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

ASKED = 3
"""Number of requests to a site in one round. The first asks for the site's signature on the server's head, the second
also contains the heads of the other sites' ledgers, and the third the signatures on these heads.
"""
DEADLINE_S = 30.0
_SITES = "sites.json"


@dataclass(frozen=True, slots=True)
class KnownWitness(Document):
    """What the server knows of a site as a witness.

    Attributes:
        own: Name under which the head of the site's own ledger is stored. This is the ledger's name in the head (its
            *origin*), with an appendix if the head of another site has the same origin. Empty if the site shares no
            head.
        held_row: Newest row of the server's ledger for which the site holds a receipt.
        sizes: By the name of each ledger, the number of rows that the ledger had at the head which this site
            countersigned last.
    """

    own: str = ""
    held_row: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


class Witnesses:
    """One round of countersigning for a study's ledger; :meth:`ask` stores what the sites answer.

    Args:
        folder: The study's ``witnesses/``.
        study: The study's id.
        ledger: The server's ledger, with its signing key.
        events: The event log.
    """

    def __init__(self, folder: Path, *, study: str, ledger: Ledger, events: EventLog) -> None:
        self._study, self._ledger, self._events = study, ledger, events
        self.memory = HeadMemory(folder)
        self._known = _load(self.memory)
        self._leaves = ledger.row_hashes()
        origin = origin_of("server", ledger.ledger_id)
        note = CheckpointNote(origin, len(self._leaves), root(self._leaves)).signed(ledger.sign, key=ledger.public_key)
        before = self.memory.note(origin)
        self._note = before.with_signatures(note.signatures) if before is not None and before.same_head(note) else note
        self._heads = {name: head for name, one in self._known.items() if (head := self.memory.note(one.own))}
        self._growths: dict[str, tuple[ConsistencyProof, ...]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._said: dict[str, WitnessReply] = {}
        self._strays: set[str] = set()
        self._asked: set[str] = set()
        self._proofs: dict[int, tuple[str, ...]] = {}

    def ask(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float = DEADLINE_S) -> None:
        """Ask all sites that are online, and log each site whose signature is missing or that contradicts a head.

        Args:
            sites: The admitted sites.
            transport: Carries the messages.
            timeout_s: Longest wait for each of the :data:`ASKED` attempts, in seconds.
        """
        for number in range(ASKED):
            before = self._state()
            online = transport.online()
            self._asked = {site.name for site in sites if site.node_id in online}
            asked = {site.node_id: (site, partial(self._request, site)) for site in sites if site.node_id in online}
            for heard in exchange(transport, asked, sign=self._ledger.sign, timeout_s=timeout_s) if asked else ():
                if isinstance(heard.message, WitnessReply):
                    self._take(heard.site, heard.message)
            if number and self._state() == before:
                break
        if not self._known:  # no site has ever answered: all run earlier versions
            return
        self._save()
        for site in sites:
            self._tell(site)

    def _request(self, site: Site) -> WitnessRequest:
        known = self._known.get(site.name, KnownWitness())
        since = known.sizes.get(self._note.origin, 0)
        own = self._heads.get(site.name)
        stored = self._asked - self._said.keys()  # a site that was recovered gives another head than the stored one
        others = [(name, note) for name, note in sorted(self._heads.items()) if name not in stored | {site.name}]
        sizes = set() if own is None else {one.sizes.get(known.own, 0) for one in self._known.values()}
        self._sizes[site.name] = tuple(sorted(sizes - {0})[-MAX_SIZES:])
        return WitnessRequest(
            study=self._study,
            ledger=self._ledger.ledger_id,
            note=self._note.render().encode(),
            growth=ConsistencyProof(since, self._proof(since)),
            held_row=known.held_row,
            held=tuple(prove_leaf(self._leaves, known.held_row - 1)),
            heads=tuple(PeerHead(name, note.render().encode(), self._growths.get(name, ())) for name, note in others),
            own=b"" if own is None else own.render().encode(),
            own_since=self._sizes[site.name],
        )

    def _proof(self, since: int) -> tuple[str, ...]:
        """Return the Merkle proof that the newest head contains the first ``since`` rows; computed once for all
        sites.
        """
        if since not in self._proofs:
            self._proofs[since] = tuple(prove_growth(self._leaves, since))
        return self._proofs[since]

    def _take(self, site: Site, reply: WitnessReply) -> None:
        """Record a site's reply.

        A countersignature counts only if it verifies under the site's registered key; the same holds for the head of
        the site's own ledger. A reply with two answers about the ledger of the same site is ignored.
        """
        if len({one.site for one in reply.heads}) < len(reply.heads):
            return
        self._said[site.name] = reply
        known = self._known.get(site.name, KnownWitness())
        sizes = {**known.sizes, self._note.origin: reply.size}
        if reply.line:
            self._note = _signed_by(site, self._note, reply.line)
        for said in reply.heads:
            if (head := self._heads.get(said.site)) is None or said.site == site.name:
                continue
            sizes[self._known[said.site].own] = said.size
            if said.line:
                self._heads[said.site] = _signed_by(site, head, said.line)
        own = known.own
        note, before = _own_head(site, reply.own), self._heads.get(site.name)
        other = note is not None and before is not None and before.origin != note.origin
        if other and before is not None and before.is_signed(site.answer_key):
            self._strays.add(site.name)  # a key may sign for one ledger only: keep the head of the first
        elif note is not None:
            known_as = known.own if before is not None and before.origin == note.origin else ""
            own = known_as or self._name(site, note)
            if own != note.origin:  # its ledger has the id of another site's ledger
                self._strays.add(site.name)
            same = before is not None and before.same_head(note)
            self._heads[site.name] = before.with_signatures(note.signatures) if same and before is not None else note
            growths = {one.since: one for one in reply.own_growths if one.since in self._sizes.get(site.name, ())}
            if growths or not same:
                self._growths[site.name] = tuple(growths.values())
        self._known[site.name] = KnownWitness(own, reply.held_row, sizes)

    def _name(self, site: Site, note: CheckpointNote) -> str:
        """Return the name under which the head of a site's own ledger is stored.

        Usually it is the head's origin, the ledger name written in the head. If another site's ledger already has this
        origin, part of this site's key is appended. This only happens if the site copied the other's ledger id, because
        ledger ids are random.
        """
        taken = any(one.own == note.origin for name, one in self._known.items() if name != site.name)
        return apart(note.origin, site.answer_key) if taken else note.origin

    def _tell(self, site: Site) -> None:
        """Log whether a site countersigned the head, did not, or contradicts a head."""
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
        """Store the heads. A countersigned head is evidence and is not replaced by one without countersignatures."""
        named = ((self._known[name].own, head) for name, head in self._heads.items())
        for name, note in ((self._note.origin, self._note), *named):
            if len(note.signatures) > 1 or self.memory.note(name) is None:
                self.memory.keep(note, name=name)
        _save_known(self.memory, self._known)


def forget_witness(folder: Path, name: str) -> bool:
    """Delete a former site's record as a witness, and the newest head of its own ledger.

    Its countersignatures on other ledgers' heads stay, because they are evidence about these ledgers.

    Args:
        folder: The study's ``witnesses/``.
        name: The site's name.

    Returns:
        True if the folder had an entry of the site.
    """
    memory = HeadMemory(folder)
    known = _load(memory)
    if (gone := known.pop(name, None)) is None:
        return False
    if gone.own:
        memory.forget(gone.own)
    _save_known(memory, known)
    return True


def _save_known(memory: HeadMemory, known: Mapping[str, KnownWitness]) -> None:
    write_json(memory.folder / _SITES, {name: one.to_json() for name, one in sorted(known.items())})


def _signed_by(site: Site, note: CheckpointNote, line: bytes) -> CheckpointNote:
    """Return the note with a site's signature added, or unchanged if the signature is not by the site's key.

    The signature in ``line`` is verified before it is added, because adding it replaces an earlier signature with the
    same name and key.
    """
    try:
        one = parse_signature(line.decode())
    except (InvalidInput, UnicodeDecodeError):
        return note
    alone = replace(note, signatures=(one,)).cosigned_at(name=witness_name(site.name), key=site.answer_key)
    return note if alone is None else note.with_signatures((one,))


def _own_head(site: Site, text: bytes) -> CheckpointNote | None:
    """Return the head of a site's own ledger with the site's signature only; None if the site's key did not sign it."""
    note = note_in(text)
    if note is None or not note.origin.startswith(origin_of("site", "")):
        return None
    alone = (replace(note, signatures=(one,)) for one in note.signatures)
    return next((one for one in alone if one.is_signed(site.answer_key)), None)


def _load(memory: HeadMemory) -> dict[str, KnownWitness]:
    """Return the stored facts about the sites; if they cannot be read, an empty dict, so that all sites are asked."""
    path = memory.folder / _SITES
    try:
        data: Mapping[str, object] = parse_json(path.read_bytes(), what="record of the witnesses")
        return {str(name): KnownWitness.from_json(item) for name, item in data.items()}
    except (OSError, InvalidInput, AttributeError):
        return {}
