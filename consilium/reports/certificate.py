"""Writes a study's privacy certificate from its ledger, as PDF and JSON: the releases, their ε, and the hospitals.

`consilium certificate` calls it. Every figure comes from a copy of the ledger that was verified first. Every ε is
stated with accountant, δ, unit and relation. The stated guarantee is the study's budget, because all of it may still be
spent under the same consent. If more than the budget was spent, the guarantee is the spent ε. The spent ε is always
stated as well. The certificate also states its assumptions and what it cannot prove. It proves the accounting. It does
not prove that noise was added: this is a promise of the server's operator or, in a sealed study, of the hospitals. The
module refuses a ledger that does not verify, a ledger that is older than its standing file, and a simulation.
"""

from __future__ import annotations

import json
import platform
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common import __version__
from common.canonical import sha256_bytes, sha256_file
from common.config import Study
from common.errors import InvalidInput
from common.ledger.charges import ReleaseRecord, Roster, RosterRecord
from common.ledger.records import LostRecord, RecoveredRecord, RefusalRecord, ReuseRecord, parse_record
from common.ledger.spending import Spending
from common.objects import write_atomically
from common.privacy.accounting import Guarantee
from common.privacy.calibration import noise_multiplier
from common.privacy.coalitions import COALITIONS
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import GRID_BITS, Mechanism, Relation, Unit
from common.reading import parsing
from common.site_facts import read_guarantee
from common.study_facts import StudyFacts
from common.study_mechanism import sealed_sentences
from consilium.reports.certificate_paper import certificate_paper
from consilium.reports.report_facts import SIMULATION
from consilium.reports.site_accounts import site_facts
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import VerifyReport, verify
from server.protocols.query_protocol import protocol_of
from server.study.consent_text import sealed_facts
from server.study.evaluated import evaluated
from server.study.read_facts import facts_in
from server.study.workspace import Workspace

CERTIFICATE_SCHEMA = 2

PROVES = (
    "The chain of rows is whole up to the signed head named here, and every row keeps the ledger's rules: no budget "
    "was exceeded at any row, and {charged}.",
    "Each contributing hospital holds signed receipts of the same rows. Charging less, dropping, rewriting or forking "
    "what they cover would contradict a receipt and stop that hospital's answers.",
    "Each hospital counted its own charges in its own ledger, when it accepted a query, independently of the server.",
)
_OPEN_CHARGED = "every stored answer was charged in the transaction that stored it"
_SEALED_CHARGED = (
    "every draw, lost or answered, was charged before a hospital was asked for its masked codes; if the hospitals on "
    "its roster added their shares of the noise, the shares of those that do not collude add up to the charged noise"
)
_OPEN_NOISE = (
    "That noise was added, or was the noise of the mechanism named here. The operator of the server opens the "
    "hospitals' codes and is trusted to add it.",
    "That codes without noise were not kept or used elsewhere.",
    "That rows after the signed head do not exist. A later head or receipt would show such rows.",
)
_SEALED_NOISE = (
    "That each hospital added its share of the noise, and its masks. The server cannot read what the hospitals send; "
    "the hospitals that do not collude are trusted to add their shares.",
    "That rows after the signed head do not exist. A later head or receipt would show such rows.",
)
CANNOT_PROVE = (
    "Whose scans are whose. What counts as one patient is each hospital's own statement: its table of patients or its "
    "BIDS subjects. Where it has neither, as in plain MSD data, every image file counts as a patient of its own, and a "
    "person with several files is protected less well than unit patient says.",
    "That training, the data and the teachers of a hospital were as it says, or that the writer's clock was right.",
)
NOT_ANCHORED = (
    "That the consortium's key signed the ledger. No public key was given, so the signatures were checked only with "
    "the key that the ledger itself names. Compare this key with `signing_key` in a hospital's kit."
)
"""What a certificate cannot prove if it was made without the server's public key."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Reports that a certificate uses in addition to the study's directory.

    Attributes:
        audit: Report of an audit; by default ``audit.json`` in the study's directory, if it exists.
        sites: Files with hospitals' own status reports; if given, no other reports are used.
        reports: A further folder of hospitals' reports, where the dashboard stores received ones.
        public_key: The server's public signing key from an independent source, with which the ledger is verified.
    """

    audit: Path | None = None
    sites: tuple[Path, ...] = ()
    reports: Path | None = None
    public_key: Ed25519PublicKey | None = None


@dataclass(frozen=True, slots=True)
class WrittenCertificate:
    """A written certificate.

    Attributes:
        pdf: The PDF.
        json: The JSON document.
        guaranteed: The stated guarantee.
        spent: The part of the guarantee that is spent.
        answers: Number of released answers.
        kept: True if the study's directory holds a copy, which the dashboard shows; False if none was asked for or it
            could not be written.
        anchored: True if the ledger's signatures were checked with a public key that the caller gave.
    """

    pdf: Path
    json: Path
    guaranteed: Guarantee
    spent: Guarantee
    answers: int
    kept: bool
    anchored: bool


def issue_certificate(workspace: Workspace, out: Path, sources: Sources, *, copy: bool = True) -> WrittenCertificate:
    """Write ``certificate.json`` and ``certificate.pdf``, and a copy of both in the study's directory.

    Args:
        workspace: The study's directory.
        out: Folder to write to.
        sources: Reports and a key that are not taken from the study's directory.
        copy: Keep a copy in the study's directory, where the dashboard shows it.

    Returns:
        The certificate.

    Raises:
        LedgerCorrupt: If the ledger does not verify or is an older copy; then nothing is written.
        InvalidInput: For a simulation, or an unreadable report.
    """
    facts = certificate_facts(workspace, sources)
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    document = text.encode()
    page = certificate_paper(facts, document_sha256=sha256_bytes(document)).pdf()
    _write(out, document, page)
    kept = copy
    try:
        if copy:
            _write(workspace.certificate_dir, document, page)
    except OSError:  # the study is mounted read-only
        kept = False
    return WrittenCertificate(
        pdf=out / "certificate.pdf",
        json=out / "certificate.json",
        guaranteed=read_guarantee(facts["guarantee"]),
        spent=read_guarantee(facts["spent"]),
        answers=facts["answers"],
        kept=kept,
        anchored=facts["ledger"]["anchored"],
    )


def _write(folder: Path, document: bytes, page: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "certificate.json", document)
    write_atomically(folder / "certificate.pdf", page)


def certificate_facts(
    workspace: Workspace,
    sources: Sources | None = None,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> dict[str, Any]:
    """Collect everything that a certificate states, as plain values for JSON.

    The ledger may be in use: a consistent copy is made, verified and read.

    Args:
        workspace: The study's directory.
        sources: An audit's report, hospitals' reports and the server's public key from outside the study's directory.
            By default only what that directory contains is used.
        clock: Source of the time of issue.

    Returns:
        Plain values.

    Raises:
        LedgerCorrupt: If the ledger does not verify or is an older copy.
        InvalidInput: For a simulation, a study that the ledger does not contain, or an unreadable report.
    """
    sources = sources or Sources()
    with verified_ledger(workspace, sources) as (ledger, report):
        return verified_facts(ledger, report, workspace, sources, clock=clock)


@contextmanager
def verified_ledger(workspace: Workspace, sources: Sources) -> Iterator[tuple[Ledger, VerifyReport]]:
    """Open a consistent copy of a study's ledger that was verified first. The ledger may be in use.

    Args:
        workspace: The study's directory.
        sources: Gives the server's public key, if there is one from outside the study's directory.

    Returns:
        A context with the copy and the verifier's report.

    Raises:
        LedgerCorrupt: If the ledger does not verify or is an older copy.
        InvalidInput: For a simulation, or a study that the ledger does not contain.
    """
    study = workspace.study()
    if study.name == SIMULATION:
        raise InvalidInput(
            "certificate of a simulation",
            limit="a study between hospitals, because in a simulation one person holds every party's data and keys",
            remedy="use the simulation's report.html",
        )
    with Ledger.open(workspace.ledger_file) as original:
        original.check_newest()  # checked here, because the copy has no standing file beside it
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger.sqlite"
        report = backup(workspace.ledger_file, copy)
        if sources.public_key is not None:
            report = verify(copy, public_key=sources.public_key)
            report.raise_for_problems()
        with Ledger.open(copy) as ledger:
            if study.id not in ledger.books.studies:
                raise InvalidInput(
                    "id of the study in study.toml",
                    value=study.id,
                    limit=f"a study that its ledger contains: {', '.join(sorted(ledger.books.studies)) or 'none'}",
                    remedy="restore the study.toml with which it ran",
                )
            yield ledger, report


def verified_facts(
    ledger: Ledger, report: VerifyReport, workspace: Workspace, sources: Sources, *, clock: Callable[[], datetime]
) -> dict[str, Any]:
    """Collect everything that a certificate states from a verified copy of the ledger.

    Args:
        ledger: The copy.
        report: The verifier's report on it.
        workspace: The study's directory.
        sources: As for :func:`certificate_facts`.
        clock: Source of the time of issue.

    Returns:
        Plain values.

    Raises:
        InvalidInput: If a report cannot be read.
    """
    study = workspace.study()
    sealed, audit = study.privacy.sealed, sources.audit or workspace.root / "audit.json"
    found = facts_in(ledger, workspace)
    sites = max(workspace.admitted_count(), found.spending.largest_roster)
    return {
        "certificate": CERTIFICATE_SCHEMA,
        "issued": clock().astimezone(UTC).isoformat(timespec="seconds"),
        "study": _study_facts(study, sites=sites, spending=found.spending),
        **_spent_facts(found, study, sites=sites),
        **_history(ledger, study, found),
        "ledger": _ledger_facts(ledger, report),
        "audit": _audit(audit) if sources.audit or audit.exists() else None,
        **site_facts(workspace, sources.sites, sources.reports),
        **_measured(workspace),
        "hashes": _hashes(workspace, study),
        "versions": _versions(),
        "proves": [one.format(charged=_SEALED_CHARGED if sealed else _OPEN_CHARGED) for one in PROVES],
        "cannot_prove": [
            *(() if report.anchored else (NOT_ANCHORED,)),
            *(_SEALED_NOISE if sealed else _OPEN_NOISE),
            *CANNOT_PROVE,
        ],
    }


def _measured(workspace: Workspace) -> dict[str, Any]:
    """Return the hospitals' signed scores of the student; empty if no hospital sent scores."""
    found = evaluated(workspace)
    return {"measured": {**found.to_json(), "in_words": found.lines}} if found.gave else {}


def _study_facts(study: Study, *, sites: int, spending: Spending) -> dict[str, Any]:
    privacy, query_plan = study.privacy, protocol_of(study).query_plan(study)
    return {
        "name": study.name,
        "id": study.id,
        "structures": list(study.data.labels[1:]),
        "asked_about": f"{query_plan.which} public {'volume' if query_plan.which.endswith(' 1') else 'volumes'}",
        "a_sum_for": query_plan.each,
        "budget_epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "accountant": str(privacy.accountant),
        "unit": str(privacy.unit),
        "relation": str(privacy.relation),
        "planned_queries": privacy.planned_queries,
        "quorum": privacy.quorum,
        "voters_per_site": privacy.voters_per_site,
        "clipping_norm": study.codec.radius,
        "edition": privacy.edition,
        **({"sealed_sum": sealed_facts(study, sites=sites, spending=spending)} if privacy.sealed else {}),
        "terms": study.to_json(),
    }


def _spent_facts(found: StudyFacts, study: Study, *, sites: int) -> dict[str, Any]:
    pools, spending = [], found.spending
    for pool in found.pools.values():
        inside, life = pool.in_study, pool.for_life
        pools.append(
            {
                "pool": pool.pool,
                "site": pool.site,
                "releases": inside.spend.releases,
                "study": inside.spent.to_json(),
                "lifetime_releases": life.spend.releases,
                "lifetime": life.spent.to_json(),
                "cap_epsilon": life.budget.epsilon,
            }
        )
    said = in_words(spending, colluders=study.privacy.sealed_colluders)
    sealed = sealed_sentences(study, sites=sites, spent=spending.mu_squared)
    return {
        "guarantee": spending.guaranteed.to_json(),
        "spent": spending.spent.to_json(),
        "spent_by": [item.to_json() for item in spending.by_all()],
        "groups": [item.to_json() for item in spending.groups()],
        "guess_right_at_most": {
            "guaranteed": spending.odds_guaranteed,
            "spent": spending.odds_spent,
        },
        "in_words": [*said, *sealed],
        "in_words_tabled": [GROUPS, *([len(said) + COALITIONS] if sealed else [])],
        "pools": pools,
    }


GROUPS = 2
"""Index of the paragraph on the ε of groups in the list that :func:`in_words` returns."""


def in_words(spending: Spending, *, colluders: int | None) -> list[str]:
    """Return paragraphs that explain the guarantee to a reader who does not know ε.

    They say what is hidden, how well it is hidden, and what holds for groups of several units.

    Args:
        spending: The budget and its spent part.
        colluders: Number of sites that may collude with the server in a sealed sum; None in an open study.

    Returns:
        Paragraphs.
    """
    promised, protection = spending.guaranteed, spending.protection
    hidden = "everything one hospital holds" if protection.unit is Unit.HOSPITAL else "one patient of one hospital"
    if protection.relation is Relation.ZERO_OUT:
        other = "had been left out, its code counting as zero"
    else:
        whose = "another hospital's data" if protection.unit is Unit.HOSPITAL else "any other patient"
        other = f"had been exchanged for {whose}"
    holds = spending.warning or (
        "That is the study's budget: it holds for all that was released and for all that can still be."
    )
    return [
        f"Whatever is released in this study looks almost the same if {hidden} {other}. How nearly the same is what "
        f"ε = {epsilon_text(promised.epsilon)} and δ = {delta_text(promised.delta)} say ({promised.accountant} "
        f"accountant, {protection}). {holds}",
        f"{spending.odds_sentence(colluders=colluders)} {spending.odds_spent_sentence(sealed=colluders is not None)}",
        spending.groups_sentence(),
        "Whatever is computed from the releases, the student model and its predictions included, is covered and costs "
        "nothing more. A person who is known at g hospitals has only the guarantee of a group of g.",
    ]


def _history(ledger: Ledger, study: Study, found: StudyFacts) -> dict[str, Any]:
    releases: list[tuple[str, str, int, ReleaseRecord]] = []
    named: dict[str, Roster] = {}
    refusals: list[dict[str, Any]] = []
    recovered = reused = by_standing = 0
    for row in ledger.rows():
        record = parse_record("server", row.kind, row.body)
        if isinstance(record, RosterRecord):
            named[record.id] = record.roster
        elif isinstance(record, ReleaseRecord) and record.study_id == study.id:
            releases.append((record.batch_id, row.time_utc, row.seq, record))
        elif isinstance(record, RefusalRecord) and record.study_id == study.id:
            refusals.append(
                {
                    "time_utc": row.time_utc,
                    "row": row.seq,
                    "queries": len(record.query_ids),
                    "reason": record.reason,
                    "pool": record.pool,
                }
            )
        elif isinstance(record, RecoveredRecord) and record.release.study_id == study.id:
            recovered += 1
        elif isinstance(record, LostRecord):
            by_standing += max((spend.releases for spend in record.studies.get(study.id, {}).values()), default=0)
        elif isinstance(record, ReuseRecord) and record.study_id == study.id:
            reused += len(record.query_ids)
    batches = []
    for (batch, time_utc), group in groupby(releases, key=lambda item: item[:2]):
        rows = list(group)
        batches.append(
            {
                "time_utc": time_utc,
                "batch": batch,
                "first_row": rows[0][2],
                "last_row": rows[-1][2],
                "queries": [record.query_id for *_, record in rows],
                "volumes": sum(len(record.query.volumes) for *_, record in rows),
                "sites": [entry.site for entry in rows[0][3].roster_in(named)],
                "voters": rows[0][3].voters,
            }
        )
    return {
        "releases": batches,
        "answers": found.answers,
        **({"lost_draws": found.lost_draws} if found.lost_draws else {}),
        "mechanisms": _mechanisms([record.query.mechanism for *_, record in releases], study),
        "refusals": refusals,
        "recovered_charges": recovered,
        **({"charges_by_standing": by_standing} if by_standing else {}),
        "reused_answers": reused,
    }


def _mechanisms(found: Sequence[Mechanism], study: Study) -> list[dict[str, Any]]:
    protection = study.privacy.protection
    return [
        {
            "name": mechanism.name,
            "releases": sum(other == mechanism for other in found),
            "coordinates": mechanism.dimension,
            "clipping_norm": mechanism.radius_int / 2**GRID_BITS,
            "noise_multiplier": noise_multiplier(mechanism, protection),
            "noise_std_on_sum": float(mechanism.noise_std) / 2**GRID_BITS,
            **({} if mechanism.colluders is None else {"colluders": mechanism.colluders}),
        }
        for mechanism in dict.fromkeys(found)
    ]


def _ledger_facts(ledger: Ledger, report: VerifyReport) -> dict[str, Any]:
    named = (row for row in ledger.rows() if row.kind in ("genesis", "key"))
    return {
        "id": ledger.ledger_id,
        "rows": report.rows,
        "signatures_checked": report.signatures,
        "answers_checked": report.answers,
        "anchored": report.anchored,
        "head": ledger.head().to_json(),
        "keys": [{"row": row.seq, "public_key": json.loads(row.body)["public_key"]} for row in named],
    }


def _audit(path: Path) -> dict[str, Any]:
    """Return an audit's summary and figures for each of its parts."""
    with parsing("audit report", value=str(path), limit="the output of `consilium audit --json`"):
        reports: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wanted = ("summary", "exceeded", "runs", "confidence", "claimed_mu")
        return {name: {key: report[key] for key in wanted} for name, report in reports.items()}


def _hashes(workspace: Workspace, study: Study) -> dict[str, str]:
    hashes = {"study": study.id}
    if workspace.codec_file.exists():
        hashes["codec"] = workspace.codec().sha256
    for name, path in (
        ("study file", workspace.study_file),
        ("student weights", workspace.student_dir / "weights.pt"),
        ("bundle metadata", workspace.bundle_dir / "configs" / "metadata.json"),
    ):
        if path.exists():
            hashes[name] = sha256_file(path)
    return hashes


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("numpy", "cryptography", "dp-accounting")}
    return {"consilium": __version__, **found, "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
