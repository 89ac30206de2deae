"""Computes the ε of a sealed sum against each coalition of server and hospitals, and states it in sentences.

Called for the consent sheet, the planner and the certificate. In a sealed sum the K sites of a roster draw the noise in
K shares, calibrated so that K − t of them have standard deviation σ, where t is the number of colluders that the study
allows for. Against a party that knows c shares, the noise that remains has standard deviation σ·√((K − c)/(K − t)). A
release of cost μ² then costs μ²·(K − t)/(K − c).

The module does not cover open studies, in which the server adds the noise. There the server knows all of the noise and
no site knows any.
"""

from __future__ import annotations

from fractions import Fraction

from common.canonical import check_integer
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.checks import check_rational
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection
from common.wording import many


def mu_squared_against(mu_squared: Fraction, *, sites: int, colluders: int, knowing: int) -> Fraction:
    """Return the Σμ² of sealed sums against a party that knows c of the K shares of the noise (``knowing``).

    The releases were charged for a party that knows t of the shares (``colluders``). The result grows with K if c < t
    and falls with K if c > t. To bound rosters of different sizes, use the largest one if c < t and the smallest one if
    c > t.

    Args:
        mu_squared: Σμ² as charged, against a party that knows t shares.
        sites: Number K of sites on the roster.
        colluders: Number t of shares that the charge assumes to be known, below K.
        knowing: Number c of shares that the party knows, below K.

    Returns:
        Σμ²·(K − t)/(K − c), exactly.

    Raises:
        InvalidInput: If a count is outside its range. With c = K no noise would be left.

    >>> mu_squared_against(Fraction(1), sites=5, colluders=1, knowing=3)
    Fraction(2, 1)
    """
    check_integer("sites on a roster", sites, least=1)
    check_rational("spent mu^2", mu_squared, zero=True)
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
    """Return the largest ε of sealed sums against parties that know no share of the noise, t shares, and t + 1 shares.

    Args:
        mu_squared: Σμ² as charged.
        budget: Its δ is used.
        protection: Unit and relation.
        accountant: Name of the accountant.
        least: Sites on the smallest roster.
        most: Sites on the largest roster.
        colluders: Number t of colluders that the charge allows for.

    Returns:
        The three guarantees, in this order.

    Raises:
        InvalidInput: If a count is outside its range, such as ``colluders`` + 1 ≥ ``least``.
    """
    check_integer("sites on the largest roster", most, least=least)
    no_share, t_shares, more = (
        guarantee(
            mu_squared_against(mu_squared, sites=sites, colluders=colluders, knowing=knowing),
            *(budget, protection, accountant),
        )
        for sites, knowing in ((most, 0), (most, colluders), (least, colluders + 1))
    )
    return no_share, t_shares, more


COALITIONS = 1
"""Index of the paragraph about the ε against each party in the result of :func:`coalition_sentences`."""


def coalition_sentences(
    found: tuple[Guarantee, Guarantee, Guarantee], *, least: int, most: int, colluders: int
) -> tuple[str, ...]:
    """Return the result of :func:`against_whom` as sentences, and the assumptions it rests on.

    Args:
        found: The three guarantees of :func:`against_whom`.
        least: Sites on the smallest roster.
        most: Sites on the largest roster.
        colluders: Number t of colluders that the charge allows for.

    Returns:
        Three paragraphs: what a sealed sum is, the ε against each party, the assumptions.
    """
    apart, together, more = (epsilon_text(one.epsilon) for one in found)
    first = found[0]
    stated = f"{first.accountant} accountant, δ = {delta_text(first.delta)}, {first.protection}"
    some = "the other hospitals" if colluders == 0 else f"{_hospitals(colluders)} of the roster"
    whom = "the server's operator alone" if colluders == 0 else f"the server's operator together with any {some}"
    return (
        "Sealed sum: every hospital masks its codes and adds its share of the noise before it sends them. The server "
        "cannot read the masked codes. It learns only their noisy sum over the whole roster.",
        f"ε = {together} holds against {whom}. A party that knows no hospital's share of the noise (the operator "
        f"alone, or the public) faces more noise: ε = {apart} if {most} hospitals answer. The more hospitals answer, "
        f"the closer this comes to ε = {together}. If more hospitals pool what they know, with or without the "
        f"operator, the guarantee is weaker: ε = {more} for {_hospitals(colluders + 1)} of {least} ({stated}).",
        "This rests on three assumptions. The software of the hospitals that do not collude draws their shares of the "
        "noise afresh and reveals them to nobody. People compared the hospitals' keys by fingerprint, not through the "
        "server. Nobody who carries the masked codes can break the ciphers of the masks (X25519, ChaCha20).",
    )


def trade_sentences(*, sealed: bool) -> tuple[str, str]:
    """Return two sentences on the parties that an open and a sealed study must trust; the chosen mode comes first.

    Args:
        sealed: True if the study's sums are sealed.

    Returns:
        The sentence about the chosen mode, and the sentence about the other one.
    """
    of_open = (
        "Open: the server's operator is trusted. One dishonest hospital can move a sum no further than an honest one, "
        "because the server refuses a code whose norm exceeds C and names the hospital that sent it."
    )
    of_sealed = (
        "Sealed: the server's operator is not trusted. One dishonest hospital can spoil a sum or steer the student. "
        "A study with a gate (the hospitals' verdicts on the student) can find this, and a dispute can prove it."
    )
    return (of_sealed, f"The other choice. {of_open}") if sealed else (of_open, f"The other choice. {of_sealed}")


def spare_sentence(*, answers: int, spare: int) -> str:
    """Return a sentence that says how many answers, and how many lost draws (attempts without an answer), the budget
    pays for.

    Args:
        answers: Number of answers.
        spare: Number of further draws (attempts at a sum) that may be lost.

    Returns:
        The sentence.
    """
    lost = "no lost draw" if spare == 0 else "1 lost draw" if spare == 1 else f"{spare} lost draws"
    beyond = "Each lost draw" if spare == 0 else "Each further lost draw"
    return (
        f"The budget pays for {many(answers, 'answer')} and {lost}. A draw is one attempt at a sum. It is lost if a "
        f"hospital never completes its part; it is charged then, and gives no answer. {beyond} takes the place of one "
        "answer."
    )


def _hospitals(count: int) -> str:
    return "one hospital" if count == 1 else f"{count} hospitals"
