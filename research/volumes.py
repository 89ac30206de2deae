"""Trains and tests the 3D cells of the papers' benchmark: one site of 160 patients, every strategy beside public
baselines.

``papers`` calls it. The hippocampus task is split once: 160 patients of the site, 12 public images, 8 public label maps
of other patients, and 20 test cases used for nothing else. A cell is a method at (ε, δ) and a seed, which determines
initial weights and public start; batches and noise come from the CSPRNG. Baselines are the mean shape of the site's own
labels, the public start as it is, and the standard trainer, which gives no guarantee.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from client.records.journal import TrainingJournal
from client.teachers.teacher import Posterior, averaged
from client.training.contract import VoterData
from client.training.private.settings import PrivateSettings, defaults
from client.training.private.teachers import train_privately
from client.training.standard import StandardTrainer
from common.calibration import NOTHING, reliability
from common.canonical import digest
from common.config import STUDENT_RECIPE, DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.metrics import dice_per_class, mean_present
from common.models.fit import predict
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.privacy.mechanism import Unit
from common.privacy.training import Neighbours, epsilon_of
from research.bench import Bench
from research.recipes import changes_text, with_fields
from research.roles import CaseRoles, Cases, load_cases
from research.setting import Setting

DATA = DataConfig(labels=("background", "anterior", "posterior"), spacing_mm=(1, 1, 1), grid=(32, 48, 32))
TEST, PUBLIC_IMAGES, PUBLIC_MAPS, PATIENTS = 20, 12, 8, 160
SPLIT = 8
"""Seed of the split. Recipes were chosen on 20 of the 160 patients, never on the test cases."""

EPSILON, DELTAS = 8.0, (1e-5, 1e-4)
PRIVATE = ("dp-sgd", "dp-sgd-layers", "dp-bbb")
LAYER_CLIP = 0.02
"""Clipping norm of every layer in dp-sgd-layers. It is below the usual norm of a layer's gradient, so all layers count
alike.
"""

NETWORK, START = TrainingConfig(), STUDENT_RECIPE
"""Default recipes of a study's teachers and of its public start."""


@dataclass(frozen=True, slots=True)
class VolumeCell:
    """One number of the 3D table.

    Attributes:
        method: Name of the method. Private methods use their own default recipe; ``dp-sgd-layers`` is dp-sgd with a
            clipping norm for each layer.
        begun: True to start from the public start, False from random weights.
        epsilon: ε; None for a method without a guarantee.
        delta: δ; None for a method without a guarantee.
        seed: The seed.
        changes: Changed fields of the recipe.
    """

    method: str
    begun: bool
    epsilon: float | None
    delta: float | None
    seed: int
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The method's name in the table."""
        return f"{self.method}{'' if self.begun else '-random'}{changes_text(dict(self.changes))}"

    @property
    def id(self) -> str:
        """The cell's name."""
        at = "none" if self.epsilon is None else f"{self.epsilon:g}/{self.delta:g}"
        return f"hippocampus/{self.name}/{at}/{self.seed}"

    @property
    def training(self) -> str:
        """Hash of everything that determines the result; it identifies the cell's journal."""
        return digest("volume-cell", json.dumps(self.to_json(), sort_keys=True))

    def settings(self) -> PrivateSettings | None:
        """Return the strategy's recipe; None for a method without a guarantee."""
        if self.epsilon is None or self.delta is None:
            return None
        own = recipe_of(self.method, epsilon=self.epsilon, delta=self.delta, begun=self.begun)
        return with_fields(own, dict(self.changes))

    def to_json(self) -> dict[str, Any]:
        """Return everything that determines the result; a cell whose recipe changed is run again."""
        private = self.settings()
        recipe = {"network": list(NETWORK.channels), "public start": repr(START), "standard": repr(NETWORK)}
        if private is not None:
            recipe |= {name: str(value) for name, value in private.facts().items()}
        facts = {"data": "hippocampus", "name": self.name, "epsilon": self.epsilon, "delta": self.delta}
        return {**facts, "seed": self.seed, "recipe": recipe}


def recipe_of(method: str, *, epsilon: float, delta: float, begun: bool) -> PrivateSettings:
    """Return a method's default recipe; ``dp-sgd-layers`` is dp-sgd with a clipping norm for each layer."""
    own = defaults(method.removesuffix("-layers"), epsilon=epsilon, delta=delta, begun=begun)
    return dataclasses.replace(own, clip=LAYER_CLIP, per_layer=True) if method.endswith("-layers") else own


def changed_volume(cell: VolumeCell, changes: Mapping[str, str]) -> VolumeCell:
    """Return the private cell with some fields of :class:`PrivateSettings` changed, under a name that states the
    changes.

    Raises:
        InvalidInput: For a cell without a guarantee, an unknown field or a wrong value.
    """
    result = dataclasses.replace(cell, changes=tuple(sorted(changes.items())))
    if cell.epsilon is None:
        raise InvalidInput("--set", value=cell.id, limit="private cells", remedy="--only hippocampus/dp-sgd")
    result.settings()
    return result


def volume_cells(seeds: int) -> list[VolumeCell]:
    """Return every 3D cell, the private ones from a public start first, those from random weights last."""
    cells = []
    for seed in range(seeds):
        cells += [VolumeCell(method, True, EPSILON, DELTAS[0], seed) for method in PRIVATE]
        cells += [VolumeCell(method, True, None, None, seed) for method in ("public-start", "standard")]
        cells += [VolumeCell(method, True, EPSILON, DELTAS[1], seed) for method in PRIVATE]
    cells.append(VolumeCell("mean-shape", True, None, None, 0))
    for seed in range(seeds):
        cells.append(VolumeCell("standard", False, None, None, seed))
        cells += [VolumeCell(method, False, EPSILON, DELTAS[0], seed) for method in PRIVATE]
    return cells


def split(cases: Cases) -> CaseRoles:
    """Return the fixed split of the cases."""
    order = np.random.default_rng(SPLIT).permutation(len(cases))
    test, images, maps, private = np.split(order, np.cumsum([TEST, PUBLIC_IMAGES, PUBLIC_MAPS]))
    return CaseRoles(private=(cases[private[:PATIENTS]],), public=cases[images], maps=cases[maps], held_out=cases[test])


@lru_cache(maxsize=1)
def _roles(directory: str) -> CaseRoles:
    return split(load_cases(Path(directory) / "Task04_Hippocampus", DATA))


def run_volume_cell(cell: VolumeCell, directory: Path, cache: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one cell. No setting is chosen by the test cases.

    Args:
        cell: The cell.
        directory: Folder of the data sets.
        cache: Folder of public starts.
        checkpoint: File from which an interrupted cell continues.

    Returns:
        The result as plain JSON.
    """
    started, roles = time.monotonic(), _roles(str(directory))
    cache.mkdir(parents=True, exist_ok=True)
    answer, facts = _trained(cell, roles, cache, checkpoint)
    result: dict[str, Any] = {"cell": cell.to_json(), "id": cell.id, "epsilon": cell.epsilon, "delta": cell.delta}
    result |= facts | scores(answer, roles.held_out)
    return result | {"seconds": round(time.monotonic() - started, 1)}


Answer = Callable[[Float[np.ndarray, "c x y z"]], Float[np.ndarray, "k x y z"]]


def _trained(cell: VolumeCell, roles: CaseRoles, cache: Path, checkpoint: Path | None) -> tuple[Answer, dict[str, Any]]:
    """Return the prediction function of the cell's method, and facts about its training."""
    site, classes = roles.private[0], len(DATA.labels)
    if cell.method == "mean-shape":
        shape = np.stack([(site.labels == k).mean(axis=0) for k in range(classes)])
        return lambda _image: shape, {}
    study = Setting("joint", 2, 1, EPSILON, DELTAS[0], Unit("patient"), 1, NETWORK, START)
    bench = Bench(study, roles, DATA, seed=cell.seed, cache=cache)
    codec = bench.codec
    begun = bench.start() if cell.begun else None
    if cell.method == "public-start":
        assert begun is not None
        return lambda image: predict(begun.model, image), {}
    start = bench.start_file() if cell.begun else None
    part = VoterData(site.images, site.labels, classes)
    settings = cell.settings()
    if settings is None:
        trained = StandardTrainer(start=start).train(part, NETWORK, seed=cell.seed)
        return lambda image: predict(trained.model, image), {}
    plan = settings.plan(patients=len(site))
    journal = TrainingJournal(plan)
    if checkpoint is not None:  # an interrupted cell continues; the charge of an interrupted step stays
        name = cell.training
        journal = TrainingJournal.open(checkpoint.with_suffix(f".{name[:16]}.journal"), plan, identity=name)
    done = train_privately(part, NETWORK, settings, journal, seed=cell.seed, start=start, checkpoint=checkpoint)
    facts: dict[str, Any] = {
        "noise_multiplier": float(plan.event.noise_multiplier),
        "relation": str(settings.neighbours),
        "replace_one_epsilon": epsilon_of(plan.event, delta=settings.delta, neighbours=Neighbours.REPLACE_ONE),
    }
    if done.deviations is None:
        return lambda image: predict(done.model, image), facts
    posterior = Posterior(tuple(done.deviations.values()), seed=cell.seed)
    networks = tuple(posterior.around(done.model))
    sampled: Answer = lambda image: np.stack([predict(network, image) for network in networks])  # noqa: E731
    drawn: Answer = lambda image: _mean(sampled(image))  # noqa: E731
    answers = [sampled(image) for image in roles.held_out.images]
    facts["code_length"] = [
        statistics.fmean(float(np.linalg.norm(codec.encode(each(samples)))) for samples in answers)
        for each in (averaged, _mean)
    ]
    for name, plain in (("mean_network", lambda image: predict(done.model, image)), ("mean_of_samples", drawn)):
        found = scores(plain, roles.held_out)
        facts |= {name: found["score"], f"{name}_ece": found["ece"], f"{name}_reliability": found["reliability"]}
    return lambda image: averaged(sampled(image)), facts


def _errors(row: dict[str, Any]) -> str:
    if "mean_network_ece" not in row:
        return ""
    return f" (ECE {row['mean_network_ece']:.4f} and {row['mean_of_samples_ece']:.4f})"


def _mean(samples: Float[np.ndarray, "s k x y z"]) -> Float[np.ndarray, "k x y z"]:
    result: np.ndarray = samples.mean(axis=0)
    return result


def scores(answer: Answer, cases: Cases) -> dict[str, Any]:
    """Return the scores of a prediction function on cases.

    Args:
        answer: Returns the probabilities for an image.
        cases: The cases.

    Returns:
        ``score``, the mean of the structures' mean Dice; ``cases``, each case's mean over structures; ``ece`` and
        ``reliability``, over the voxels of a structure in either label map of all cases.
    """
    each, sure = [], NOTHING
    for image, label in zip(cases.images, cases.labels, strict=True):
        probabilities = answer(image)
        each.append(dice_per_class(probabilities.argmax(axis=0).astype(np.uint8), label, len(DATA.labels)))
        sure += reliability(probabilities, label)
    structures = [mean_present(values) for values in zip(*each, strict=True)]
    return {
        "score": statistics.fmean(structures),
        "structures": structures,
        "cases": [round(mean_present(values), 4) for values in each],
        "ece": sure.error,
        "reliability": [list(point) for point in sure.points],
    }


def volume_rows(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method and (ε, δ): mean and deviation over seeds, and the difference to DP-SGD seed by
    seed.
    """
    groups: dict[tuple[str, float | None, float | None], dict[int, dict[str, Any]]] = {}
    for result in results:
        cell = result["cell"]
        groups.setdefault((cell["name"], cell["epsilon"], cell["delta"]), {})[cell["seed"]] = result
    rows = []
    for (name, epsilon, delta), members in groups.items():
        found = [member["score"] for member in members.values()]
        first = next(iter(members.values()))
        row: dict[str, Any] = {
            "data": "hippocampus",
            "method": name,
            "epsilon": epsilon,
            "delta": delta,
            "mean": statistics.fmean(found),
            "sd": statistics.stdev(found) if len(found) > 1 else None,
            "seeds": len(found),
            "structures": [
                statistics.fmean(column)
                for column in zip(*(member["structures"] for member in members.values()), strict=True)
            ],
            "recipe": first["cell"]["recipe"],
        }
        for key in ("noise_multiplier", "relation", "replace_one_epsilon"):
            if key in first:
                row[key] = first[key]
        for key in ("ece", "mean_network", "mean_of_samples", "mean_network_ece", "mean_of_samples_ece"):
            if key in first:
                row[key] = statistics.fmean(member[key] for member in members.values())
        if "code_length" in first:
            row["code_length"] = [
                statistics.fmean(column)
                for column in zip(*(member["code_length"] for member in members.values()), strict=True)
            ]
        own, bracket, changes = name.partition("[")
        random = "-random" if own.endswith("-random") else ""
        other = groups.get((f"dp-sgd{random}{bracket}{changes}", epsilon, delta), {})
        gaps = [np.mean(np.subtract(members[seed]["cases"], other[seed]["cases"])) for seed in members if seed in other]
        row["over_dp_sgd"] = float(np.mean(gaps)) if gaps else None
        rows.append(row)
    return rows


def volume_markdown(rows: list[dict[str, Any]]) -> list[str]:
    """Render the 3D table as Markdown lines."""
    if not rows:
        return []
    lines = [
        f"### hippocampus: Dice on {TEST} test cases, one site of {PATIENTS} patients",
        "",
        "unit patient, relation add-remove, Poisson sampling, PLD accountant; `-random`: not from the public start",
        "",
        "| method | ε | δ | z | Dice | anterior, posterior | over dp-sgd | ECE | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(rows, key=lambda r: (r["epsilon"] is not None, r["method"], r["delta"] or 0))
    for row in order:
        at = ("∞", "–", "–")
        if row["epsilon"] is not None:
            at = (epsilon_text(row["epsilon"]), delta_text(row["delta"]), noise_text(row["noise_multiplier"], 4))
        spread = "" if row["sd"] is None else f" ± {row['sd']:.4f}"
        structures = ", ".join(f"{value:.3f}" for value in row["structures"])
        gap = "–" if row["over_dp_sgd"] is None else f"{row['over_dp_sgd']:+.4f}"
        error = f"{row['ece']:.3f}" if "ece" in row else "–"  # cells of earlier versions have none
        columns = (row["method"], *at, f"{row['mean']:.4f}{spread}", structures, gap, error, row["seeds"])
        lines.append(f"| {' | '.join(map(str, columns))} |")
    lines.append("")
    for row in order:
        if "code_length" in row:
            shorter, plain = row["code_length"]
            lines.append(
                f"{row['method']} at δ {delta_text(row['delta'])}: mean network {row['mean_network']:.4f}, mean of "
                f"samples {row['mean_of_samples']:.4f}{_errors(row)}; length of the code {plain:.4f}, shortened "
                f"by disagreement {shorter:.4f}"
            )
    return [*lines, ""]
