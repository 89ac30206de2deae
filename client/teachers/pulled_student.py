"""Fetches the student from the server, checks it against this site's study and receipts, and unpacks it.

`consilium site student pull` calls it. A bundle is accepted only if all of these conditions hold:

1. The server's key signed a statement about it, for the study this site consented to.
2. The ledger in the statement contains every row for which this site has a receipt.
3. Its privacy cost is not below that of this site's receipts. It is not above the study's budget, unless staff have
   confirmed that the server's ledger was recovered: a recovery charges lost answers beyond the budget, too.
4. The hospitals' verdicts release it, if the study asks for them.
5. Its files equal those that this program writes from the weights, numbers and names in it. The files written to disk
   are the site's own, because MONAI evaluates expressions in a bundle's configuration.

Otherwise it is refused, with a remedy. Nothing is written before all checks have passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.site.books import read_books
from client.site.fetch import OnBytes, OnWait, PublicObjects
from client.teachers.bundle_values import check_same, read_values, regenerate
from common.bundle_archive import from_archive, to_archive
from common.canonical import sha256_bytes
from common.config import Study
from common.errors import SAME_VERSION, InvalidInput, LedgerCorrupt, Refused
from common.ledger.charges import charge_of
from common.ledger.keys import public_hex
from common.ledger.receipts import Receipt, row_hashes
from common.ledger.records import ReceiptRecord, RecoveryRecord, parse_record
from common.models.bundle_facts import BundlePrivacy
from common.models.student_bundle import FILES, METADATA, PRIVACY, write_bundle
from common.objects import write_atomically
from common.privacy.accounting import Guarantee, max_mu_squared
from common.privacy.mechanism import AccountantName
from common.reading import naming_file, parse_json
from common.site_verdict import GateState, SiteVerdict, genuine
from common.student_statement import StudentStatement

STUDENT_DIR = "student"
STATEMENT = "statement.json"
OWN_VERDICT = "verdict.json"
"""File of this site's newest verdict, in the student's folder."""
_EXPORT_AGAIN = "ask the consortium to run `consilium student export` again, then pull again"
_TALK = "keep the statement, and talk to the other sites before you talk to the server's operator"
_RESTORED = (
    "if you know that the server's ledger was restored and recovered, run `consilium site recover "
    "--server-restored`; otherwise keep the statement, and talk to the other sites before you talk to the server's "
    "operator"
)


@dataclass(frozen=True, slots=True)
class PulledStudent:
    """A student that passed all checks.

    Attributes:
        bundle: Folder into which it was unpacked.
        statement: The server's signed statement.
        guarantee: The guarantee of the answers it was trained on, by the study's accountant.
        receipts: Number of this site's receipts of the study against which it was checked.
    """

    bundle: Path
    statement: StudentStatement
    guarantee: Guarantee
    receipts: int
    gate: str = ""
    """The hospitals' verdicts in words; empty if the study needs none."""


def pull(
    site_dir: Path,
    *,
    out: Path | None = None,
    to_evaluate: bool = False,
    on_bytes: OnBytes = lambda count: None,
    on_wait: OnWait = lambda said: None,
) -> PulledStudent:
    """Fetch the statement and the bundle of the site's study, check both, and unpack the bundle.

    If a call is interrupted, the next call continues its download.

    Args:
        site_dir: The site's directory.
        out: Folder to write to; by default ``student`` in the site's directory.
        to_evaluate: Also pull a student that the verdicts have not released yet, in order to evaluate it.
        on_bytes: Called with the number of bytes fetched.
        on_wait: Called with a sentence about each wait for the server.

    Returns:
        The student.

    Raises:
        InvalidInput: If the statement or the bundle fails a check, or the folder holds something else.
        LedgerCorrupt: If the server signed something that contradicts this site's receipts or the study's budget.
        Refused: ``not-released`` if the verdicts do not release it and ``to_evaluate`` is False.
    """
    config = load_site(site_dir)
    study = config.load_study()
    out = out or site_dir / STUDENT_DIR
    target = out / "bundle"
    if target.exists() and not (target / METADATA).is_file():
        raise InvalidInput(
            "the folder contains something other than a bundle", value=str(target), remedy="choose another"
        )
    objects = PublicObjects(config, on_wait=on_wait)
    statement = StudentStatement.parse(objects.statement(study.id))
    with read_books(_with_books(config)) as ledger:
        receipts = check_statement(statement, study=study, keys=config.server.signing_public_keys, ledger=ledger)
        voted = own_verdict(site_dir, statement.bundle) is not None
        gate = check_gate(statement, study=study, site=config.site, ledger=ledger, to_evaluate=to_evaluate, voted=voted)

    def bounded(count: int) -> None:
        if count > statement.size:
            raise InvalidInput(
                "student's bundle", value=f"{count} bytes", limit=f"the signed size, {statement.size} bytes"
            )
        on_bytes(count)

    archive = objects.get(statement.bundle, on_bytes=bounded)
    if len(archive) != statement.size:
        raise InvalidInput(
            "student's bundle", value=f"{len(archive)} bytes", limit=f"the signed size, {statement.size} bytes"
        )
    files = from_archive(archive)
    values = read_values(files)
    _check_facts(values.privacy, statement, study)
    own = regenerate(values, study)
    check_same(files, own)
    (out / STATEMENT).unlink(missing_ok=True)  # a killed call leaves no statement about another student than the bundle
    write_bundle(target, own)
    write_atomically(out / STATEMENT, statement.render())
    privacy = study.privacy
    cost = statement.guarantee(privacy.budget, privacy.protection, privacy.accountant)
    return PulledStudent(bundle=target, statement=statement, guarantee=cost, receipts=receipts, gate=gate)


def check_statement(
    statement: StudentStatement, *, study: Study, keys: tuple[Ed25519PublicKey, ...], ledger: SiteLedger
) -> int:
    """Check a signed statement against the study and this site's receipts.

    Args:
        statement: The statement.
        study: The study that this site consented to.
        keys: Keys with which the server may sign.
        ledger: The site's ledger.

    Returns:
        Number of this site's receipts of the study.

    Raises:
        InvalidInput: If it is not signed by the server, is about another study, or is older than the receipts.
        LedgerCorrupt: If the statement contradicts the receipts, or if its cost is above the study's budget although
            this site knows of no recovery of the server's ledger.
    """
    _check_signed(statement, study=study, keys=keys)
    own = [receipt for receipt in ledger.receipts() if receipt.study_id == study.id]
    if any(receipt.ledger_id != statement.head.ledger_id for receipt in own):
        raise LedgerCorrupt(f"the statement names a different ledger than this site's receipts; to fix: {_TALK}")
    rows, known = statement.positions(), _known_rows(ledger, statement.head.ledger_id)
    for seq, hashed in known.items():
        if seq in rows and rows[seq] != hashed:
            raise LedgerCorrupt(
                f"the statement's ledger contradicts this site's receipts; to fix: {_RESTORED}", row=seq
            )
    newest = max((one.head.seq for one in own if known.get(one.head.seq) == one.head.hash), default=0)
    if newest > statement.head.seq or _receipted(own, study) > statement.mu_squared:
        raise InvalidInput(
            "the statement is older than this site's receipts, so it does not count every release",
            value=f"row {statement.head.seq}",
            limit=f"row {newest} or later",
            remedy=_EXPORT_AGAIN,
        )
    over = statement.mu_squared > max_mu_squared(study.privacy.accountant, study.privacy.budget)
    if over and statement.head.ledger_id not in ledger.books.recovered_at:
        raise LedgerCorrupt(f"the statement spends more than the study's budget; to fix: {_RESTORED}")
    return len(own)


def check_gate(
    statement: StudentStatement,
    *,
    study: Study,
    site: str,
    ledger: SiteLedger,
    to_evaluate: bool,
    voted: bool = False,
) -> str:
    """Check whether the hospitals' verdicts release the student.

    In a sealed study a verdict counts only if this site has confirmed the key that signed it. The server can therefore
    omit verdicts but not invent them. In an open study the operator is trusted, and every verdict in its signed
    statement counts.

    Args:
        statement: The server's signed statement, with the verdicts.
        study: The study.
        site: This site's name.
        ledger: The site's ledger.
        to_evaluate: Do not raise if the student is not released.
        voted: True if this site has signed a verdict on this student, even if the server has not read it. The error
            then does not ask the site for another verdict.

    Returns:
        The verdicts in words; empty if the study asks for none.

    Raises:
        Refused: ``not-released`` if the verdicts do not release the student and ``to_evaluate`` is False.
    """
    if not (needed := study.gate.verdicts):
        return ""
    own, confirmed = {site: ledger.public_key}, ledger.peers(study.id)
    said = statement.verdicts or ()
    if study.privacy.sealed:
        keys = confirmed | own
        said = genuine(said, keys, study=study, bundle=statement.bundle)
        sites = max(len(keys), study.privacy.quorum)
    else:
        said = tuple({one.site: one for one in said if one.bundle == statement.bundle}.values())
        sites = len(said) + needed  # a site does not know how many will vote, so no count of verdicts shuts the gate
    gate, counted = GateState(needed, said, sites), any(one.site == site for one in said)
    if not gate.released and not to_evaluate:
        remedy = _gate_remedy(shut=gate.shut, counted=counted, voted=voted)
        raise Refused("not-released", f"{gate.words}; to fix: {remedy}")
    return gate.words


def pulled_statement(site_dir: Path) -> StudentStatement:
    """Return the signed statement about the pulled student, if its signature and the bundle's privacy figures fit.

    One of the two may have been restored from a backup, or copied from the directory of another study.

    Args:
        site_dir: The site's directory.

    Returns:
        The statement.

    Raises:
        InvalidInput: If no student was pulled, if no key in site.toml signed the statement for this site's study, or if
            the privacy figures in the bundle are not those of the statement.
    """
    folder = site_dir / STUDENT_DIR
    try:
        statement = StudentStatement.parse((folder / STATEMENT).read_bytes())
        facts = parse_json((folder / "bundle" / PRIVACY).read_bytes(), what=PRIVACY)
    except FileNotFoundError as error:
        raise InvalidInput(
            "student", value=str(folder), limit="a pulled student", remedy="run `consilium site student pull`"
        ) from error
    config = load_site(site_dir)
    study = config.load_study()
    with naming_file(folder, remedy="run `consilium site student pull` again"):
        _check_signed(statement, study=study, keys=config.server.signing_public_keys)
        _check_facts(BundlePrivacy.from_json(facts), statement, study)
    return statement


def signed_student(site_dir: Path) -> tuple[StudentStatement, dict[str, bytes]]:
    """Return the pulled student; refuse it unless its files are byte for byte those that the server signed.

    A verdict, figures or a guarantee about another network than the signed one would be false.

    Args:
        site_dir: The site's directory.

    Returns:
        The statement, and the files' contents by path in the bundle.

    Raises:
        InvalidInput: If a file is missing or differs, or :func:`pulled_statement` refuses the student.
    """
    statement, folder = pulled_statement(site_dir), site_dir / STUDENT_DIR / "bundle"
    files = {name: path.read_bytes() for name in FILES if (path := folder / name).is_file()}
    if files.keys() != set(FILES) or sha256_bytes(to_archive(files)) != statement.bundle:
        raise InvalidInput(
            "student's bundle is not the one that the server signed",
            value=str(folder),
            remedy=f"run `consilium site student pull`; if it is refused again, {SAME_VERSION}",
        )
    return statement, files


def check_pulled(site_dir: Path) -> None:
    """Check whether the hospitals' verdicts, as of when the student was pulled, release it.

    Args:
        site_dir: The site's directory, with a pulled student.

    Raises:
        InvalidInput: If :func:`pulled_statement` refuses the student.
        Refused: ``not-released`` if the verdicts do not release it.
    """
    config = load_site(site_dir)
    study, statement = config.load_study(), pulled_statement(site_dir)
    if not study.gate.verdicts:
        return
    voted = own_verdict(site_dir, statement.bundle) is not None
    with read_books(_with_books(config)) as ledger:
        check_gate(statement, study=study, site=config.site, ledger=ledger, to_evaluate=False, voted=voted)


def _gate_remedy(*, shut: bool, counted: bool, voted: bool) -> str:
    """Return what a site can do about a student that is not released; a site that has voted need not vote again."""
    if shut:
        fetch = "" if counted or voted else "`consilium site student pull --to-evaluate`, then "
        return f"do not wait for this student; {fetch}`consilium site adapt` trains a network for this hospital"
    if counted:
        return "this site has given its verdict; pull again when other hospitals have given theirs"
    if voted:
        return "send the verdict that this site has signed to the consortium; pull again when it has read it"
    return "`consilium site student pull --to-evaluate`, then `consilium site evaluate --verdict FILE`"


def own_verdict(site_dir: Path, bundle: str) -> SiteVerdict | None:
    """Return this site's verdict on a student.

    Args:
        site_dir: The site's directory.
        bundle: Hash of the student's archive.

    Returns:
        The verdict; None if this site gave none.
    """
    path = site_dir / STUDENT_DIR / OWN_VERDICT
    if not path.is_file():
        return None
    found = SiteVerdict.parse(path.read_bytes())
    return found if found.bundle == bundle else None


def _known_rows(ledger: SiteLedger, ledger_id: str) -> dict[int, str]:
    """Return the hashes, by row number, of the rows of a server's ledger that this site's receipts contain.

    Receipts from before the last recovery of that ledger are left out.
    """
    known: dict[int, str] = {}
    for row in ledger.rows():
        if row.kind not in ("recovery", "receipt"):
            continue
        match parse_record("site", row.kind, row.body):
            case RecoveryRecord(ledger_id=recovered) if recovered == ledger_id:
                known.clear()
            case ReceiptRecord(receipt=receipt) if receipt.ledger_id == ledger_id:
                known |= row_hashes(receipt)
    return known


def _receipted(own: list[Receipt], study: Study) -> Fraction:
    """Return Σμ² of the study's releases for which this site has receipts, for the study's unit and relation."""
    protection = study.privacy.protection
    mechanisms = [mechanism for receipt in own for mechanism in receipt.mechanisms]
    return sum((charge_of(mechanism, protection, protection) for mechanism in mechanisms), start=Fraction(0))


def _check_signed(statement: StudentStatement, *, study: Study, keys: tuple[Ed25519PublicKey, ...]) -> None:
    """Refuse a statement that no key in site.toml signed, and a statement about another study."""
    if not any(statement.is_genuine(key) for key in keys) or statement.head.public_key not in map(public_hex, keys):
        raise InvalidInput(
            "the statement about the student is not signed by a key in site.toml",
            remedy="ask the consortium for its key",
        )
    if statement.study_id != study.id:
        raise InvalidInput(
            "the statement is about another study", value=statement.study_id, limit=study.id, remedy=_EXPORT_AGAIN
        )


def _check_facts(facts: BundlePrivacy, statement: StudentStatement, study: Study) -> None:
    """Refuse a bundle whose privacy figures differ from the signed ones."""
    privacy = study.privacy
    budget, protection = privacy.budget, privacy.protection
    pairs = [
        (facts.epsilon_exact, statement.guarantee(budget, protection, AccountantName.EXACT).epsilon),
        (facts.epsilon_rdp, statement.guarantee(budget, protection, AccountantName.RDP).epsilon),
        (facts.delta, budget.delta),
        (facts.budget_epsilon, budget.epsilon),
    ]
    if facts.epsilon_paper is not None:
        pairs.append((facts.epsilon_paper, statement.guarantee(budget, protection, AccountantName.PAPER).epsilon))
    named = (facts.study, facts.ledger_head, facts.queries, facts.protection, facts.accountant, facts.voters_per_site)
    signed = (study.id, statement.head.hash, statement.queries, protection, privacy.accountant, privacy.voters_per_site)
    if named != signed or not all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs):
        raise InvalidInput("the privacy figures in the bundle differ from the signed ones", remedy=_EXPORT_AGAIN)


def _with_books(config: SiteConfig) -> SiteConfig:
    if not config.ledger_file.exists():
        raise InvalidInput(
            "this site has no ledger, so it has no receipts to check a student against",
            value=config.ledger_file.name,
            remedy="start the site once with `consilium site up`",
        )
    return config
