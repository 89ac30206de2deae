"""Signed receipts: what the server tells a site it charged, in a form the site can check without trusting the server.

A receipt covers one transaction of the server's ledger that released something with the site on its roster. It holds
the release rows word for word, the pool's totals before and after, and for every row since the site's previous receipt
the few facts that make up its hash; so the site itself computes the new signed head from the one it kept. Refuses a
receipt that is not signed by the server's key, that does not add up, and that does not follow from what the site knows.

It proves accounting: the server cannot later charge less, drop, rewrite or fork what a receipt covers without a site
that keeps its receipts seeing it. It does not prove that noise was added, nor that the roster's other sites exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from common.canonical import canonical_bytes, check_hash, check_schema, checked_fields, parse_canonical
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.chain import NO_HASH, SignedHead, body_digest, check_time, row_hash
from common.ledger.keys import hex_bytes
from common.ledger.records import (
    NOTHING,
    PoolDeclaration,
    ReleaseRecord,
    Spend,
    StudyTerms,
    charge_of,
    check_name,
    event_json,
    parse_release,
)
from common.privacy.mechanism import Mechanism

RECEIPT_SCHEMA = 1
_DOMAIN = b"consilium/receipt/v1\0"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the server's ledger: row number and hash; (0, zeros) is before the first row."""

    seq: int = 0
    hash: str = NO_HASH


@dataclass(frozen=True, slots=True)
class Link:
    """What makes up one row's hash, without its body."""

    time_utc: str
    kind: str
    body_sha256: str


@dataclass(frozen=True, slots=True)
class ReceiptedRelease:
    """One release row, word for word."""

    seq: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A signed receipt for one site. Totals are of the site's pool, under the protection it was declared with."""

    study_id: str
    batch_id: str
    site: str
    declaration: PoolDeclaration
    releases: tuple[ReceiptedRelease, ...]
    before: Spend
    after: Spend
    previous: Position
    links: tuple[Link, ...]
    head: SignedHead
    signature: str = ""

    @property
    def ledger_id(self) -> str:
        return self.head.ledger_id

    @property
    def query_ids(self) -> tuple[str, ...]:
        return tuple(release.body["query_id"] for release in self.releases)

    @property
    def roster(self) -> tuple[tuple[str, str], ...]:
        """(site, pool) of every site in these releases."""
        return tuple((site, pool) for site, pool in self.releases[0].body["roster"])

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanism of each release, in order."""
        return tuple(Mechanism.from_json(release.body["query"]["mechanism"]) for release in self.releases)

    def to_json(self) -> dict[str, object]:
        return {**self._unsigned(), "signature": self.signature}

    def render(self) -> str:
        """The receipt as canonical text, for sending and filing."""
        return canonical_bytes(self.to_json()).decode()

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Read what :meth:`render` wrote; InvalidInput for anything else. The signature is not checked here."""
        return cls.from_json(parse_canonical(text.encode()))

    @classmethod
    def from_json(cls, data: object) -> Receipt:
        kinds: dict[str, type] = dict.fromkeys(("batch", "signature", "site", "study"), str)
        kinds |= dict.fromkeys(("after", "before", "head", "pool", "previous"), dict)
        fields = checked_fields(data, {**kinds, "links": list, "releases": list, "schema": int})
        check_schema("receipt", fields["schema"], known=RECEIPT_SCHEMA)
        previous = checked_fields(fields["previous"], {"hash": str, "seq": int})
        releases = [checked_fields(item, {"body": dict, "seq": int}) for item in fields["releases"]]
        if not releases:
            raise InvalidInput("releases of a receipt", value=0, limit="at least one")
        for release in releases:
            parse_release(release["body"])
        return cls(
            study_id=check_hash(fields["study"]),
            batch_id=check_name(fields["batch"], what="batch id"),
            site=check_name(fields["site"], what="site name"),
            declaration=PoolDeclaration.from_json(fields["pool"]),
            releases=tuple(ReceiptedRelease(seq=item["seq"], body=item["body"]) for item in releases),
            before=Spend.from_json(fields["before"]),
            after=Spend.from_json(fields["after"]),
            previous=Position(seq=previous["seq"], hash=check_hash(previous["hash"])),
            links=tuple(_link(item) for item in fields["links"]),
            head=SignedHead.from_json(fields["head"]),
            signature=fields["signature"],
        )

    @property
    def losses(self) -> int:
        """How often since the last receipt the server's ledger was restored, and charged what its copy had forgotten.

        The kind is part of the row's hash, so a server cannot say of one row two things to two sites.
        """
        return sum(link.kind == "lost" for link in self.links)

    def signed(self, key: Ed25519PrivateKey) -> Receipt:
        """This receipt with the server's signature. Deterministic: the same rows give the same receipt again."""
        return dataclasses.replace(self, signature=key.sign(self._message()).hex())

    def is_genuine(self, public_key: Ed25519PublicKey) -> bool:
        """Whether ``public_key`` signed this receipt and the head in it."""
        try:
            public_key.verify(hex_bytes(self.signature), self._message())
        except (InvalidSignature, ValueError):
            return False
        return self.head.is_genuine()

    def _unsigned(self) -> dict[str, object]:
        return {
            "after": self.after.to_json(),
            "batch": self.batch_id,
            "before": self.before.to_json(),
            "head": self.head.to_json(),
            "links": [[link.time_utc, link.kind, link.body_sha256] for link in self.links],
            "pool": self.declaration.to_json(),
            "previous": {"hash": self.previous.hash, "seq": self.previous.seq},
            "releases": [{"body": release.body, "seq": release.seq} for release in self.releases],
            "schema": RECEIPT_SCHEMA,
            "site": self.site,
            "study": self.study_id,
        }

    def _message(self) -> bytes:
        return _DOMAIN + canonical_bytes(self._unsigned())


@dataclass(frozen=True, slots=True)
class Known:
    """What a site knows of one server ledger from the receipts it has accepted: where it stood, and its own sum.

    ``owed`` is charged by genuine receipts that contradicted the record; a recovered ledger must hold it too.
    """

    position: Position = Position()
    spend: Spend = NOTHING
    recovering: bool = False
    owed: Spend = NOTHING


def read_receipts(path: Path) -> tuple[Receipt, ...]:
    """The receipts in a file, one a line, as :meth:`Receipt.render` writes them; signatures are not checked here."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("receipts", value=str(path), limit="a file with one receipt a line") from error
    return tuple(Receipt.parse(line) for line in lines if line)


def row_hashes(receipt: Receipt) -> dict[int, str]:
    """Row number → hash of every row a receipt covers, worked out from its links."""
    hashes, hashed = {}, receipt.previous.hash
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        hashed = row_hash(
            "server", seq=seq, time_utc=link.time_utc, kind=link.kind, body_sha256=link.body_sha256, prev_hash=hashed
        )
        hashes[seq] = hashed
    return hashes


def first_fork(ours: Iterable[Receipt], theirs: Iterable[Receipt]) -> tuple[str, int] | None:
    """Ledger id and first row for which two sites were shown different ledgers, or None where their views agree.

    Every row covered by both sites' receipts is compared, not only the heads. Receipts must have been found genuine.
    """
    seen = {(receipt.ledger_id, seq): hashed for receipt in ours for seq, hashed in row_hashes(receipt).items()}
    other = {(receipt.ledger_id, seq): hashed for receipt in theirs for seq, hashed in row_hashes(receipt).items()}
    return min((place for place in seen.keys() & other.keys() if seen[place] != other[place]), default=None)


def check_arithmetic(receipt: Receipt, study: StudyTerms) -> tuple[ReleaseRecord, ...]:
    """The releases, if the receipt holds together in itself; LedgerCorrupt says what does not.

    Every release is of the receipt's study and batch, names the site with this pool, has the event that follows from
    its query; the charges lead from ``before`` to ``after`` exactly; and the rows' hashes lead from ``previous`` to the
    head, with each release at its place.
    """
    if receipt.head.role != "server" or len(receipt.links) != receipt.head.seq - receipt.previous.seq:
        raise LedgerCorrupt("the receipt's links do not reach from its previous head to its new one")
    bodies = {release.seq: body_digest(canonical_bytes(release.body).decode()) for release in receipt.releases}
    if len(bodies) != len(receipt.releases) or list(bodies) != sorted(bodies):
        raise LedgerCorrupt("the receipt names a release twice or out of order")
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        if seq in bodies and (link.kind != "release" or bodies.pop(seq) != link.body_sha256):
            raise LedgerCorrupt("the receipt shows a release other than the one in the chain", row=seq)
    if bodies or row_hashes(receipt).get(receipt.head.seq) != receipt.head.hash:
        raise LedgerCorrupt("the receipt's rows do not lead to its signed head", row=receipt.head.seq)
    spend, records = receipt.before, []
    for release in receipt.releases:
        record = parse_release(release.body)
        entry = next((entry for entry in record.roster if entry.site == receipt.site), None)
        if record.study_id != study.id or record.study_id != receipt.study_id or record.batch_id != receipt.batch_id:
            raise LedgerCorrupt("the release is of another study or batch than the receipt", row=release.seq)
        if entry is None or entry.pool != receipt.declaration.pool:
            raise LedgerCorrupt("the release's roster does not name the site with its pool", row=release.seq)
        mechanism = record.query.mechanism
        if len(record.roster) < study.quorum or mechanism.voters_per_site != study.voters_per_site:
            raise LedgerCorrupt("the release has fewer sites or other voters than the study says", row=release.seq)
        if release.body["event"] != event_json(mechanism, study.protection):
            raise LedgerCorrupt("the event does not follow from the release's mechanism", row=release.seq)
        charge = charge_of(mechanism, receipt.declaration.protection, study.protection)
        spend = spend.plus(charge, mechanism.dimension)
        records.append(record)
    if spend != receipt.after:
        raise LedgerCorrupt("the receipt's running totals do not add up", row=receipt.head.seq)
    return tuple(records)


def check_continuity(receipt: Receipt, known: Known) -> None:
    """That the receipt follows directly from the last one; LedgerCorrupt for a rollback, a fork or other totals.

    Refused (``receipt-gap``) if receipts in between have not arrived: the server can issue them again. After a recovery
    the new line may begin anywhere, but its totals may not fall short of what this site holds receipts for; nor may
    they after the server charged what it lost, which is more than any receipt told.
    """
    if known.recovering:
        if _falls_short(receipt.before, known.spend + known.owed):
            raise LedgerCorrupt("the recovered ledger has forgotten charges this site holds receipts for")
        return
    if receipt.previous.seq > known.position.seq:
        raise Refused(
            "receipt-gap", f"receipts between rows {known.position.seq} and {receipt.previous.seq} have not arrived"
        )
    if receipt.previous != known.position:
        raise LedgerCorrupt(
            f"the receipt continues from row {receipt.previous.seq}, but this site holds a signed head of row "
            f"{known.position.seq}: the ledger was rolled back or forked",
            row=known.position.seq,
        )
    if _falls_short(receipt.before, known.spend) or (receipt.before != known.spend and not receipt.losses):
        raise LedgerCorrupt("the totals before this receipt are not those after the last one", row=receipt.previous.seq)


def never_receipted(receipt: Receipt, known: Known) -> Spend:
    """What the server charged as lost and this site was never receipted: draws that its acceptances may not have paid.

    A query whose answer was lost before its receipt arrived is asked again under the acceptance that paid for the first
    draw, so the site counts the lost one here.
    """
    if not receipt.losses:
        return NOTHING
    return receipt.before.beyond(known.spend + known.owed if known.recovering else known.spend)


def _falls_short(spend: Spend, least: Spend) -> bool:
    return spend.mu_squared < least.mu_squared or spend.releases < least.releases


def _link(item: object) -> Link:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(part, str) for part in item):
        raise InvalidInput("link of a receipt", limit="time, kind and hash of a body")
    return Link(time_utc=check_time(item[0]), kind=item[1], body_sha256=check_hash(item[2]))
