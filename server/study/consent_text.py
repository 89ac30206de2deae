"""A study in words: what the consortium sees, and what a hospital reads before it consents.

Every ε stands with its accountant, δ, unit and relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from textwrap import fill

from common.canonical import check_integer
from common.config import Study
from common.privacy.accounting import guarantee, max_mu_squared
from common.privacy.calibration import noise_multiplier
from common.privacy.coalitions import against_whom
from common.privacy.consent import (
    delta_rule,
    group_guarantees,
    group_sentence,
    guess_right_at_most,
    guess_sentence,
    warn_about,
)
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Relation, Unit
from common.study_mechanism import sealed_sentences, study_mechanism
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.protocols.base import protocol_of

_UNITS = {
    Unit.HOSPITAL: "everything one hospital holds",
    Unit.PATIENT: "one patient of one hospital",
}
_RELATIONS = {
    Relation.REPLACE_ONE: "exchanged for any other {unit}",
    Relation.ZERO_OUT: "left out, its code counting as zero",
}

_SEEN_OPEN = """\
  The server's operator   your clipped codes, opened by the server core. The operator is TRUSTED to add the noise;
                          receipts prove the accounting, not the noise.
  Flower and its database sealed codes only, unreadable without the core's key."""
_SEEN_SEALED = """\
  The server's operator   codes behind your masks and your share of the noise, and their noisy sum. Not trusted: what
                          holds against the operator, and with whom, stands above.
  Flower and its database the same, sealed once more to the core's key."""


@dataclass(frozen=True, slots=True)
class BatchRoster:
    """Who took part in one release: how many queries it answered, and the sites on its roster, by name."""

    batch: str
    queries: int
    roster: tuple[str, ...]


def rosters(answers: Sequence[StoredAnswer]) -> tuple[BatchRoster, ...]:
    """The releases behind a study's answers in order. A batch that was answered in two runs with other sites is two."""
    found: list[BatchRoster] = []
    for answer in answers:
        roster = tuple(sorted(entry.site for entry in answer.roster))
        if found and (found[-1].batch, found[-1].roster) == (answer.batch_id, roster):
            found[-1] = BatchRoster(answer.batch_id, found[-1].queries + 1, roster)
        else:
            found.append(BatchRoster(answer.batch_id, 1, roster))
    return tuple(found)


def is_spent(ledger: Ledger, study: Study, *, pool: str) -> bool:
    """Whether the budget of a declared pool, its own or the study's for it, has no room for one more query."""
    mechanism = study_mechanism(study, dimension=1)
    declared = next(declaration for declaration in ledger.pools() if declaration.pool == pool)
    in_study = mechanism.mu_squared(study.privacy.protection)
    in_all = mechanism.mu_squared(declared.protection)
    return ledger.remaining(pool) < in_all or ledger.remaining(pool, study.id) < in_study


def facts(study: Study, *, sites: int = 0) -> dict[str, object]:
    """The study's plan as plain values: what `consilium study show --json` prints. ``sites``: how many may answer."""
    privacy = study.privacy
    mechanism = study_mechanism(study, dimension=1)
    spent = mechanism.mu_squared(privacy.protection) * privacy.charges
    limit = study_limit(study)
    groups = group_guarantees(limit, privacy.budget, privacy.protection, privacy.accountant)
    planned = {str(name): guarantee(spent, privacy.budget, privacy.protection, name).epsilon for name in AccountantName}
    return {
        "name": study.name,
        "id": study.id,
        "labels": list(study.data.labels),
        "spacing_mm": list(study.data.spacing_mm),
        "grid": list(study.data.grid),
        "codec": study.codec.name,
        "joint": protocol_of(study).name == "joint",
        **({"finer": study.data.finer} if study.data.finer > 1 else {}),
        **({"paired": study.codec.paired} if study.codec.paired else {}),
        "clipping_norm": study.codec.radius,
        "unit": str(privacy.unit),
        "relation": str(privacy.relation),
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "accountant": str(privacy.accountant),
        "planned_queries": privacy.planned_queries,
        "voters_per_site": privacy.voters_per_site,
        "quorum": privacy.quorum,
        "noise_multiplier": noise_multiplier(mechanism, privacy.protection),
        "epsilon_of_plan": planned,
        "guess_right_at_most": guess_right_at_most(limit),
        "groups": [one.to_json() for one in groups],
        **({"sealed_sum": sealed_facts(study, sites=sites)} if privacy.sealed else {}),
    }


def sealed_facts(study: Study, *, sites: int = 0) -> dict[str, object]:
    """Against whom which ε holds in a sealed study, for its whole budget, on rosters of the quorum to ``sites``."""
    privacy = study.privacy
    most = max(check_integer("sites", sites, least=0), privacy.quorum)
    terms = privacy.budget, privacy.protection, privacy.accountant
    no_share, t_shares, more = against_whom(
        study_limit(study), *terms, least=privacy.quorum, most=most, colluders=privacy.colluders
    )
    return {
        "colluders": privacy.colluders,
        "spare_draws": privacy.spare_draws,
        "sites_at_least": privacy.quorum,
        "sites_at_most": most,
        "knowing_no_share": no_share.to_json(),
        "knowing_the_colluders_shares": t_shares.to_json(),
        "knowing_one_more": more.to_json(),
        "in_words": list(sealed_sentences(study, sites=sites)),
    }


def for_consortium(study: Study, *, sites: int) -> str:
    """The plan as text, one fact a line. ``sites``: how many take part, as far as is known: at least the quorum."""
    f, privacy, wording = facts(study, sites=sites), study.privacy, protocol_of(study).wording(study)
    plan = f["epsilon_of_plan"]
    assert isinstance(plan, dict)
    stated = f"δ = {delta_text(privacy.delta)}, unit {privacy.unit}, relation {privacy.relation}"
    whole = ", ".join(f"ε = {epsilon_text(value)} ({name})" for name, value in plan.items())
    warning = warn_about(privacy.delta, unit=privacy.unit, units=sites) if privacy.unit is Unit.HOSPITAL else None
    return "\n".join(
        [
            f"study {f['name']} ({study.id[:16]}…)",
            f"labels {', '.join(study.data.labels)}; grid {study.data.grid} at {study.data.spacing_mm} mm"
            + (f", the student at {study.data.finer} times that resolution" if study.data.finer > 1 else ""),
            f"budget ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant} accountant), {stated}",
            f"plan {wording.plan}, {privacy.voters_per_site} voter(s) a site, quorum {privacy.quorum} sites",
            *([f"{study.codec.paired} public volumes with their label maps"] if study.codec.paired else []),
            f"noise multiplier z = {f['noise_multiplier']:.6f} on a sum clipped at C = {f['clipping_norm']:g}",
            f"whole plan: {whole}, {stated}",
            guess_sentence(privacy.protection, study_limit(study), colluders=privacy.sealed_colluders),
            *sealed_sentences(study, sites=sites),
            delta_rule(privacy.delta, unit=privacy.unit),
            *([] if warning is None else [f"warning: {warning}"]),
        ]
    )


def study_limit(study: Study) -> Fraction:
    """The largest Σμ² a unit can lose in the study, whatever is asked: what its budget admits."""
    return max_mu_squared(study.privacy.accountant, study.privacy.budget)


def for_site(study: Study, *, patients: int | None = None) -> str:
    """What a hospital reads before it consents. ``patients``: how many it has, where it says so."""
    f = facts(study)
    privacy = study.privacy
    unit = _UNITS[privacy.unit]
    relation = _RELATIONS[privacy.relation].format(unit=privacy.unit)
    guarantee_line = (
        f"ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant} accountant), δ = {delta_text(privacy.delta)}, "
        f"unit {privacy.unit}, relation {privacy.relation}"
    )
    limit = study_limit(study)
    groups = group_guarantees(limit, privacy.budget, privacy.protection, privacy.accountant)
    guess = guess_sentence(privacy.protection, limit, colluders=privacy.sealed_colluders, yours=True)
    sentences = [guess, group_sentence(groups)]
    sentences.append(delta_rule(privacy.delta, unit=privacy.unit))
    if privacy.unit is Unit.PATIENT and patients is not None:
        warning = warn_about(privacy.delta, unit=Unit.PATIENT, units=patients)
        sentences += [] if warning is None else [f"Warning: {warning}."]
    said = "\n".join(_filled(sentence) for sentence in sentences)
    sealed = "".join(f"{_filled(sentence)}\n" for sentence in sealed_sentences(study))
    seen = _SEEN_SEALED if privacy.sealed else _SEEN_OPEN
    wording = protocol_of(study).wording(study)
    asked = _filled(
        f"Your teachers, {privacy.voters_per_site} a site, trained at your site on your own patients, segment "
        f"{wording.which} public volumes: {', '.join(study.data.labels[1:])}. For {wording.each} your site sends the "
        f"sum of their codes. Each code is clipped to norm C = {study.codec.radius:g} at your site. No image, label "
        "map, weight or gradient of yours leaves."
    )
    return f"""\
Study {study.name}, {study.id}

WHAT IS ASKED OF YOU
{asked}

WHAT IS GUARANTEED
  {guarantee_line}.
  In words: whatever is released in this study looks almost the same if {unit} were
  {relation}. "Almost" is ε and δ.
{said}
{sealed}  Noise: standard deviation {f["noise_multiplier"]:.4f} × the sensitivity of the sum, on every number released.
  A release names at least {privacy.quorum} sites; below that nothing is released.
  The budget belongs to your patient pool: other studies on the same pool add up, and your own ledger refuses
  past your own cap in site.toml.

WHO SEES WHAT
{seen}
  The other hospitals     the noisy releases, the roster of each, and the student.
  The public              whatever the consortium publishes of those: the guarantee covers all of it.

WHAT IS NOT COVERED
  Whether you take part (your name is on the roster). Patients known at several sites count once per site.
  The public volumes and public label maps. What your own staff can see at your own site.
"""


def _filled(text: str) -> str:
    return fill(text, width=106, initial_indent="  ", subsequent_indent="  ")
