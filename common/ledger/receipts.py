"""Defines signed receipts: proof of what the server charged a site, which the site can check without trusting the
server.

The server issues receipts after each release; sites check and keep them. A receipt covers one transaction of the
server's ledger that released something with the site on its roster. It contains the release rows word for word, the
pool's totals before and after, and for every row since the site's previous receipt the facts that make up its hash. The
site can therefore compute the new signed head from the head that it kept.

A receipt proves accounting: if the server later charges less, or drops, rewrites or forks rows that a receipt covers, a
site that keeps its receipts detects it. A receipt does not prove that noise was added, nor that the roster's other
sites exist.

Schemas of a receipt:

* Schema 1 repeats the roster in every release, as in version 0.1.0.
* Schema 2 names one roster for all releases.
* In schema 3 a long roster has a row of its own, and a release names it by the hash of that row's body. If such a row
  is among the rows that a receipt covers and the roster contains the site, the receipt contains the roster. A site
  therefore receives each of its rosters once. The signature covers a short text: the site's own facts, and the digest
  of the facts that all receipts of the transaction share. This digest covers the hashes of the rosters' bodies.

Refuses a receipt that the server's key did not sign, whose totals do not add up, or that contradicts the site's earlier
receipts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import canonical_members, canonical_text, check_schema, parse_canonical, sha256_bytes
from common.document import Between, Count, Document, Key, Sha256
from common.errors import InvalidInput, LedgerCorrupt, ReceiptContradiction, Refused
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
from common.objects import read_given
from common.privacy.mechanism import Mechanism
from common.reading import naming_file

OWN = ("after", "before", "pool", "site")
"""Fields that differ between the receipts of one transaction. All other fields are equal in these receipts, except
``signature`` and ``rosters``.
"""


@dataclass(frozen=True, slots=True)
class ReceiptedRelease(Document):
    """A release row of the server's ledger in a receipt: the row's number, and its body word for word."""

    seq: int
    release: Annotated[ReleaseRecord, Key("body")]


@dataclass(frozen=True, slots=True)
class Receipt(Signed):
    """A signed receipt for one site. Its totals are those of the site's pool, under the pool's unit and relation.

    Attributes:
        study_id: Content hash of the study.
        batch_id: Name of the batch.
        site: Name of the site.
        declaration: The declaration of the site's pool.
        releases: The transaction's releases with this site on their roster.
        before: The pool's total before these releases.
        after: The pool's total after these releases.
        previous: The last row that the site's previous receipt covered.
        links: The facts from which each row's hash is computed, from the row after ``previous`` to the head.
        head: The signed head of the transaction.
        rosters: Rosters that a receipt of schema 3 contains for the site; None if it contains none.
        schema: 1, 2 or 3, as the module's docstring describes them.
        signature: Signature by the server's key.
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
        """Refuse a receipt of schema 1 or 2 that names a roster by a hash or contains ``rosters``, as only schema 3
        may.
        """
        by_hash = any(item.release.roster_sha256 is not None for item in self.releases)
        if self.schema < 3 and (by_hash or self.rosters is not None):
            raise InvalidInput("receipt schema", value=self.schema, limit="3, because rosters have rows of their own")

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as JSON values, in the form that its schema prescribes."""
        made: dict[str, Any] = Document.to_json(self)
        if self.schema == 2:
            rosters = [item["body"].pop("roster") for item in made["releases"]]
            made["roster"] = rosters[0]
        return made

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON form of any known schema."""
        if isinstance(data, dict) and (schema := data.get("schema")) != 1:
            if schema == 2:
                data = _roster_in_each(data)
            else:
                check_schema("receipt", schema, known=3)
        return super(Receipt, cls).from_json(data)  # with slots, a bare super() would name a class that was replaced

    @property
    def ledger_id(self) -> str:
        """Id of the server's ledger."""
        return self.head.ledger_id

    @property
    def query_ids(self) -> tuple[str, ...]:
        """Ids of the released queries in order."""
        return tuple(item.release.query_id for item in self.releases)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanism of each release, in order."""
        return tuple(item.release.query.mechanism for item in self.releases)

    def render(self) -> str:
        """Return the receipt as canonical text, for sending and filing."""
        return canonical_text(self.to_json())

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Read the text that :meth:`render` wrote. The signature is not checked.

        Args:
            text: The text.

        Returns:
            The receipt.

        Raises:
            InvalidInput: For anything else.
        """
        return cls.from_json(parse_canonical(text.encode()))

    @property
    def losses(self) -> int:
        """Number of rows of kind ``lost`` or ``recovered`` since the previous receipt.

        A server that restored an older copy of its ledger charges the missing releases in such rows. The kind is
        ``recovered`` if a site's receipt shows the release, and ``lost`` otherwise. A row's hash covers its kind, so
        the server cannot show a row to one site as ``lost`` and to another site as another kind.
        """
        return sum(link.kind in ("lost", "recovered") for link in self.links)

    def is_genuine(self, public_key: Ed25519PublicKey) -> bool:
        """Return whether a key signed this receipt, and whether the head in the receipt has a valid signature.

        The head's signature is checked with the key that the head itself names. Of the rosters in the receipt, the
        receipt's signature covers only those in :attr:`shown`.
        """
        return Signed.is_genuine(self, public_key) and self.head.is_genuine()

    @property
    def named(self) -> frozenset[str]:
        """SHA-256 of the body of each roster row that this receipt covers: those after row ``previous``, up to the
        head.
        """
        return frozenset(link.body_sha256 for link in self.links if link.kind == "roster")

    @property
    def shown(self) -> dict[str, Roster]:
        """The receipt's rosters whose rows are after row ``previous`` and up to the head, by the SHA-256 of the row's
        body.
        """
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
    """Return the SHA-256 of the facts that the receipts of one transaction share.

    Args:
        members: The facts as canonical texts, by name.

    Returns:
        The digest.
    """
    return sha256_bytes(b"consilium/receipt-common/v3\0" + canonical_members(members).encode())


def signed_text(own: Mapping[str, str], *, common: str) -> bytes:
    """Return the bytes that the signature of a receipt of schema 3 covers.

    Args:
        own: The site's own facts as canonical texts, by name.
        common: The result of :func:`common_digest`.

    Returns:
        The bytes.
    """
    return b"consilium/receipt/v3\0" + canonical_members({**own, "common": canonical_text(common)}).encode()


def _roster_in_each(data: dict[str, Any]) -> dict[str, Any]:
    """Convert the JSON of a receipt of schema 2 to the form of schema 1, in which every release contains the roster."""
    made = {key: value for key, value in data.items() if key != "roster"}
    releases = made.get("releases")
    if "roster" not in data or not isinstance(releases, list) or not all(map(_without_roster, releases)):
        raise InvalidInput("receipt", limit="in schema 2, one roster for the whole receipt and no roster in a release")
    return made | {"releases": [item | {"body": item["body"] | {"roster": data["roster"]}} for item in releases]}


def _without_roster(item: object) -> bool:
    body = item.get("body") if isinstance(item, dict) else None
    return isinstance(body, dict) and "roster" not in body


@dataclass(frozen=True, slots=True)
class KnownLedger:
    """A site's knowledge of one ledger of the server, from the receipts that the site accepted.

    Attributes:
        position: The last row that an accepted receipt covers.
        spend: The total of the site's pool at that row.
        recovering: True after a person at the site has recorded that the server's ledger was recovered, until the next
            receipt is accepted.
        owed: Charges of genuinely signed receipts that contradicted this site's record. A recovered ledger of the
            server must contain these charges too.
        losses: Number of rows in the contradicting receipts that charge lost releases.
        unshown: The part of ``spend`` that the server marked as lost and that no receipt has shown. It may contain
            charges in ``owed``.
    """

    position: Position = START
    spend: Spend = NOTHING
    recovering: bool = False
    owed: Spend = NOTHING
    losses: int = 0
    unshown: Spend = NOTHING


MAX_RECEIPTS_FILE_BYTES = 1 << 30
"""Limit on the size of a file with a site's receipts, in bytes. It is enough for some hundred thousand releases."""


def read_receipts(path: Path) -> tuple[Receipt, ...]:
    """Read receipts from a file, one per line as :meth:`Receipt.render` writes them. Signatures are not checked.

    Args:
        path: The file.

    Returns:
        The receipts.

    Raises:
        InvalidInput: If the file is unreadable or too large, or a line is no receipt.
    """
    try:
        lines = read_given(path, most_bytes=MAX_RECEIPTS_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("receipts", value=str(path), limit="a file with one receipt per line") from error
    with naming_file(path, remedy="give the file that the other site wrote with `consilium site heads --out`"):
        return tuple(Receipt.parse(line) for line in lines if line)


def row_hashes(receipt: Receipt) -> dict[int, str]:
    """Return the hash of every row that a receipt covers, computed from its links.

    Args:
        receipt: The receipt.

    Returns:
        Hash by row number.
    """
    return dict(linked_hashes(receipt.links, after=receipt.previous))


def check_same_ledger(ours: Sequence[Receipt], theirs: Sequence[Receipt]) -> None:
    """Check that two sites' receipts show the same ledger of the server, in all rows that both cover.

    Args:
        ours: Genuine receipts of one site, oldest first.
        theirs: Genuine receipts of another site, oldest first.

    Raises:
        LedgerCorrupt: If a row differs (``row`` is the first that does), or if the two sites have receipts of one study
            from different ledgers.
        InvalidInput: If the sites have no receipts of the same ledger or study, so that nothing can be compared.
    """
    remedy = (
        "to fix: keep both files as evidence, let the sites pause the study, and talk to the other site before you "
        "talk to the server's operator; if the operator restored an older copy, do the steps for that in "
        "docs/ledger.md, which charge both histories; this comparison may still name the row afterwards"
    )
    fork = first_fork(ours, theirs)
    if fork is not None:
        raise LedgerCorrupt(
            f"from this row on, the server showed the two sites different ledgers with the same id {fork[0]}: it was "
            f"forked, or restored from an older copy; {remedy}",
            row=fork[1],
        )
    shown = [{(one.study_id, one.ledger_id) for one in receipts} for receipts in (ours, theirs)]
    studies, ledgers = ({pair[at] for pair in shown[0]} & {pair[at] for pair in shown[1]} for at in (0, 1))
    if apart := sorted(studies - {study for study, _ in shown[0] & shown[1]}):
        raise LedgerCorrupt(f"the server showed the two sites different ledgers of study {apart[0][:12]}; {remedy}")
    if not ledgers:
        raise InvalidInput(
            "receipts of two sites",
            value=f"{len(ours)} and {len(theirs)}",
            limit="receipts of the same server's ledger at both sites",
            remedy="compare the files that the sites of one study wrote with `consilium site heads --out`",
        )


def first_fork(ours: Iterable[Receipt], theirs: Iterable[Receipt]) -> tuple[str, int] | None:
    """Return the first row of the server's ledger in which the receipts of two sites contradict each other.

    Every row that both sites' receipts cover is compared, not only the heads. After the server restored an older copy,
    a site may hold two versions of a row, and another site only one. So a row counts as a contradiction only if each
    site's newest version of it is unknown to the other.

    Args:
        ours: Genuine receipts of one site, oldest first.
        theirs: Genuine receipts of another site, oldest first.

    Returns:
        Ledger id and row number; None if the receipts agree.
    """
    seen, other = _rows_shown(ours), _rows_shown(theirs)
    both = seen.keys() & other.keys()
    return min((at for at in both if seen[at][-1] not in other[at] and other[at][-1] not in seen[at]), default=None)


def _rows_shown(receipts: Iterable[Receipt]) -> dict[tuple[str, int], list[str]]:
    """Return the hashes that receipts show for each row, oldest first, by ledger id and row number."""
    found: dict[tuple[str, int], list[str]] = {}
    for receipt in receipts:
        for seq, hashed in row_hashes(receipt).items():
            found.setdefault((receipt.ledger_id, seq), []).append(hashed)
    return found


def check_arithmetic(receipt: Receipt, study: StudyTerms, *, known: Mapping[str, Roster] | None = None) -> None:
    """Check that the parts of a receipt agree with each other.

    1. The links lead from ``previous`` to the signed head, with each release at its row.
    2. Every release belongs to the receipt's study and batch, names the site with its pool, has the number of sites
       and voters that the study requires, and has the event that follows from its query.
    3. The charges lead exactly from ``before`` to ``after``.

    Args:
        receipt: A genuine receipt.
        study: The study's terms.
        known: Rosters that earlier receipts contained, by the SHA-256 of their rows' bodies.

    Raises:
        ReceiptContradiction: If the receipt contradicts itself.
        InvalidInput: If the receipt should contain its roster and does not. The roster may have been removed on the
            way, because the signature covers only its hash.
        Refused: With code ``receipt-gap`` if the roster is in an earlier receipt that has not arrived.
    """
    if receipt.head.role != "server" or len(receipt.links) != receipt.head.seq - receipt.previous.seq:
        raise ReceiptContradiction("the receipt's links do not reach from its previous head to its new one")
    bodies = {item.seq: body_digest(canonical_text(item.release.to_json())) for item in receipt.releases}
    if len(bodies) != len(receipt.releases) or list(bodies) != sorted(bodies):
        raise ReceiptContradiction("the receipt names a release twice or out of order")
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        if seq in bodies and (link.kind != "release" or bodies.pop(seq) != link.body_sha256):
            raise ReceiptContradiction("the receipt shows a release other than the one in the chain", row=seq)
    if bodies or row_hashes(receipt).get(receipt.head.seq) != receipt.head.hash:
        raise ReceiptContradiction("the receipt's rows do not lead to its signed head", row=receipt.head.seq)
    spend, rosters = receipt.before, {**(known or {}), **receipt.shown}
    for item in receipt.releases:
        _check_release(receipt, item, study, rosters)
        mechanism = item.release.query.mechanism
        charge = charge_of(mechanism, receipt.declaration.protection, study.protection)
        spend = spend.plus(charge, mechanism.dimension)
    if spend != receipt.after:
        raise ReceiptContradiction("the receipt's running totals do not add up", row=receipt.head.seq)


def _check_release(receipt: Receipt, item: ReceiptedRelease, study: StudyTerms, rosters: Mapping[str, Roster]) -> None:
    """Check that a release belongs to the receipt's study and batch, names the site, and follows the study's terms."""
    record, mechanism = item.release, item.release.query.mechanism
    try:
        roster = record.roster_in(rosters)
    except KeyError:
        if record.roster_sha256 in receipt.named:
            raise InvalidInput(
                "receipt without one of its rosters", limit="a receipt with every roster whose row it covers"
            ) from None
        raise Refused(
            "receipt-gap",
            "the earlier receipt that contains the roster has not arrived; to fix: nothing to do, the server sends "
            "it again",
        ) from None
    except InvalidInput as error:
        raise ReceiptContradiction(
            f"the release's number of voters differs from its roster's ({error})", row=item.seq
        ) from None
    entry = next((entry for entry in roster if entry.site == receipt.site), None)
    if record.study_id != study.id or record.study_id != receipt.study_id or record.batch_id != receipt.batch_id:
        raise ReceiptContradiction("the release belongs to another study or batch than its receipt", row=item.seq)
    if entry is None or entry.pool != receipt.declaration.pool:
        raise ReceiptContradiction("the release's roster does not name the site with its pool", row=item.seq)
    stated = study.voters_per_site, study.colluders
    if len(roster) < study.least_roster or (mechanism.voters_per_site, mechanism.colluders) != stated:
        raise ReceiptContradiction(
            "the release has fewer sites, or another number of voters or colluders, than the study states", row=item.seq
        )
    if record.event != event_json(mechanism, study.protection):
        raise ReceiptContradiction("the event does not follow from the release's mechanism", row=item.seq)


def check_continuity(receipt: Receipt, known: KnownLedger) -> None:
    """Check that a receipt directly follows the site's last one.

    After a recovery of the server's ledger the next receipt may begin at any row, but its totals must not be below
    those of the site's last receipt, nor below the charges of all receipts that this site holds. If the server has
    charged rows that it lost, the totals may be above the charges of this site's receipts.

    Args:
        receipt: A genuine receipt.
        known: The site's knowledge of the ledger.

    Raises:
        ReceiptContradiction: If the server's ledger was rolled back or forked, or if its totals contradict the last
            receipt.
        Refused: With code ``receipt-gap`` if receipts in between have not arrived. The server can issue them again.
    """
    if known.recovering:
        if _falls_short(receipt.before, known.spend + known.owed.beyond(known.unshown)):
            raise ReceiptContradiction("the recovered ledger lacks charges for which this site holds receipts")
        return
    if receipt.previous.seq > known.position.seq:
        raise Refused(
            "receipt-gap",
            f"receipts between rows {known.position.seq} and {receipt.previous.seq} have not arrived; to fix: "
            "nothing to do, the server sends them again",
        )
    if receipt.previous != known.position:
        raise ReceiptContradiction(
            f"the receipt continues from row {receipt.previous.seq}, but this site holds a signed head of row "
            f"{known.position.seq}: the ledger was rolled back or forked",
            row=known.position.seq,
        )
    if _falls_short(receipt.before, known.spend) or (receipt.before != known.spend and not receipt.losses):
        raise ReceiptContradiction(
            "the totals before this receipt differ from the totals after the previous one", row=receipt.previous.seq
        )


def never_receipted(receipt: Receipt, known: KnownLedger) -> Spend:
    """Return charges that the server marked lost without sending this site a receipt.

    The site charges itself once for each query that it accepts. Suppose the server loses an answer before the site has
    the receipt, and asks the query again. There are then two releases, but the site has charged itself only once. The
    site adds the charges returned here for the other release.

    Args:
        receipt: A genuine receipt.
        known: The site's knowledge of the ledger.

    Returns:
        The charges; zero if no row in the receipt records a loss. After a recovery, rows in the receipts that
        contradicted the site's record count as well.
    """
    if not receipt.losses and not (known.recovering and known.losses):
        return NOTHING
    return receipt.before.beyond(known.spend + known.owed if known.recovering else known.spend)


def _falls_short(spend: Spend, least: Spend) -> bool:
    return spend.mu_squared < least.mu_squared or spend.releases < least.releases
