"""The messages between the server core and the sites' workers: frozen values and their canonical bytes.

An :class:`Offer` names the queries of a batch in full, so that a site decides from public facts alone; an
:class:`OfferReply` accepts or declines with an allow-listed word; a :class:`CodesRequest` asks for the accepted
queries' codes; a :class:`CodesReply` carries sealed codes; :class:`Receipts` bring a site its signed receipts.
:class:`Several` carries some of these, or the replies to them, in one message, because each takes a way through queues
that are polled. Refuses anything that is not canonical, misses a field, has an unknown one or one out of bounds.

A message is one line of canonical JSON. Sealed codes and receipts that are long follow it as raw bytes, of which the
line says the lengths: schema 4. All other messages are of schema 3, where everything is in the line, and long ones of
schema 3 are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from common.canonical import canonical_bytes, check_schema, parse_canonical
from common.document import Between, Count, Document, OneOf, Sha256
from common.errors import InvalidInput
from common.evidence import WordSignature
from common.ledger.charges import SiteName
from common.masking import MAX_MEMBERS, DrawId, DrawNumber, MaskedRoster, MaskKey, Member
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.witness.messages import WitnessReply, WitnessRequest

MESSAGE_SCHEMA = 3
FRAMED_SCHEMA = 4
"""Of a message that is followed by bytes."""
LONG = 64 << 10
"""Bytes of codes or receipts from which on they follow the line."""

MAX_ATTEMPT = 1_000_000
MAX_DEADLINE_S = 604_800
"""A week, as a study's own deadlines may be at most; asked every second for that long, an attempt has six digits."""

MAX_TIME = 1 << 50
"""Milliseconds since 1970."""

MAX_MESSAGE_BYTES = 64 << 20
"""What the ways between core and worker carry."""
MAX_MESSAGE_VALUES = 1 << 20
"""Values in a message: each takes many times its bytes in memory, so they are counted before it is read."""
MAX_QUERIES = 500
"""Of an offer, a codes request and its reply; the largest batch that a study may plan."""
MAX_VOLUMES = 1_000
"""Public volumes of one offer, all its queries together."""
MAX_COUNTER = 1_000_000
"""Largest edition and round of a query."""
MAX_RECEIPTS = 1_000
MAX_RECEIPTS_BYTES = 16 << 20
"""Of all the receipts in one message; the core sends what is left in another."""
MAX_STATUS = 1 << 15
"""Characters of a site's account of itself."""

NO_HEAD = "0" * 64
"""The head of one who holds no receipt yet."""

REASONS = (
    "accepted",
    "budget",
    "busy",
    "daily-cap",
    "malformed",
    "old-draw",
    "paused",
    "stale",
    "unavailable",
    "unknown-peers",
    "unknown-study",
    "wrong-codec",
    "wrong-edition",
    "wrong-mechanism",
)
"""The only words a site gives for its decision; none of them depends on patients' data."""


def _check_ledger_id(text: str) -> None:
    """A server ledger's id goes into the site's own rows, so it is checked here: 1 to 128 letters and digits."""
    if not 1 <= len(text) <= 128 or not (text.isascii() and text.isalnum()):
        raise InvalidInput("id of the server's ledger", limit="1 to 128 letters and digits")


def _volumes(items: list[Any]) -> int:
    """The volumes of all the queries in an offer that was not read yet."""
    volumes = [item.get("volumes") for item in items if isinstance(item, dict)]
    return sum(len(one) for one in volumes if isinstance(one, list))


def _characters(items: list[Any]) -> int:
    return sum(len(item) for item in items if isinstance(item, str))


def _once(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise InvalidInput(what, value=len(names), limit="each once")


def _check_head(row: int, head: str) -> None:
    if row < 0 or (row == 0) != (head == NO_HEAD):
        raise InvalidInput("head held", value=(row, head), limit="a row from 1 with its hash, or 0 and zeros")


_LedgerId = Annotated[str, _check_ledger_id]


@dataclass(frozen=True, slots=True)
class Offer(Document):
    """A batch of queries under one study, for a site to accept or decline as a whole; ``ledger`` is the server's.

    In a sealed sum the offer is of one ``draw``, and ``peers`` are the sites that may be on its roster. ``issued`` is
    when the server made this message, in milliseconds since 1970 by its clock: whoever carries messages could otherwise
    bring a site an offer again that it has declined. Servers up to 0.2.0 leave it out.
    """

    study: Sha256
    ledger: _LedgerId
    batch: Sha256
    queries: Annotated[
        tuple[QuerySpec, ...],
        Count("queries of an offer", most=MAX_QUERIES),
        Count("volumes of an offer", most=MAX_VOLUMES, of=_volumes),
    ]
    draw: DrawNumber | None = None
    peers: Annotated[tuple[Peer, ...], Count("peers of an offer", most=MAX_MEMBERS)] | None = None
    issued: Annotated[int, Between("time of an offer", 0, MAX_TIME)] | None = None

    def check(self) -> None:
        for query in self.queries:
            Between("edition of a query", 1, MAX_COUNTER)(query.edition)
            Between("round of a query", 1, MAX_COUNTER)(query.round)
        if (self.draw is None) != (self.peers is None):
            raise InvalidInput(
                "draw of an offer", limit="both a draw number and the peers it is offered to, or neither"
            )
        _once("peers of an offer", [peer.site for peer in self.peers or ()])

    @property
    def draw_id(self) -> DrawId | None:
        """The draw it is of, None in an open study."""
        return None if self.draw is None else DrawId(self.study, self.ledger, self.batch, self.draw)


@dataclass(frozen=True, slots=True)
class OfferReply(Document):
    """A site's decision about a batch, and the newest head of the server's ledger it holds a receipt for: row and hash,
    0 and :data:`NO_HEAD` for none.

    In a sealed sum: the site's mask key for the draw if it accepts, the peers whose keys nobody there has confirmed,
    and the newest draw of one of the queries that it has accepted.
    """

    batch: Sha256
    reason: Annotated[str, OneOf("reason of an offer's reply", REASONS)]
    ledger_row: int
    ledger_head: Sha256
    mask: MaskKey | None = None
    unconfirmed: Annotated[tuple[SiteName, ...], Count("peers of a reply", most=MAX_MEMBERS)] | None = None
    last_draw: DrawNumber | None = None

    @property
    def accepted(self) -> bool:
        return self.reason == "accepted"

    def check(self) -> None:
        _check_head(self.ledger_row, self.ledger_head)


@dataclass(frozen=True, slots=True)
class CodesRequest(Document):
    """Ask for the sealed codes of queries that were accepted for this very study and server (``ledger`` is its id).

    ``attempt`` numbers the asking, ``deadline_s`` bounds the work. In a sealed sum the codes are to be masked for this
    ``draw`` and these ``members``: the same for every asking.
    """

    study: Sha256
    ledger: _LedgerId
    batch: Sha256
    attempt: Annotated[int, Between("attempt of a codes request", 1, MAX_ATTEMPT)]
    deadline_s: Annotated[int, Between("deadline_s of a codes request", 1, MAX_DEADLINE_S)]
    queries: Annotated[tuple[Sha256, ...], Count("queries of a codes request", least=1, most=MAX_QUERIES)]
    draw: DrawNumber | None = None
    members: Annotated[tuple[Member, ...], Count("members of a roster", least=2, most=MAX_MEMBERS)] | None = None

    def check(self) -> None:
        _once("queries of a codes request", self.queries)
        if (self.draw is None) != (self.members is None):
            raise InvalidInput("draw of a codes request", limit="both a draw number and its members, or neither")

    @property
    def roster(self) -> MaskedRoster | None:
        """For whom the codes are to be masked, None for an open study; InvalidInput for one that is none."""
        if self.draw is None or self.members is None:
            return None
        roster = MaskedRoster(self.study, self.ledger, self.batch, self.draw, self.members)
        roster.check()
        return roster


@dataclass(frozen=True, slots=True)
class CodesReply(Document):
    """Sealed codes by query id: of every query asked for, or of none where the site was not done in time."""

    batch: Sha256
    attempt: Annotated[int, Between("attempt of a reply", 1, MAX_ATTEMPT)]
    codes: Annotated[tuple[tuple[Sha256, bytes], ...], Count("codes of a reply", most=MAX_QUERIES)]
    signatures: Annotated[tuple[WordSignature, ...], Count("signatures of a reply", most=MAX_QUERIES)] | None = None
    """In a sealed sum, the site's own over the words of each query (:mod:`common.evidence`), in the codes' order."""

    def check(self) -> None:
        _once("sealed codes of one query", [query for query, _ in self.codes])
        if self.signatures is not None and len(self.signatures) != len(self.codes):
            raise InvalidInput("signatures of a reply", value=len(self.signatures), limit="one a code, or none at all")


@dataclass(frozen=True, slots=True)
class Receipts(Document):
    """Signed receipts of ``ledger`` in order, as it wrote them; the site checks each against its own record."""

    ledger: _LedgerId
    receipts: Annotated[
        tuple[str, ...],
        Count("receipts of a message", most=MAX_RECEIPTS),
        Count("bytes of receipts", most=MAX_RECEIPTS_BYTES, of=_characters),
    ]


@dataclass(frozen=True, slots=True)
class ReceiptsReply(Document):
    """The newest head of the server's ledger that the site now holds a receipt for, as in :class:`OfferReply`.

    ``status`` is JSON about the site itself, where its policy shares that; nobody acts on what it says.
    """

    ledger_row: int
    ledger_head: Sha256
    status: str | None = None

    def check(self) -> None:
        _check_head(self.ledger_row, self.ledger_head)
        if self.status is not None and len(self.status) > MAX_STATUS:
            raise InvalidInput("status of a site", value=len(self.status), limit=f"at most {MAX_STATUS} characters")


Part = Offer | OfferReply | CodesRequest | CodesReply | Receipts | ReceiptsReply | WitnessRequest | WitnessReply


@dataclass(frozen=True, slots=True)
class Several:
    """Messages that travel as one and are handled in order, or the replies to them; what deserves no reply has none.

    Each is of another kind: one of a thousand would be a thousand times the work, or the codes, of one.
    """

    parts: tuple[Part, ...]


_KINDS: dict[str, type[Part]] = {
    "offer": Offer,
    "offer-reply": OfferReply,
    "codes": CodesRequest,
    "codes-reply": CodesReply,
    "receipts": Receipts,
    "receipts-reply": ReceiptsReply,
    "witness": WitnessRequest,
    "witness-reply": WitnessReply,
}
_NAMES = {part: kind for kind, part in _KINDS.items()}
AnyMessage = Part | Several


def encode(message: AnyMessage) -> bytes:
    """The canonical bytes of a message."""
    follows: list[bytes] = []
    if isinstance(message, Several):
        parts = b",".join([_encoded(part, follows) for part in message.parts])
        line = b'{"kind":"several","parts":[%b],"schema":%d}' % (parts, FRAMED_SCHEMA if follows else MESSAGE_SCHEMA)
    elif isinstance(message, Offer | CodesRequest):
        line = _shared(message, schema=MESSAGE_SCHEMA)
    else:
        body = _written(message, follows)
        line = canonical_bytes({**body, "schema": FRAMED_SCHEMA if follows else MESSAGE_SCHEMA})
    return b"".join((line, b"\n", *follows)) if follows else line


def _encoded(part: Part, follows: list[bytes]) -> bytes:
    """One of several parts as it stands in the line."""
    return _shared(part) if isinstance(part, Offer | CodesRequest) else canonical_bytes(_written(part, follows))


@lru_cache(maxsize=4)
def _shared(part: Offer | CodesRequest, **more: int) -> bytes:
    """What every site is sent alike, and may name all of them, is written once."""
    return canonical_bytes(_written(part, []) | more)


def decode(data: bytes) -> AnyMessage:
    """Read a message; :class:`InvalidInput` for anything that :func:`encode`, or an earlier one, would not have
    written."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidInput("message", value=f"{len(data)} bytes", limit=f"at most {MAX_MESSAGE_BYTES} bytes")
    end = data.find(b"\n")
    line = data if end < 0 else data[:end]
    if not line.isascii():
        raise InvalidInput("message", limit="a line of ASCII")
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_MESSAGE_VALUES:
        raise InvalidInput("values in a message", limit=f"at most {MAX_MESSAGE_VALUES}")
    document = parse_canonical(line)
    if not isinstance(document, dict):
        raise InvalidInput("message", value=type(document).__name__, limit="a mapping")
    check_schema("message", document.pop("schema", None), known=MESSAGE_SCHEMA if end < 0 else FRAMED_SCHEMA)
    follows = None if end < 0 else _Following(data, end + 1)
    read = _several(document, follows) if document.get("kind") == "several" else _part(document, follows)
    if follows is not None and (follows.at != len(data) or not follows.taken):
        raise InvalidInput("bytes of a message", limit="as many as its header line states")
    return read


def _written(part: Part, follows: list[bytes]) -> dict[str, object]:
    """A part as it stands in the line; what goes after it is added to ``follows``."""
    kind = _NAMES[type(part)]
    if isinstance(part, CodesReply) and sum(len(sealed) for _, sealed in part.codes) >= LONG:
        follows += [sealed for _, sealed in part.codes]
        codes = [[query, len(sealed)] for query, sealed in part.codes]
        return {"kind": kind, **replace(part, codes=()).to_json(), "codes": codes}
    if isinstance(part, Receipts) and sum(map(len, part.receipts)) >= LONG:
        texts = [text.encode() for text in part.receipts]
        follows += texts
        return {"kind": kind, **replace(part, receipts=()).to_json(), "receipts": [len(text) for text in texts]}
    return {"kind": kind, **part.to_json()}


@dataclass(slots=True)
class _Following:
    """The bytes after a message's line, taken one after another."""

    data: bytes
    at: int
    taken: bool = False

    def take(self, length: object) -> bytes:
        if type(length) is not int or not 0 <= length <= len(self.data) - self.at:
            raise InvalidInput("bytes of a message", limit="as many as its header line states")
        self.at, self.taken = self.at + length, True
        return self.data[self.at - length : self.at]


def _codes_reply(document: dict[str, Any], follows: _Following) -> CodesReply:
    """A reply whose line has the lengths of its codes; all else is checked as ever."""
    codes = document.get("codes")
    if not isinstance(codes, list) or not all(isinstance(one, list) and len(one) == 2 for one in codes):
        raise InvalidInput("codes of a reply", limit="queries with the lengths of their codes")
    reply = CodesReply.from_json({**document, "codes": [[query, ""] for query, _ in codes]})
    return replace(reply, codes=tuple((query, follows.take(length)) for query, length in codes))


def _receipts(document: dict[str, Any], follows: _Following) -> Receipts:
    """Receipts whose line has their lengths."""
    lengths = document.get("receipts")
    if not isinstance(lengths, list) or len(lengths) > MAX_RECEIPTS:
        raise InvalidInput("receipts of a message", limit=f"the lengths of at most {MAX_RECEIPTS}")
    taken = [follows.take(length) for length in lengths]
    if not all(one.isascii() for one in taken):
        raise InvalidInput("receipts of a message", limit="ASCII")
    return Receipts.from_json({**document, "receipts": [one.decode() for one in taken]})


def _several(document: dict[str, Any], follows: _Following | None) -> Several:
    parts = document.get("parts")
    if document.keys() != {"kind", "parts"} or not isinstance(parts, list) or len(parts) > len(_KINDS):
        raise InvalidInput("parts of a message", limit="a list of messages, one of each kind at most")
    kinds = [part.get("kind") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(kind, str) for kind in kinds) or len(set(kinds)) != len(kinds):
        raise InvalidInput("parts of a message", value=kinds, limit="one of each kind at most")
    return Several(tuple(_part(part, follows) for part in parts))


def _part(document: dict[str, Any], follows: _Following | None) -> Part:
    kind = document.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInput("message kind", limit=", ".join(sorted(_KINDS)))
    if follows is not None and kind in _FRAMED:
        return _FRAMED[kind](document, follows)
    return _KINDS[kind].from_json(document)


_FRAMED: dict[str, Callable[[dict[str, Any], _Following], Part]] = {"codes-reply": _codes_reply, "receipts": _receipts}
