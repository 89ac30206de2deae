"""Defines the messages between the server core and the sites' workers: frozen values and their canonical bytes.

1. An :class:`Offer` names the queries of a batch in full, so that a site decides from public facts alone.
2. An :class:`OfferReply` accepts or declines with a word from a fixed list.
3. A :class:`CodesRequest` asks for the codes of accepted queries.
4. A :class:`CodesReply` contains sealed codes: encrypted to the server's sealing key.
5. :class:`Receipts` contains a site's signed receipts, and a :class:`ReceiptsReply` confirms them.

:class:`Several` combines several of these, or the replies to them, in one message, because each message passes through
polled queues and therefore takes time.

A message is one line of canonical JSON. Long sealed codes and receipts follow the line as raw bytes, and the line
states their lengths (schema 4). All other messages have schema 3, with everything in the line; long messages of schema
3 are read too. Refuses anything that is not canonical, and missing, unknown or out-of-bounds fields.
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
"""Schema of a message whose line is followed by raw bytes."""
LONG = 64 << 10
"""Least total size in bytes of a message's codes or receipts that are sent as raw bytes after its line of JSON. Smaller
ones are part of the line."""

MAX_ATTEMPT = 1_000_000
MAX_DEADLINE_S = 604_800
"""Longest deadline of a study in seconds: a week. ``MAX_ATTEMPT`` is the largest number of an attempt to collect a
batch; it allows more than one attempt per second for a week.
"""

MAX_TIME = 1 << 50
"""Largest time in a message, in milliseconds since 1970."""

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message that every transport between core and worker carries."""
MAX_MESSAGE_VALUES = 1 << 20
"""Most JSON values in a message. A parsed value needs far more memory than its text, so values are counted first."""
MAX_QUERIES = 500
"""Most queries of an offer, a codes request and its reply: the largest batch that a study may plan."""
MAX_VOLUMES = 1_000
"""Most public volumes of all queries of one offer."""
MAX_COUNTER = 1_000_000
"""Largest number of a query's edition (the pool's set of teachers) and of its round."""
MAX_RECEIPTS = 1_000
MAX_RECEIPTS_BYTES = 16 << 20
"""Largest size of all receipts in one message. The core sends the others in a further message."""
MAX_STATUS = 1 << 15
"""Most characters of a site's status."""

NO_HEAD = "0" * 64
"""Hash that a site without a receipt states in place of the server ledger's newest hash."""

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
    "withdrawn",
    "wrong-codec",
    "wrong-edition",
    "wrong-mechanism",
)
"""The words that a site may give for its decision. None of them depends on patients' data."""


def _check_ledger_id(text: str) -> None:
    """Refuse the id of a server's ledger, which the site stores, unless it has 1 to 128 letters and digits."""
    if not 1 <= len(text) <= 128 or not (text.isascii() and text.isalnum()):
        raise InvalidInput("id of the server's ledger", limit="1 to 128 letters and digits")


def _volumes(items: list[Any]) -> int:
    """Count the volumes of all queries in an offer whose queries have not been parsed yet."""
    volumes = [item.get("volumes") for item in items if isinstance(item, dict)]
    return sum(len(one) for one in volumes if isinstance(one, list))


def _characters(items: list[Any]) -> int:
    return sum(len(item) for item in items if isinstance(item, str))


def _once(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise InvalidInput(
            what, value=f"{len(names)} entries, {len(set(names))} of them different", limit="each entry only once"
        )


def _check_head(row: int, head: str) -> None:
    if row < 0 or (row == 0) != (head == NO_HEAD):
        raise InvalidInput(
            "newest hash of the server's ledger in a site's reply",
            value=(row, head),
            limit="a row number from 1 with the row's hash, or 0 with 64 zeros",
        )


_LedgerId = Annotated[str, _check_ledger_id]


@dataclass(frozen=True, slots=True)
class Offer(Document):
    """A batch of queries under one study, which a site accepts or declines as a whole.

    Attributes:
        study: Id of the study.
        ledger: Id of the server's ledger.
        batch: Id of the batch.
        queries: The queries.
        draw: Number of the draw in a sealed sum.
        peers: In a sealed sum, the sites that may be on the roster.
        issued: Time at which the server made this message, in milliseconds since 1970 by its clock. Without it, Flower
            or the gateway could replay an offer that the site has declined. Servers up to 0.2.0 leave it out.
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
        """Refuse an offer whose fields contradict each other.

        Refuse a query whose edition (number of the pool's set of teachers) or round is outside 1 to
        :data:`MAX_COUNTER`. Refuse peers without a draw number, and a draw number without peers. Refuse a peer that
        occurs twice.
        """
        for query in self.queries:
            Between("edition of a query", 1, MAX_COUNTER)(query.edition)
            Between("round of a query", 1, MAX_COUNTER)(query.round)
        if (self.draw is None) != (self.peers is None):
            raise InvalidInput("draw of an offer", limit="both a draw number and the offered peers, or neither")
        _once("peers of an offer", [peer.site for peer in self.peers or ()])

    @property
    def draw_id(self) -> DrawId | None:
        """Identifier of the draw (attempt at a sealed sum) that is offered; None in an open study."""
        return None if self.draw is None else DrawId(self.study, self.ledger, self.batch, self.draw)


@dataclass(frozen=True, slots=True)
class OfferReply(Document):
    """A site's decision about a batch of queries. It also states the newest row of the server's ledger for which the
    site has a receipt.

    Attributes:
        batch: Id of the batch.
        reason: ``accepted``, or why the offer is declined: one of :data:`REASONS`.
        ledger_row: Number of that row; 0 if the site has no receipt.
        ledger_head: Hash of that row; :data:`NO_HEAD` if the site has no receipt.
        mask: In a sealed sum, the site's mask key for the draw if it accepts.
        unconfirmed: In a sealed sum, the other sites whose keys nobody at this site has confirmed.
        last_draw: In a sealed sum, the largest number of a draw that the site accepted for one of the queries.
    """

    batch: Sha256
    reason: Annotated[str, OneOf("reason of an offer's reply", REASONS)]
    ledger_row: int
    ledger_head: Sha256
    mask: MaskKey | None = None
    unconfirmed: Annotated[tuple[SiteName, ...], Count("peers of a reply", most=MAX_MEMBERS)] | None = None
    last_draw: DrawNumber | None = None

    def check(self) -> None:
        """Refuse a row number without a hash, and a hash with row number 0."""
        _check_head(self.ledger_row, self.ledger_head)


@dataclass(frozen=True, slots=True)
class CodesRequest(Document):
    """Asks for the sealed codes of queries that were accepted for this study and server.

    Attributes:
        study: Id of the study.
        ledger: Id of the server's ledger.
        batch: Id of the batch.
        attempt: Number of this attempt.
        deadline_s: Seconds that the work may take.
        queries: Ids of the queries.
        draw: In a sealed sum, the draw for which codes are masked; the same in every attempt.
        members: In a sealed sum, the roster; the same in every attempt.
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
        """Refuse a query that occurs twice, and a draw number without members or the reverse."""
        _once("queries of a codes request", self.queries)
        if (self.draw is None) != (self.members is None):
            raise InvalidInput(
                "draw of a codes request", limit="both a draw number and the sites of the draw, or neither"
            )

    @property
    def roster(self) -> MaskedRoster | None:
        """The sites with whose keys the codes are masked; None in an open study. Raises InvalidInput if it is
        invalid.
        """
        if self.draw is None or self.members is None:
            return None
        roster = MaskedRoster(self.study, self.ledger, self.batch, self.draw, self.members)
        roster.check()
        return roster


@dataclass(frozen=True, slots=True)
class CodesReply(Document):
    """Sealed codes by query id: those of all requested queries, or none if the site did not finish in time."""

    batch: Sha256
    attempt: Annotated[int, Between("attempt of a reply", 1, MAX_ATTEMPT)]
    codes: Annotated[tuple[tuple[Sha256, bytes], ...], Count("codes of a reply", most=MAX_QUERIES)]
    signatures: Annotated[tuple[WordSignature, ...], Count("signatures of a reply", most=MAX_QUERIES)] | None = None
    """In a sealed sum, the site's signatures over the masked codes (:mod:`common.evidence`), in order."""

    def check(self) -> None:
        """Refuse two codes for one query, and another number of signatures than of codes."""
        _once("sealed codes of one query", [query for query, _ in self.codes])
        if self.signatures is not None and len(self.signatures) != len(self.codes):
            raise InvalidInput("signatures of a reply", value=len(self.signatures), limit="one for each code, or none")


@dataclass(frozen=True, slots=True)
class Receipts(Document):
    """The server's signed receipts for a site, from the server's ledger with the id ``ledger``, in order.

    The site checks each receipt against its own record.
    """

    ledger: _LedgerId
    receipts: Annotated[
        tuple[str, ...],
        Count("receipts of a message", most=MAX_RECEIPTS),
        Count("bytes of receipts", most=MAX_RECEIPTS_BYTES, of=_characters),
    ]


@dataclass(frozen=True, slots=True)
class ReceiptsReply(Document):
    """A site's confirmation of receipts. It states number and hash of the newest row of the server's ledger for which
    the site has a receipt.

    ``status`` is JSON about the site, if its policy shares that. The server displays it and bases no decision on it.
    """

    ledger_row: int
    ledger_head: Sha256
    status: str | None = None

    def check(self) -> None:
        """Refuse a row number without a hash, a hash with row number 0, and a status that is too long."""
        _check_head(self.ledger_row, self.ledger_head)
        if self.status is not None and len(self.status) > MAX_STATUS:
            raise InvalidInput(
                "length of the status of a site", value=len(self.status), limit=f"at most {MAX_STATUS} characters"
            )


Part = Offer | OfferReply | CodesRequest | CodesReply | Receipts | ReceiptsReply | WitnessRequest | WitnessReply


@dataclass(frozen=True, slots=True)
class Several:
    """Several messages that are sent as one and handled in order, or the replies to such messages.

    Some messages have no reply.

    Each part has a different kind, so a message causes at most the work of one message of each kind.
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
    """Return the canonical bytes of a message.

    Args:
        message: The message.

    Returns:
        One line, and raw bytes after it if there are long codes or receipts.
    """
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
    """Return a part of a combined message (:class:`Several`) as JSON bytes, for the message's first line.

    Raw bytes that must follow the line are appended to ``follows``.
    """
    return _shared(part) if isinstance(part, Offer | CodesRequest) else canonical_bytes(_written(part, follows))


@lru_cache(maxsize=4)
def _shared(part: Offer | CodesRequest, **more: int) -> bytes:
    """Return the bytes of a message that is the same for every site. They are computed once and cached."""
    return canonical_bytes(_written(part, []) | more)


def decode(data: bytes) -> AnyMessage:
    """Read a message.

    Args:
        data: At most :data:`MAX_MESSAGE_BYTES` bytes.

    Returns:
        The message.

    Raises:
        InvalidInput: If this or an earlier version could not have written the bytes.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidInput("message", value=f"{len(data)} bytes", limit=f"at most {MAX_MESSAGE_BYTES} bytes")
    end = data.find(b"\n")
    line = data if end < 0 else data[:end]
    if not line.isascii():
        raise InvalidInput("first line of a message", limit="ASCII characters")
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_MESSAGE_VALUES:
        raise InvalidInput("values in a message", limit=f"at most {MAX_MESSAGE_VALUES}")
    document = parse_canonical(line)
    if not isinstance(document, dict):
        raise InvalidInput("message", value=type(document).__name__, limit="a mapping")
    check_schema("message", document.pop("schema", None), known=MESSAGE_SCHEMA if end < 0 else FRAMED_SCHEMA)
    follows = None if end < 0 else _Following(data, end + 1)
    read = _several(document, follows) if document.get("kind") == "several" else _part(document, follows)
    if follows is not None and (follows.at != len(data) or not follows.taken):
        raise InvalidInput("bytes after the first line of a message", limit="as many as this line states")
    return read


def _written(part: Part, follows: list[bytes]) -> dict[str, object]:
    """Return the JSON form of a part for the line, and append its raw bytes to ``follows``."""
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
    """The raw bytes after a message's first line. :meth:`take` returns them one piece after another."""

    data: bytes
    at: int
    taken: bool = False

    def take(self, length: object) -> bytes:
        if type(length) is not int or not 0 <= length <= len(self.data) - self.at:
            raise InvalidInput("bytes after the first line of a message", limit="as many as this line states")
        self.at, self.taken = self.at + length, True
        return self.data[self.at - length : self.at]


def _codes_reply(document: dict[str, Any], follows: _Following) -> CodesReply:
    """Read a reply of codes; its JSON line contains the codes' lengths, and their bytes follow the line."""
    codes = document.get("codes")
    if not isinstance(codes, list) or not all(isinstance(one, list) and len(one) == 2 for one in codes):
        raise InvalidInput(
            "codes of a reply", limit="a list of pairs: a query's id, and the length of its code in bytes"
        )
    reply = CodesReply.from_json({**document, "codes": [[query, ""] for query, _ in codes]})
    return replace(reply, codes=tuple((query, follows.take(length)) for query, length in codes))


def _receipts(document: dict[str, Any], follows: _Following) -> Receipts:
    """Read receipts whose line contains their lengths."""
    lengths = document.get("receipts")
    if not isinstance(lengths, list) or len(lengths) > MAX_RECEIPTS:
        raise InvalidInput("receipts of a message", limit=f"a list with the lengths of at most {MAX_RECEIPTS} receipts")
    taken = [follows.take(length) for length in lengths]
    if not all(one.isascii() for one in taken):
        raise InvalidInput("receipts of a message", limit="ASCII characters")
    return Receipts.from_json({**document, "receipts": [one.decode() for one in taken]})


def _several(document: dict[str, Any], follows: _Following | None) -> Several:
    parts = document.get("parts")
    if document.keys() != {"kind", "parts"} or not isinstance(parts, list) or len(parts) > len(_KINDS):
        raise InvalidInput("parts of a message", limit="a list of messages, at most one of each kind")
    kinds = [part.get("kind") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(kind, str) for kind in kinds) or len(set(kinds)) != len(kinds):
        raise InvalidInput("parts of a message", value=kinds, limit="at most one of each kind")
    return Several(tuple(_part(part, follows) for part in parts))


def _part(document: dict[str, Any], follows: _Following | None) -> Part:
    kind = document.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInput("message kind", limit=", ".join(sorted(_KINDS)))
    if follows is not None and kind in _FRAMED:
        return _FRAMED[kind](document, follows)
    return _KINDS[kind].from_json(document)


_FRAMED: dict[str, Callable[[dict[str, Any], _Following], Part]] = {"codes-reply": _codes_reply, "receipts": _receipts}
