"""What a query protocol is to the server: what is asked, and how answers become labels, a student and its controls.

The site's half is :mod:`common.protocols.base`, where protocols are registered; adding one takes a file and a line.
Everything after an answer is post-processing of what the ledger stores. Functions take values: what is public of a
study, its answers, its labels; who reads them from where is not theirs to know. No protocol imports torch before a
network is to be trained, since questions are asked while the ledger is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from common.config import Study
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.protocols.base import halves
from common.registry import registered
from common.study_mechanism import study_mechanism
from server.aggregation.progress import OnStage
from server.protocols.joint.plausible import Plausible
from server.protocols.paired import Paired
from server.protocols.posterior import Standing
from server.protocols.stored_labels import StoredLabels
from server.study.workspace import Public

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

STUDENT_SEED = 0
"""Seeds the student's initial weights and batches; it protects nothing, so it may be fixed."""


class Answer(Protocol):
    """A released answer: the noisy sum int64 [d] in grid steps, and how many voters' codes are in it."""

    @property
    def query(self) -> QuerySpec: ...
    @property
    def noisy_sum(self) -> NDArray[np.int64]: ...
    @property
    def voters(self) -> int: ...


AnswerOf = Callable[[str], Answer | None]
"""The stored answer to a query, by the query's id."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A study's plan in words: ``plan`` for the consortium; ``which`` volumes a site's teachers segment, and for
    ``each`` of what a sum is sent."""

    plan: str
    which: str
    each: str


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What the answers say of a volume: float32 probabilities, and the newest query that they are from."""

    volume: str
    query: str
    probabilities: Float[np.ndarray, "k x y z"]


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

    def discard(self) -> None:
        """Delete them; there is then no network of this name."""
        later = self.checkpoint.parent.glob(f"{self.checkpoint.name}.*")
        for path in (self.inputs, self.weights, self.checkpoint, *later):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student may learn from: nothing but what is public or released. ``labels`` are in query order, those that
    stand rejected left out; ``image`` gives a public volume on the student's grid, ``onto`` brings a label of it there;
    ``paired`` are public with both."""

    public: Public
    answers: Sequence[Answer]
    labels: StoredLabels
    image: Callable[[str], Float[np.ndarray, "c x y z"]]
    seed: int = STUDENT_SEED
    paired: Paired | None = None
    onto: Callable[[str, Float[np.ndarray, "k x y z"]], Float[np.ndarray, "k u v w"]] = lambda _volume, label: label


@dataclass(frozen=True, slots=True)
class Training:
    """A network to be trained. ``inputs``: digest of all that shapes the result; ``steps``: how many it counts."""

    inputs: str
    train: Callable[[FitFiles, OnStep], torch.nn.Module]
    steps: int


class QueryProtocol(Protocol):
    """A protocol at the server. Made without arguments; holds nothing."""

    name: ClassVar[str]

    def wording(self, study: Study) -> Wording:
        """The plan in words."""
        ...

    def check_study(self, study: Study) -> None:
        """InvalidInput for terms that the protocol cannot run; asked before the study is made."""
        ...

    def check_volumes(self, study: Study, count: int) -> None:
        """InvalidInput where so many public volumes are too few or too many for the plan."""
        ...

    def asked_about(self, study: Study, volumes: Sequence[str]) -> tuple[str, ...]:
        """Those of the public volumes that the plan asks about, in order."""
        ...

    def volumes_answered(self, answers: int, *, asked: int) -> int:
        """Of so many volumes ``asked`` about, how many have a label after so many answers."""
        ...

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        """Make, keep and publish what the first question needs beside the codec; for the answers of ``sites`` sites.

        A function gives ``public``: where nothing is needed, volumes may be published later.
        """
        ...

    def questions(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """What is asked in turn: queries that may be asked together, each group made of the answers to those before.

        The same answers give the same queries, whenever and however often: another id would be another charge. Ends
        where a group is left without the answers that the next would be made of. A group that is answered already may
        be given again: sites may be owed receipts.
        """
        ...

    def labels(self, public: Public, answers: Sequence[Answer]) -> Iterator[Label]:
        """What the study's stored answers say of each volume."""
        ...

    def weigh(self, public: Public, answers: Sequence[Answer]) -> Plausible | None:
        """Whether the answers look like what was expected of them; None where nothing was, or before the first."""
        ...

    def standings(self, public: Public, answers: Sequence[Answer], *, draws: int) -> Iterator[Standing]:
        """What each volume's label was before the answers, and what the noise leaves open of it after them."""
        ...

    def student(self, lesson: Lesson) -> Training:
        """The student's training; InvalidInput where nothing was answered."""
        ...

    def control(self, lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]) -> Training | None:
        """The training of one of :data:`~server.protocols.controls.CONTROLS`, None where there is none of the name.

        ``trained`` gives a control that stands before it in their order.
        """
        ...


def protocol_of(study: Study) -> QueryProtocol:
    """The server's half of the study's protocol."""
    made: QueryProtocol = registered(halves(study).server)()
    return made


def query_about(
    study: Study, volumes: Sequence[str], *, codec: str, dimension: int, number: int = 1, centre: str = "zero"
) -> QuerySpec:
    """A query of the study about these volumes, its code of ``dimension`` numbers."""
    return QuerySpec(
        edition=study.privacy.edition,
        codec=codec,
        volumes=tuple(volumes),
        round=number,
        centre=centre,
        weights="codec",
        mechanism=study_mechanism(study, dimension=dimension),
    )


def at_least(volumes: int, *, needed: int) -> None:
    """InvalidInput for fewer public volumes than are needed."""
    if volumes < needed:
        raise InvalidInput(
            "public volumes",
            value=volumes,
            limit=f"at least {needed}",
            remedy="publish more volumes or plan fewer queries",
        )
