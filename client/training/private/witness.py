"""The site's ledger as the witness of a private training: a row says how far it got, before the steps are drawn.

A folder of teachers that comes back from a backup knows less than was drawn. The ledger, whose own restores show by its
standing, does not: so no step is drawn a second time for one charge. Refuses a second run of one training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from client.ledger.site_ledger import SiteLedger

MOST_ROWS = 128
"""Rows of one training: a longer one is put on record several steps at a time."""


def steps_a_row(steps: int) -> int:
    """How many steps of a training of so many go on record at once; a run that dies loses at most these."""
    return ceil(steps / MOST_ROWS)


class LedgerWitness:
    """See :class:`~client.records.journal.Witness`. ``steps`` are those of the plan."""

    def __init__(self, ledger: SiteLedger, training_id: str, *, steps: int) -> None:
        self._ledger, self._training_id, self._steps = ledger, training_id, steps
        self._drawn = ledger.drawn(training_id)

    @property
    def drawn(self) -> int:
        return self._drawn

    def claim(self, steps: int) -> None:
        upto = min(self._steps, steps + steps_a_row(self._steps) - 1)
        self._ledger.record_drawn(self._training_id, upto, after=self._drawn)
        self._drawn = upto


@contextmanager
def witness_of(site: Path, training_id: str, *, steps: int) -> Iterator[LedgerWitness]:
    """The witness of a training that the ledger of this site's pool has on record."""
    from client.policy import load_site
    from client.site.books import open_books

    with open_books(load_site(site)) as ledger:
        yield LedgerWitness(ledger, training_id, steps=steps)
