"""Trains a network with DP-SGD at each hospital and keeps it near the hospitals' mean (MR-MTL, Liu et al. 2022).

`consilium bench utility --central` calls it, to compare the student with these networks. All hospitals take each
training step together. After it, each network is moved towards the mean of all hospitals' weights. The mean uses only
weights that are already private. So it costs no further budget (post-processing, adaptive composition): each patient
has the (ε, δ) of the training at their own hospital. Sampling, clipping, noise and accounting are those of the
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from client.records.journal import TrainingJournal
from client.training.contract import VoterData
from client.training.private.descent import cosine
from client.training.private.engine import run
from client.training.private.gradients import Weights, load_weights_into
from client.training.private.settings import PrivateSettings
from client.training.private.strategies_3d import Patients, VolumeSgd
from client.training.private.teachers import Setup, sgd, untrained
from research.bench import Bench
from server.protocols.public_start import Start

STRENGTH = 10.0
"""The weight λ of the term that keeps a hospital's network near the mean. 0 would train every hospital alone."""


def at_silos(
    bench: Bench, start: Start | None, *, strength: float = STRENGTH
) -> tuple[list[torch.nn.Module], torch.nn.Module]:
    """Train every hospital's network at the setting's (ε, δ) for one patient, replace-one.

    Args:
        bench: The setting and seed.
        start: The public start, if any.
        strength: Weight λ with which each network is kept near the mean.

    Returns:
        Every hospital's network, and the network of their mean weights.
    """
    settings = bench.dp_sgd(start)
    parts = [VoterData(site.images, site.labels, bench.classes) for site in bench.roles.private]
    journals = [TrainingJournal(settings.plan(patients=len(part.images))) for part in parts]
    silos = [_silo(bench, part, settings, start, key=own.key) for part, own in zip(parts, journals, strict=True)]
    rates = iter([cosine(settings.learning_rate)(step, settings.steps) for step in range(settings.steps)])

    def move_towards_mean() -> None:
        mean, share = _mean(silos), min(1.0, next(rates) * strength)
        for silo in silos:
            for name, weights in silo.weights.items():
                weights.lerp_(mean[name], share)

    barrier = Barrier(len(silos), action=move_towards_mean)  # the last network to finish a step moves all of them

    def wait(_spent: int) -> None:
        barrier.wait()

    def train(silo: VolumeSgd, journal: TrainingJournal) -> None:
        try:
            run(silo, journal, on_step=wait)
        except BaseException:
            barrier.abort()  # so that no other network waits for this one
            raise

    with ThreadPoolExecutor(len(silos)) as pool:
        list(pool.map(train, silos, journals))
    return [_network(bench, silo.weights) for silo in silos], _network(bench, _mean(silos))


def _silo(bench: Bench, part: VoterData, settings: PrivateSettings, start: Start | None, *, key: bytes) -> VolumeSgd:
    """Return a DP-SGD trainer for a hospital's patients.

    It begins at the public start if there is one, otherwise at the same random weights at every hospital.
    """
    model = untrained(part, bench.setting.teacher, seed=bench.seed)
    if start is not None:
        model.load_state_dict(start.model.state_dict())
    patients = Patients(part.images, part.labels, part.slots, classes=part.classes, key=key)
    return sgd(Setup(model, patients, settings, len(part.images), bench.seed, start is not None))


def _mean(silos: Sequence[VolumeSgd]) -> dict[str, torch.Tensor]:
    names = silos[0].weights
    return {name: torch.stack([silo.weights[name] for silo in silos]).mean(dim=0) for name in names}


def _network(bench: Bench, weights: Weights) -> torch.nn.Module:
    model = bench.empty(bench.setting.teacher)
    load_weights_into(model, weights)
    return model.eval()
