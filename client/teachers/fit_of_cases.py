"""Finds out whether labelled cases fit the models of a site, before their scores are blamed on the student.

Evaluation and adaptation call it. Exchanged labels, a wrong orientation or another modality lower the score of
every model. The module therefore reports that the cases do not fit in two situations:

1. The site's own teachers score far lower than on the site's own cases.
2. The student and every public model score almost nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from client.data.layouts import open_for_training
from client.policy import SiteConfig
from client.site.deals import read_withdrawn
from client.teachers.comparison import OWN_TEACHERS, Reference
from client.teachers.evaluation_input import NOT_USED, parts_of
from common.config import Study
from common.data.volume import load_example
from common.errors import InvalidInput
from common.intervals import mean_interval
from common.metrics import dice_per_class, mean_present

FAR_BELOW = 0.8
"""Cases do not fit the site's own teachers if the teachers' mean Dice on them is below this fraction of their mean Dice
on the site's own cases."""

NOTHING_FOUND = 0.1
"""Mean Dice below which a model finds almost nothing."""

MOST_AT_HOME = 20
"""Largest number of the site's own cases on which the teachers' Dice is measured for comparison."""

REMEDY = "check labels, orientation and modality of these cases; if they are right, give --even-if-unfit"

CHECK = (
    "Check labels, orientation and modality of these cases before you judge the network: look at worst.png and run "
    "`consilium site doctor --data DIR`."
)


@dataclass(frozen=True, slots=True)
class FitScores:
    """Scores that show whether cases fit the models of a site.

    Attributes:
        here: The own teachers' mean Dice of each case; empty if there are none.
        home: The own teachers' mean Dice of each of the site's own cases, without the voter that was trained on the
            case; empty if unknown.
        public: Mean Dice of the student and of every public model on the cases, by name.
        accepted: True if a person asked for a verdict although the cases do not fit.
    """

    here: tuple[float, ...] = ()
    home: tuple[float, ...] = ()
    public: Mapping[str, float] = field(default_factory=dict)
    accepted: bool = False

    @property
    def sentence(self) -> str:
        """Why the cases do not fit, as a sentence without a full stop; empty if there is no sign of it."""
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

    def check_training(self) -> None:
        """Refuse to train on cases that do not fit.

        Raises:
            InvalidInput: If the cases do not fit, and nobody accepted that.
        """
        if self.refused:
            raise InvalidInput(f"no network is trained: {self.sentence}", remedy=REMEDY)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        means = {
            name: statistics.fmean(known) if (known := [dice for dice in each if math.isfinite(dice)]) else None
            for name, each in (("own_teachers_here", self.here), ("own_teachers_at_home", self.home))
        }
        return {"finding": self.sentence, "verdict_refused": self.refused, **means}


def fit_of(
    site_dir: Path,
    config: SiteConfig,
    study: Study,
    found: Sequence[Reference],
    dice: Mapping[str, Sequence[float]],
    *,
    elsewhere: bool,
    accepted: bool,
) -> FitScores:
    """Return the scores that show whether cases fit the site's own teachers and the public models.

    For cases from elsewhere, the site's own teachers are scored on the site's own cases too.

    Args:
        site_dir: The site's directory.
        config: The site's policy.
        study: The study.
        found: The models with which the student is compared.
        dice: Mean Dice of each case, for the student and every model, by name.
        elsewhere: True if the cases are not those of the site's own dataset.
        accepted: True if a person asked for a verdict although the cases do not fit.

    Returns:
        The scores.
    """
    own = next((one for one in found if one.name == OWN_TEACHERS), None)
    return FitScores(
        here=tuple(dice.get(OWN_TEACHERS, ())),
        home=_level_at_home(site_dir, config, study, own) if own is not None and elsewhere else (),
        public={name: mean_present(each) for name, each in dice.items() if name != OWN_TEACHERS},
        accepted=accepted,
    )


def _level_at_home(site_dir: Path, config: SiteConfig, study: Study, own: Reference) -> tuple[float, ...]:
    """Return the own teachers' mean Dice of each of up to :data:`MOST_AT_HOME` of the site's own cases.

    A case on which a voter was trained is scored without this voter. The result is empty if the site's own dataset
    cannot be read.
    """
    try:
        dataset = open_for_training(config.path(config.data), study.data.student, config.dataset)
        gone_patients, _ = read_withdrawn(config, {dataset.patient_of(case.id) for case in dataset.labelled})
        parts = parts_of(site_dir, dataset)
    except InvalidInput:  # without the site's own dataset the level at home is unknown
        return ()
    dice: list[float] = []
    for case in dataset.labelled:
        answer = own.untrained(*parts.get(case.id, NOT_USED))
        if answer is None or dataset.patient_of(case.id) in gone_patients:
            continue
        try:
            example = load_example(case, study.data.student)
        except InvalidInput:
            continue
        drawn = answer(example.volume.image).argmax(axis=0).astype(np.uint8)
        dice.append(mean_present(dice_per_class(drawn, example.label, study.data.student.members)))
        if len(dice) == MOST_AT_HOME:
            break
    return tuple(dice)
