"""A sealed sum in words: who sees what, and against whom which ε holds.

The noise of a roster of K sites is drawn in K shares, and was calibrated so that K − t of them carry σ. Whoever knows c
shares is left with σ·√((K − c)/(K − t)): a release of μ² costs μ²·(K − t)/(K − c) against them. Says nothing of studies
whose noise the server adds: there no site knows any of it, and the server all.
"""

from __future__ import annotations

from fractions import Fraction

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection


def mu_squared_against(mu_squared: Fraction, *, sites: int, colluders: int, knowing: int) -> Fraction:
    """Σμ² of releases over rosters of ``sites``, each charged for t ``colluders``, for who knows ``knowing`` shares.

    InvalidInput where nobody's share is left to hide behind. With fewer than t shares less is lost on small rosters
    than on large ones, so a bound for many rosters is that of the largest; with more than t, of the smallest.
    """
    check_integer("sites on a roster", sites, least=1)
    if not isinstance(mu_squared, Fraction) or mu_squared < 0:
        raise InvalidInput("spent mu^2", value=mu_squared, limit="a rational, 0 or above")
    check_integer("shares of the noise that are known", knowing, least=0, most=sites - 1)
    check_integer("colluders", colluders, least=0, most=sites - 1)
    return mu_squared * Fraction(sites - colluders, sites - knowing)


def against_whom(
    mu_squared: Fraction,
    budget: Budget,
    protection: Protection,
    accountant: AccountantName | str,
    *,
    least: int,
    most: int,
    colluders: int,
) -> tuple[Guarantee, Guarantee, Guarantee]:
    """What releases of Σμ² cost at most on rosters of ``least`` to ``most`` sites: who knows no share, who knows t, and
    who knows one more."""
    check_integer("sites on the largest roster", most, least=least)
    no_share, t_shares, more = (
        guarantee(
            mu_squared_against(mu_squared, sites=sites, colluders=colluders, knowing=knowing),
            *(budget, protection, accountant),
        )
        for sites, knowing in ((most, 0), (most, colluders), (least, colluders + 1))
    )
    return no_share, t_shares, more


def coalition_sentences(
    found: tuple[Guarantee, Guarantee, Guarantee], *, least: int, most: int, colluders: int
) -> tuple[str, ...]:
    """:func:`against_whom` in words, for rosters of ``least`` to ``most``, and what the figures rest on."""
    apart, together, more = (epsilon_text(one.epsilon) for one in found)
    first = found[0]
    stated = f"{first.accountant} accountant, δ = {delta_text(first.delta)}, {first.protection}"
    some = "the other hospitals" if colluders == 0 else f"{_hospitals(colluders)} of the roster"
    whom = "the server's operator alone" if colluders == 0 else f"the server's operator together with any {some}"
    return (
        "Sealed sum: every hospital masks its codes and adds its share of the noise before it sends. The server adds "
        "up what it cannot read and learns the noisy sum of a whole roster, nothing else.",
        f"ε = {together} holds against {whom}. Who knows no hospital's share of the noise (the operator alone, "
        f"the public) has more noise before them: ε = {apart} where {most} hospitals answer, and nearer to ε = "
        f"{together} the more they are. More hospitals that pool what they know, with the operator or without, have "
        f"less: ε = {more} for {_hospitals(colluders + 1)} of {least} ({stated}).",
        "This rests on the hospitals of a roster that do not collude: that their software draws their share of the "
        "noise afresh and tells nobody, that people compared the hospitals' keys by fingerprint, not through the "
        "server, and, against whoever carries the masked codes, on the ciphers of the masks (X25519, ChaCha20).",
    )


def trade_sentences(*, sealed: bool) -> tuple[str, str]:
    """Sentences on whom an open and a sealed study each trust; the chosen mode comes first."""
    of_open = (
        "Open: the server's operator is trusted, and one dishonest hospital is bounded by its ball: it moves a sum as "
        "far as an honest one can, and is named where it tries more."
    )
    of_sealed = (
        "Sealed: the server's operator is not trusted, and one dishonest hospital can spoil a sum or steer the "
        "student; it is found by the gate (verdicts of hospitals) and proven in a dispute."
    )
    return (of_sealed, f"The other choice. {of_open}") if sealed else (of_open, f"The other choice. {of_sealed}")


def spare_sentence(*, answers: int, spare: int) -> str:
    """What the budget holds: answers, and sums that may be lost."""
    lost = "no lost draw" if spare == 0 else "1 lost draw" if spare == 1 else f"{spare} lost draws"
    beyond = "each" if spare == 0 else "each beyond them"
    return (
        f"The budget holds {answers} answers and {lost}: a sum that one of its hospitals never completes is charged "
        f"and gives no answer, and {beyond} takes the place of one."
    )


def _hospitals(count: int) -> str:
    return "one hospital" if count == 1 else f"{count} hospitals"
