"""Defines what a hospital declares about a teacher that it adds instead of training one: kind, labels and limits.

The declaration is a file (``foreign.json``) beside the model; a hash over both is in the site's ledger.
``client.foreign`` writes this file, and the worker reads it before loading a teacher. The module refuses labels and
channels that are not the study's, and a declaration that does not name every label of the study.
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
    """The form in which a hospital adds an existing teacher: a MONAI bundle, a TorchScript model, or a command."""

    BUNDLE = "bundle"
    TORCHSCRIPT = "torchscript"
    COMMAND = "command"


class Activation(StrEnum):
    """The function that turns a model's output into probabilities."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


class Intensity(StrEnum):
    """How a volume's intensities are normalised before a TorchScript model reads it."""

    Z_SCORE = "z-score"
    UNIT = "unit"
    AS_IS = "as-is"


@dataclass(frozen=True, slots=True)
class LabelOf(Document):
    """The study's label for one output of the model.

    Attributes:
        output: Channel number of a model that gives probabilities, or a value of its label map.
        label: Name of the label in the study.
    """

    output: Annotated[int, Between("output of a model", 0, 65_535)]
    label: str


@dataclass(frozen=True, slots=True)
class TeacherDeclaration(Document):
    """The content of ``foreign.json``: what a teacher is made of, what it reads and writes, and its limits.

    Attributes:
        kind: Bundle, TorchScript or command.
        labels: The study's label for each output of the model.
        channels: The study's channels in the order in which the model takes them.
        files: SHA-256 by path; paths are relative to the teacher's folder, or absolute.
        timeout_s: Longest time for one volume, in seconds.
        memory_gib: Most memory for one volume, in GiB.
        activation: How the model's output becomes probabilities.
        intensity: How a TorchScript model's input is normalised. A bundle states this itself.
        spacing_mm: Voxel spacing in mm that a TorchScript model expects; empty for a bundle or a command.
        patch: Window in voxels for a TorchScript model's sliding-window inference; empty for whole volumes.
        command: The command with its placeholders; empty for the other kinds.
        reads: Paths outside ``files`` that a command may read.
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
        """The number of output channels of a model that gives probabilities."""
        return max(one.output for one in self.labels) + 1

    @property
    def served(self) -> str:
        """The hash that identifies this teacher; it covers every file of the teacher and every declared value."""
        return digest("foreign-teacher", self.to_json())

    @classmethod
    def read(cls, path: Path) -> TeacherDeclaration:
        """Read a declaration.

        Args:
            path: The ``foreign.json`` to read.

        Returns:
            The declaration.

        Raises:
            InvalidInput: If the file cannot be read or is not a declaration.
        """
        what, remedy = "declaration of a teacher cannot be read", "add the teacher again: `consilium site teacher add`"
        with parsing(what, value=str(path), remedy=remedy):
            return cls.from_json(parse_json(path.read_bytes(), what=what, value=str(path), remedy=remedy))

    def label_numbers(self, data: DataConfig) -> dict[int, int]:
        """Map each output of the model to the study's label number.

        Args:
            data: The study's labels and channels.

        Returns:
            The study's label number by output number.

        Raises:
            InvalidInput: If a label or channel is not the study's, if a label of the study is missing, or if an output
                is named twice.
        """
        _check_known("label of a teacher", [one.label for one in self.labels], data.labels)
        _check_known("channel of a teacher", self.channels, data.channels)
        missing = [name for name in data.labels if name not in {one.label for one in self.labels}]
        if missing or len({one.output for one in self.labels}) != len(self.labels):
            raise InvalidInput(
                "labels of a teacher",
                value=f"without {', '.join(missing)}" if missing else "an output named twice",
                limit=f"all of {', '.join(data.labels)}, each output once",
            )
        return {one.output: data.labels.index(one.label) for one in self.labels}


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(what, value=name, limit=", ".join(known), remedy="use the study's names")


def has_foreign(teachers: Path, voter: int) -> bool:
    """Tell whether a voter's teacher is one that the hospital added instead of training it here.

    Args:
        teachers: The site's directory of teachers.
        voter: The voter's number.

    Returns:
        True if the voter's folder contains a declaration.
    """
    return (voter_directory(teachers, voter) / DECLARED).exists()


def check_unit(study: Study) -> None:
    """Refuse teachers trained elsewhere in a study whose unit of privacy is the patient.

    With unit patient, one patient may influence one voter only; this holds because patients are assigned to voters
    before any training. A model trained elsewhere may have seen every patient of the pool. With unit hospital, the
    whole contribution of a site is one unit, so it does not matter who trained the model.

    Args:
        study: The study in which the teacher is to vote.

    Raises:
        InvalidInput: If the study's unit is not the hospital.
    """
    if study.privacy.unit is not Unit.HOSPITAL:
        raise InvalidInput(
            "privacy unit of the study, for a teacher that was added and not trained here",
            value=str(study.privacy.unit),
            limit=str(Unit.HOSPITAL),
            remedy="train teachers with `consilium site train`, or take part in a study of unit hospital",
        )


def read_labels(text: str) -> tuple[LabelOf, ...]:
    """Parse the option ``--labels``.

    Args:
        text: The study's label for each output channel of the added teacher. Either the labels' names in the order of
            the channels (``background,anterior``), or pairs of channel number and name (``0=background,4=anterior``).

    Returns:
        One entry for each name in the text.

    Raises:
        InvalidInput: If an entry has no name, or its number is not one to five digits.
    """
    found = []
    for place, item in enumerate(part.strip() for part in text.split(",")):
        number, name = item.split("=", 1) if "=" in item else (str(place), item)
        if not re.fullmatch(r"\d{1,5}", number.strip()) or not name.strip():
            raise InvalidInput(
                "--labels",
                value=item,
                limit="the study's label of each output: NAME,NAME,… in order, or NUMBER=NAME,…",
            )
        found.append(LabelOf(int(number), name.strip()))
    return tuple(found)
