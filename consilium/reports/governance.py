"""Drafts the documents that a hospital and its ethics board ask for, from a study's facts.

`consilium governance` calls it. The documents are a data protection impact assessment, a checklist by NIST SP 800-226,
an entry for a registry of deployments, a record of the data that left the hospitals, and the record of processing.
Facts come from the verified ledger and the study only; everything else is marked as to be filled in. A draft is no
legal advice and does not say that a study may be run. Refuses a ledger that does not verify, and a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import parse_rational
from common.ledger.charges import ReleaseRecord, Roster, RosterRecord
from common.ledger.records import parse_record
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.site_figures import SiteFigures
from common.site_verdict import SiteVerdict
from common.wording import many
from consilium.reports.certificate import Sources, verified_facts, verified_ledger
from consilium.reports.papers import Blank, Paper, PaperSection, Row, Text
from server.ledger.server_ledger import Ledger
from server.study.gate import read_kept
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class ChargedQuery:
    """One charged query, for the record of the data that left the hospitals.

    Attributes:
        time: Time of the row, UTC.
        row: Row of the ledger.
        query: Id of the query.
        sites: Hospitals that took part in the sum.
        coordinates: Number of noisy values.
        mu_squared: μ² that the query cost, for the study's unit and relation.
        draw: Number of the draw in a sealed sum; None otherwise.
    """

    time: str
    row: int
    query: str
    sites: tuple[str, ...]
    coordinates: int
    mu_squared: Fraction
    draw: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the charged query as plain values for JSON."""
        return {
            "time_utc": self.time,
            "row": self.row,
            "query": self.query,
            "sites": list(self.sites),
            "coordinates": self.coordinates,
            "mu_squared": str(self.mu_squared),
            **({} if self.draw is None else {"draw": self.draw}),
        }


@dataclass(frozen=True, slots=True)
class SentStatement:
    """A statement about the student that a hospital sent by consent, under no ε.

    Attributes:
        time: When the hospital signed it, UTC.
        site: The hospital.
        kind: ``verdict`` or ``figures``.
        value: What it says.
    """

    time: str
    site: str
    kind: str
    value: str

    def to_json(self) -> dict[str, Any]:
        """Return the statement as plain values for JSON."""
        return {"time_utc": self.time, "site": self.site, "kind": self.kind, "value": self.value}


def papers(
    workspace: Workspace, *, now: datetime | None = None, public_key: Ed25519PublicKey | None = None
) -> tuple[Paper, ...]:
    """Draft every document of a study.

    Args:
        workspace: The study's directory.
        now: Time in the documents; by default the current time.
        public_key: The server's public signing key from an independent source, with which the ledger is verified.

    Returns:
        The documents.

    Raises:
        LedgerCorrupt: If the ledger does not verify or is an older copy.
        InvalidInput: For a simulation, or a study that the ledger does not contain.
    """
    made = (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
    sources = Sources(public_key=public_key)
    with verified_ledger(workspace, sources) as (ledger, report):
        facts = verified_facts(ledger, report, workspace, sources, clock=lambda: made)
        left = tuple(_left(ledger, facts["study"]["id"]))
    make = _Papers(facts, left, _sent(workspace), made, sealed="sealed_sum" in facts["study"])
    return make.assessment(), make.checklist(), make.registry(), make.egress(), make.processing()


def _left(ledger: Ledger, study: str) -> Iterator[ChargedQuery]:
    named: dict[str, Roster] = {}
    for row in ledger.rows():
        if row.kind not in ("roster", "release"):
            continue
        record = parse_record("server", row.kind, row.body)
        if isinstance(record, RosterRecord):
            named[record.id] = record.roster
        elif isinstance(record, ReleaseRecord) and record.study_id == study:
            sites = tuple(entry.site for entry in record.roster_in(named))
            mu_squared = parse_rational(str(record.event["mu_squared"]))
            size = record.query.mechanism.dimension
            yield ChargedQuery(row.time_utc, row.seq, record.query_id, sites, size, mu_squared, record.draw)


def _sent(workspace: Workspace) -> tuple[SentStatement, ...]:
    """Return all stored verdicts and figures on any student of the study, in the order of their times."""
    found = [
        SentStatement(one.time_utc, one.site, "verdict", one.word)
        for one in read_kept(workspace.verdicts_dir, SiteVerdict)
    ]
    for figures in read_kept(workspace.figures_dir, SiteFigures):
        dice = ", ".join(f"{one.structure} {one.hundredths / 100:.2f}" for one in figures.dice)
        found.append(SentStatement(figures.time_utc, figures.site, "figures", f"mean Dice: {dice}"))
    return tuple(sorted(found, key=lambda one: (one.time, one.site, one.kind)))


@dataclass(frozen=True, slots=True)
class _Papers:
    facts: dict[str, Any]
    left: tuple[ChargedQuery, ...]
    sent: tuple[SentStatement, ...]
    made: datetime
    sealed: bool

    @property
    def study(self) -> dict[str, Any]:
        found: dict[str, Any] = self.facts["study"]
        return found

    @property
    def promised(self) -> str:
        return _guarantee(self.facts["guarantee"])

    @property
    def spent(self) -> str:
        return _guarantee(self.facts["spent"])

    def paper(
        self, name: str, title: str, what: Sequence[str], sections: Sequence[PaperSection], facts: dict[str, Any]
    ) -> Paper:
        about = {"study": self.study["name"], "study_id": self.study["id"], "ledger_head": self.facts["ledger"]["head"]}
        everything = (PaperSection("What this is", what), *sections, self._source())
        return Paper(name, f"{title}: {self.study['name']}", self.made, everything, about | facts)

    def _source(self) -> PaperSection:
        head, ledger = self.facts["ledger"]["head"], self.facts["ledger"]
        with_key = (
            "with the public key of the server that was given"
            if ledger["anchored"]
            else "ONLY with the key that the ledger itself names, because no public key was given"
        )
        return PaperSection(
            "Where the facts are from",
            [
                f"Study {self.study['id']}; ledger {ledger['id']}, verified up to row {head['seq']}, hash "
                f"{head['hash']}. Its signatures were checked {with_key}. Anybody who has the ledger can make this "
                "document again; `consilium verify` checks it."
            ],
        )

    def _terms(self) -> list[Row]:
        study, terms = self.study, self.study["terms"]
        return [
            ("What", "By the study that the hospitals consented to"),
            ("Structures that the model learns", ", ".join(study["structures"])),
            ("Images", ", ".join(terms["data"].get("channels", ["MRI"])) + ", three-dimensional"),
            ("Unit of privacy", f"{study['unit']}, {study['relation']} neighbours"),
            ("Guarantee", self.promised),
            ("Spent so far", f"{self.spent}, in {many(self.facts['answers'], 'answer')}"),
            ("Who adds the noise", _who_adds(self.sealed)),
            ("Least number of hospitals in a release", str(study["quorum"])),
        ]

    def _hospitals(self) -> list[Row]:
        rows: list[Row] = [
            ("Hospital", "Patient pool", "Spent in this study", "Spent in all its studies", "Lifetime cap")
        ]
        for pool in self.facts["pools"]:
            own, life = _guarantee(pool["study"]), _guarantee(pool["lifetime"])
            rows.append((pool["site"], pool["pool"], own, life, f"ε = {epsilon_text(pool['cap_epsilon'])}"))
        return rows

    def assessment(self) -> Paper:
        risks: list[Row] = [
            ("Risk", "How likely, by the ledger's figures", "Measures against it"),
            (
                f"Somebody who sees all releases can tell whether one {self.study['unit']} took part",
                self.facts["in_words"][1],
                f"noise on every release, charged before it: {self.promised}",
            ),
            (
                "The operator of the server sees a hospital's answer without noise",
                "not covered by ε: "
                + (
                    "the server adds up masked answers and cannot read them"
                    if self.sealed
                    else "the operator opens the answers and is trusted to add the noise"
                ),
                "sealed sum" if self.sealed else Blank("agreement with the operator; or a study with a sealed sum"),
            ),
            (
                "More is released than was agreed",
                "not without a contradiction: each hospital charges in its own ledger when it accepts",
                "caps and a veto at each hospital, signed receipts, a chain of rows that anybody can verify",
            ),
            (
                "The model is wrong for some patients",
                "not told by ε; hospitals evaluate the student on their own cases",
                Blank("who decides on clinical use, and by which evaluation"),
            ),
            (
                "Access to images at the hospital by the software",
                "images are read by the hospital's own worker and do not leave",
                Blank("access rights and location of the worker at this hospital"),
            ),
        ]
        what = (
            "A draft of a data protection impact assessment (Article 35 GDPR). Figures are from the ledger; legal "
            "judgements are blanks, and are the controller's.",
        )
        sections = [
            PaperSection(
                "Who is responsible",
                points=[
                    Blank("controller, joint controllers and their arrangement (Article 26)"),
                    Blank("processor and contract (Article 28), where there is one"),
                    Blank("data protection officer consulted, and the advice (Article 35(2))"),
                ],
            ),
            PaperSection("What is processed", rows=self._terms()),
            PaperSection(
                "What stays and what leaves",
                [*self.facts["in_words"]],
                points=[
                    "Images, label maps and trained teachers stay at the hospital.",
                    f"Noisy sums of codes left it: {len(self.left)} charged queries "
                    f"({sum(one.coordinates for one in self.left)} numbers in all), listed in the egress record.",
                    "Receipts, signed states of ledgers and other messages of the protocol are exchanged. Their "
                    "content depends on no patient. The table in docs/privacy.md of what is released for free lists "
                    "what their times and sizes may show.",
                    f"{self._by_consent} Such a statement depends on patients' data, and no ε covers it.",
                ],
            ),
            PaperSection(
                "On which basis",
                points=[
                    Blank("lawful basis (Article 6) and condition for health data (Article 9)"),
                    Blank("national research provisions and ethics vote, with number and date"),
                    Blank("necessity and proportionality: why this purpose needs these data"),
                    Blank("how patients are informed, and how they object"),
                ],
            ),
            PaperSection("Hospitals and what each has spent", rows=self._hospitals()),
            PaperSection("Risks, how likely, and measures", rows=risks),
            PaperSection("What the ledger proves", points=list(self.facts["proves"])),
            PaperSection("What nobody can prove by it", points=list(self.facts["cannot_prove"])),
            PaperSection("Decision", points=[Blank("residual risk accepted or not, by whom, date, signature")]),
        ]
        facts = {"guarantee": self.facts["guarantee"]}
        return self.paper("dpia", "Data protection impact assessment (draft)", what, sections, facts)

    @property
    def _by_consent(self) -> str:
        """A sentence with the number of statements about the student that hospitals consented to send."""
        if not self.sent:
            return "No hospital has sent a verdict or figures on the student so far."
        counted = (f"{sum(one.kind == kind for one in self.sent)} {kind}" for kind in ("verdict", "figures"))
        return (
            f"By consent hospitals sent statements on the student ({', '.join(counted)}); the egress record lists them."
        )

    def checklist(self) -> Paper:
        study, mechanisms = self.study, self.facts["mechanisms"]
        used = "; ".join(
            f"{one['releases']} × {one['name']}: {one['coordinates']} coordinates, clipping norm "
            f"{one['clipping_norm']:.4g}, noise multiplier {noise_text(one['noise_multiplier'], 4)}"
            for one in mechanisms
        )
        audit = self.facts["audit"]
        audited: Text = Blank("run `consilium audit` and file its report")
        if audit is not None:
            audited = "; ".join(f"{name}: {one['summary']}" for name, one in audit.items())
        rows: list[Row] = [
            ("Question", "Answer by study and ledger"),
            (
                "Which definition of differential privacy?",
                "(ε, δ), by Gaussian mechanisms, accounted exactly as μ-GDP",
            ),
            ("What are ε and δ?", f"{self.promised}; spent {self.spent}"),
            ("Is ε small enough for the purpose?", Blank("judgement, beside the odds in the impact assessment")),
            ("What is the unit of privacy?", f"{study['unit']}, neighbours by {study['relation']}"),
            (
                "May one person be in several units?",
                "yes: a person known at g hospitals is in g units, and has only the guarantee of a group of g",
            ),
            (
                "How do releases compose?",
                f"Σμ² over all {len(self.left)} charged queries, all studies of a pool, for life",
            ),
            (
                "Is the budget bounded and enforced?",
                "yes: the ledger refuses a query past it; so does each hospital's own",
            ),
            ("Which mechanism, sensitivity and noise?", used or "no query was charged yet"),
            (
                "Is sensitivity enforced, and where?",
                "codes are clipped at the hospital and, in an open sum, checked at the server",
            ),
            ("Floating point and randomness?", "rounded Gaussian on integers, from the operating system's CSPRNG"),
            ("Timing and other side channels?", "replies leave at whole ticks; which tick remains (docs/privacy.md)"),
            ("Who is trusted (model of deployment)?", _who_adds(self.sealed)),
            ("What was measured about utility?", Blank("the study's report: student against controls, with intervals")),
            ("What was measured about bias?", Blank("evaluation by subgroup at the hospitals")),
            ("Was the implementation tested against its claim?", audited),
            ("Who may read the data before noise?", "the hospital's own worker; codes are sealed on their way"),
            (
                "Is the data collection itself covered?",
                Blank("consent and retention at each hospital; ε does not cover it"),
            ),
        ]
        what = (
            "The questions that NIST SP 800-226 (Guidelines for Evaluating Differential Privacy Guarantees) puts to a "
            "deployment: guarantee, unit, composition, algorithms, trust, implementation, data.",
        )
        sections = [PaperSection("Checklist", rows=rows)]
        return self.paper("nist-800-226", "Checklist by NIST SP 800-226", what, sections, {"mechanisms": mechanisms})

    def registry(self) -> Paper:
        study, guarantee = self.study, self.facts["guarantee"]
        entry: dict[str, Text | float | int | list[str]] = {
            "deployment_name": study["name"],
            "data_curator": Blank("organisation that answers for the release"),
            "data_product_type": "machine learning model: 3D segmentation",
            "data_product_region": Blank("countries"),
            "intended_use": Blank("in one sentence"),
            "publication_date": Blank("date of the student's release"),
            "dp_flavor": "approximate differential privacy (ε, δ), accounted by Gaussian differential privacy",
            "privacy_loss_epsilon": guarantee["epsilon"],
            "privacy_loss_delta": guarantee["delta"],
            "privacy_unit": f"{study['unit']}, {study['relation']}",
            "deployment_model": "federated; "
            + ("secure aggregation, noise by the hospitals" if self.sealed else "trusted aggregator"),
            "release_type": f"{self.facts['answers']} answers of {study['planned_queries']} planned",
            "mechanisms": sorted({one["name"] for one in self.facts["mechanisms"]}),
            "accountant": study["accountant"],
            "implementation": f"Consilium {self.facts['versions']['consilium']}",
            "justification": Blank("why this ε"),
            "technical_documentation": Blank("address of the published documents"),
        }
        rows: list[Row] = [("Field", "Entry")]
        for name, value in entry.items():
            shown = value if isinstance(value, Blank) else ", ".join(value) if isinstance(value, list) else str(value)
            rows.append((name.replace("_", " "), shown))
        given = {name: None if isinstance(value, Blank) else value for name, value in entry.items()}
        what = ("An entry for a public registry of differential privacy deployments.",)
        sections = [PaperSection("Entry", rows=rows)]
        return self.paper("registry", "Entry for a registry of deployments", what, sections, {"entry": given})

    def egress(self) -> Paper:
        rows: list[Row] = [("Time (UTC)", "Row", "Query", "Hospitals", "Noisy numbers", "Charge μ²")]
        for one in self.left:
            query = one.query[:16] if one.draw is None else f"{one.query[:16]}, draw {one.draw}"
            charge = f"{float(one.mu_squared):.6g}"
            rows.append((_time(one.time), str(one.row), query, ", ".join(one.sites), str(one.coordinates), charge))
        refused: list[Row] = [("Time (UTC)", "Row", "Queries", "Reason", "Pool")]
        for found in self.facts["refusals"]:
            refused.append(
                (_time(found["time_utc"]), str(found["row"]), str(found["queries"]), found["reason"], found["pool"])
            )
        total = sum((one.mu_squared for one in self.left), Fraction(0))
        sent: list[Row] = [("Time (UTC)", "Hospital", "Kind", "What it says")]
        sent += [(_time(one.time), one.site, one.kind, one.value) for one in self.sent]
        lost = self.facts.get("lost_draws")
        what = (
            "Everything that left the hospitals under a charge, row by row of the ledger. Each row is a sum over the "
            "hospitals named, with noise. The charge μ² adds up; ε does not.",
            f"In all {len(self.left)} charged queries, Σμ² = {float(total):.6g}; spent {self.spent}."
            + (f" {lost} charged draws gave no answer." if lost else ""),
        )
        sections = [
            _listed("What left", rows, nothing="Nothing yet.", widths=(2, 1, 2.4, 2, 1.3, 1.5)),
            _listed(
                "What hospitals sent by consent, under no ε",
                sent,
                "The newest statement of each hospital on the student. It depends on patients' data.",
                nothing="Nothing so far.",
            ),
            _listed("What was refused", refused, nothing="Nothing."),
            PaperSection("Checked before release by", points=[Blank("output checker, date, signature")]),
        ]
        facts = {
            "left": [one.to_json() for one in self.left],
            "sent_by_consent": [one.to_json() for one in self.sent],
            "refused": self.facts["refusals"],
            "mu_squared": str(total),
        }
        return self.paper("egress", "Egress record", what, sections, facts)

    def processing(self) -> Paper:
        rows: list[Row] = [
            ("Item (Article 30(1) GDPR)", "Entry"),
            ("Controller and contact", Blank("name, representative, data protection officer")),
            ("Purposes", Blank("purpose as approved; the study trains one segmentation model")),
            ("Categories of data subjects", "patients of the pools below whose images the hospital uses"),
            (
                "Categories of personal data",
                f"3D images and label maps of {', '.join(self.study['structures'])}; they stay",
            ),
            (
                "Recipients",
                "the study's server: " + ("masked sums" if self.sealed else "codes, to which it adds noise"),
            ),
            ("Transfers to third countries", Blank("where the server and the other hospitals are")),
            (
                "Erasure",
                Blank("retention of images and teachers; `site withdraw-patient` takes a patient out of teachers"),
            ),
            (
                "Security measures",
                "TLS with a key for each hospital, sealed codes, a ledger that refuses; docs/deployment.md",
            ),
        ]
        what = ("The record of processing activities, for one hospital to complete.",)
        sections = [PaperSection("Record", rows=rows), PaperSection("Patient pools", rows=self._hospitals())]
        return self.paper("processing", "Record of processing", what, sections, {"pools": self.facts["pools"]})


def _listed(heading: str, rows: list[Row], *said: str, nothing: str, widths: Sequence[float] = ()) -> PaperSection:
    """Return a section with a table, or with the text ``nothing`` if the table has no row besides its head."""
    if len(rows) == 1:
        return PaperSection(heading, [nothing])
    return PaperSection(heading, said, rows=rows, widths=widths)


def _time(text: str) -> str:
    return text[:19].replace("T", " ")


def _guarantee(found: dict[str, Any]) -> str:
    return (
        f"ε = {epsilon_text(found['epsilon'])} ({found['accountant']}), δ = {delta_text(found['delta'])}, "
        f"unit {found['unit']}, relation {found['relation']}"
    )


def _who_adds(sealed: bool) -> str:
    if sealed:
        return "the hospitals, each a share (sealed sum); the server's operator is not trusted with any answer"
    return "the server's operator, who is trusted to add it and to keep no answer"
