"""Writes a study's terms in words: the plan for the consortium, and the text a hospital reads before it consents.

`consilium study show`, the site's consent sheet and the dashboard use it. Every ε is stated with its accountant, δ,
unit and relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill

from common.canonical import check_integer
from common.config import Study
from common.ledger.spending import Spending
from common.plain import RESEARCH_ONLY
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.calibration import noise_multiplier
from common.privacy.coalitions import against_whom, trade_sentences
from common.privacy.consent import delta_rule, warn_about
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.privacy.mechanism import AccountantName, Relation, Unit
from common.protocol_terms import OLD_KEY
from common.study_mechanism import pool_sentence, sealed_sentences, study_mechanism
from common.wording import many
from server.ledger.server_draws import StoredAnswer
from server.protocols.query_protocol import protocol_of

_UNITS = {
    Unit.HOSPITAL: ("all data of one hospital", "those of any other hospital"),
    Unit.PATIENT: ("the data of one patient of one hospital", "those of any other patient"),
}
_RELATIONS = {
    Relation.REPLACE_ONE: "exchanged for {others}",
    Relation.ZERO_OUT: "left out, so that its codes counted as zero",
}

_SEEN_OPEN = (
    (
        "The server's operator",
        "your clipped codes, which the server core decrypts. The operator is TRUSTED to add the noise\n"
        "and to ask real hospitals: receipts prove what was charged, not that noise was added\n"
        "or that the other hospitals on a roster exist.",
    ),
    ("Flower and its database", "your codes only as ciphertext, which nobody can read without the core's key."),
)
_SEEN_SEALED = (
    (
        "The server's operator",
        "your codes only under masks and with your share of the noise, and the noisy sum of all. The\n"
        "operator is not trusted; the text above says which ε holds against it, and with whom.",
    ),
    ("Flower and its database", "the same, encrypted once more to the core's key."),
)
_SEEN = (
    ("The other hospitals", "the noisy releases, the roster of each, and the student."),
    ("The public", "what the consortium publishes of those. The guarantee covers all of it."),
)
_VERDICTS_SEEN = ("Everybody", "with the student: each hospital's signed verdict. No ε covers it.")


@dataclass(frozen=True, slots=True)
class ConsentSection:
    """A section of the consent text.

    Attributes:
        title: The section's title.
        paragraphs: Pairs of a party and a paragraph about it, which is broken into lines for a terminal. The party is
            empty except in the section "Who sees what".
    """

    title: str
    paragraphs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the section as a terminal shows it."""
        width = 24 if self.paragraphs[0][0] else 0
        lines = (
            f"  {who if number == 0 else '':{width}}{line}"
            for who, words in self.paragraphs
            for number, line in enumerate(words.split("\n"))
        )
        return "\n".join((self.title.upper(), *lines))


@dataclass(frozen=True, slots=True)
class BatchRoster:
    """The sites that took part in one release.

    Attributes:
        batch: Id of the batch.
        queries: Number of queries that the release answered.
        roster: Names of the sites whose codes are in the release.
    """

    batch: str
    queries: int
    roster: tuple[str, ...]


def rosters(answers: Sequence[StoredAnswer]) -> tuple[BatchRoster, ...]:
    """Group a study's answers by the release in which they were made, in order.

    Answers that follow each other belong to one release if they have the same batch and the same sites. If a batch was
    answered in two runs with different sites, it counts as two releases.

    Args:
        answers: The stored answers, in the order of their rows.

    Returns:
        One entry for each release.
    """
    found: list[BatchRoster] = []
    for answer in answers:
        roster = tuple(sorted(entry.site for entry in answer.roster))
        if found and (found[-1].batch, found[-1].roster) == (answer.batch_id, roster):
            found[-1] = BatchRoster(answer.batch_id, found[-1].queries + 1, roster)
        else:
            found.append(BatchRoster(answer.batch_id, 1, roster))
    return tuple(found)


def facts(study: Study, *, sites: int = 0, spending: Spending | None = None) -> dict[str, object]:
    """Return the study's plan as plain values, as `consilium study show --json` prints them.

    Args:
        study: The study.
        sites: Number of sites that may answer.
        spending: The spending so far, if there is a ledger; by default nothing is spent.

    Returns:
        A mapping with the keys and values of the JSON document that the command prints.
    """
    privacy, spending = study.privacy, spending or Spending.of(study.privacy)
    mechanism = study_mechanism(study, dimension=1)
    spent = mechanism.mu_squared(privacy.protection) * privacy.charges
    planned = {str(name): guarantee(spent, privacy.budget, privacy.protection, name).epsilon for name in AccountantName}
    return {
        "name": study.name,
        "id": study.id,
        "labels": list(study.data.labels),
        "spacing_mm": list(study.data.spacing_mm),
        "grid": list(study.data.grid),
        "codec": study.codec.name,
        OLD_KEY: study.codec.to_table()[OLD_KEY],
        **({"finer": study.data.finer} if study.data.finer > 1 else {}),
        **({"paired": study.codec.paired} if study.codec.paired else {}),
        **({"start": study.start.to_table()} if study.start.weights else {}),
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
        "guaranteed_epsilon": None if spending.doubt else spending.guaranteed.epsilon,
        "guess_right_at_most": None if spending.doubt else spending.odds_guaranteed,
        "groups": [one.to_json() for one in spending.groups()],
        **({"warning": spending.warning} if spending.warning else {}),
        "modes": list(trade_sentences(sealed=privacy.sealed)),
        "pool_epsilon_for_life": study.pool_budget.epsilon,
        **({"verdicts_needed": study.gate.verdicts} if study.gate.verdicts else {}),
        **({"sealed_sum": sealed_facts(study, sites=sites, spending=spending)} if privacy.sealed else {}),
    }


def sealed_facts(study: Study, *, sites: int = 0, spending: Spending | None = None) -> dict[str, object]:
    """Return the ε of a sealed study against a server that knows the noise of no site, of t sites, and of t + 1 sites.

    A site that colludes with the server tells the server its share of the noise, so ε grows with the number of such
    sites. The values hold for every roster from the quorum up to ``sites`` or the largest roster so far, whichever is
    larger. They are computed for the whole budget. If more than the budget was spent, they are computed for the
    spending.

    Args:
        study: A sealed study; t is its number of colluders.
        sites: Number of sites that may answer.
        spending: The spending so far, if there is a ledger; by default nothing is spent.

    Returns:
        The mapping that :func:`facts` returns under the key ``sealed_sum``. It contains one guarantee for each of the
        three cases, the numbers of sites for which the guarantees hold, and the guarantees in words.
    """
    privacy, spending = study.privacy, spending or Spending.of(study.privacy)
    most, (no_share, t_shares, more) = against_server(study, spending, sites=sites)
    return {
        "colluders": privacy.colluders,
        "spare_draws": privacy.spare_draws,
        "sites_at_least": privacy.quorum,
        "sites_at_most": most,
        "knowing_no_share": no_share.to_json(),
        "knowing_the_colluders_shares": t_shares.to_json(),
        "knowing_one_more": more.to_json(),
        "in_words": list(map(spending.if_known, sealed_sentences(study, sites=most, spent=spending.mu_squared))),
    }


def against_server(
    study: Study, spending: Spending, *, sites: int
) -> tuple[int, tuple[Guarantee, Guarantee, Guarantee]]:
    """Return the guarantees of a sealed study against a server that knows the noise of no site, of t and of t + 1.

    Args:
        study: A sealed study; t is its number of colluders.
        spending: The spending so far.
        sites: Number of sites that may answer.

    Returns:
        The largest number of sites for which the guarantees hold, and the three guarantees.
    """
    privacy = study.privacy
    most = max(check_integer("sites", sites, least=0), privacy.quorum, spending.largest_roster)
    terms = privacy.budget, privacy.protection, privacy.accountant
    return most, against_whom(spending.bound, *terms, least=privacy.quorum, most=most, colluders=privacy.colluders)


def for_consortium(study: Study, *, sites: int, spending: Spending | None = None) -> str:
    """Return the study's plan as text, one fact a line.

    Args:
        study: The study.
        sites: Number of sites that take part, at least the quorum.
        spending: What was spent, if there is a ledger; by default nothing is spent.

    Returns:
        The text.
    """
    spending = spending or Spending.of(study.privacy)
    f, privacy = facts(study, sites=sites, spending=spending), study.privacy
    query_plan = protocol_of(study).query_plan(study)
    plan = f["epsilon_of_plan"]
    assert isinstance(plan, dict)
    stated = f"δ = {delta_text(privacy.delta)}, {privacy.protection}"
    whole = ", ".join(f"ε = {epsilon_text(value)} ({name})" for name, value in plan.items())
    warning = warn_about(privacy.delta, unit=privacy.unit, units=sites) if privacy.unit is Unit.HOSPITAL else None
    return "\n".join(
        [
            f"study {f['name']} ({study.id[:16]}…)",
            f"labels {', '.join(study.data.labels)}; grid {study.data.grid} at {study.data.spacing_mm} mm"
            + (f", the student at {study.data.finer} times that resolution" if study.data.finer > 1 else ""),
            f"budget ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant} accountant), {stated}",
            f"plan {query_plan.plan}, {many(privacy.voters_per_site, 'voter')} a site, "
            f"quorum {many(privacy.quorum, 'site')}",
            *([f"{study.codec.paired} public volumes with their label maps"] if study.codec.paired else []),
            *([_start_sentence(study)] if study.start.weights else []),
            pool_sentence(study),
            f"noise multiplier z = {_z(study, 7)} on a sum clipped at C = {f['clipping_norm']:g}",
            f"whole plan: {whole}, {stated}",
            *([] if spending.warning is None else [f"warning: {spending.warning}"]),
            spending.odds_sentence(colluders=privacy.sealed_colluders),
            *map(
                spending.if_known,
                sealed_sentences(study, sites=max(sites, spending.largest_roster), spent=spending.mu_squared),
            ),
            *trade_sentences(sealed=privacy.sealed),
            *([_gate_sentence(study)] if study.gate.verdicts else []),
            delta_rule(privacy.delta, unit=privacy.unit),
            *([] if warning is None else [f"warning: {warning}"]),
        ]
    )


def _z(study: Study, digits: int) -> str:
    """Return the noise multiplier of one release, rounded down to at most ``digits`` significant digits."""
    return noise_text(noise_multiplier(study_mechanism(study, dimension=1), study.privacy.protection), digits)


def _gate_sentence(study: Study, *, yours: bool = False) -> str:
    """Describe the verdicts that the study asks of hospitals, and the data that leave a hospital with a verdict.

    With ``yours``, the text addresses one hospital as "your site".
    """
    needed, who = study.gate.verdicts, "your site" if yours else "a hospital"
    return (
        f"Gate: the student is released once {needed} hospitals have found, on cases of their own, that it is better "
        f"than a network trained on public data alone. For that {who} sends one signed word (better, not-better or "
        "worse), if its staff consent to it then. The word depends on patients' data and no ε covers it. No figure and "
        "no case leaves with it."
    )


def _start_sentence(study: Study, *, yours: bool = False) -> str:
    """Describe the given network from which student, controls and possibly teachers begin.

    With ``yours``, the text addresses one hospital and says "your teachers".
    """
    start, teachers = study.start, "your teachers" if yours else "teachers"
    who = f"{teachers}, the student and its controls" if study.one_network else "the student and its controls"
    named = f' "{start.name}"' if start.name else ""
    origin = (
        f"It is the student of the study {start.study}. What that study spent is not part of this study's ε. If the "
        "two studies share a ledger, a pool's lifetime budget counts both; otherwise the two ε add up. "
        if start.study
        else "No budget of this study covers its training data: the consortium is responsible for their being public. "
    )
    return (
        f"Given network{named}: {who} begin from the weights with SHA-256 {start.weights}. {origin}"
        "The student's gain is measured over this network, too."
    )


def consent_sheet(study: Study, *, patients: int | None, counted: str, spending: Spending | None = None) -> str:
    """Return the consent sheet for a hospital: the study's terms, the hospital's patients, the duration and the end.

    Args:
        study: The study.
        patients: Number of the hospital's patients; None if it is unknown.
        counted: Text that states where the number is from, or why it is unknown.
        spending: What was spent, if there is a ledger; by default nothing is spent.

    Returns:
        The text.
    """
    many = counted if patients is None else f"{patients}, {counted}"
    queries = study.privacy.planned_queries
    return f"""{for_site(study, patients=patients, spending=spending)}
YOUR SITE, HOW LONG IT LASTS AND HOW IT ENDS
  Purpose, contact        a model that segments {", ".join(study.data.labels[1:])}; the consortium's letter says what
                          for, and whom to ask there.
  Use of the student      {RESEARCH_ONLY}
  Patients                {many}.
  Duration                {queries} questions, then no more; asking takes hours to days once your teachers are trained.
  Withdrawal              `consilium site pause` at any time, `site withdraw` for good, `site withdraw-patient` for one
                          patient. What was released before stays released; it cannot be recalled.
  Kept                    here: your ledger, for the life of the patient pool, because budgets add up; teachers, logs
                          and evaluations, until you delete them. At the consortium: noisy releases, its signed
                          ledger with your site's name, and the student; `consilium provision forget` deletes
                          what else it holds of a site that left.
"""


def for_site(study: Study, *, patients: int | None = None, spending: Spending | None = None) -> str:
    """Return the study's terms as a hospital reads them: the first part of :func:`consent_sheet`.

    Args:
        study: The study.
        patients: Number of the hospital's patients; None if the hospital does not state it.
        spending: What was spent, if there is a ledger; by default nothing is spent.

    Returns:
        The text.
    """
    parts = consent_sections(study, patients=patients, spending=spending)
    return "\n\n".join((f"Study {study.name}, {study.id}", *map(str, parts))) + "\n"


def consent_sections(
    study: Study, *, patients: int | None = None, spending: Spending | None = None
) -> tuple[ConsentSection, ...]:
    """Return the sections of :func:`for_site`.

    Args:
        study: The study.
        patients: Number of the hospital's patients; None if the hospital does not state it.
        spending: What was spent, if there is a ledger; by default nothing is spent.

    Returns:
        The sections.
    """
    spending = spending or Spending.of(study.privacy)
    privacy, query_plan = study.privacy, protocol_of(study).query_plan(study)
    unit, others = _UNITS[privacy.unit]
    relation = _RELATIONS[privacy.relation].format(others=others)
    asked = [
        f"Your site trains networks, the teachers, on your own patients: {privacy.voters_per_site} a site. The "
        f"teachers segment {query_plan.which} public volumes ({', '.join(study.data.labels[1:])}). A code is a "
        "short vector that describes a teacher's segmentation. Your site clips each code to norm C = "
        f"{study.codec.radius:g}. For {query_plan.each} your site sends the sum of the teachers' codes. No image, "
        "label map, weight or gradient of yours leaves."
    ]
    asked += [_start_sentence(study, yours=True)] if study.start.weights else []
    asked += [_gate_sentence(study, yours=True)] if study.gate.verdicts else []
    odds = [] if spending.warning is None else [f"Warning: {spending.warning}"]
    odds.append(spending.odds_sentence(colluders=privacy.sealed_colluders, yours=True))
    odds.append(spending.groups_sentence())
    odds.append(delta_rule(privacy.delta, unit=privacy.unit))
    if privacy.unit is Unit.PATIENT and patients is not None:
        warning = warn_about(privacy.delta, unit=Unit.PATIENT, units=patients)
        odds += [] if warning is None else [f"Warning: {warning}."]
    against = sealed_sentences(study, sites=spending.largest_roster, spent=spending.mu_squared)
    guaranteed = (
        f"ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant} accountant), δ = {delta_text(privacy.delta)}, "
        f"{privacy.protection}.",
        f"In words: everything that this study releases would look almost the same if\n{unit} were {relation}.",
        "ε and δ say how nearly the same.",
        *_filled(odds),
        *_filled(map(spending.if_known, against)),
        f"Noise is added to every number released: standard deviation {_z(study, 5)} × the sensitivity of the sum.",
        f"Nothing is released with fewer than {privacy.quorum} sites.",
        *_filled([pool_sentence(study, yours=True)]),
        "Your site's own ledger refuses every query that would exceed the cap you set in site.toml.",
    )
    seen = (*(_SEEN_SEALED if privacy.sealed else _SEEN_OPEN), *_SEEN)
    return (
        _section("What is asked of you", _filled(asked)),
        _section("What is guaranteed", guaranteed),
        ConsentSection("Who sees what", (*seen, _VERDICTS_SEEN) if study.gate.verdicts else seen),
        _section("One dishonest hospital", _filled(trade_sentences(sealed=privacy.sealed))),
        _section("What is not covered", _NOT_COVERED),
    )


_NOT_COVERED = (
    "The guarantee does not hide that you take part: your name is on the roster. It protects a patient known at\n"
    "several sites less, because the patient counts once at each site. It does not cover the public volumes and\n"
    "public label maps, nor what your own staff can see at your own site.",
)


def _section(title: str, paragraphs: Iterable[str]) -> ConsentSection:
    return ConsentSection(title, tuple(("", words) for words in paragraphs))


def _filled(sentences: Iterable[str]) -> list[str]:
    return [fill(sentence, width=104) for sentence in sentences]
