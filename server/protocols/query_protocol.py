"""Defines the interface of a query protocol at the server. A study uses it in this order:

1. ``query_plan`` states what the study will ask, as plain data. It needs only the study's terms.
2. ``prepare`` computes and stores what the first query needs besides the codec.
3. ``configure`` gives the queries of a round, which may depend on the answers to the rounds before.
4. ``aggregate`` computes each volume's label from the stored answers.
5. ``finish`` defines how the student is trained on the labels, and ``control`` how its controls are.

Steps 2 to 4 correspond to a Flower strategy's ``initialize_parameters``, ``configure_train`` and ``aggregate_train``.
The interface at a site is :mod:`common.protocols.site_protocol`; protocols are registered in
:mod:`common.protocol_terms`. Everything after an answer is post-processing of the stored answers. The functions take
values (a study's public material, its answers, its labels) and do not read the study's directory. No protocol imports
torch before a network is to be trained, because queries are made while the ledger is open.
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
from server.protocols.plausible import PlausibilityTest
from server.protocols.posterior import LabelUncertainty
from server.protocols.stored_labels import Labels
from server.public.material import OnStage, PublicMaterial

if TYPE_CHECKING:
    import torch

    from common.models.fit import OnStep

STUDENT_SEED = 0
"""Seed of the student's initial weights and batches. It is public and protects nothing."""


class Answer(Protocol):
    """A released answer.

    Attributes:
        query: The query that was asked.
        noisy_sum: The noisy sum of the codes, int64 array [d] in steps of 2⁻¹⁶, for codes of d coordinates.
        voters: Number of voters whose codes it sums.
    """

    @property
    def query(self) -> QuerySpec: ...
    @property
    def noisy_sum(self) -> NDArray[np.int64]: ...
    @property
    def voters(self) -> int: ...


AnswerOf = Callable[[str], Answer | None]
"""Function that returns the stored answer to a query, by the query's id; None if there is none."""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The plan of a study's queries, in words and numbers.

    Attributes:
        plan: The plan in words, for the consortium.
        which: Words that complete "teachers segment … public volumes" in the consent sheet, such as ``up to 80``.
        each: Words that complete "For … your site sends the sum of the teachers' codes", such as ``each volume,``.
        asks: Number of queries if each is about one public volume (the first volumes in order); None if every query is
            about all volumes.
        an_answer: Number of volumes that get a label with each answer; None if every answer labels all volumes.
    """

    plan: str
    which: str
    each: str
    asks: int | None = None
    an_answer: int | None = None

    def check_volumes(self, count: int) -> None:
        """Check that the number of public volumes fits the plan.

        Args:
            count: Number of public volumes.

        Raises:
            InvalidInput: If there are too many volumes for a query about all of them, or fewer volumes than the plan
                asks about.
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
        """Return the public volumes that the plan asks about.

        Args:
            volumes: Hashes of all public volumes.

        Returns:
            The first :attr:`asks` of them, in order.
        """
        return tuple(volumes[: self.asks])

    def labelled(self, answers: int, *, asked: int) -> int:
        """Return how many volumes have a label.

        Args:
            answers: Number of stored answers.
            asked: Number of volumes asked about.

        Returns:
            Number of volumes.

        >>> QueryPlan("3 queries", "up to 3", "each", asks=3, an_answer=1).labelled(2, asked=3)
        2
        """
        return (asked if answers else 0) if self.an_answer is None else answers * self.an_answer


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """The label of a volume, computed from the answers.

    Attributes:
        volume: The volume's hash.
        query: Id of the newest query that contributed.
        probabilities: Float32 array [k, x, y, z] for k classes, the background first.
    """

    volume: str
    query: str
    probabilities: Float[np.ndarray, "k x y z"]


@dataclass(frozen=True, slots=True)
class FitFiles:
    """The files of a training run.

    Attributes:
        weights: The trained weights.
        inputs: Digest of everything that determined the training.
        checkpoint: State of an unfinished training.
    """

    weights: Path
    inputs: Path
    checkpoint: Path

    @classmethod
    def at(cls, folder: Path, name: str = "") -> FitFiles:
        """Return the files of a network in a folder.

        Args:
            folder: The folder.
            name: The network's name; by default the folder has only one network.

        Returns:
            The paths; the files may not exist.
        """
        if not name:
            return cls(folder / "weights.pt", folder / "inputs", folder / "checkpoint.pt")
        return cls(folder / f"{name}.pt", folder / f"{name}.inputs", folder / f"{name}.checkpoint")

    def discard(self) -> None:
        """Delete the network's files, including the checkpoints of all its passes."""
        later = self.checkpoint.parent.glob(f"{self.checkpoint.name}.*")
        for path in (self.inputs, self.weights, self.checkpoint, *later):
            path.unlink(missing_ok=True)


def _untrained(name: str) -> torch.nn.Module:
    raise InvalidInput(
        "network that this training needs, but that is not trained yet",
        value=name,
        limit="a control that was trained before",
    )


@dataclass(frozen=True, slots=True)
class StudentData:
    """The data from which the student and its controls are trained: only public and released data.

    Attributes:
        public: The study's public material (terms, codec, volumes).
        answers: Its stored answers.
        labels: Labels in query order, without the rejected ones.
        seed: Seed of the training.
        trained: Function that takes the name of a control and returns its network, which was trained earlier.
    """

    public: PublicMaterial
    answers: Sequence[Answer]
    labels: Labels
    seed: int = STUDENT_SEED
    trained: Callable[[str], torch.nn.Module] = _untrained

    def image(self, volume: str) -> Float[np.ndarray, "c x y z"]:
        """Return a public volume's image on the student's grid.

        Args:
            volume: The volume's hash.

        Returns:
            The image, float [c, x, y, z].
        """
        return self.public.image(volume, finer=True)


@dataclass(frozen=True, slots=True)
class NetworkTraining:
    """A network to be trained.

    Attributes:
        inputs: Digest of everything that determines the result.
        train: Trains the network. It writes checkpoints to the given files; with None it writes nothing and cannot be
            resumed.
        steps: Number of training steps, for the progress display.
        passes: The last step of each pass, if passes learn from different labels; empty if there is one pass.
    """

    inputs: str
    train: Callable[[FitFiles | None, OnStep], torch.nn.Module]
    steps: int
    passes: tuple[int, ...] = ()


class AnswerResults(Protocol):
    """The labels and checks that follow from a study's stored answers.

    Each method computes its result when it is called. All results are post-processing of released answers.
    """

    def labels(self) -> Iterator[Label]:
        """Yield the label of each volume that has one."""
        ...

    def plausibility(self) -> PlausibilityTest | None:
        """Test whether the answers are as large as expected.

        Returns:
            The test's result; None before the first answer, or if the protocol defines no expected size.
        """
        ...

    def doubts(self, *, draws: int) -> Iterator[LabelUncertainty]:
        """Yield for each volume its label before any answer, and how uncertain its label after the answers is.

        The answers' noise causes this uncertainty. It is measured by samples from the label's posterior.

        Args:
            draws: Number of samples.

        Yields:
            One :class:`LabelUncertainty` for each volume that has a label.
        """
        ...


class QueryProtocol(Protocol):
    """A query protocol at the server, without state. The numbers of its steps are those in the module's docstring."""

    def query_plan(self, study: Study) -> QueryPlan:
        """Return what the study will ask (step 1).

        Args:
            study: The study.

        Returns:
            The query_plan.
        """
        ...

    def prepare(self, public: Callable[[], PublicMaterial], *, sites: int, on_stage: OnStage) -> None:
        """Compute, store and publish what the first query needs besides the codec (step 2).

        Args:
            public: Returns the study's public material (terms, codec, volumes). A protocol that needs nothing does not
                call it, so that volumes may be published later.
            sites: Number of sites expected to answer.
            on_stage: Called with the progress.
        """
        ...

    def configure(self, public: PublicMaterial, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """Yield groups of queries that may be asked together (step 3).

        A group may depend on the answers to the groups before it. The same answers must always give the same queries,
        because a query with another id is charged again. The iteration ends if the next group depends on answers that
        are missing. A group that is answered already may be yielded again, so that sites get receipts they lack.

        Args:
            public: The study's public material (terms, codec, volumes).
            answer_of: Returns the stored answer to a query id, or None.

        Yields:
            The queries of one group.
        """
        ...

    def aggregate(self, public: PublicMaterial, answers: Sequence[Answer]) -> AnswerResults:
        """Return the labels and checks that follow from a study's stored answers (step 4).

        Args:
            public: The study's public material (terms, codec, volumes).
            answers: The stored answers; the sequence is allowed to be empty.

        Returns:
            An object that computes labels and checks on request.
        """
        ...

    def finish(self, student_data: StudentData) -> NetworkTraining:
        """Return how the student is trained (step 5).

        Args:
            student_data: Public data and released labels to learn from.

        Returns:
            The training.

        Raises:
            InvalidInput: If there is no answer or no label to train on.
        """
        ...

    def control(self, student_data: StudentData, name: str) -> NetworkTraining | None:
        """Return the training of a control, a network for comparison with the student (step 5).

        Args:
            student_data: Public data and released labels to learn from.
            name: One of :data:`~server.protocols.controls.CONTROLS`.

        Returns:
            The training; None if the protocol has no such control for this student_data.

        Raises:
            InvalidInput: If there is no answer or no label to train on, or no control of this name.
        """
        ...


def protocol_of(study: Study) -> QueryProtocol:
    """Return the implementation of a study's protocol for the server.

    Args:
        study: The study.

    Returns:
        A new instance of the registered class.
    """
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

    Returns:
        The query.
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
    """Check, before a study is created, that its protocol can run with these terms.

    Args:
        study: The terms.

    Raises:
        InvalidInput: If a recipe's network cannot halve the grid, or if the grid is too large for a query about all
            volumes, or for a student without patches.
    """
    study.teacher.check_grid(study.data.grid)
    study.student.check_grid(study.data.student.grid)
    if not study.codec.terms.framed:
        return
    if math.prod(study.data.grid) > WHOLE_VOXELS:
        raise InvalidInput(
            "voxels of each volume in a query about all volumes",
            value=math.prod(study.data.grid),
            limit=f"at most {WHOLE_VOXELS}",
            remedy="choose a coarser data.grid, with data.finer = 2 for the student, or one query per volume",
        )
    if math.prod(study.data.student.grid) > WHOLE_VOXELS and not study.student.patch:
        raise InvalidInput(
            "student.patch",
            value=(),
            limit="a patch size, because whole volumes of this grid are too large to train on",
        )
