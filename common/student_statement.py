"""Defines the server's signed statement about a student: its bundle, study, privacy cost and ledger row.

The server makes it at export; sites check it when they pull the student. It contains the ledger's newest head (the
signed hash of its newest row) and, for every row up to that head, the facts from which the row's hash is computed. A
site with receipts can therefore check that the head continues the rows in its receipts, and that the study's total is
not below the total in its receipts. Refuses text that is not canonical, and rows whose hash chain does not end at the
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import check_hash
from common.document import Count, Key, Sha256, StoredDocument
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.keys import Signed
from common.ledger.rows import START, Link, SignedHead, Time, check_time, linked_hashes
from common.objects import MAX_OBJECT_BYTES
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.mechanism import AccountantName, Budget, Protection
from common.site_verdict import MAX_VERDICTS, SiteVerdict

MAX_STATEMENT_BYTES = 64 << 20
MAX_QUERIES = 1_000_000_000


def _check_kinds(links: tuple[Link, ...]) -> None:
    for link in links:
        if len(link.kind) > 64 or not link.kind.isprintable():
            raise InvalidInput(
                "kind of a ledger row in a statement", value=link.kind[:64], limit="at most 64 printable characters"
            )


@dataclass(frozen=True, slots=True)
class StudentStatement(Signed, StoredDocument):
    """A signed statement about a student.

    Attributes:
        study_id: Id of the study.
        bundle: SHA-256 of the bundle's archive.
        size: Size of the archive in bytes.
        queries: Number of answers.
        mu_squared: Σμ² of the answers for the pool that they cost most, for the study's unit and relation.
        head: Newest signed head of the server's ledger.
        links: The ledger's rows from the first to the head's, without bodies.
        created_utc: Time by the server's clock.
        verdicts: Hospitals' verdicts, each signed; None if the study has no gate.
        signature: Signature by the server's key.

    Raises:
        InvalidInput: If a value is outside its range.
    """

    DOMAIN: ClassVar = b"consilium/student/v1"
    SCHEMA: ClassVar = ("student's statement", 1)

    study_id: Annotated[Sha256, Key("study")]
    bundle: Sha256
    size: int
    queries: int
    mu_squared: Fraction
    head: SignedHead
    links: Annotated[tuple[Link, ...], _check_kinds]
    created_utc: Time
    verdicts: Annotated[tuple[SiteVerdict, ...], Count("verdicts of a statement", most=MAX_VERDICTS)] | None = None
    """Hospitals' verdicts on this student, each signed by its site; None if the study has no gate."""
    signature: str = ""

    def __post_init__(self) -> None:
        check_hash(self.study_id)
        check_hash(self.bundle)
        check_time(self.created_utc)
        if not 1 <= self.size <= MAX_OBJECT_BYTES or not 1 <= self.queries <= MAX_QUERIES or self.mu_squared <= 0:
            limit = f"a bundle of at most {MAX_OBJECT_BYTES} bytes, 1 to {MAX_QUERIES} answers, and Σμ² above 0"
            raise InvalidInput("statement about a student", limit=limit)
        if self.head.role != "server" or len(self.links) != self.head.seq:
            raise InvalidInput(
                "number of ledger rows in a statement",
                value=len(self.links),
                limit=f"{self.head.seq}, up to the signed head",
            )

    def guarantee(self, budget: Budget, protection: Protection, accountant: AccountantName) -> Guarantee:
        """Return the guarantee of the student's labels.

        Args:
            budget: The study's budget; its δ is used.
            protection: The study's unit and relation.
            accountant: The study's accountant.

        Returns:
            The guarantee.
        """
        return guarantee(self.mu_squared, budget, protection, accountant)

    def is_genuine(self, public_key: Ed25519PublicKey) -> bool:
        """Return whether a key signed this statement, and whether the ledger head in it is signed validly."""
        return Signed.is_genuine(self, public_key) and self.head.is_genuine()

    def positions(self) -> dict[int, str]:
        """Return the hash of every row, computed from the links.

        Returns:
            Hash by row number.

        Raises:
            LedgerCorrupt: If the links do not lead to the head.
        """
        hashes = dict(linked_hashes(self.links, after=START))
        if hashes.get(self.head.seq) != self.head.hash:
            raise LedgerCorrupt(
                "the hash chain of the statement's rows does not end at its signed head; to fix: keep the statement, "
                "and ask the server's operator to export the student again",
                row=self.head.seq,
            )
        return hashes
