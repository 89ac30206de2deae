"""Arranges the facts of a privacy certificate as a document for people, in reading order.

``consilium certificate`` calls it. It computes no privacy fact; every figure is passed in.
:mod:`consilium.reports.papers` renders the pages.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from common.data.dataset import PatientIdentity
from common.plain import RESEARCH_ONLY
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.site_facts import few
from common.wording import many
from consilium.reports.papers import Paper, PaperSection

_REASONS = {
    "pool-budget": "the pool's lifetime budget",
    "study-budget": "the study's own budget",
    "coordinates": "the pool's noisy numbers for life",
}
_ROADS = {
    "ledger": "simulated studies in each world, through the ledger on disk",
    "memory": "simulated studies in each world, in memory",
    "service": "simulated studies through aggregator, workers and both ledgers",
}


def certificate_paper(facts: dict[str, Any], *, document_sha256: str) -> Paper:
    """Arrange the certificate's facts as a document.

    Args:
        facts: The result of ``certificate_facts``.
        document_sha256: SHA-256 in hex of the JSON document that states the same facts.

    Returns:
        The document. The same facts give the same bytes of its PDF.
    """
    study, given, head = facts["study"], facts["guarantee"], facts["ledger"]["head"]
    return Paper(
        name="certificate",
        title=f"Privacy certificate: study {study['name']}",
        made=datetime.fromisoformat(facts["issued"]),
        sections=(
            _in_words(facts),
            _every_epsilon(facts),
            _released(facts),
            _refused(facts),
            _pools(facts),
            _audited(facts),
            _reported(facts),
            *_measured(facts),
            PaperSection("What ledger and receipts prove", points=facts["proves"]),
            PaperSection("What they cannot prove", points=facts["cannot_prove"]),
            *_identity(facts, document_sha256),
        ),
        lead=(
            f"Guaranteed: ε = {epsilon_text(given['epsilon'])} at δ = {delta_text(given['delta'])}",
            f"{given['accountant']} accountant · unit {given['unit']} · relation {given['relation']}",
            _spent_line(facts),
        ),
        foot=f"ledger head, row {head['seq']}: {head['hash']}",
        sign=("Privacy officer, name and signature", "Place and date"),
        made_by="consilium certificate",
    )


def _in_words(facts: dict[str, Any]) -> PaperSection:
    """Return the first page's text. It states one ε only; :func:`_every_epsilon` returns the table of all ε."""
    said = [text for place, text in enumerate(facts["in_words"]) if place not in facts["in_words_tabled"]]
    return PaperSection(
        "In plain words",
        paragraphs=(
            "For the files of the hospitals and their privacy officers: what the study released, and what its ledger "
            f"proves of it. Issued from ledger {facts['ledger']['id']} by the holder of its signing key, named below.",
            *said,
            *_files_as_patients(facts),
            f"This page is about privacy. It says nothing on how well the student segments. {RESEARCH_ONLY}",
        ),
    )


def _files_as_patients(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return a sentence naming the hospitals at which every file counts as a patient; empty if there is none."""
    counted = PatientIdentity.FILE.sentence
    sites = [site["site"] for site in facts["sites"] if any(counted in line for line in site["patient_is"])]
    if not sites:
        return ()
    weaker = (
        "A person with several files there has only the guarantee of a group of that many patients."
        if facts["study"]["unit"] == "patient"
        else "The guarantee does not depend on it, because its unit is the hospital."
    )
    return (f"By their own reports, every image file counts as a patient of its own at {', '.join(sites)}. {weaker}",)


def _every_epsilon(facts: dict[str, Any]) -> PaperSection:
    study, sealed = facts["study"], facts["study"].get("sealed_sum")
    everybody = "anybody who has all that was released"
    if sealed:
        t = sealed["colluders"]
        everybody = "the server's operator" + (f" together with any {many(t, 'hospital')}" if t else " alone")
    rows = [("What it is", "Value", "Terms", "Against whom"), _epsilon("Guaranteed", facts["guarantee"], everybody)]
    rows += [_epsilon(f"Spent so far, by the {g['accountant']} accountant", g, everybody) for g in facts["spent_by"]]
    if sealed:
        fewest, most = sealed["sites_at_least"], sealed["sites_at_most"]
        parties = (
            ("no share", "knowing_no_share", f"anybody who knows no hospital's noise, if {most} hospitals answer"),
            ("shares that may be known", "knowing_the_colluders_shares", everybody),
            ("one share more", "knowing_one_more", f"{many(t + 1, 'hospital')} of {fewest} that pool what they know"),
        )
        rows += [_epsilon(f"Sealed sum, {name}", sealed[key], whom) for name, key, whom in parties]
    units = f"{study['unit']}s"
    rows += [
        _epsilon(f"Guaranteed for {group['group']} {units} that change together", group, everybody)
        for group in facts["groups"]
        if group.get("group", 1) > 1
    ]
    said = (
        "The guarantee is the first row. Of what was spent, the exact accountant's figure is the smallest valid one. "
        f"The accountant that decided in this study was {study['accountant']}."
    )
    return PaperSection("Every ε of this study", (said,), rows=rows, widths=(0.3, 0.14, 0.26, 0.3))


def _epsilon(what: str, given: dict[str, Any], whom: str) -> tuple[str, str, str, str]:
    terms = f"{given['accountant']}, δ = {delta_text(given['delta'])}, unit {given['unit']}, {given['relation']}"
    return what, f"ε = {epsilon_text(given['epsilon'])}", terms, whom


def _released(facts: dict[str, Any]) -> PaperSection:
    study = facts["study"]
    voters = study["voters_per_site"]
    sent = "its teacher's code," if voters == 1 else f"the sum of its {voters} teachers' codes, each"
    paragraphs = [
        f"The hospitals' teachers segmented {study['asked_about']}: {', '.join(study['structures'])}. "
        f"For {study['a_sum_for'].rstrip(',')}, every hospital sent {sent} clipped to norm C = "
        f"{study['clipping_norm']:g}. What was released is the sum over at least "
        f"{many(study['quorum'], 'hospital')} plus noise. No image, label map, weight or gradient left a hospital."
    ]
    points = [
        f"{many(m['releases'], 'release')} by {m['name']}: {many(m['coordinates'], 'number')} each, noise of standard "
        f"deviation {noise_text(m['noise_std_on_sum'])} on every number, {noise_text(m['noise_multiplier'])} times "
        f"what one {study['unit']} can change (noise multiplier z, relation {study['relation']}){_left(m)}."
        for m in facts["mechanisms"]
    ]
    rows = [
        (
            _time(batch["time_utc"]),
            str(len(batch["queries"])),
            _rows(batch),
            f"{len(batch['sites'])}: {', '.join(batch['sites'])}",
        )
        for batch in facts["releases"]
    ]
    if rows:
        rows.insert(0, ("Time (UTC)", "Answers", "Ledger rows", "Hospitals on the roster"))
    else:
        paragraphs.append("No answer was released in this study.")
    notes = []
    if facts["reused_answers"]:
        notes.append(f"Answers taken from another study on the same pools: {facts['reused_answers']}.")
    if facts["recovered_charges"]:
        notes.append(
            "Charges entered again from the hospitals' receipts after a restored backup: "
            f"{facts['recovered_charges']}. These charges count, but their answers are lost."
        )
    if "lost_draws" in facts:
        notes.append(f"Lost draws of sums: {facts['lost_draws']}. They count, but gave no answer.")
    if "charges_by_standing" in facts:
        notes.append(
            f"Charges that a restored backup lacked, entered again from the ledger's standing file: "
            f"{facts['charges_by_standing']}. These charges count, but their answers are lost."
        )
    heading = "What was released, when and with whom"
    return PaperSection(heading, paragraphs, points, rows, notes, widths=(0.24, 0.1, 0.16, 0.5) if rows else ())


def _left(mechanism: dict[str, Any]) -> str:
    if "colluders" not in mechanism:
        return ""
    return f", drawn at the hospitals; as much noise stays unknown to any {mechanism['colluders']} of them"


def _refused(facts: dict[str, Any]) -> PaperSection:
    if not facts["refusals"]:
        return PaperSection("Refusals", paragraphs=("The ledger refused no query of this study.",))
    listed = [
        (_time(r["time_utc"]), str(r["queries"]), _REASONS.get(r["reason"], r["reason"]), r["pool"] or "–")
        for r in facts["refusals"]
    ]
    head = ("Time (UTC)", "Queries", "Limit that did not allow them", "Pool")
    return PaperSection("Refusals", rows=(head, *listed), widths=(0.24, 0.1, 0.36, 0.3))


def _pools(facts: dict[str, Any]) -> PaperSection:
    rows = [("Hospital / pool", "In this study", "In all studies, of cap", "At")]
    for pool in facts["pools"]:
        study, life = pool["study"], pool["lifetime"]
        rows.append(
            (
                f"{pool['site']} / {pool['pool']}",
                f"ε = {epsilon_text(study['epsilon'])} ({study['accountant']}), {many(pool['releases'], 'release')}",
                f"ε = {epsilon_text(life['epsilon'])} of {epsilon_text(pool['cap_epsilon'])} ({life['accountant']})",
                f"δ = {delta_text(life['delta'])}, {life['unit']}, {life['relation']}",
            )
        )
    said = "A budget belongs to a hospital's patient pool for life: all studies, editions and retrainings on it add up."
    return PaperSection("What each patient pool has spent", (said,), rows=rows, widths=(0.2, 0.27, 0.22, 0.31))


def _audited(facts: dict[str, Any]) -> PaperSection:
    heading = "Audit"
    if facts["audit"] is None:
        return PaperSection(heading, ("No audit of the release mechanism was filed with this study.",))
    points = [
        f"{report['summary']} {report['runs']} {_ROADS.get(road, road)}, at confidence "
        f"{100 * report['confidence']:g} %. An audit finds faults; it proves no privacy."
        for road, report in facts["audit"].items()
    ]
    return PaperSection(heading, points=points)


def _reported(facts: dict[str, Any]) -> PaperSection:
    rows = []
    for site in facts["sites"]:
        spent = site["spent"][site["cap"]["accountant"]]
        shorter = [
            pool
            for pool in facts["pools"]
            if pool["pool"] == site["pool"]
            and (pool["lifetime"]["delta"], pool["lifetime"]["accountant"]) == (spent["delta"], spent["accountant"])
            and pool["lifetime"]["epsilon"] > spent["epsilon"]
        ]
        signed = f"signed {_time(site['signed'])}" if site["signed"] else "not signed"
        remarks = [signed, *few(site["alarms"]), *(["smaller than the server's figure"] if shorter else [])]
        rows.append(
            (
                f"{site['site']} / {site['pool']}",
                f"{'at least ' if 'at_least' in site else ''}ε = {epsilon_text(spent['epsilon'])} of "
                f"{epsilon_text(site['cap']['epsilon'])} "
                f"({spent['accountant']}), δ = {delta_text(spent['delta'])}, {spent['unit']}, {spent['relation']}",
                f"{site['queries_accepted']} / {site['receipted']}",
                "; ".join(remarks),
            )
        )
    if rows:
        rows.insert(0, ("Hospital / pool", "By its own ledger", "Accepted / receipted", "Signed, alarms"))
        notes = [
            "The hospitals reported these figures, which cover all studies. A query that a hospital accepted "
            "stays spent there even without a receipt, so a hospital's figure can be larger than the server's. If "
            "it is smaller, the report is older than the server's ledger or contradicts it. A signed report bears "
            "the signature of the key with which the hospital was admitted. An unsigned report is only a "
            "statement of the person who filed it.",
            *(
                f"One patient of {site['site']}: {line}."
                for site in facts["sites"]
                for line in [*site["patient_is"], *site["patient"]]
            ),
        ]
    else:
        notes = ["No hospital's own report was filed; each has one: consilium site status."]
    if aside := facts.get("reports_set_aside"):
        notes.append(f"Left out, because they are no valid reports of the sites in their names: {', '.join(aside)}.")
    widths = (0.2, 0.37, 0.2, 0.23) if rows else ()
    return PaperSection("The hospitals' own figures", rows=rows, notes=notes, widths=widths)


def _measured(facts: dict[str, Any]) -> tuple[PaperSection, ...]:
    if "measured" not in facts:
        return ()
    notes = (
        "No ε covers these figures: they are computed from patients' data, and each hospital's staff consented to send "
        "them. They are signed with the keys with which the hospitals were admitted.",
    )
    return (PaperSection("The student as hospitals measured it", points=facts["measured"]["in_words"], notes=notes),)


def _identity(facts: dict[str, Any], document_sha256: str) -> tuple[PaperSection, ...]:
    ledger, head = facts["ledger"], facts["ledger"]["head"]
    known = (
        "the signatures were checked with a public key that was given"
        if ledger["anchored"]
        else "the signatures were checked ONLY with the key that the ledger itself names, because no public key was "
        "given"
    )
    rows = (
        ("What", "Value"),
        ("Ledger", ledger["id"]),
        (f"Head, row {head['seq']}", head["hash"]),
        ("Signature", head["signature"]),
        *((f"Key from row {key['row']}", key["public_key"]) for key in ledger["keys"]),
        *((name.capitalize(), value) for name, value in facts["hashes"].items()),
        ("certificate.json", document_sha256),
        ("Versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())),
    )
    verified = (
        f"Verified before this was written: {many(ledger['rows'], 'row')}, "
        f"{many(ledger['signatures_checked'], 'signature')}, {many(ledger['answers_checked'], 'stored answer')}; "
        f"{known}."
    )
    key = ledger["keys"][-1]["public_key"]
    return (
        PaperSection("Ledger, signature, versions", (verified,), rows=rows, widths=(0.2, 0.8)),
        PaperSection(
            "How to check this certificate",
            (
                "With a copy of the ledger and the server's public key (`signing_key` in the kit or site.toml of a "
                "hospital; take it from there, not from this certificate). It fails if anything up to the head above "
                "was changed since, or if the certificate states another guarantee than the ledger:",
            ),
            code=("consilium verify ledger.sqlite --head certificate.json --public-key \\", f"  {key}"),
        ),
        PaperSection(
            "How a hospital checks it against its own receipts",
            ("Without the server's ledger:",),
            code=("consilium verify site-ledger.sqlite --server-key \\", f"  {key}"),
        ),
    )


def _spent_line(facts: dict[str, Any]) -> str:
    counted = ("releases", "answers", "reused_answers", "recovered_charges")
    if not facts["spent"]["epsilon"] and not any(facts[name] for name in counted):
        return "Nothing was released: nothing of it was spent"
    spent, planned = facts["spent"], facts["study"]["planned_queries"]
    said = "Spent of it" if spent["epsilon"] <= facts["study"]["budget_epsilon"] else "Spent, more than the budget"
    return (
        f"{said}: ε = {epsilon_text(spent['epsilon'])} at δ = {delta_text(spent['delta'])}, same accountant, unit "
        f"and relation · {facts['answers']} of {planned} planned answers"
    )


def _time(text: str) -> str:
    return f"{text[:10]} {text[11:16]} UTC"


def _rows(batch: dict[str, Any]) -> str:
    first, last = batch["first_row"], batch["last_row"]
    return str(first) if first == last else f"{first}–{last}"
