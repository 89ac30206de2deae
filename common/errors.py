"""Every error Consilium raises on purpose, with the exit code its command ends with.

An error says what was wrong, the value, the limit and the remedy; it never carries patient data, a code or a key.
Exit codes: 0 done, 1 unexpected failure, 2 bad input, 3 budget exhausted, 4 quorum not reached, 5 ledger damaged,
6 refused by policy, 7 a daemon failed, 8 `site doctor` found something to repair, 9 a disk is full or failing,
10 `site evaluate --strict` found a student that should not be used.
"""

from __future__ import annotations

from reprlib import Repr

_SHOWN_CHARACTERS = 500
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN_CHARACTERS
_SHOWN.maxlong = 100
_SHOWN.maxlist = _SHOWN.maxtuple = _SHOWN.maxset = _SHOWN.maxfrozenset = _SHOWN.maxdict = 20
_SHOWN.maxlevel = 3


def _shown(value: object) -> str:
    """What was wrong, briefly: it may be a megabyte long, or nested too deeply to be written out at all."""
    text = _SHOWN.repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class ConsiliumError(Exception):
    """Base of all deliberate errors; ``exit_code`` is what the command line returns."""

    exit_code = 1


class InvalidInput(ConsiliumError):
    """Something given from outside is wrong: what, its value, the limit and the remedy."""

    exit_code = 2

    def __init__(self, what: str, *, value: object = None, limit: str = "", remedy: str = "") -> None:
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        parts = [what if value is None else f"{what}: got {_shown(value)}"]
        if limit:
            parts.append(f"allowed: {limit}")
        if remedy:
            parts.append(f"to fix: {remedy}")
        super().__init__("; ".join(parts))


class BudgetExceeded(ConsiliumError):
    """A release would pass a pool's privacy budget; nothing was charged and nothing released.

    ``requested`` and ``remaining`` are μ² (the squared GDP parameter), the unit in which releases add up.
    """

    exit_code = 3

    def __init__(self, pool: str, *, requested: float, remaining: float) -> None:
        self.pool, self.requested, self.remaining = pool, requested, remaining
        super().__init__(
            f"the privacy budget of pool {pool!r} does not cover this release: "
            f"it needs μ² = {requested:.6g}, {remaining:.6g} is left; "
            "to fix: plan fewer queries, or agree on a larger budget with the site"
        )


class QuorumNotReached(ConsiliumError):
    """Fewer sites accepted than the study's quorum; nothing was dispatched or charged."""

    exit_code = 4


class StorageFailed(ConsiliumError):
    """A disk is full or failing. What was committed before stands; nothing since was charged or released."""

    exit_code = 9


class LedgerCorrupt(ConsiliumError):
    """The ledger's chain, signatures, sums or schema do not hold; ``row`` names the first bad one."""

    exit_code = 5

    def __init__(self, message: str, *, row: int | None = None) -> None:
        self.row = row
        super().__init__(message if row is None else f"row {row}: {message}")


class Refused(ConsiliumError):
    """A site's policy or the server's checks said no; ``reason`` is an allow-listed word fit to leave the site."""

    exit_code = 6

    def __init__(self, reason: str, message: str = "") -> None:
        self.reason = reason
        super().__init__(message or reason)


class DaemonFailed(ConsiliumError):
    """A process Consilium needs did not start, or died."""

    exit_code = 7
