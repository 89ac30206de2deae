"""Measures how much 0, 1 or 2 dishonest sites change the labels and the student of a joint study.

`consilium bench poison` calls it. A dishonest (poisoned) site may send any vector in every round; it is clipped to the
ball of radius C, as every site's vector is. Roles of the cases, teachers, public start, frame, rounds and student are
computed as in the utility benchmark (:mod:`research.utility`). The arms of a seed share their noise, so a difference
between two arms is the effect of the poison. Finished arms are stored. It refuses every recipe but ``joint``, and too
few hospitals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from rich.console import Console
from rich.table import Table

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from common.metrics import score
from common.models.fit import predict
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import QuerySpec
from common.privacy.release import noisy_sum
from common.protocols.frame import Frame, sharpen
from common.protocols.joint import FrameEncoder
from common.protocols.site_protocol import Encoder
from research.asked import ask as ask_study
from research.bench import Bench
from research.setting import Setting, settings_json
from research.stored_results import NumbersFile, weights_hash
from research.table import heading, paired
from server.protocols.decode import labels_of
from server.protocols.joint.belief import estimated_codes
from server.protocols.plausible import PlausibilityTest
from server.protocols.public_start import TEMPERATURE, Start
from server.protocols.rounds import surprise

MOST_POISONED = 2
DRAWS = 8
"""Number of times that the noise is drawn. Labels and warnings are averaged over all of them; the student uses the
first.
"""
ATTACKS = {
    "erase": "last structure erased",
    "oppose": "opposed at full norm",
}


Vote = Callable[[Frame, int], Float[np.ndarray, "d"]]
"""A function of a round's frame and a voter's number that returns the vector the voter sends, before clipping."""


def attack_by(
    attack: str, *, codes: Float[np.ndarray, "k n l"], erased: Float[np.ndarray, "p n l"], radius: float
) -> Vote:
    """Return the function that gives every voter's vector if the first p voters attack and the others are honest.

    ``erase``: an attacker answers with predictions that lack a structure. Relative to the frame's centre these are far
    away, so clipping turns them into a push of full norm in every round. ``oppose``: an attacker sends the opposite of
    its honest vote, lengthened to the radius. Since teachers agree, this opposes nearly everything that the others
    send.

    Args:
        attack: A key of :data:`ATTACKS`.
        codes: Honest codes of all voters, float [k, n, l].
        erased: Codes of the p attackers without the structure, float [p, n, l].
        radius: Clipping norm C.

    Raises:
        InvalidInput: For an unknown attack.
    """
    if attack not in ATTACKS:
        raise InvalidInput("attack", value=attack, limit=", ".join(ATTACKS))

    def vote(frame: Frame, voter: int) -> Float[np.ndarray, "d"]:
        if voter >= len(erased):
            return frame.encode(codes[voter])
        if attack == "erase":
            return frame.encode(erased[voter])
        return against(frame.encode(codes[voter]), radius=radius)

    return vote


def against(vote: Float[np.ndarray, "d"], *, radius: float) -> Float[np.ndarray, "d"]:
    """Return the opposite of ``vote``, with norm ``radius``; zero stays zero."""
    length = float(np.linalg.norm(vote))
    result: np.ndarray = -vote * (radius / length) if length > 0 else vote
    return result


def erased_codes(model: torch.nn.Module, bench: Bench, *, structure: int) -> Float[np.ndarray, "n l"]:
    """Return a teacher's codes [n, l] if every voxel's probability of one structure is given to the background.

    Args:
        model: The teacher.
        bench: The setting and seed.
        structure: The structure's class.
    """
    codes = []
    for image in bench.images:
        probabilities = predict(model, image).copy()
        probabilities[0] += probabilities[structure]
        probabilities[structure] = 0
        codes.append(bench.codec.encode(sharpen(probabilities, temperature=TEMPERATURE)))
    return np.stack(codes)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of all rounds.

    Attributes:
        codes: The estimated codes of the volumes, float [n, l].
        plausible: The server's plausibility test of the answers, whose warnings the operator sees.
    """

    codes: Float[np.ndarray, "n l"]
    plausible: PlausibilityTest


def ask(bench: Bench, start: Start, frame: Frame, vote: Vote, *, draw: int) -> Outcome:
    """Run all rounds with the given votes, and estimate the volumes' codes from the answers.

    Production functions clip, sum and noise the votes, estimate the codes and test whether the answers are plausible.

    Args:
        bench: The setting and seed.
        start: The public start.
        frame: The first frame.
        vote: Returns a voter's vector in a round.
        draw: Number that selects one of :data:`DRAWS` stored draws of the noise.
    """

    def sent(encoder: Encoder, _query: QuerySpec, voter: int) -> Float[np.ndarray, "d"]:
        assert isinstance(encoder, FrameEncoder)
        return vote(encoder.frame, voter)

    def noised(query: QuerySpec, votes: Sequence[Int64[np.ndarray, "d"]]) -> Int64[np.ndarray, "d"]:
        return noisy_sum(votes, query.mechanism, sampler=partial(_noise, bench, query.round, draw))

    with bench.asking(start, frame) as public:
        answers = ask_study(public, sent, voters=bench.voters, draw=noised)
        return Outcome(estimated_codes(public, answers)[1], PlausibilityTest(*surprise(public, answers)))


def _noise(bench: Bench, number: int, draw: int, size: int, noise_std: Fraction) -> Int64[np.ndarray, "d"]:
    """Return the noise of a round, which all arms share."""
    parts = [repr(bench.setting), bench.seed, number, draw, size, noise_std]
    return bench.kept.array("poison-noise", parts, partial(rounded_gaussian, size, noise_std))


def measure(bench: Bench, report: Callable[[str], None]) -> dict[str, float]:
    """Return every arm's Dice of student and labels, and the share of its draws in which the operator is warned.

    Args:
        bench: The setting and seed.
        report: Called with each arm's name.

    Raises:
        InvalidInput: If the recipe is not ``joint``, or there are too few hospitals.
    """
    setting = bench.setting
    if setting.recipe != "joint":
        raise InvalidInput("recipe of a poisoned study", value=setting.recipe, limit="joint")
    if setting.hospitals <= MOST_POISONED:
        raise InvalidInput("hospitals", value=setting.hospitals, limit=f"more than {MOST_POISONED}")
    report("teachers")
    start = bench.start()
    teachers = bench.teachers(start)
    codes = bench.codes(teachers)
    report("frame")
    frame = bench.frame(start)
    erased = np.stack([_erased(bench, model) for model in teachers[: MOST_POISONED * setting.voters]])
    parts = [repr(setting), bench.seed, sha256_bytes(frame.to_bytes()), DRAWS]
    cell = NumbersFile(bench.kept.file("poison", parts, ".json"))

    def keep(name: str, each: Sequence[Float[np.ndarray, "n l"]], *, warned: float) -> None:
        values = {
            "labels": float(np.mean([_labels(bench, codes) for codes in each])),
            "student": bench.taught(start, each[0]),
            "warned": warned,
        }
        cell.add({f"{name}-{what}": value for what, value in values.items()})

    arms = {"honest": ("erase", 0)}
    arms |= {f"{attack}-{n}": (attack, n) for n in range(1, MOST_POISONED + 1) for attack in ATTACKS}
    if "public-student" not in cell.values():
        report("public")
        keep("public", [start.codes], warned=0.0)
    for name, (attack, sites) in arms.items():
        if f"{name}-student" in cell.values():
            continue
        report(name)
        poisoned = erased[: sites * setting.voters]
        vote = attack_by(attack, codes=codes, erased=poisoned, radius=bench.study.codec.radius)
        outcomes = [ask(bench, start, frame, vote, draw=draw) for draw in range(DRAWS)]
        warned = float(np.mean([bool(outcome.plausible.warnings) for outcome in outcomes]))
        keep(name, [outcome.codes for outcome in outcomes], warned=warned)
    return cell.values()


def _labels(bench: Bench, codes: Float[np.ndarray, "n l"]) -> float:
    labels = labels_of(bench.codec, codes).argmax(axis=1).astype(np.uint8)
    return score(labels, bench.roles.public.labels, bench.classes).mean


def _erased(bench: Bench, model: torch.nn.Module) -> Float[np.ndarray, "n l"]:
    structure = bench.classes - 1
    name = [bench.codec_hash, weights_hash(model), len(bench.images), TEMPERATURE, structure]
    return bench.kept.array("codes-erased", name, partial(erased_codes, model, bench, structure=structure))


def poison_summary(setting: Setting, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the table as plain JSON: Dice of labels and student of every arm, and how much each arm lost, from the
    differences seed by seed.
    """
    names = [name.removesuffix("-student") for name in rows[0] if name.endswith("-student")]
    return {
        "schema": 1,
        "setting": {**settings_json(setting), "relation": "replace-one", "accountant": "exact"},
        "seeds": len(rows),
        "attacks": ATTACKS,
        "arms": {
            name: {
                what: {
                    "each": (each := [row[f"{name}-{what}"] for row in rows]),
                    "mean": fmean(each),
                    "lost": paired([row[f"honest-{what}"] for row in rows], each),
                }
                for what in ("labels", "student")
            }
            | {"warned": fmean([row[f"{name}-warned"] for row in rows])}
            for name in names
        },
    }


def render_poison(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    heading(document, console)
    table = Table(box=None, pad_edge=False)
    for header in ("", "labels", "lost (95 %)", "student", "lost (95 %)", "warned"):
        table.add_column(header, justify="left" if not header else "right")
    for name, arm in document["arms"].items():
        attack, _, sites = name.rpartition("-")
        what = {"public": "public start alone", "honest": "nobody poisoned"}.get(
            name, f"{sites} of {document['setting']['hospitals']}, {ATTACKS.get(attack, attack)}"
        )
        cells = [
            text
            for part in ("labels", "student")
            for text in (f"{arm[part]['mean']:.4f}", "" if name == "honest" else _lost(arm[part]["lost"]))
        ]
        table.add_row(what, *cells, "" if name == "public" else f"{arm['warned']:.0%}")
    console.print(table)


def _lost(lost: dict[str, float | None]) -> str:
    half = lost["half_width"]
    return f"{lost['mean']:.4f} (one seed)" if half is None else f"{lost['mean']:.4f} ± {half:.4f}"
