"""What a privacy officer reads: the promise to the hospitals in their own words, and the newest certificate of it.

The words are the consent text's, so that what is shown here is what every site agreed to.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.canonical import sha256_file
from common.config import Study
from common.privacy.consent import group_guarantees, group_sentence, guess_sentence
from common.privacy.figures import delta_text, epsilon_text
from server.study.consent_text import for_site, study_limit

SEEN, COLUMN = "Who sees what", 26
"""The section of the consent text in two columns, and where its second one begins."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the consent text, and what stands below it: pairs of whom it is about, if anybody, and sentences."""

    title: str
    said: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """The guarantee in one line, the odds of a guess and what groups lose as sentences, and the whole consent text."""

    guarantee: str
    odds: str
    groups: str
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Issued:
    """The newest certificate issued here: when, and the SHA-256 of its JSON and PDF."""

    time: str
    json_sha256: str
    pdf_sha256: str


def promise(study: Study) -> Promise:
    """What the study promises. Every ε stands with accountant, δ, unit and relation."""
    privacy, limit = study.privacy, study_limit(study)
    groups = group_guarantees(limit, privacy.budget, privacy.protection, privacy.accountant)
    parts = [block.split("\n", 1) for block in for_site(study).strip().split("\n\n")]
    return Promise(
        guarantee=f"ε = {epsilon_text(privacy.epsilon)} at δ = {delta_text(privacy.delta)}, {privacy.accountant} "
        f"accountant, unit {privacy.unit}, relation {privacy.relation}",
        odds=guess_sentence(privacy.protection, limit, colluders=privacy.sealed_colluders),
        groups=group_sentence(groups),
        sections=tuple(_section(part[0].capitalize(), part[1]) for part in parts if len(part) == 2),
    )


def _section(title: str, text: str) -> Section:
    """The lines of a section put together again as they were before they were cut for a terminal."""
    column, said = COLUMN if title == SEEN else 0, [("", "")]
    for line in text.splitlines():
        who, words = line[:column].strip(), line[column:].strip()
        if who or said[-1][1].endswith("."):
            said.append((who, words))
        else:
            said[-1] = (said[-1][0], f"{said[-1][1]} {words}".strip())
    return Section(title, tuple(pair for pair in said if pair[1]))


def issued(folder: Path) -> Issued | None:
    """The certificate in ``folder``; None before one was issued."""
    document, page = folder / "certificate.json", folder / "certificate.pdf"
    try:
        moment = datetime.fromtimestamp(document.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return Issued(moment, sha256_file(document), sha256_file(page))
    except OSError:
        return None
