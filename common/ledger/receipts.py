"""Signed receipts: what the server tells a site it charged, in a form the site can check without trusting the server.

A receipt covers one transaction of the server's ledger that released something with the site on its roster. It holds
the release rows word for word, the pool's totals before and after, and for every row since the site's previous receipt
the few facts that make up its hash; so the site itself computes the new signed head from the one it kept. Refuses a
receipt that is not signed by the server's key, that does not add up, and that does not follow from what the site knows.

A short roster stands in every release, as release 0.1.0 wrote it (schema 1; schema 2 names it once a receipt). A long
one has a row of its own, and a release names it by that row's hash (schema 3): a receipt shows, of the rows it spans,
every roster that names its site. So a site was shown every roster it was ever on, once. The signature is then over a
short text: what is the site's own, and the digest of what all receipts of the transaction say, which covers rosters by
their hashes among the links.

It proves accounting: the server cannot later charge less, drop, rewrite or fork what a receipt covers without a site
that keeps its receipts seeing it. It does not prove that noise was added, nor that the roster's other sites exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import canonical_members, canonical_text, check_schema, parse_canonical, sha256_bytes
from common.document import Between, Count, Document, Key, Sha256
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.charges import (
    NOTHING,
    BatchName,
    PoolDeclaration,
    ReleaseRecord,
    Roster,
    RosterRecord,
    SiteName,
    Spend,
    StudyTerms,
    charge_of,
    event_json,
)
from common.ledger.keys import Signed
from common.ledger.rows import START, Link, Position, SignedHead, body_digest, linked_hashes
from common.privacy.mechanism import Mechanism

OWN = ("after", "before", "pool", "site")
"""What a receipt says to its site alone; everything else but signature and rosters is common to a transaction's."""


@dataclass(frozen=True, slots=True)
class ReceiptedRelease(Document):
    """One release row, word for word: ``release`` is its body."""

    seq: int
    release: Annotated[ReleaseRecord, Key("body")]


@dataclass(frozen=True, slots=True)
class Receipt(Signed):
    """A signed receipt for one site. Totals are of the site's pool, under the protection it was declared with.

    Its form is of ``schema`` 1; of 2 where all releases have one roster, named once; of 3 where rosters have rows of
    their own, and ``rosters`` are those shown with it.
    """

    DOMAIN: ClassVar = b"consilium/receipt/v1"

    study_id: Annotated[Sha256, Key("study")]
    batch_id: Annotated[BatchName, Key("batch")]
    site: SiteName
    declaration: Annotated[PoolDeclaration, Key("pool")]
    releases: Annotated[tuple[ReceiptedRelease, ...], Count("releases of a receipt", least=1)]
    before: Spend
    after: Spend
    previous: Position
    links: tuple[Link, ...]
    head: SignedHead
    rosters: Annotated[tuple[RosterRecord, ...], Count("rosters of a receipt", least=1)] | None = None
    schema: Annotated[int, Between("receipt schema", 1, 3)] = 1
    signature: str = ""

    def check(self) -> None:
        by_hash = any(item.release.roster_sha256 is not None for item in self.releases)
        if self.schema < 3 and (by_hash or self.rosters is not None):
            raise InvalidInput("receipt schema", value=self.schema, limit="3, where rosters have rows of their own")

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = Document.to_json(self)
        if self.schema == 2:
            rosters = [item["body"].pop("roster") for item in made["releases"]]
            made["roster"] = rosters[0]
        return made

    @classmethod
    def from_json(cls, data: object) -> Self:
        if isinstance(data, dict) and (schema := data.get("schema")) != 1:
            if schema == 2:
                data = _roster_in_each(data)
            else:
                check_schema("receipt", schema, known=3)
        return super(Receipt, cls).from_json(data)  # slots make this another class than the one super() knows

    @property
    def ledger_id(self) -> str:
        return self.head.ledger_id

    @property
    def query_ids(self) -> tuple[str, ...]:
        return tuple(item.release.query_id for item in self.releases)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanism of each release, in order."""
        return tuple(item.release.query.mechanism for item in self.releases)

    def render(self) -> str:
        """The receipt as canonical text, for sending and filing."""
        return canonical_text(self.to_json())

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Read what :meth:`render` wrote; InvalidInput for anything else. The signature is not checked here."""
        return cls.from_json(parse_canonical(text.encode()))

    @property
    def losses(self) -> int:
        """How often since the last receipt the server's ledger was restored, and charged what its copy had forgotten.

        The kind is part of the row's hash, so a server cannot say of one row two things to two sites.
        """
        return sum(link.kind == "lost" for link in self.links)

    def is_genuine(self, public_key: Ed25519PublicKey) -> bool:
        """Whether ``public_key`` signed this receipt, and the head in it is genuine.

        Of the rosters with it only those are signed, by their hashes, that are of rows it spans: :attr:`shown`.
        """
        return Signed.is_genuine(self, public_key) and self.head.is_genuine()

    @property
    def named(self) -> frozenset[str]:
        """Hashes of the rosters whose rows it spans."""
        return frozenset(link.body_sha256 for link in self.links if link.kind == "roster")

    @property
    def shown(self) -> dict[str, Roster]:
        """The rosters with it that are of rows it spans, by their hashes."""
        named = self.named
        return {record.id: record.roster for record in self.rosters or () if record.id in named}

    def _message(self) -> bytes:
        if self.schema != 3:
            return Signed._message(self)
        texts = {name: canonical_text(value) for name, value in self.to_json().items()}
        own = {name: texts.pop(name) for name in OWN}
        del texts["signature"]
        texts.pop("rosters", None)
        return signed_text(own, common=common_digest(texts))


def common_digest(members: Mapping[str, str]) -> str:
    """SHA-256 of what the receipts of one transaction have in common, given as canonical texts."""
    return sha256_bytes(b"consilium/receipt-common/v3\0" + canonical_members(members).encode())


def signed_text(own: Mapping[str, str], *, common: str) -> bytes:
    """What the signature of a receipt of schema 3 covers: its own members, as texts, and the common digest."""
    return b"consilium/receipt/v3\0" + canonical_members({**own, "common": canonical_text(common)}).encode()


def _roster_in_each(data: dict[str, Any]) -> dict[str, Any]:
    """A receipt of schema 2 with the roster in every release, as schema 1 has it."""
    made = {key: value for key, value in data.items() if key != "roster"}
    releases = made.get("releases")
    if "roster" not in data or not isinstance(releases, list) or not all(map(_without_roster, releases)):
        raise InvalidInput("receipt", limit="one roster for the receipt, and none in its releases")
    return made | {"releases": [item | {"body": item["body"] | {"roster": data["roster"]}} for item in releases]}


def _without_roster(item: object) -> bool:
    body = item.get("body") if isinstance(item, dict) else None
    return isinstance(body, dict) and "roster" not in body


@dataclass(frozen=True, slots=True)
class Known:
    """What a site knows of one server ledger from the receipts it has accepted: where it stood, and its own sum.

    ``owed`` is charged by genuine receipts that contradicted the record; a recovered ledger must hold it too.
    """

    position: Position = START
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
    return dict(linked_hashes(receipt.links, after=receipt.previous))


def first_fork(ours: Iterable[Receipt], theirs: Iterable[Receipt]) -> tuple[str, int] | None:
    """Ledger id and first row for which two sites were shown different ledgers, or None where their views agree.

    Every row covered by both sites' receipts is compared, not only the heads. Receipts must have been found genuine.
    """
    seen = {(receipt.ledger_id, seq): hashed for receipt in ours for seq, hashed in row_hashes(receipt).items()}
    other = {(receipt.ledger_id, seq): hashed for receipt in theirs for seq, hashed in row_hashes(receipt).items()}
    return min((place for place in seen.keys() & other.keys() if seen[place] != other[place]), default=None)


def check_arithmetic(receipt: Receipt, study: StudyTerms, *, known: Mapping[str, Roster] | None = None) -> None:
    """That the receipt holds together in itself; LedgerCorrupt says what does not.

    Every release is of the receipt's study and batch, names the site with this pool, has the event that follows from
    its query; the charges lead from ``before`` to ``after`` exactly; and the rows' hashes lead from ``previous`` to the
    head, with each release at its place. ``known``: rosters that earlier receipts have shown, by their hashes.
    InvalidInput where the receipt should show its roster and does not, which anyone could have taken away; Refused
    (``receipt-gap``) where an earlier one should have.
    """
    if receipt.head.role != "server" or len(receipt.links) != receipt.head.seq - receipt.previous.seq:
        raise LedgerCorrupt("the receipt's links do not reach from its previous head to its new one")
    bodies = {item.seq: body_digest(canonical_text(item.release.to_json())) for item in receipt.releases}
    if len(bodies) != len(receipt.releases) or list(bodies) != sorted(bodies):
        raise LedgerCorrupt("the receipt names a release twice or out of order")
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        if seq in bodies and (link.kind != "release" or bodies.pop(seq) != link.body_sha256):
            raise LedgerCorrupt("the receipt shows a release other than the one in the chain", row=seq)
    if bodies or row_hashes(receipt).get(receipt.head.seq) != receipt.head.hash:
        raise LedgerCorrupt("the receipt's rows do not lead to its signed head", row=receipt.head.seq)
    spend, rosters = receipt.before, {**(known or {}), **receipt.shown}
    for item in receipt.releases:
        _check_release(receipt, item, study, rosters)
        mechanism = item.release.query.mechanism
        charge = charge_of(mechanism, receipt.declaration.protection, study.protection)
        spend = spend.plus(charge, mechanism.dimension)
    if spend != receipt.after:
        raise LedgerCorrupt("the receipt's running totals do not add up", row=receipt.head.seq)


def _check_release(receipt: Receipt, item: ReceiptedRelease, study: StudyTerms, rosters: Mapping[str, Roster]) -> None:
    """LedgerCorrupt unless the release is the receipt's: of its study and batch, with the site, as the study says."""
    record, mechanism = item.release, item.release.query.mechanism
    try:
        roster = record.roster_in(rosters)
    except KeyError:
        if record.roster_sha256 in receipt.named:
            raise InvalidInput(
                "receipt", limit="a receipt that contains every roster it is the first to name"
            ) from None
        raise Refused("receipt-gap", "the receipt that shows the roster has not arrived") from None
    except InvalidInput as error:
        raise LedgerCorrupt(
            f"the release's number of voters differs from its roster's ({error})", row=item.seq
        ) from None
    entry = next((entry for entry in roster if entry.site == receipt.site), None)
    if record.study_id != study.id or record.study_id != receipt.study_id or record.batch_id != receipt.batch_id:
        raise LedgerCorrupt("the release belongs to another study or batch than its receipt", row=item.seq)
    if entry is None or entry.pool != receipt.declaration.pool:
        raise LedgerCorrupt("the release's roster does not name the site with its pool", row=item.seq)
    if len(roster) < study.quorum or mechanism.voters_per_site != study.voters_per_site:
        raise LedgerCorrupt(
            "the release has fewer sites, or another number of voters, than the study states", row=item.seq
        )
    if record.event != event_json(mechanism, study.protection):
        raise LedgerCorrupt("the event does not follow from the release's mechanism", row=item.seq)


def check_continuity(receipt: Receipt, known: Known) -> None:
    """That the receipt follows directly from the last one; LedgerCorrupt for a rollback, a fork or other totals.

    Refused (``receipt-gap``) if receipts in between have not arrived: the server can issue them again. After a recovery
    the new line may begin anywhere, but its totals may not fall short of what this site holds receipts for; nor may
    they after the server charged what it lost, which is more than any receipt told.
    """
    if known.recovering:
        if _falls_short(receipt.before, known.spend + known.owed):
            raise LedgerCorrupt("the recovered ledger lacks charges for which this site holds receipts")
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
        raise LedgerCorrupt(
            "the totals before this receipt differ from the totals after the previous one", row=receipt.previous.seq
        )


def never_receipted(receipt: Receipt, known: Known) -> Spend:
    """Return charges the server marked lost without sending this site a receipt.

    Such a draw may not be covered by what the site accepted. A query whose answer was lost before its receipt arrived
    is asked again under the acceptance that paid for the first draw, so the site counts the lost draw here.
    """
    if not receipt.losses:
        return NOTHING
    return receipt.before.beyond(known.spend + known.owed if known.recovering else known.spend)


def _falls_short(spend: Spend, least: Spend) -> bool:
    return spend.mu_squared < least.mu_squared or spend.releases < least.releases
