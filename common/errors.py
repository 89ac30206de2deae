"""Defines every error that Consilium raises on purpose, with the exit code of a command that ends with it.

An error states what was wrong, the value, the limit and the remedy. It never contains patient data, a code or a key.

    ConsiliumError (1)
    ├── InvalidInput (2)        an argument, a file or a message is not valid
    ├── BudgetExceeded (3)      a release would exceed a pool's budget
    ├── QuorumNotReached (4)    fewer sites accepted than the quorum
    ├── LedgerCorrupt (5)       a ledger's chain, signatures or sums are wrong
    │   └── ReceiptContradiction    a server's receipt contradicts itself or a site's ledger
    ├── Refused (6)             a policy or a check refused a request, or another command is at work
    ├── DaemonFailed (7)        a process did not start, or ended
    └── StorageFailed (9)       a disk is full or failing

Commands use further exit codes: 0 done, 1 unexpected failure, 8 `site doctor` found something to repair, 10 `site
evaluate --strict` found a student that should not be used, 11 a `dispute` found evidence against a hospital, 12
`predict` left out some files, 130 interrupted.
"""

from __future__ import annotations

from fractions import Fraction
from reprlib import Repr

from common import __version__
from common.plain import plain, plain_lines

SAME_VERSION = f"install the same version of Consilium at the server and the sites; {__version__} runs here"
"""Remedy for a message or a file that another version wrote."""

ASK_OPERATOR = "tell the consortium's operator this line; its server may run another study or an older ledger"
"""Remedy for a server's request that does not fit this site's record."""

LEDGER_REMEDY = (
    "stop what writes this ledger; `consilium verify` names its first bad row, and docs/runbook.md says what to do then"
)
"""Remedy of every :class:`LedgerCorrupt` that states none; the command line adds it."""

ALARM_REMEDY = (
    "if this site's ledger was restored from an older copy, run `consilium site recover --own-ledger`; if not, ask the "
    "server's operator for the cause; once the cause is known, run `consilium site recover`"
)
"""Remedy of every :class:`ReceiptContradiction` that states none, and of a site's alarms."""

ALARM_STOPS = "no study of this pool is answered, whichever server runs it, until a person ends the alarm"
"""What stops while a site has an alarm about a server's ledger, or about its own restored ledger."""

_SHOWN_CHARACTERS = 500
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN_CHARACTERS
_SHOWN.maxlong = 100
_SHOWN.maxlist = _SHOWN.maxtuple = _SHOWN.maxset = _SHOWN.maxfrozenset = _SHOWN.maxdict = 20
_SHOWN.maxlevel = 3


def _shown(value: object) -> str:
    """Return a short representation of a value, which may be very large or deeply nested."""
    try:
        text = str(value) if isinstance(value, Fraction) else _SHOWN.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class ConsiliumError(Exception):
    """Base class of all errors that Consilium raises on purpose.

    ``exit_code`` is the exit code of a command that ends with this error. A message may quote text from elsewhere, so
    control characters are removed from it (:mod:`common.plain`).

    >>> issubclass(c.InvalidInput, c.ConsiliumError), c.ConsiliumError.exit_code
    (True, 1)
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(plain_lines(message))


class InvalidInput(ConsiliumError):
    """An argument, a file or a message from outside is not valid.

    Args:
        what: Names the thing that is wrong.
        value: The value that was given; it is shortened in the message.
        limit: The values that are allowed.
        remedy: What to do.

    >>> raise c.InvalidInput("quorum", value=0, limit="1 to 10000", remedy="set privacy.quorum")
    Traceback (most recent call last):
    ...
    common.errors.InvalidInput: quorum: got 0; allowed: 1 to 10000; to fix: set privacy.quorum
    """

    exit_code = 2

    def __init__(self, what: str, *, value: object = None, limit: str = "", remedy: str = "") -> None:
        if not remedy and type(value).__module__ == "numpy" and not isinstance(value, float):  # np.float64 is a float
            remedy = "give a Python value, as .tolist() makes it of a numpy value"
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        parts = [what if value is None else f"{what}: got {_shown(value)}"]
        if limit:
            parts.append(f"allowed: {limit}")
        if remedy:
            parts.append(f"to fix: {remedy}")
        super().__init__(plain("; ".join(parts)))

    @property
    def without_value(self) -> str:
        """The message without the value, which may name a patient."""
        return str(InvalidInput(self.what, limit=self.limit, remedy=self.remedy))


class BudgetExceeded(ConsiliumError):
    """A release would exceed a pool's privacy budget. Nothing was charged and nothing was released.

    Args:
        pool: Name of the patient pool.
        requested: μ² of the release. μ is the parameter of Gaussian DP; μ² of several releases add up.
        remaining: μ² that the budget leaves.
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
    """Fewer sites accepted than the study's quorum. The server requested and charged nothing for the batch."""

    exit_code = 4


class StorageFailed(ConsiliumError):
    """A disk is full or failing. Everything committed before the failure is safe. Nothing was charged or released after
    it.
    """

    exit_code = 9


class LedgerCorrupt(ConsiliumError):
    """A ledger's chain, signatures, sums or schema are wrong.

    Args:
        message: What is wrong.
        row: Number of the first bad row, if it is known.
    """

    exit_code = 5
    remedy = LEDGER_REMEDY

    def __init__(self, message: str, *, row: int | None = None) -> None:
        self.row = row
        super().__init__(message if row is None else f"row {row}: {message}")


class ReceiptContradiction(LedgerCorrupt):
    """A receipt that the server signed contradicts itself or a site's ledger, whose file is not damaged."""

    remedy = ALARM_REMEDY


class Refused(ConsiliumError):
    """A site's policy or the server's checks refused a request.

    Args:
        reason: A code word from a fixed list, which may be sent to the other party.
        message: The text for people on this machine, which is never sent; by default the code word.
    """

    exit_code = 6

    def __init__(self, reason: str, message: str = "") -> None:
        self.reason = reason
        super().__init__(message or reason)


class DaemonFailed(ConsiliumError):
    """A process that Consilium needs did not start, or ended."""

    exit_code = 7
