"""Writes the report of an adaptation: a page, the same facts as JSON, and pictures, readable by the site's user only.

The pictures show the patients with the worst and the best score, predicted by a network that had not seen them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from client.adapting.adapted import Adapted, shown
from client.adapting.material import Patient
from client.adapting.methods import WORDS
from client.teachers.evaluation_pictures import case_picture
from common.models.bundle import Bundle
from common.objects import write_atomically
from common.plain import RESEARCH_ONLY
from common.wording import many

Unseen = Callable[[int], Bundle]
"""Function from a patient's position to the network that predicts the patient's picture.

The network is made in the chosen way, and trained without the patient if possible."""


def write_report(result: Adapted, patients: Sequence[Patient], dice: Sequence[float], *, unseen: Unseen) -> Adapted:
    """Write ``adapted.html``, ``adapted.json`` and the pictures.

    Args:
        result: The adaptation; ``result.report`` is the folder.
        patients: The patients.
        dice: Cross-validated Dice of the chosen way for each patient; empty with too few patients.
        unseen: Returns the network that predicts a patient's picture.

    Returns:
        The result with the pictures' names.
    """
    result.report.mkdir(mode=0o700, parents=True, exist_ok=True)
    result.report.chmod(0o700)
    for old in result.report.glob("*.png"):
        old.unlink()
    pictures = {}
    for name, place in _shown_patients(dice).items():
        case, figure = patients[place].cases[0], dice[place] if dice else math.nan
        how = "trained on it" if math.isnan(figure) else f"Dice {figure:.3f}, not trained on it"
        picture = case_picture(case, unseen(place), title=f"{case.id}: {how}", who="the adapted network")
        write_atomically(result.report / f"{name}.png", picture, mode=0o600)
        pictures[name] = f"{name}.png"
    done = replace(result, pictures=pictures)
    facts = json.dumps(done.to_json(), indent=1, allow_nan=False) + "\n"
    write_atomically(result.report / "adapted.json", facts.encode(), mode=0o600)
    write_atomically(result.report / "adapted.html", _page(done).encode(), mode=0o600)
    return done


def _shown_patients(dice: Sequence[float]) -> dict[str, int]:
    """Return the positions of the patients with the worst and the best score; without scores, of the first patient."""
    ranked = sorted((place for place, value in enumerate(dice) if not math.isnan(value)), key=lambda place: dice[place])
    if not ranked:
        return {"first": 0}
    return {"worst": ranked[0]} if len(ranked) == 1 else {"worst": ranked[0], "best": ranked[-1]}


def _page(result: Adapted) -> str:
    page = Environment(loader=PackageLoader("client"), autoescape=select_autoescape(), undefined=StrictUndefined)
    rows: list[dict[str, Any]] = [
        {
            "what": one.what,
            "taken": one.way == result.way,
            "dice": shown(one.interval),
            "structures": [shown(one.structures[name]) for name in result.structures],
        }
        for one in result.figures
    ]
    ahead = {WORDS[way]: shown(one, sign=True) for way, one in result.ahead.items() if way != result.way}
    return page.get_template("adapted.html").render(
        adapted=result.to_json(),
        many=many,
        length=result.length,
        research_only=RESEARCH_ONLY,
        rows=rows,
        ahead=ahead,
        by_choice=None if result.by_choice is None else shown(result.by_choice),
        structures=result.structures,
        pictures=result.pictures,
    )
