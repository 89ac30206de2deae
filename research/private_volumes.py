"""Compares the private training strategies at one site of any dataset.

`consilium bench private` calls it. One hospital has every private case; each seed holds out another fifth of the
patients. Every strategy trains at the same (ε, δ), sampling rate and number of steps, from a public start and from
random weights, with its own default recipe for the rest. The time of a step is the training's processor time divided by
its steps, so the ratio to dp-sgd compares trainings of one run.

The module also compares the gradients of DP-MAC's blocks with those of back-propagation, before and after DP-MAC's
training, on cases of the site (:func:`heard`). It reports three figures for every block:

1. The norm of the block's mean gradient divided by the norm of the last block's. A small value shows that the gradient
   vanishes.
2. The cosine of the angle between DP-MAC's mean gradient and that of back-propagation.
3. The distance between the two clipped sums.

These figures are computed without noise, so use public data only. The module refuses unknown names of methods and of
initial weights.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from client.records.journal import TrainingJournal
from client.teachers.teacher import Posterior, averaged
from client.training.contract import VoterData
from client.training.private.blocks import blocks_of
from client.training.private.clipped_sums import integer_sum
from client.training.private.gradients import per_patient, plain_weights, segmentation_loss
from client.training.private.mac import Penalty, mac_loss
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import train_privately
from common.canonical import digest
from common.config import STUDENT_RECIPE, DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.metrics import dice_per_class, mean_present
from common.models.fit import one_hot, predict, soft_dice_ce
from common.objects import write_atomically
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import Unit
from common.privacy.training import Neighbours, epsilon_of
from research.bench import Bench
from research.roles import BenchData, CaseRoles, Cases
from research.setting import Setting
from research.volumes import recipe_of

METHODS = ("dp-sgd", "dp-sgd-layers", "dp-bbb", "dp-mac")
STARTS = ("public", "random")
"""The networks' starts: a public start, or random weights."""

LOOKED_AT = 8
"""Number of the site's cases on which the blocks' gradients are computed."""

CHUNK = 8


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """What all trainings of a measurement share; everything else is each strategy's default.

    Attributes:
        epsilon: ε of every training.
        delta: δ of every training.
        steps: Number of steps; None for each strategy's default.
        network: The teachers' network.
    """

    epsilon: float
    delta: float
    steps: int | None
    network: TrainingConfig

    def settings(self, method: str, *, begun: bool) -> PrivateSettings:
        """Return a method's default recipe at these terms."""
        own = recipe_of(method, epsilon=self.epsilon, delta=self.delta, begun=begun)
        return dataclasses.replace(own, steps=self.steps or own.steps, chunk=CHUNK)


def bench_of(roles: CaseRoles, data: DataConfig, terms: SharedTerms, *, seed: int, cache: Path) -> Bench:
    """Return the bench of a rotation. Its public start has the teachers' network.

    Args:
        roles: The cases by role.
        data: The study's grid.
        terms: (ε, δ) and the network.
        seed: The seed.
        cache: Folder of public starts.
    """
    network = terms.network
    start = dataclasses.replace(STUDENT_RECIPE, network=network.network, channels=network.channels)
    setting = Setting("joint", 2, 1, terms.epsilon, terms.delta, Unit.PATIENT, 1, network, start)
    return Bench(setting, roles, data, seed=seed, cache=cache)


def measure(
    source: BenchData,
    data: DataConfig,
    terms: SharedTerms,
    *,
    seeds: int,
    cache: Path,
    methods: Sequence[str] = METHODS,
    starts: Sequence[str] = STARTS,
) -> dict[str, Any]:
    """Train and test every cell that is not stored yet.

    Args:
        source: The dataset, and how its cases are assigned to roles.
        data: The study's grid.
        terms: (ε, δ), steps and network.
        seeds: Number of repetitions, each with another fifth held out.
        cache: Folder of public starts and finished cells; keep it to resume.
        methods: Some of :data:`METHODS`.
        starts: Some of :data:`STARTS`.

    Returns:
        Plain JSON: every cell in ``cells``, their summary over seeds in ``rows``, and the terms.

    Raises:
        InvalidInput: For an unknown method or start.
    """
    for given, known in ((methods, METHODS), (starts, STARTS)):
        if not set(given) <= set(known):
            raise InvalidInput("methods or starts", value=", ".join(given), limit=", ".join(known))
    cache.mkdir(parents=True, exist_ok=True)
    begun = [start == "public" for start in starts]
    cells = list(_cells(source, data, terms, seeds=seeds, cache=cache, methods=methods, begun=begun))
    return {
        "terms": {"epsilon": terms.epsilon, "delta": terms.delta, "unit": "patient"},
        "network": [terms.network.network, *terms.network.channels],
        "grid": list(data.grid),
        "spacing_mm": [float(width) for width in data.spacing_mm],
        "rows": rows_of(cells),
        "cells": cells,
    }


def _cells(
    source: BenchData,
    data: DataConfig,
    terms: SharedTerms,
    *,
    seeds: int,
    cache: Path,
    methods: Sequence[str],
    begun: Sequence[bool],
) -> Iterator[dict[str, Any]]:
    for public in begun:
        for seed in range(seeds):
            roles = source.roles(data, seed=seed)
            for method in methods:
                yield _cell(roles, data, terms, cache, method=method, begun=public, seed=seed)


def _cell(
    roles: CaseRoles, data: DataConfig, terms: SharedTerms, cache: Path, *, method: str, begun: bool, seed: int
) -> dict[str, Any]:
    settings, site = terms.settings(method, begun=begun), roles.private[0]
    facts = {"method": method, "begun": begun, "seed": seed, "recipe": {k: str(v) for k, v in settings.facts().items()}}
    where = [facts, repr(terms.network), repr(data), len(site), len(roles.held_out)]
    path = cache / f"private-{digest('private-cell', json.dumps(where, sort_keys=True))[:32]}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    bench = bench_of(roles, data, terms, seed=seed, cache=cache)
    start = None
    if begun:
        bench.start()
        start = bench.start_file()
    plan = settings.plan(patients=len(site))
    classes, clock = len(data.labels), time.process_time()
    part = VoterData(site.images, site.labels, classes)
    done = train_privately(part, terms.network, settings, TrainingJournal(plan), seed=seed, start=start)
    seconds = time.process_time() - clock
    answer: Callable[[np.ndarray], np.ndarray] = lambda image: predict(done.model, image)  # noqa: E731
    if done.deviations is not None:
        networks = tuple(Posterior(tuple(done.deviations.values()), seed=seed).around(done.model))
        answer = lambda image: averaged(np.stack([predict(one, image) for one in networks]))  # noqa: E731
    cell: dict[str, Any] = facts | {
        "patients": len(site),
        "held_out": len(roles.held_out),
        "noise_multiplier": float(plan.event.noise_multiplier),
        "replace_one_epsilon": epsilon_of(plan.event, delta=terms.delta, neighbours=Neighbours.REPLACE_ONE),
        "seconds_a_step": round(seconds / settings.steps, 4),
        **scores(answer, roles.held_out, classes),
    }
    if begun:
        cell["start"] = scores(lambda image: predict(bench.start().model, image), roles.held_out, classes)["score"]
    if method == "dp-mac":
        first = bench.start().model if begun else bench.empty(terms.network, seed=seed)
        cell["blocks"] = {
            "before": heard(first, site, settings, classes=classes, mu=settings.mu),
            "after": heard(done.model, site, settings, classes=classes, mu=settings.mu * settings.mu_growth),
        }
    write_atomically(path, (json.dumps(cell) + "\n").encode())
    return cell


def scores(answer: Callable[[np.ndarray], np.ndarray], cases: Cases, classes: int) -> dict[str, Any]:
    """Return the mean Dice of a prediction function (``score``), and each case's (``cases``)."""
    each = [
        dice_per_class(answer(image).argmax(axis=0).astype(np.uint8), label, classes)
        for image, label in zip(cases.images, cases.labels, strict=True)
    ]
    found = [mean_present(values) for values in each]
    return {"score": statistics.fmean(found), "cases": [round(value, 4) for value in found]}


def heard(
    model: torch.nn.Module, cases: Cases, settings: PrivateSettings, *, classes: int, mu: float
) -> list[dict[str, float]]:
    """Compare the gradient that DP-MAC computes for each block's weights with that of back-propagation, without noise.

    Args:
        model: A network.
        cases: Cases; the first :data:`LOOKED_AT` of them are used.
        settings: Settings of a dp-mac training.
        classes: Number of classes, the background included.
        mu: Weight μ of the penalty on auxiliary coordinates in DP-MAC's loss.

    Returns:
        For each block: ``length`` and ``back_propagation``, the mean gradient's norm divided by the last block's;
            ``cosine`` of the two gradients; ``apart``, the distance of the two clipped sums divided by the length of
            back-propagation's.
    """
    blocks, weights = blocks_of(model), plain_weights(model)
    x = torch.tensor(cases.images[:LOOKED_AT, None], dtype=torch.float32)
    y = torch.tensor(np.stack([one_hot(label, classes) for label in cases.labels[:LOOKED_AT]])[:, None])
    how = Penalty(settings.mu, settings.mu_growth, settings.z_steps, settings.z_rate)
    losses = (mac_loss(blocks, soft_dice_ce, mu=mu, how=how), segmentation_loss(model, soft_dice_ce))
    vectors = [per_patient(loss)(weights, x, y.float())[0] for loss in losses]
    parts = blocks.parts(settings.clip)
    sums = [integer_sum(each, parts) for each in vectors]
    rows: list[dict[str, float]] = []
    last: list[float] = []
    for names in reversed(blocks.weights):
        own, plain = (_flat({n: each[n].mean(dim=0) for n in names}) for each in vectors)
        summed, other = (_flat({n: total[n].double() for n in names}) for total in sums)
        last = last or [float(own.norm()), float(plain.norm())]
        rows.append(
            {
                "length": float(own.norm()) / last[0],
                "back_propagation": float(plain.norm()) / last[1],
                "cosine": float(own @ plain / (own.norm() * plain.norm())),
                "apart": float((summed - other).norm() / other.norm()),
            }
        )
    return rows[::-1]


def _flat(entries: dict[str, torch.Tensor]) -> Float[torch.Tensor, "d"]:
    return torch.cat([entry.flatten().double() for entry in entries.values()])


def rows_of(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method and start: Dice over seeds, differences to dp-sgd seed by seed, and time of a
    step.
    """
    groups: dict[tuple[bool, str], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["begun"], cell["method"]), {})[cell["seed"]] = cell
    rows = []
    for (begun, method), members in groups.items():
        found = [cell["score"] for cell in members.values()]
        row: dict[str, Any] = {
            "method": method,
            "begun": begun,
            "seeds": sorted(members),
            "each": found,
            "mean": statistics.fmean(found),
            "sd": statistics.stdev(found) if len(found) > 1 else None,
            "steps": next(cell["recipe"]["steps"] for cell in members.values()),
            "noise_multiplier": next(cell["noise_multiplier"] for cell in members.values()),
            "seconds_a_step": statistics.median(cell["seconds_a_step"] for cell in members.values()),
        }
        for name, other in (("over_dp_sgd", "dp-sgd"), ("over_dp_sgd_layers", "dp-sgd-layers")):
            beside = groups.get((begun, other), {})
            row[name] = [members[seed]["score"] - beside[seed]["score"] for seed in sorted(members) if seed in beside]
        beside = groups.get((begun, "dp-sgd"), {})
        ratios = [members[s]["seconds_a_step"] / beside[s]["seconds_a_step"] for s in members if s in beside]
        row["times_dp_sgd"] = statistics.median(ratios) if ratios else None
        if "start" in next(iter(members.values())):
            row["start"] = statistics.fmean(cell["start"] for cell in members.values())
        rows.append(row)
    return rows


def private_markdown(found: dict[str, Any]) -> str:
    """Render the measurement as a Markdown table."""
    terms = found["terms"]
    lines = [
        f"ε = {epsilon_text(terms['epsilon'])}, δ = {delta_text(terms['delta'])}, unit patient, add-remove, Poisson",
        "",
        "| start | method | steps | Dice | over dp-sgd | over its clip a layer | processor time a step | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
        gaps = [f"{statistics.fmean(row[name]):+.3f}" if row[name] else "–" for name in _GAPS]
        ratio = "" if row["times_dp_sgd"] is None else f", {row['times_dp_sgd']:.2f} of dp-sgd's"
        start = "public" if row["begun"] else "random"
        cells = [
            start,
            row["method"],
            str(row["steps"]),
            f"{row['mean']:.3f}{spread}",
            *gaps,
            f"{row['seconds_a_step']:.2f} s{ratio}",
        ]
        lines.append(f"| {' | '.join(cells)} | {len(row['seeds'])} |")
    return "\n".join(lines) + "\n"


_GAPS = ("over_dp_sgd", "over_dp_sgd_layers")
