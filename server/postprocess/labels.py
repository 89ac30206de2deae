"""Decodes the stored answers of a study into label files.

``pipeline.finish`` and the commands call it. :func:`read_released` reads the ledger once; all later post-processing
uses its result. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from common.canonical import sha256_file
from common.events import EventLog
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.postprocess.decisions import rejected_labels
from server.protocols.query_protocol import protocol_of
from server.protocols.stored_labels import StoredLabels, store_label
from server.public.material import PairedFiles, Public
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Released:
    """The data of a study from which labels and networks are made.

    Attributes:
        public: The study's public material: terms, codec and public volumes.
        answers: The stored answers that the study may use.
        rejected: Pairs (volume's hash, SHA-256 of the label's file), one for each rejected label.
        labels_dir: Folder that labels are written to.
        student_dir: Folder that networks are written to.
        validation: Labelled public cases on which the student is scored.
    """

    public: Public
    answers: tuple[StoredAnswer, ...]
    rejected: frozenset[tuple[str, str]]
    labels_dir: Path
    student_dir: Path
    validation: tuple[PairedFiles, ...] = ()

    def labels(self) -> StoredLabels:
        """Return the decoded labels by volume hash, in query order, without the rejected ones."""
        return labels_in(self.labels_dir, self.public.volumes, rejected=self.rejected)


def read_released(workspace: Workspace, *, ledger_file: Path | None = None) -> Released:
    """Read a study's directory and ledger.

    Args:
        workspace: The study.
        ledger_file: A copy of the ledger to read in place of the study's own.

    Returns:
        The study's public material, stored answers and rejected labels.
    """
    public = workspace.public()
    with Ledger.open(ledger_file or workspace.ledger_file) as ledger:
        answers = tuple(ledger.answers(public.study.id))
    rejected = rejected_in(workspace)
    folders = workspace.labels_dir, workspace.student_dir
    return Released(public, answers, rejected, *folders, workspace.validation())


def rejected_in(workspace: Workspace) -> frozenset[tuple[str, str]]:
    """Return a study's rejected labels: pairs (volume's hash, SHA-256 of the label's file).

    Args:
        workspace: The study.

    Returns:
        The pairs.
    """
    return rejected_labels(workspace.decisions_file, workspace.study().id)


def labels_in(labels_dir: Path, volumes: Iterable[str], *, rejected: Collection[tuple[str, str]]) -> StoredLabels:
    """Return the decoded labels of a folder, without the rejected ones.

    Args:
        labels_dir: The study's folder of labels.
        volumes: Hashes of the public volumes.
        rejected: Pairs (volume's hash, SHA-256 of the label's file).

    Returns:
        The labels by volume, in the order of ``volumes``.
    """
    paths = {volume: label_file(labels_dir, volume) for volume in volumes}
    found = {volume: path for volume, path in paths.items() if path.exists()}
    return StoredLabels({v: path for v, path in found.items() if (v, sha256_file(path)) not in rejected})


def label_file(labels_dir: Path, volume: str) -> Path:
    """Return the path of a volume's label file.

    Args:
        labels_dir: The study's folder of labels.
        volume: The volume's hash.

    Returns:
        The path; the file may not exist.
    """
    return labels_dir / f"{volume}.npz"


def write_labels(released: Released, *, events: EventLog) -> None:
    """Decode every stored answer into ``labels/<volume>.npz``: float16 probabilities [c, x, y, z].

    If the protocol defines how large honest answers should be, the size of the answers is checked, and the result is
    logged for the operator.

    Args:
        released: Result of :func:`read_released`.
        events: The event log.
    """
    said = protocol_of(released.public.study).aggregate(released.public, released.answers)
    for label in said.labels():
        store_label(label_file(released.labels_dir, label.volume), label.probabilities)
        events.emit("label-decoded", volume=label.volume, query=label.query)
    if (plausible := said.weighed()) is not None:
        events.emit("answers-weighed", **plausible.event())
