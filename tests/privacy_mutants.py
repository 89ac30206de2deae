"""Makes the page of the privacy path's mutants: which audit and which test notices each.

``python -m tests.privacy_mutants`` runs every mutant's test, with ``--audit`` also its part of ``consilium audit``;
``NAME…`` runs these mutants only. Outcomes are recorded in ``benchmarks/results/privacy/mutants.json`` and shown in
``docs/lab/privacy-mutants.md``. ``--page`` writes the page from the record and runs nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from common.canonical import canonical_bytes, sha256_bytes
from tests.mutation import ledgers, privacy
from tests.mutation.privacy import AUDIT, Row
from tests.mutation.runner import BROKEN, KILLED, SURVIVED, outcomes

ROOT = Path(__file__).resolve().parent.parent
ROWS = (*privacy.ROWS, *ledgers.ROWS)
RECORD = ROOT / "benchmarks" / "results" / "privacy" / "mutants.json"
TABLE = ROOT / "docs" / "lab" / "privacy-mutants.md"
TIMEOUT_S, AT_ONCE = 600, 12
AUDITED = {KILLED: "alarm", SURVIVED: "silent", BROKEN: "cannot run", "": "not run"}
"""The table's word for an audit, by the outcome of its test."""

Seen = Mapping[str, Mapping[str, str]]
"""By mutant name: the hash of the ``row`` that was run; the outcomes of its ``test`` and ``audit`` (empty: not run)."""


def recorded() -> Seen:
    found: Seen = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def as_run(row: Row) -> str:
    """Hash a row, as the record keeps it, so that an outcome of an older row is not taken for this one's."""
    return sha256_bytes(canonical_bytes(json.loads(json.dumps(asdict(row)))))[:16]


def page(seen: Seen) -> str:
    """Return the record as a page."""
    audited = [seen[row.mutant.name]["audit"] for row in ROWS if seen[row.mutant.name]["audit"]]
    alarms, tested = audited.count(KILLED), sum(seen[row.mutant.name]["test"] == KILLED for row in ROWS)
    lines = [
        "# Mutants of the privacy path",
        "",
        "For auditors and contributors. After this page you know which test, and which audit, notices a wrong line.",
        "",
        "A mutant is the production code with a line or two changed, so that a promise of "
        "[the proof](../privacy.md) no",
        "longer holds. `tests/mutation/privacy.py` and `tests/mutation/ledgers.py` list them;",
        "`python -m tests.privacy_mutants --audit` runs them and writes this page.",
        "",
        "- **Test**: this test fails when the line is changed. A slow test runs a sample anew",
        "  (`tests/test_privacy_mutants.py`).",
        "- **Audit**: what one part of `consilium audit` says about a study that runs with the changed line: *alarm*",
        "  (or the audit ends with an error), or *silent*. *Not run*: nobody tried. `–`: no audit can see this line.",
        "",
        "| area | mutant | audit | test |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        found = seen[row.mutant.name]
        audit = AUDITED[found["audit"]] if row.audit else "–"
        test = row.mutant.test.rpartition("::")[2].partition("[")[0]
        lines.append(f"| {row.area} | {row.mutant.name} | {audit} | {_test(found['test'], test)} |")
    lines += [
        "",
        f"A test fails for {tested} of {len(ROWS)} mutants. Audits were run on {len(audited)} and alarmed at {alarms}.",
        "",
    ]
    return "\n".join(lines)


def _test(outcome: str, name: str) -> str:
    return f"`{name}`" if outcome == KILLED else f"**{outcome}**: `{name}`"


def watched(rows: Sequence[Row], before: Seen, *, audit: bool) -> dict[str, dict[str, str]]:
    """Run the test of each row and, if asked, its audit; an audit that was run before of the same row is kept."""
    asked = [row for row in rows if audit and row.audit]
    audits = [replace(row.mutant, name=f"audit: {row.mutant.name}", test=f"{AUDIT}[{row.audit}]") for row in asked]
    found = outcomes([*(row.mutant for row in rows), *audits], timeout_s=TIMEOUT_S)
    seen: dict[str, dict[str, str]] = {}
    for row in rows:
        name, kept = row.mutant.name, before.get(row.mutant.name, {})
        known = kept.get("audit", "") if kept.get("row") == as_run(row) else ""
        seen[name] = {
            "row": as_run(row),
            "test": found[name],
            "audit": found.get(f"audit: {name}", known),
        }
        print(f"{name}: test {seen[name]['test']}, audit {seen[name]['audit'] or 'not run'}", flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; all of them where none is named")
    parser.add_argument("--audit", action="store_true", help="also run each mutant's part of an audit")
    parser.add_argument("--page", action="store_true", help="write the page from the record only")
    asked = parser.parse_args()
    seen = {name: dict(found) for name, found in recorded().items()} if RECORD.exists() else {}
    chosen = [row for row in ROWS if not asked.page and (not asked.names or row.mutant.name in asked.names)]
    for start in range(0, len(chosen), AT_ONCE):
        seen |= watched(chosen[start : start + AT_ONCE], seen, audit=asked.audit)
        RECORD.write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    seen = {row.mutant.name: seen[row.mutant.name] for row in ROWS}
    RECORD.write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    TABLE.write_text(page(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
