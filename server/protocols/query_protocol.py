"""Defines the server's half of a query protocol, in the order in which a study uses it.

1. ``agenda``: what the study will ask, as plain data, before anything else exists.
2. ``prepare`` (a strategy's ``initialize_parameters``): what the first question needs beside the codec.
3. ``configure`` (``configure_train``): the queries of a round, given the answers to the rounds before.
4. ``aggregate`` (``aggregate_train``): what the stored answers say about each volume.
5. ``finish``: how the student and its controls are trained on that.

The site's half is :mod:`common.protocols.site_protocol`; protocols are registered in :mod:`common.protocol_terms`.
Everything after an answer is post-processing of what the ledger stores. The functions take values (what is public of a
study, its answers, its labels) and read no study directory. No protocol imports torch before a network is to be
trained, because questions are asked while the ledger is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from common.config import Study
from common.data.grid import WHOLE_VOXELS
from common.errors import InvalidInput
from common.messages import MAX_VOLUMES
from common.privacy.mechanism import QuerySpec
from common.registry import registered
from common.study_mechanism import study_mechanism
from server.protocols.paired import Paired
from server.protocols.plausible import Plausible
from server.protocols.posterior import Doubt
from server.protocols.stored_labels import Labels
from server.public.material import OnStage, Public

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

STUDENT_SEED = 0
"""Seed of the student's initial weights and batches. It is public and protects nothing."""


class Answer(Protocol):
    """A released answer.

    Attributes:
        query: What was asked.
        noisy_sum: Int64 array [d] in grid steps, with noise.
        voters: Number of voters' codes in it.
    """

    @property
    def query(self) -> QuerySpec: ...
    @property
    def noisy_sum(self) -> NDArray[np.int64]: ...
    @property
    def voters(self) -> int: ...


AnswerOf = Callable[[str], Answer | None]
"""The stored answer to a query, by the query's id."""


@dataclass(frozen=True, slots=True)
class Agenda:
    """What a study will ask.

    Attributes:
        plan: The plan in words, for the consortium.
        which: In words, the volumes that a site's teachers segment.
        each: In words, for what a sum is sent.
        asks: Number of public volumes asked about, the first ones; None for all, which one query then names.
        an_answer: Number of volumes that get a label with each answer; None for all of them.
    """

    plan: str
    which: str
    each: str
    asks: int | None = None
    an_answer: int | None = None

    def check_volumes(self, count: int) -> None:
        """Raise InvalidInput if the number of public volumes does not fit the plan.

        Args:
            count: Number of public volumes.
        """
        if self.asks is None and count > MAX_VOLUMES:
            raise InvalidInput("public volumes of one query", value=count, limit=f"at most {MAX_VOLUMES}")
        if count < (needed := self.asks or 1):
            raise InvalidInput(
                "public volumes",
                value=count,
                limit=f"at least {needed}",
                remedy="publish more volumes or plan fewer queries",
            )

    def asked(self, volumes: Sequence[str]) -> tuple[str, ...]:
        """Return the public volumes that the plan asks about, in order."""
        return tuple(volumes[: self.asks])

    def labelled(self, answers: int, *, asked: int) -> int:
        """Return how many volumes have a label.

        Args:
            answers: Number of stored answers.
            asked: Number of volumes asked about.

        >>> Agenda("3 queries", "up to 3", "each", asks=3, an_answer=1).labelled(2, asked=3)
        2
        """
        return (asked if answers else 0) if self.an_answer is None else answers * self.an_answer


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """The label of a volume, according to the answers.

    Attributes:
        volume: The volume's hash.
        query: Id of the newest query that contributed.
        probabilities: Float32 array [k, x, y, z].
    """

    volume: str
    query: str
    probabilities: Float[np.ndarray, "k x y z"]


@dataclass(frozen=True, slots=True)
class FitFiles:
    """The files of a training run.

    Attributes:
        weights: The trained weights.
        inputs: Digest of what they were trained on.
        checkpoint: State of an unfinished run.
    """

    weights: Path
    inputs: Path
    checkpoint: Path

    @classmethod
    def at(cls, folder: Path, name: str = "") -> FitFiles:
        """Return the files of the network ``name`` in a folder, or of its only network if no name is given."""
        if not name:
            return cls(folder / "weights.pt", folder / "inputs", folder / "checkpoint.pt")
        return cls(folder / f"{name}.pt", folder / f"{name}.inputs", folder / f"{name}.checkpoint")

    def discard(self) -> None:
        """Delete the files, after which no network of this name exists."""
        later = self.checkpoint.parent.glob(f"{self.checkpoint.name}.*")
        for path in (self.inputs, self.weights, self.checkpoint, *later):
            path.unlink(missing_ok=True)


def _untrained(name: str) -> torch.nn.Module:
    raise InvalidInput("network that is not trained yet", value=name, limit="a network that is trained before this one")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student may learn from: only public and released data.

    Attributes:
        public: What is public of the study.
        answers: Its stored answers.
        labels: Labels in query order, without the rejected ones.
        image: Returns a public volume's image on the student's grid.
        seed: Seed of the training.
        paired: Public cases with label maps, if any.
        onto: Resamples a volume's label to the student's grid.
        trained: Returns a network that is trained before this one.
    """

    public: Public
    answers: Sequence[Answer]
    labels: Labels
    image: Callable[[str], Float[np.ndarray, "c x y z"]]
    seed: int = STUDENT_SEED
    paired: Paired | None = None
    onto: Callable[[str, Float[np.ndarray, "k x y z"]], Float[np.ndarray, "k u v w"]] = lambda _volume, label: label
    trained: Callable[[str], torch.nn.Module] = _untrained


@dataclass(frozen=True, slots=True)
class NetworkTraining:
    """A network to be trained.

    Attributes:
        inputs: Digest of everything that determines the result.
        train: Trains the network. It writes checkpoints to the given files; with None it writes nothing and cannot be
            resumed.
        steps: Number of steps that it reports.
        passes: Last steps of several passes, each of which learns from other labels; empty for a single one.
    """

    inputs: str
    train: Callable[[FitFiles | None, OnStep], torch.nn.Module]
    steps: int
    passes: tuple[int, ...] = ()


class Said(Protocol):
    """What a study's stored answers say. This is post-processing, computed on request."""

    def labels(self) -> Iterator[Label]:
        """Yield the label of each volume that has one."""
        ...

    def weighed(self) -> Plausible | None:
        """Compare the answers with what was expected; None if nothing was expected, or before the first answer."""
        ...

    def doubts(self, *, draws: int) -> Iterator[Doubt]:
        """Yield each volume's label before the answers, and how uncertain the noise leaves it after them.

        Args:
            draws: Number of samples.
        """
        ...


class QueryProtocol(Protocol):
    """A protocol at the server. It is created without arguments and has no state."""

    def agenda(self, study: Study) -> Agenda:
        """Return what the study will ask (step 1)."""
        ...

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        """Compute, store and publish what the first question needs beside the codec (step 2).

        Args:
            public: Returns what is public of the study. A protocol that needs nothing does not call it, so that volumes
                may be published later.
            sites: Number of sites expected to answer.
            on_stage: Called with the progress.
        """
        ...

    def configure(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """Yield groups of queries that may be asked together, each based on the answers to the groups before (step 3).

        The same answers must always give the same queries, because another query id would be another charge. The
        iteration ends at a group whose answers are needed for the next group and missing. A group that is answered
        already may be yielded again, since sites may be owed receipts.

        Args:
            public: What is public of the study.
            answer_of: Returns the stored answer to a query id, or None.
        """
        ...

    def aggregate(self, public: Public, answers: Sequence[Answer]) -> Said:
        """Return what the study's stored answers say (step 4); there may be none yet."""
        ...

    def finish(self, lesson: Lesson, network: str) -> NetworkTraining | None:
        """Return how a network is trained (step 5).

        Args:
            lesson: What may be learnt from.
            network: :data:`~server.protocols.controls.STUDENT` or the name of a control.

        Returns:
            The training; None if the protocol has no such control for this lesson.

        Raises:
            InvalidInput: If there is no answer.
        """
        ...


def protocol_of(study: Study) -> QueryProtocol:
    """Return the server's half of the study's protocol."""
    made: QueryProtocol = registered(study.codec.terms.server)()
    return made


def query_about(
    study: Study, volumes: Sequence[str], *, codec: str, dimension: int, number: int = 1, centre: str = "zero"
) -> QuerySpec:
    """Return a query of the study.

    Args:
        study: The study.
        volumes: Hashes of the public volumes it is about.
        codec: Hash of the codec.
        dimension: Length of the code.
        number: Number of the round, from 1.
        centre: Hash of the frame that codes are relative to, or ``zero``.
    """
    return QuerySpec(
        edition=study.privacy.edition,
        codec=codec,
        volumes=tuple(volumes),
        round=number,
        centre=centre,
        weights="codec",
        mechanism=study_mechanism(study, dimension=dimension),
    )


def check_study(study: Study) -> None:
    """Refuse terms that the study's protocol cannot run; called before the study is created.

    Raises:
        InvalidInput: If the grid is too large for a query about all volumes, or for a student without patches.
    """
    if not study.codec.terms.framed:
        return
    if math.prod(study.data.grid) > WHOLE_VOXELS:
        raise InvalidInput(
            "voxels of the volumes of one query",
            value=math.prod(study.data.grid),
            limit=f"at most {WHOLE_VOXELS}",
            remedy="ask on a coarser data.grid, with data.finer = 2 for the student, or in one query a volume",
        )
    if math.prod(study.data.student.grid) > WHOLE_VOXELS and not study.student.patch:
        raise InvalidInput(
            "student.patch",
            value=(),
            limit="a patch size, because whole volumes of this grid are too large to train on",
        )
