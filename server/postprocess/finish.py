"""After the answers: pseudo-labels, the student, the bundle. All of it post-processing of what the ledger stores.

Each step writes whole files and can be repeated; a finished one is not repeated. Refuses to train without a single
stored answer.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from common.bundle_archive import pack
from common.canonical import digest, sha256_file
from common.codecs import load_codec
from common.data.volume import volume_from_bytes
from common.data.volume_cache import VolumeCache, together
from common.errors import InvalidInput
from common.events import EventLog
from common.ledger.chain import Clock, body_digest, format_time, utc_now
from common.ledger.keys import load_signing_key
from common.ledger.receipts import Link
from common.models.bundle_facts import BundlePrivacy
from common.models.fit import OnStep
from common.models.student_bundle import export_bundle
from common.models.unet import build_unet, load_weights, save_weights
from common.objects import write_atomically
from common.privacy.calibration import noise_multiplier
from common.privacy.mechanism import AccountantName
from common.student_statement import StudentStatement
from server.ledger.server_ledger import Ledger
from server.operations.objects_app import statement_file
from server.postprocess.decisions import rejected_labels
from server.postprocess.decode import decode_answer
from server.postprocess.student import train_student
from server.study.workspace import Workspace

STUDENT_SEED = 0
"""Seeds the student's initial weights and batches; it protects nothing, so it may be fixed."""

PROGRESS_STEPS = 20
CACHE_BYTES = 1 << 29
"""Volumes and labels held in memory while a student is trained; more lies in files."""


@dataclass(frozen=True, slots=True)
class FitFiles:
    """Where a training run keeps its weights, the digest of what they were trained on, and its checkpoint."""

    weights: Path
    inputs: Path
    checkpoint: Path

    @classmethod
    def at(cls, folder: Path, name: str = "") -> FitFiles:
        """The files of the network ``name`` in ``folder``; of the only one there by default."""
        if not name:
            return cls(folder / "weights.pt", folder / "inputs", folder / "checkpoint.pt")
        return cls(folder / f"{name}.pt", folder / f"{name}.inputs", folder / f"{name}.checkpoint")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A training run that was done now: the SHA-256 of its weights, and its seconds."""

    weights: str
    seconds: float


def decode_labels(workspace: Workspace, *, events: EventLog) -> None:
    """Decode every stored answer of the study into ``labels/<volume>.npz``: float16 probabilities [c, x, y, z].

    Answers of a joint query are also held against what was expected of them, for the operator's eyes.
    """
    from server.protocols.joint.study import decode_joint, weigh

    joint = workspace.study().codec.joint
    decoded = decode_joint(workspace) if joint else _single_labels(workspace)
    for volume, query, probabilities in decoded:
        stream = io.BytesIO()
        np.savez_compressed(stream, probabilities=probabilities.astype(np.float16))
        write_atomically(workspace.labels_dir / f"{volume}.npz", stream.getvalue())
        events.emit("label-decoded", volume=volume, query=query)
    if joint and (plausible := weigh(workspace)) is not None:
        events.emit("answers-weighed", **plausible.event())


def _single_labels(workspace: Workspace) -> Iterator[tuple[str, str, Float[np.ndarray, "c x y z"]]]:
    """(volume, query id, probabilities) of every stored answer."""
    codecs = {}
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(workspace.study().id)
    for answer in answers:
        name, noise_std_int = answer.query.codec, answer.query.mechanism.noise_std
        if name not in codecs:
            codecs[name] = load_codec(workspace.objects.get(name), expected_hash=name)
        (volume,) = answer.query.volumes
        yield (
            volume,
            answer.query.id,
            decode_answer(codecs[name], answer.noisy_sum, voters=answer.voters, noise_std_int=noise_std_int),
        )


class StoredLabels(Mapping[str, Float[np.ndarray, "c x y z"]]):
    """Decoded labels by volume hash, read from their files one at a time: sixteen of BraTS size would not fit."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    def __getitem__(self, volume: str) -> Float[np.ndarray, "c x y z"]:
        with np.load(self._files[volume], allow_pickle=False) as stored:
            return as_stored(stored["probabilities"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_labels(workspace: Workspace) -> StoredLabels:
    """Decoded pseudo-label probabilities (float32) by volume hash, in query order; those that stand rejected in
    ``decisions.jsonl`` of the study's directory are left out."""
    files = {}
    rejected = rejected_labels(workspace.decisions_file, workspace.study().id)
    for volume in workspace.volumes():
        path = workspace.labels_dir / f"{volume}.npz"
        if path.exists() and (volume, sha256_file(path)) not in rejected:
            files[volume] = path
    return StoredLabels(files)


def as_stored(probabilities: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "c x y z"]:
    """Probabilities as a student sees them: rounded to float16 as in their file, then float32 summing to 1."""
    rounded = probabilities.astype(np.float16).astype(np.float32)
    result: np.ndarray = rounded / rounded.sum(axis=0, keepdims=True)
    return result


def fit_student(workspace: Workspace, *, events: EventLog) -> None:
    """Train the student on the pseudo-labels; weights land in ``student/weights.pt``. Resumes from a checkpoint."""
    study = workspace.study()
    labels = load_labels(workspace)
    if not labels:
        raise InvalidInput("pseudo-labels", value=0, limit="at least one", remedy="run the study first")
    total = study.student.steps

    def on_step(step: int, loss: float) -> None:
        if step % PROGRESS_STEPS == 0 or step == total:
            events.emit("student-step", step=step, total=total, loss=round(loss, 5))

    files = FitFiles.at(workspace.student_dir)
    if study.codec.joint:
        from server.protocols.joint.study import fit_joint

        fitted = fit_joint(workspace, files=files, on_step=on_step)
    else:
        inputs = digest("student-inputs", [study.id, repr(study.student), _label_hashes(workspace, labels)])
        fitted = fit_labels(workspace, labels, files=files, inputs=inputs, on_step=on_step)
    if fitted is not None:
        events.emit("student-trained", weights=fitted.weights, seconds=fitted.seconds)


def fit_labels(
    workspace: Workspace,
    labels: Mapping[str, Float[np.ndarray, "c x y z"]],
    *,
    files: FitFiles,
    inputs: str,
    on_step: OnStep,
) -> Fitted | None:
    """Train a fresh network by the study's student recipe and seed on ``labels`` (by volume hash), or resume it.

    ``inputs``: digest of all that shapes the result. None, and nothing done, where weights for these inputs exist.
    """

    def train() -> torch.nn.Module:
        data = workspace.study().data
        with VolumeCache(files.weights.with_suffix(".cache"), budget_bytes=CACHE_BYTES) as cache:
            images = [cache.keep(volume_from_bytes(workspace.objects.get(name), data).image) for name in labels]
            model, _ = train_student(
                together(images),
                together([cache.keep(label) for label in labels.values()]),
                workspace.study().student,
                seed=STUDENT_SEED,
                checkpoint=files.checkpoint,
                on_step=on_step,
            )
        return model

    return fit_once(train, files=files, inputs=inputs)


def fit_once(train: Callable[[], torch.nn.Module], *, files: FitFiles, inputs: str) -> Fitted | None:
    """Train and keep the weights, unless weights for these ``inputs`` are kept already: then None."""
    if files.weights.exists() and files.inputs.exists() and files.inputs.read_text(encoding="utf-8") == inputs:
        return None
    files.weights.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    name = save_weights(files.weights, train())
    write_atomically(files.inputs, inputs.encode())
    return Fitted(weights=name, seconds=round(time.monotonic() - started, 3))


def public_images(workspace: Workspace, volumes: Sequence[str]) -> Float[np.ndarray, "n c x y z"]:
    """Public volumes by content hash, on the study's grid."""
    data = workspace.study().data
    return np.stack([volume_from_bytes(workspace.objects.get(volume), data).image for volume in volumes])


def load_student(workspace: Workspace) -> torch.nn.Module:
    """The trained student, ready to predict."""
    path = workspace.student_dir / "weights.pt"
    if not path.exists():
        raise InvalidInput("there is no student yet", remedy="run `consilium student train`")
    return load_model(workspace, path)


def load_model(workspace: Workspace, path: Path) -> torch.nn.Module:
    """A network of the study's student recipe with the weights in ``path``, ready to predict."""
    study = workspace.study()
    model = build_unet(
        study.student.channels, in_channels=len(study.data.channels), out_channels=len(study.data.labels)
    )
    load_weights(path, model)
    model.eval()
    return model


def export_student(workspace: Workspace, *, events: EventLog, clock: Clock = utc_now) -> None:
    """Export the student as a MONAI bundle in ``bundle/`` with what its labels cost, read from the ledger; publish it.

    Its archive goes into the object store, and a signed statement about it beside the objects. Nothing is published
    anew while bundle and ledger are those of the statement that stands there.
    """
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        guarantees = ledger.study_guarantees(study.id)
        answers = ledger.answers(study.id)
        costs = [ledger.spent(declared.pool, study.id).mu_squared for declared in ledger.pools()]
        head = ledger.head()
        links = tuple(
            Link(time_utc=row.time_utc, kind=row.kind, body_sha256=body_digest(row.body))
            for row in ledger.rows()
            if row.seq <= head.seq
        )
    if not answers:
        raise InvalidInput("stored answers", value=0, limit="at least one", remedy="run the study first")
    protection = study.privacy.protection
    facts = BundlePrivacy(
        budget_epsilon=study.privacy.epsilon,
        epsilon_exact=guarantees[AccountantName.EXACT].epsilon,
        epsilon_rdp=guarantees[AccountantName.RDP].epsilon,
        delta=study.privacy.delta,
        protection=protection,
        accountant=study.privacy.accountant,
        queries=len(answers),
        noise_multiplier=min(noise_multiplier(answer.query.mechanism, protection) for answer in answers),
        sites=max(len(answer.roster) for answer in answers),
        voters_per_site=study.privacy.voters_per_site,
        ledger_head=head.hash,
        study=study.id,
        codec=answers[0].query.codec,
        epsilon_paper=guarantees[AccountantName.PAPER].epsilon
        if study.privacy.accountant is AccountantName.PAPER
        else None,
    )
    files = export_bundle(workspace.bundle_dir, study=study, model=load_student(workspace), privacy=facts)
    archive = pack({name: (workspace.bundle_dir / name).read_bytes() for name in files})
    statement = StudentStatement(
        study_id=study.id,
        bundle=workspace.objects.put(archive),
        size=len(archive),
        queries=len(answers),
        mu_squared=max(costs),
        head=head,
        links=links,
        created_utc=format_time(clock()),
    )
    publish_statement(workspace, statement)
    events.emit("bundle-exported", sha256=statement.bundle)


def publish_statement(workspace: Workspace, statement: StudentStatement) -> None:
    """Sign a statement and put it where sites ask for it, unless one that says the same stands there already."""
    path = statement_file(workspace.objects_dir, statement.study_id)
    signed = statement.signed(load_signing_key(workspace.signing_key_file))
    with contextlib.suppress(OSError, InvalidInput):
        standing = StudentStatement.parse(path.read_bytes())
        if replace(signed, created_utc=standing.created_utc, signature="") == replace(standing, signature=""):
            return
    write_atomically(path, signed.render())


def _label_hashes(workspace: Workspace, labels: Mapping[str, np.ndarray]) -> list[str]:
    files: list[Path] = [workspace.labels_dir / f"{volume}.npz" for volume in labels]
    return [sha256_file(path) for path in files]
