"""The messages between the server core and the sites' workers: frozen values and their canonical bytes.

An :class:`Offer` names the queries of a batch in full, so that a site decides from public facts alone; an
:class:`OfferReply` accepts or declines with an allow-listed word; a :class:`CodesRequest` asks for the accepted
queries' codes; a :class:`CodesReply` carries sealed codes; :class:`Receipts` bring a site its signed receipts.
:class:`Several` carries some of these, or the replies to them, in one message, because each takes a way through queues
that are polled. Refuses anything that is not canonical, misses a field, has an unknown one or one out of bounds.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from common.canonical import canonical_bytes, check_hash, check_schema, checked_fields, parse_canonical
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec

MESSAGE_SCHEMA = 3

MAX_ATTEMPT = 1_000_000
MAX_DEADLINE_S = 604_800
"""A week, as a study's own deadlines may be at most; asked every second for that long, an attempt has six digits."""

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

NO_HEAD = "0" * 64
"""The head of one who holds no receipt yet."""

REASONS = frozenset(
    {
        "accepted",
        "busy",
        "budget",
        "daily-cap",
        "malformed",
        "paused",
        "unknown-study",
        "wrong-codec",
        "wrong-edition",
        "wrong-mechanism",
        "unavailable",
    }
)
"""The only words a site gives for its decision; none of them depends on patients' data."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch of queries under one study, for a site to accept or decline as a whole; ``ledger`` is the server's."""

    study: str
    ledger: str
    batch: str
    queries: tuple[QuerySpec, ...]


@dataclass(frozen=True, slots=True)
class OfferReply:
    """A site's decision about a batch, and the newest head of the server's ledger it holds a receipt for: row and hash,
    0 and :data:`NO_HEAD` for none."""

    batch: str
    reason: str
    ledger_row: int
    ledger_head: str

    @property
    def accepted(self) -> bool:
        return self.reason == "accepted"


@dataclass(frozen=True, slots=True)
class CodesRequest:
    """Ask for the sealed codes of queries that were accepted for this very study and server (``ledger`` is its id).

    ``attempt`` numbers the asking, ``deadline_s`` bounds the work.
    """

    study: str
    ledger: str
    batch: str
    attempt: int
    deadline_s: int
    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CodesReply:
    """Sealed codes by query id: of every query asked for, or of none where the site was not done in time."""

    batch: str
    attempt: int
    codes: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Receipts:
    """Signed receipts of ``ledger`` in order, as it wrote them; the site checks each against its own record."""

    ledger: str
    receipts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceiptsReply:
    """The newest head of the server's ledger that the site now holds a receipt for, as in :class:`OfferReply`."""

    ledger_row: int
    ledger_head: str


Part = Offer | OfferReply | CodesRequest | CodesReply | Receipts | ReceiptsReply


@dataclass(frozen=True, slots=True)
class Several:
    """Messages that travel as one and are handled in order, or the replies to them; what deserves no reply has none.

    Each is of another kind: one of a thousand would be a thousand times the work, or the codes, of one.
    """

    parts: tuple[Part, ...]


_KINDS = {
    Offer: "offer",
    OfferReply: "offer-reply",
    CodesRequest: "codes",
    CodesReply: "codes-reply",
    Receipts: "receipts",
    ReceiptsReply: "receipts-reply",
}
AnyMessage = Part | Several


def encode(message: AnyMessage) -> bytes:
    """The canonical bytes of a message."""
    if isinstance(message, Several):
        parts = [_document(part) for part in message.parts]
        return canonical_bytes({"kind": "several", "schema": MESSAGE_SCHEMA, "parts": parts})
    return canonical_bytes({**_document(message), "schema": MESSAGE_SCHEMA})


def _document(message: Part) -> dict[str, Any]:
    body: dict[str, Any]
    match message:
        case Offer():
            queries = [query.to_json() for query in message.queries]
            body = {"study": message.study, "ledger": message.ledger, "batch": message.batch, "queries": queries}
        case OfferReply():
            body = {"batch": message.batch, "reason": message.reason, **_head(message)}
        case CodesRequest():
            body = {
                "study": message.study,
                "ledger": message.ledger,
                "batch": message.batch,
                "attempt": message.attempt,
                "deadline_s": message.deadline_s,
                "queries": list(message.queries),
            }
        case CodesReply():
            codes = [[query, base64.b64encode(sealed).decode()] for query, sealed in message.codes]
            body = {"batch": message.batch, "attempt": message.attempt, "codes": codes}
        case Receipts():
            body = {"ledger": message.ledger, "receipts": list(message.receipts)}
        case ReceiptsReply():
            body = _head(message)
    return {"kind": _KINDS[type(message)], **body}


def decode(data: bytes) -> AnyMessage:
    """Read a message; :class:`InvalidInput` for anything that :func:`encode` would not have written."""
    if len(data) > MAX_MESSAGE_BYTES or not data.isascii():
        raise InvalidInput("message", value=f"{len(data)} bytes", limit=f"ASCII, at most {MAX_MESSAGE_BYTES} bytes")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_MESSAGE_VALUES:
        raise InvalidInput("values in a message", limit=f"at most {MAX_MESSAGE_VALUES}")
    document = parse_canonical(data)
    if not isinstance(document, dict):
        raise InvalidInput("message", value=type(document).__name__, limit="a mapping")
    check_schema("message", document.pop("schema", None), known=MESSAGE_SCHEMA)
    if document.get("kind") != "several":
        return _part(document)
    parts = checked_fields(document, {"kind": str, "parts": list})["parts"]
    if len(parts) > len(_KINDS) or not all(isinstance(part, dict) for part in parts):
        raise InvalidInput("parts of a message", value=len(parts), limit="a list of messages, one of each kind at most")
    kinds = [part.get("kind") for part in parts]
    if not all(isinstance(kind, str) for kind in kinds) or len(set(kinds)) != len(kinds):
        raise InvalidInput("parts of a message", value=kinds, limit="one of each kind at most")
    return Several(tuple(map(_part, parts)))


def _part(document: dict[str, Any]) -> Part:
    match document.pop("kind", None):
        case "offer":
            body = checked_fields(document, {"study": str, "ledger": str, "batch": str, "queries": list})
            return Offer(
                study=check_hash(body["study"]),
                ledger=_ledger_id(body["ledger"]),
                batch=check_hash(body["batch"]),
                queries=_offered(body["queries"]),
            )
        case "offer-reply":
            body = checked_fields(document, {"batch": str, "reason": str, **_HEAD})
            if body["reason"] not in REASONS:
                raise InvalidInput("reason of an offer's reply", limit=", ".join(sorted(REASONS)))
            return OfferReply(batch=check_hash(body["batch"]), reason=body["reason"], **_checked_head(body))
        case "codes":
            kinds = {"study": str, "ledger": str, "batch": str, "attempt": int, "deadline_s": int, "queries": list}
            body = checked_fields(document, kinds)
            _check_count("attempt of a codes request", body["attempt"], most=MAX_ATTEMPT)
            _check_count("deadline_s of a codes request", body["deadline_s"], most=MAX_DEADLINE_S)
            _check_count("queries of a codes request", len(body["queries"]), most=MAX_QUERIES)
            queries = tuple(check_hash(item) for item in body["queries"])
            if len(set(queries)) != len(queries):
                raise InvalidInput("queries of a codes request", value=len(queries), limit="each once")
            return CodesRequest(
                study=check_hash(body["study"]),
                ledger=_ledger_id(body["ledger"]),
                batch=check_hash(body["batch"]),
                attempt=body["attempt"],
                deadline_s=body["deadline_s"],
                queries=queries,
            )
        case "codes-reply":
            body = checked_fields(document, {"batch": str, "attempt": int, "codes": list})
            _check_count("attempt of a reply", body["attempt"], most=MAX_ATTEMPT)
            return CodesReply(
                batch=check_hash(body["batch"]), attempt=body["attempt"], codes=_sealed_codes(body["codes"])
            )
        case "receipts":
            body = checked_fields(document, {"ledger": str, "receipts": list})
            _check_count("receipts of a message", len(body["receipts"]), least=0, most=MAX_RECEIPTS)
            if not all(isinstance(receipt, str) for receipt in body["receipts"]):
                raise InvalidInput("receipts", limit="a list of strings")
            _check_count("bytes of receipts", sum(map(len, body["receipts"])), least=0, most=MAX_RECEIPTS_BYTES)
            return Receipts(ledger=_ledger_id(body["ledger"]), receipts=tuple(body["receipts"]))
        case "receipts-reply":
            return ReceiptsReply(**_checked_head(checked_fields(document, _HEAD)))
        case _:
            raise InvalidInput("message kind", limit=", ".join(sorted(_KINDS.values())))


def _offered(items: list[Any]) -> tuple[QuerySpec, ...]:
    """An offer's queries, counted before one is read."""
    _check_count("queries of an offer", len(items), least=0, most=MAX_QUERIES)
    volumes = [item.get("volumes") for item in items if isinstance(item, dict)]
    _check_count(
        "volumes of an offer", sum(len(one) for one in volumes if isinstance(one, list)), least=0, most=MAX_VOLUMES
    )
    queries = tuple(QuerySpec.from_json(item) for item in items)
    for query in queries:
        _check_count("edition of a query", query.edition, most=MAX_COUNTER)
        _check_count("round of a query", query.round, most=MAX_COUNTER)
    return queries


def _check_count(what: str, value: int, *, least: int = 1, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInput(what, value=value, limit=f"{least} to {most}")


def _ledger_id(text: str) -> str:
    """A server ledger's id goes into the site's own rows, so it is checked here: 1 to 128 letters and digits."""
    if not 1 <= len(text) <= 128 or not (text.isascii() and text.isalnum()):
        raise InvalidInput("id of the server's ledger", limit="1 to 128 letters and digits")
    return text


_HEAD: dict[str, type] = {"ledger_row": int, "ledger_head": str}


def _head(message: OfferReply | ReceiptsReply) -> dict[str, object]:
    return {"ledger_row": message.ledger_row, "ledger_head": message.ledger_head}


def _checked_head(body: dict[str, Any]) -> dict[str, Any]:
    row, head = body["ledger_row"], check_hash(body["ledger_head"])
    if row < 0 or (row == 0) != (head == NO_HEAD):
        raise InvalidInput("head held", value=(row, head), limit="a row from 1 with its hash, or 0 and zeros")
    return {"ledger_row": row, "ledger_head": head}


def _sealed_codes(items: list[Any]) -> tuple[tuple[str, bytes], ...]:
    _check_count("codes of a reply", len(items), least=0, most=MAX_QUERIES)
    codes: dict[str, bytes] = {}
    for item in items:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], str):
            raise InvalidInput("sealed code", limit="[query id, base64 text]")
        query = check_hash(item[0])
        if query in codes:
            raise InvalidInput("sealed codes of one query", value=query, limit="one a reply")
        try:
            codes[query] = base64.b64decode(item[1], validate=True)
        except ValueError as error:  # binascii.Error too
            raise InvalidInput("sealed code", limit="base64") from error
    return tuple(codes.items())
