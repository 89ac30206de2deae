"""Controls: the student again, by the identical recipe, without what the teachers say about its volumes.

Same seed, volumes, network, steps and augmentation as the student; only the labels differ:

* ``zero_code``: every label is decoded from the zero code, with its release's voters and noise: what the decoder says
  when nobody answers. By every codec's promise that is its public mean shape, the same for every volume.
* ``shuffled_codes``: the stored noisy answers, dealt to the wrong volumes by a fixed derangement: the same codes, noise
  and variety, without the link from volume to code. Needs two labelled volumes; with one it is left out.
* ``public_only``: every label is the soft mean of the public label maps, as far as the codec keeps it
  (:func:`public_mean`). It differs little from ``zero_code``, and the docstring there says in what.

Whatever the student scores above all three is what the teachers' answers gave it; whatever they score too, public data
and the recipe give anyway. The labels are made of public data and of noisy answers that the ledger stores and has
charged, so this is post-processing and costs no privacy. Refuses what the student refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import softmax

from common.canonical import digest, sha256_bytes
from common.codecs import Codec, load_codec, shapes
from common.codecs.pca import PcaCodec
from common.errors import InvalidInput
from common.events import EventLog
from common.ledger.store import Ledger
from server.decode import decode_answer
from server.finish import PROGRESS_STEPS, FitFiles, as_stored, fit_labels, load_labels, load_model
from server.workspace import Workspace

CONTROLS = ("zero_code", "shuffled_codes", "public_only")

DERANGEMENT_SEED = 0
"""Fixes who gets whose answer in ``shuffled_codes``; it protects nothing."""


def fit_controls(workspace: Workspace, *, events: EventLog) -> None:
    """Train every control; weights land in ``student/controls/<name>.pt``. What is done is not trained again."""
    study = workspace.study()
    steps = study.student.steps
    for index, (name, labels) in enumerate(control_labels(workspace).items()):
        before = index * steps

        def on_step(step: int, _loss: float, *, before: int = before) -> None:
            if step % PROGRESS_STEPS == 0 or step == steps:
                events.emit("stage-progress", stage="controls", done=before + step, total=len(CONTROLS) * steps)

        hashes = [[volume, sha256_bytes(label.tobytes())] for volume, label in labels.items()]
        fitted = fit_labels(
            workspace,
            labels,
            files=_files(workspace, name),
            inputs=digest("control-inputs", [name, study.id, repr(study.student), hashes]),
            on_step=on_step,
        )
        if fitted is not None:
            events.emit("control-trained", name=name, weights=fitted.weights, seconds=fitted.seconds)


def control_labels(workspace: Workspace) -> dict[str, dict[str, Float[np.ndarray, "c x y z"]]]:
    """The controls' labels by volume hash, the student's volumes in the student's order; float16 as its own are.

    Without ``shuffled_codes`` where the student has one volume only: there is no wrong one to deal its answer to.
    """
    own = load_labels(workspace)
    if not own:
        raise InvalidInput("pseudo-labels", value=0, limit="at least one", remedy="run the study first")
    public = as_stored(public_mean(workspace_codec(workspace)))
    labels = {"zero_code": _zero_labels(workspace, own)}
    if len(own) > 1:
        volumes = list(own)
        dealt = derangement(len(volumes), seed=DERANGEMENT_SEED)
        labels["shuffled_codes"] = {volume: own[volumes[other]] for volume, other in zip(volumes, dealt, strict=True)}
    labels["public_only"] = dict.fromkeys(own, public)
    return labels


def derangement(count: int, *, seed: int) -> tuple[int, ...]:
    """A permutation of 0 … count - 1 that leaves nothing in its place: one random cycle through all of them.

    Source: Sattolo 1986. The same arguments give the same permutation. Fewer than two have none and are refused.
    """
    if count < 2:
        raise InvalidInput(
            "answers to deal to the wrong volumes", value=count, limit="at least 2", remedy="plan two queries or more"
        )
    draws = np.random.default_rng(seed)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(draws.integers(last))  # never ``last`` itself: so one cycle, and no fixed point
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def public_mean(codec: Codec) -> Float[np.ndarray, "c x y z"]:
    """The soft mean of the public label maps the codec was fitted on, as far as the codec keeps it; float32.

    The server stores no label map, only the codec fitted on them. ``pca`` keeps their mean averaged over blocks of
    voxels, as log-ratios of probabilities lifted by a floor; undone, that is the mean itself at the codec's resolution,
    exactly. From the zero code's label it differs in two ways: by the floor (there no structure is ever less likely
    than about one in a hundred, here its probability is 0 where no public map has it), and between block centres
    probabilities are interpolated, not log-ratios. Any other codec keeps nothing but the zero code's label, and gets
    that: its control then trains the very student of ``zero_code``, and is no second piece of evidence.
    """
    if not isinstance(codec, PcaCodec):
        return codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    floor = shapes.PROBABILITY_FLOOR
    lifted = softmax(np.concatenate([np.zeros_like(codec.centre[:1]), codec.centre]), axis=0)
    pooled = np.maximum(lifted * (1 + codec.labels * floor) - floor, 0)
    mean = shapes.enlarge(pooled, factor=codec.grid[0] // pooled.shape[1])
    result: np.ndarray = (mean / mean.sum(axis=0, keepdims=True)).astype(np.float32)
    return result


def workspace_codec(workspace: Workspace) -> Codec:
    """The study's codec."""
    name = workspace.codec().sha256
    return load_codec(workspace.objects.get(name), expected_hash=name)


def control_trained(workspace: Workspace, name: str) -> bool:
    """Whether this control has weights."""
    return _files(workspace, name).weights.exists()


def load_control(workspace: Workspace, name: str) -> torch.nn.Module:
    """A trained control, ready to predict."""
    if not control_trained(workspace, name):
        raise InvalidInput("there is no such control yet", value=name, remedy="run `consilium study resume`")
    return load_model(workspace, _files(workspace, name).weights)


def _zero_labels(workspace: Workspace, own: Mapping[str, np.ndarray]) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """The zero code in place of each volume's answer, decoded as that answer was."""
    codecs: dict[str, Codec] = {}
    decoded: dict[tuple[str, int, Fraction], np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(workspace.study().id)
    for answer in answers:
        name, noise = answer.query.codec, answer.query.mechanism.noise_std
        if name not in codecs:
            codecs[name] = load_codec(workspace.objects.get(name), expected_hash=name)
        key = (name, answer.voters, noise)
        if key not in decoded:
            silence = np.zeros_like(answer.noisy_sum)
            decoded[key] = as_stored(decode_answer(codecs[name], silence, voters=answer.voters, noise_std_int=noise))
        labels |= dict.fromkeys(answer.query.volumes, decoded[key])
    return {volume: labels[volume] for volume in own}


def _files(workspace: Workspace, name: str) -> FitFiles:
    folder: Path = workspace.student_dir / "controls"
    return FitFiles(
        weights=folder / f"{name}.pt", inputs=folder / f"{name}.inputs", checkpoint=folder / f"{name}.checkpoint"
    )
