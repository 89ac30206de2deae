"""Decodes every stored answer of a study's directory into a label file; the ledger is read once.

What is done with answers, labels and networks after this takes what was read here. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.canonical import sha256_file
from common.events import EventLog
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.postprocess.decisions import rejected_labels
from server.protocols.query_protocol import protocol_of
from server.protocols.stored_labels import StoredLabels, store_label
from server.public.material import Public
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Released:
    """What post-processing reads: all that is public of a study, its stored answers, and decisions about its labels;
    and the folders that labels and networks are written to. ``rejected``: (volume, SHA-256 of the label's file)."""

    public: Public
    answers: tuple[StoredAnswer, ...]
    rejected: frozenset[tuple[str, str]]
    labels_dir: Path
    student_dir: Path

    def labels(self) -> StoredLabels:
        """Decoded labels by volume hash, in query order; those that stand rejected are left out."""
        paths = {volume: label_file(self.labels_dir, volume) for volume in self.public.volumes}
        found = {volume: path for volume, path in paths.items() if path.exists()}
        return StoredLabels({v: path for v, path in found.items() if (v, sha256_file(path)) not in self.rejected})


def read_released(workspace: Workspace, *, ledger_file: Path | None = None) -> Released:
    """Read a study's directory, and its ledger from ``ledger_file`` if a copy of it is to be read."""
    public = workspace.public()
    with Ledger.open(ledger_file or workspace.ledger_file) as ledger:
        answers = tuple(ledger.answers(public.study.id))
    rejected = rejected_labels(workspace.decisions_file, public.study.id)
    return Released(public, answers, rejected, workspace.labels_dir, workspace.student_dir)


def label_file(labels_dir: Path, volume: str) -> Path:
    """Where a volume's label is kept."""
    return labels_dir / f"{volume}.npz"


def write_labels(released: Released, *, events: EventLog) -> None:
    """Decode every stored answer of the study into ``labels/<volume>.npz``: float16 probabilities [c, x, y, z].

    Where it is known what answers should look like they are held against that, for the operator's eyes.
    """
    said = protocol_of(released.public.study).aggregate(released.public, released.answers)
    for label in said.labels():
        store_label(label_file(released.labels_dir, label.volume), label.probabilities)
        events.emit("label-decoded", volume=label.volume, query=label.query)
    if (plausible := said.weighed()) is not None:
        events.emit("answers-weighed", **plausible.event())
