"""Finds out whether labelled cases fit the models of a site, before their scores are blamed on the student.

``client.teachers.evaluation`` calls it. Exchanged labels, a wrong orientation or another modality lower the score of
every model. So there is a finding in two cases:

1. The site's own teachers score far below their level on the site's own cases.
2. The student and every public model score almost nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidInput
from common.intervals import mean_interval

FAR_BELOW = 0.8
"""The own teachers do not fit the cases if their mean Dice is below this fraction of their level at home."""

NOTHING_FOUND = 0.1
"""Mean Dice below which a model finds almost nothing."""

MOST_AT_HOME = 20
"""Largest number of the site's own cases on which the teachers' level is measured."""

REMEDY = "check labels, orientation and modality of these cases; if they are right, give --even-if-unfit"

CHECK = (
    "Check labels, orientation and modality of these cases before you judge the student: look at worst.png and run "
    "`consilium site doctor --data DIR`."
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Scores that show whether cases fit the models of a site.

    Attributes:
        here: The own teachers' mean Dice of each case; empty if there are none.
        home: The same on the site's own cases, each without the voter that was trained on it; empty if unknown.
        public: Mean Dice of the student and of every public model on the cases, by name.
        accepted: True if a person asked for a verdict although the cases do not fit.
    """

    here: tuple[float, ...] = ()
    home: tuple[float, ...] = ()
    public: Mapping[str, float] = field(default_factory=dict)
    accepted: bool = False

    @property
    def sentence(self) -> str:
        """The finding, without a full stop; empty if nothing speaks against the cases."""
        here, home = ([dice for dice in each if math.isfinite(dice)] for each in (self.here, self.home))
        if here and home:
            (ours, our_half), (usual, usual_half) = mean_interval(here), mean_interval(home)
            beyond_chance = our_half is None or usual_half is None or usual - ours > math.hypot(our_half, usual_half)
            if ours < FAR_BELOW * usual and beyond_chance:
                return (
                    f"these cases do not fit this site's own teachers, whose Dice is {ours:.3f} here and {usual:.3f} "
                    "on this site's own cases"
                )
        known = [dice for dice in self.public.values() if math.isfinite(dice)]
        if len(known) > 1 and max(known) < NOTHING_FOUND:
            return (
                "these cases fit no model: the student and all models from public data have Dice below "
                f"{NOTHING_FOUND:g} here"
            )
        return ""

    @property
    def refused(self) -> bool:
        """True if no verdict is given on these cases."""
        return bool(self.sentence) and not self.accepted

    def check(self, what: str) -> None:
        """Refuse a statement for the consortium on cases that do not fit.

        Args:
            what: Name of the statement, such as "verdict".

        Raises:
            InvalidInput: If the cases do not fit, and nobody accepted that.
        """
        if self.refused:
            raise InvalidInput(f"no {what} is signed: {self.sentence}", remedy=REMEDY)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        means = {
            name: statistics.fmean(known) if (known := [dice for dice in each if math.isfinite(dice)]) else None
            for name, each in (("own_teachers_here", self.here), ("own_teachers_at_home", self.home))
        }
        return {"finding": self.sentence, "verdict_refused": self.refused, **means}
