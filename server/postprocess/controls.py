"""Controls: the student again, by the identical recipe, without what the teachers say about its volumes.

Same seed, volumes, network, steps and augmentation as the student; only the labels differ:

* ``zero_code``: every label is decoded from the zero code, with its release's voters and noise: what the decoder says
  when nobody answers. By every codec's promise that is its public mean shape, the same for every volume.
* ``shuffled_codes``: the stored noisy answers, dealt to the wrong volumes by a fixed derangement: the same codes, noise
  and variety, without the link from volume to code. Needs two labelled volumes; with one it is left out.
* ``public_only``: self-training on public data. The student of ``zero_code``, which has seen public volumes and the
  public mean shape and nothing else, labels the volumes itself (its soft predictions); a fresh student learns those.
  It is what a consortium gets without asking anybody, and usually the hardest control to beat.

Whatever the student scores above all three is what the teachers' answers gave it; whatever they score too, public data
and the recipe give anyway. The labels are made of public data and of noisy answers that the ledger stores and has
charged, so this is post-processing and costs no privacy. Refuses what the student refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float

from common.canonical import digest, sha256_bytes
from common.codecs import Codec, load_codec
from common.data.volume import volume_from_bytes
from common.errors import InvalidInput
from common.events import EventLog
from common.models.fit import predict
from server.ledger.server_ledger import Ledger
from server.postprocess.dealing import DERANGEMENT_SEED, derangement
from server.postprocess.decode import decode_answer
from server.postprocess.finish import PROGRESS_STEPS, FitFiles, as_stored, fit_labels, load_labels, load_model
from server.protocols.joint.study import fit_joint
from server.study.workspace import Workspace

CONTROLS = ("zero_code", "shuffled_codes", "public_only")


def fit_controls(workspace: Workspace, *, events: EventLog) -> None:
    """Train every control; weights land in ``student/controls/<name>.pt``. What is done is not trained again."""
    study = workspace.study()
    steps = study.student.steps
    for index, name in enumerate(CONTROLS):
        before = index * steps

        def on_step(step: int, _loss: float, *, before: int = before) -> None:
            if step % PROGRESS_STEPS == 0 or step == steps:
                events.emit("stage-progress", stage="controls", done=before + step, total=len(CONTROLS) * steps)

        if study.codec.joint:
            fitted = fit_joint(workspace, control=name, files=_files(workspace, name), on_step=on_step)
        else:
            labels = control_labels(workspace, name)  # in this order: the last one's are the first one's predictions
            if not labels:
                continue
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


def control_labels(workspace: Workspace, name: str) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """A control's labels by volume hash, the student's volumes in the student's order; float16 as its own are.

    Empty for ``shuffled_codes`` where the student has one volume only: there is no wrong one to deal its answer to.
    ``public_only`` needs the trained ``zero_code``.
    """
    own = load_labels(workspace)
    if not own:
        raise InvalidInput("pseudo-labels", value=0, limit="at least one", remedy="run the study first")
    match name:
        case "zero_code":
            return _zero_labels(workspace, own)
        case "shuffled_codes":
            volumes = list(own)
            if len(volumes) < 2:
                return {}
            dealt = derangement(len(volumes), seed=DERANGEMENT_SEED)
            return {volume: own[volumes[other]] for volume, other in zip(volumes, dealt, strict=True)}
        case "public_only":
            data = workspace.study().data
            images = [volume_from_bytes(workspace.objects.get(volume), data).image for volume in own]
            labels = self_labels(load_control(workspace, "zero_code"), images)
            return dict(zip(own, labels, strict=True))
        case _:
            raise InvalidInput("control", value=name, limit=", ".join(CONTROLS))


def self_labels(
    model: torch.nn.Module, images: Iterable[Float[np.ndarray, "c x y z"]]
) -> list[Float[np.ndarray, "k x y z"]]:
    """A student's own soft predictions on its volumes, as labels for the next student (self-training)."""
    return [as_stored(predict(model, image)) for image in images]


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
    return FitFiles.at(workspace.student_dir / "controls", name)
