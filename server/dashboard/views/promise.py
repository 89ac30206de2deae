"""Shows a privacy officer the guarantee as the hospitals read it, and the newest certificate.

The Study page uses it. The text is taken from the consent text, so it is the text that every site agreed to.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.canonical import sha256_file
from common.config import Study
from common.ledger.spending import Spending
from common.privacy.accounting import Guarantee
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import Relation, Unit
from common.study_mechanism import sealed_sentences
from server.study.consent_text import ConsentSection, against_server, consent_sections


@dataclass(frozen=True, slots=True)
class ShownGuarantee:
    """The guarantee as the Study page shows it.

    Attributes:
        guarantee: ε, δ, accountant, unit and relation of the study's budget, in one line.
        terms: Accountant, unit and relation.
        warning: Sentence that more was or may have been spent than promised; None if not.
        against: Pairs of an adversary and the ε that holds against it, or why none does.
        plainly: The guarantee in six plain sentences.
        details: Sentences on groups and on a sealed sum.
        sections: The whole consent text.
    """

    guarantee: str
    terms: str
    warning: str | None
    against: tuple[tuple[str, str], ...]
    plainly: tuple[str, ...]
    details: tuple[str, ...]
    sections: tuple[ConsentSection, ...]


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """The newest certificate, which this dashboard or a command issued: its time, and the SHA-256 of JSON and PDF."""

    time: str
    json_sha256: str
    pdf_sha256: str


def promise(study: Study, spending: Spending, *, sites: int) -> ShownGuarantee:
    """Return the guarantee that the study promises, or the weaker one that holds if more than its budget was spent.

    Args:
        study: The study.
        spending: What was spent.
        sites: Largest number of sites that may answer.

    Returns:
        The guarantee.
    """
    privacy = study.privacy
    terms = f"{privacy.accountant} accountant, {privacy.protection}"
    return ShownGuarantee(
        guarantee=f"ε = {epsilon_text(privacy.epsilon)} at δ = {delta_text(privacy.delta)}, {terms}",
        terms=terms,
        warning=spending.warning,
        against=() if spending.doubt else _against(study, spending, sites=sites),
        plainly=_plainly(study, spending),
        details=(
            spending.groups_sentence(),
            *map(spending.if_known, sealed_sentences(study, sites=sites, spent=spending.mu_squared)),
        ),
        sections=consent_sections(study, spending=spending),
    )


def _against(study: Study, spending: Spending, *, sites: int) -> tuple[tuple[str, str], ...]:
    """Return pairs of an adversary and the ε that holds against it.

    Each ε is computed from the study's whole budget, or from what was spent if that is more.
    """
    privacy, guaranteed = study.privacy, spending.guaranteed
    everybody = "Anybody who sees everything that this study releases"
    pairs = [one for one in spending.groups() if one.group == 2]
    together = [(f"Anybody, of two {privacy.unit}s whose data change together", _epsilon(one)) for one in pairs]
    if not privacy.sealed:
        operator = ("The server's operator, who sees every hospital's code", "none: trusted to add the noise")
        return ((everybody, _epsilon(guaranteed)), *together, operator)
    most, (no_share, t_shares, more) = against_server(study, spending, sites=sites)
    with_t = f"The server's operator together with {privacy.colluders} of the hospitals"
    with_more = f"The server's operator together with {privacy.colluders + 1} of the hospitals"
    return (
        (f"{everybody}, the server's operator too, of {most} hospitals", _epsilon(no_share)),
        (with_t if privacy.colluders else "The server's operator, for certain", _epsilon(t_shares)),
        (with_more, _epsilon(more)),
        *together,
    )


def _epsilon(found: Guarantee) -> str:
    return f"ε = {epsilon_text(found.epsilon)}"


def _plainly(study: Study, spending: Spending) -> tuple[str, ...]:
    """Return the promise in six sentences that can be read on their own."""
    privacy = study.privacy
    whose = "a hospital's whole data" if privacy.unit is Unit.HOSPITAL else "one patient's data"
    other = "any other" if privacy.relation is Relation.REPLACE_ONE else "nothing"
    sees = "their noisy sum alone" if privacy.sealed else "the codes, and is trusted to add the noise"
    return (
        f"Everything released looks almost the same whether {whose} were used or exchanged for {other}.",
        spending.odds_sentence(colluders=privacy.sealed_colluders),
        f"Short clipped codes about public volumes leave a hospital; the server's operator sees {sees}.",
        f"Nothing is released with fewer than {privacy.quorum} hospitals in it, and no scan, label or model leaves.",
        "Every hospital counts in a ledger of its own, refuses past its own cap, and may pause or leave at any time.",
        "It is not hidden that a hospital takes part. A patient of two hospitals is protected at each one separately.",
    )


def issued(folder: Path) -> IssuedCertificate | None:
    """Return the newest certificate in a folder.

    Args:
        folder: The folder.

    Returns:
        Its time and hashes; None before one was issued.
    """
    document, page = folder / "certificate.json", folder / "certificate.pdf"
    try:
        moment = datetime.fromtimestamp(document.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return IssuedCertificate(moment, sha256_file(document), sha256_file(page))
    except OSError:
        return None
