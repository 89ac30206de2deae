"""Counts a private training's steps in the site's ledger before their batches are used.

A step is *drawn* when the gradients of its random batch are summed and noise is added; drawing it again needs another
charge. A directory of teachers that was restored from a backup may record fewer steps than were drawn. A restored
ledger is noticed by its standing, a small file beside the ledger that no backup contains. The ledger therefore counts
the steps, and no step is drawn twice for one charge. The module refuses a second run of one training at the same time.
"""

from __future__ import annotations

from math import ceil

from client.ledger.site_ledger import SiteLedger

MOST_ROWS = 128
"""Most rows for one training; a longer training records several steps in one row."""


def steps_a_row(steps: int) -> int:
    """Return how many steps of a training are recorded in one ledger row.

    A run that dies loses at most this many steps: they count as spent although they were not all drawn.

    Args:
        steps: Planned number of steps of the training.

    Returns:
        Number of steps that one row covers.
    """
    return ceil(steps / MOST_ROWS)


class LedgerWitness:
    """Counts a training's steps in a ledger; implements :class:`~client.records.journal.Witness`.

    Args:
        ledger: The site's ledger.
        training_id: Id of the training.
        steps: Steps of the plan.
    """

    def __init__(self, ledger: SiteLedger, training_id: str, *, steps: int) -> None:
        self._ledger, self._training_id, self._steps = ledger, training_id, steps
        self._drawn = ledger.drawn(training_id)

    @property
    def drawn(self) -> int:
        """The number of steps that count as drawn."""
        return self._drawn

    def claim(self, steps: int) -> None:
        """Record in the ledger that all steps up to ``steps`` are drawn, before the noise of the last of them is drawn.

        One ledger row covers several steps. It may therefore also count later steps, some of which may never be drawn.

        Raises:
            Refused: ``training-busy`` if another run is drawing the same steps.
        """
        upto = min(self._steps, steps + steps_a_row(self._steps) - 1)
        self._ledger.record_drawn(self._training_id, upto, after=self._drawn)
        self._drawn = upto
