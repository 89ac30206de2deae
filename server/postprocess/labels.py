"""Decodes the stored answers of a study into label files.

``pipeline.finish`` and the commands call it. :func:`read_released` reads the ledger once; all later post-processing
uses its result. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.events import EventLog
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.postprocess.decisions import rejected_labels
from server.protocols.query_protocol import protocol_of
from server.protocols.stored_labels import StoredLabels
from server.public.material import PairedFiles, PublicMaterial
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Released:
    """The data of a study from which labels and networks are made.

    Attributes:
        public: The study's public material: terms, codec and public volumes.
        answers: The stored answers that the study may use.
        labels: The decoded labels by volume hash, in query order, without the rejected ones.
        student_dir: Folder that networks are written to.
        validation: Labelled public cases on which the student is scored.
    """

    public: PublicMaterial
    answers: tuple[StoredAnswer, ...]
    labels: StoredLabels
    student_dir: Path
    validation: tuple[PairedFiles, ...] = ()


def read_released(workspace: Workspace, *, ledger_file: Path | None = None) -> Released:
    """Read a study's directory and ledger.

    Args:
        workspace: The study.
        ledger_file: A copy of the ledger to read in place of the study's own.

    Returns:
        The study's public material, stored answers and labels.
    """
    public = workspace.public()
    with Ledger.open(ledger_file or workspace.ledger_file) as ledger:
        answers = tuple(ledger.answers(public.study.id))
    return Released(public, answers, labels_in(workspace), workspace.student_dir, workspace.validation())


def labels_in(workspace: Workspace) -> StoredLabels:
    """Return a study's decoded labels, without the rejected ones.

    Args:
        workspace: The study.

    Returns:
        The labels by volume, in the order of the study's volumes.
    """
    rejected = rejected_labels(workspace.decisions_file, workspace.study().id)
    return StoredLabels(workspace.labels_dir, workspace.volumes(), rejected=rejected)


def write_labels(released: Released, *, events: EventLog) -> None:
    """Decode every stored answer into ``labels/<volume>.npz``: float16 probabilities [k, x, y, z] of k classes.

    If the protocol defines the expected size of honest answers (sum of squares), the answers are compared with it, and
    the result is logged for the operator.

    Args:
        released: Result of :func:`read_released`.
        events: The event log.
    """
    results = protocol_of(released.public.study).aggregate(released.public, released.answers)
    for label in results.labels():
        released.labels.store(label.volume, label.probabilities)
        events.emit("label-decoded", volume=label.volume, query=label.query)
    if (plausible := results.plausibility()) is not None:
        events.emit("answers-weighed", **plausible.event())
