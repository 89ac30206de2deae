"""Defines what a hospital declares about a teacher it adds: its kind, labels, channels and limits.

The declaration lies beside the model (``foreign.json``), and the hash of both is on the site's record. Refuses labels
and channels that are not the study's, and a declaration that does not name every label of the study.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from client.records.voter_files import voter_directory
from common.canonical import digest
from common.config import DataConfig, Study
from common.document import Between, Document, Sha256
from common.errors import InvalidInput
from common.privacy.mechanism import Unit
from common.reading import parse_json, parsing

DECLARED = "foreign.json"


class ForeignKind(StrEnum):
    """What was brought."""

    BUNDLE = "bundle"
    TORCHSCRIPT = "torchscript"
    COMMAND = "command"


class Activation(StrEnum):
    """What makes probabilities of a model's output."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


class Intensity(StrEnum):
    """How a volume is normalised before a TorchScript model sees it."""

    Z_SCORE = "z-score"
    UNIT = "unit"
    AS_IS = "as-is"


@dataclass(frozen=True, slots=True)
class LabelOf(Document):
    """What one output of the model, a channel or a value of its label map, is called in the study."""

    output: Annotated[int, Between("output of a model", 0, 65_535)]
    label: str


@dataclass(frozen=True, slots=True)
class Declared(Document):
    """``foreign.json``. ``files`` are SHA-256 by path, relative to the teacher's folder or absolute.

    ``channels`` are the study's, in the order in which the model takes them; ``command`` is the template of a command,
    ``reads`` what it may read beside ``files``. ``spacing_mm``, ``patch``, ``intensity`` are a TorchScript's: a bundle
    says them itself. A volume may take ``timeout_s`` and ``memory_gib``.
    """

    SCHEMA: ClassVar = ("declaration of a teacher", 1)

    kind: ForeignKind
    labels: tuple[LabelOf, ...]
    channels: tuple[str, ...]
    files: dict[str, Sha256]
    timeout_s: Annotated[int, Between("timeout of a teacher in s", 1, 86_400)]
    memory_gib: Annotated[int, Between("memory of a teacher in GiB", 1, 4096)]
    activation: Activation = Activation.SOFTMAX
    intensity: Intensity = Intensity.Z_SCORE
    spacing_mm: tuple[float, ...] = ()
    patch: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """Channels of the model's output, where it gives probabilities."""
        return max(one.output for one in self.labels) + 1

    @property
    def served(self) -> str:
        """The hash that names this teacher: of every file it is made of, and of what was declared."""
        return digest("foreign-teacher", self.to_json())

    @classmethod
    def read(cls, path: Path) -> Declared:
        """InvalidInput for a file that is not a declaration."""
        what, remedy = "declaration of a teacher cannot be read", "`consilium site teacher add` it again"
        with parsing(what, value=str(path), remedy=remedy):
            return cls.from_json(parse_json(path.read_bytes(), what=what, value=str(path), remedy=remedy))

    def label_numbers(self, data: DataConfig) -> dict[int, int]:
        """The study's number for each output; InvalidInput unless labels and channels are the study's."""
        _check_known("label of a teacher", [one.label for one in self.labels], data.labels)
        _check_known("channel of a teacher", self.channels, data.channels)
        missing = [name for name in data.labels if name not in {one.label for one in self.labels}]
        if missing or len({one.output for one in self.labels}) != len(self.labels):
            raise InvalidInput(
                "labels of a teacher",
                value=missing or "an output twice",
                limit=f"every one of {', '.join(data.labels)}",
            )
        return {one.output: data.labels.index(one.label) for one in self.labels}


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(what, value=name, limit=", ".join(known), remedy="use the study's names")


def has_foreign(teachers: Path, voter: int) -> bool:
    """Whether this voter's teacher is one that the hospital brought."""
    return (voter_directory(teachers, voter) / DECLARED).exists()


def check_unit(study: Study) -> None:
    """InvalidInput for a study of unit patient: nobody can say of this teacher which patients one vote is about.

    There a patient moves one voter, because patients were dealt to slots before any training. A model that came from
    elsewhere may have seen every patient of the pool. For unit hospital all a site says is one unit, whoever made it.
    """
    if study.privacy.unit is not Unit.HOSPITAL:
        raise InvalidInput(
            "unit of the study, for a teacher that was not trained by slots",
            value=str(study.privacy.unit),
            limit=str(Unit.HOSPITAL),
            remedy="train teachers with `consilium site train`, or take part in a study of unit hospital",
        )


def read_labels(text: str) -> tuple[LabelOf, ...]:
    """``--labels``: the study's label of every output in turn (``background,anterior``), or by number (``0=…,4=…``)."""
    found = []
    for place, item in enumerate(part.strip() for part in text.split(",")):
        number, name = item.split("=", 1) if "=" in item else (str(place), item)
        if not re.fullmatch(r"\d{1,5}", number.strip()) or not name.strip():
            raise InvalidInput("--labels", value=item, limit="NAME,NAME,… or NUMBER=NAME,…")
        found.append(LabelOf(int(number), name.strip()))
    return tuple(found)
