"""Defines the server's half of a query protocol, in the order in which a study uses it.

1. ``agenda``: what the study will ask, as plain data, before there is anything to ask with.
2. ``prepare`` (a strategy's ``initialize_parameters``): what the first question needs beside the codec.
3. ``configure`` (``configure_train``): the queries of a round, of the answers to those before.
4. ``aggregate`` (``aggregate_train``): what the stored answers say of each volume.
5. ``finish``: how the student and its controls are trained on that.

The site's half is :mod:`common.protocols.site_protocol`; protocols are registered in :mod:`common.protocol_terms`.
Everything after an answer is post-processing of what the ledger stores. Functions take values: what is public of a
study, its answers, its labels; who reads them from where is not theirs to know. No protocol imports torch before a
network is to be trained, since questions are asked while the ledger is open.
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
class Agenda:
    """What a study will ask. In words: its ``plan`` for the consortium; ``which`` volumes a site's teachers segment,
    and for ``each`` of what a sum is sent. It asks about the first ``asks`` public volumes, and ``an_answer`` of them
    have a label after one answer; None for all of them, and then one query names them all."""

    plan: str
    which: str
    each: str
    asks: int | None = None
    an_answer: int | None = None

    def check_volumes(self, count: int) -> None:
        """InvalidInput where so many public volumes are too few or too many for the plan."""
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
        """Those of the public volumes that the plan asks about, in order."""
        return tuple(volumes[: self.asks])

    def labelled(self, answers: int, *, asked: int) -> int:
        """Of so many volumes ``asked`` about, how many have a label after so many answers."""
        return (asked if answers else 0) if self.an_answer is None else answers * self.an_answer


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


def _untrained(name: str) -> torch.nn.Module:
    raise InvalidInput("network that is not trained yet", value=name, limit="a network that is trained before this one")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student may learn from: nothing but what is public or released. ``labels`` are in query order, those that
    stand rejected left out; ``image`` gives a public volume on the student's grid, ``onto`` brings a label of it there;
    ``paired`` are public with both; ``trained`` gives a network that stands before this one in their order."""

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
    """A network to be trained. ``inputs``: digest of all that shapes the result; ``steps``: how many it counts.

    ``train`` keeps its checkpoints in the files it is given; with None it writes nothing and cannot be resumed.
    """

    inputs: str
    train: Callable[[FitFiles | None, OnStep], torch.nn.Module]
    steps: int


class Said(Protocol):
    """What a study's stored answers say: post-processing, worked out when it is asked for."""

    def labels(self) -> Iterator[Label]:
        """The label of each volume that has one."""
        ...

    def weighed(self) -> Plausible | None:
        """Whether the answers look like what was expected of them; None where nothing was, or before the first."""
        ...

    def doubts(self, *, draws: int) -> Iterator[Doubt]:
        """What each volume's label was before the answers, and what the noise leaves open of it after them."""
        ...


class QueryProtocol(Protocol):
    """A protocol at the server. Made without arguments; holds nothing."""

    def agenda(self, study: Study) -> Agenda:
        """What the study will ask."""
        ...

    def prepare(self, public: Callable[[], Public], *, sites: int, on_stage: OnStage | None) -> None:
        """Make, keep and publish what the first question needs beside the codec; for the answers of ``sites`` sites.

        A function gives ``public``: where nothing is needed, volumes may be published later.
        """
        ...

    def configure(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """What is asked in turn: queries that may be asked together, each group made of the answers to those before.

        The same answers give the same queries, whenever and however often: another id would be another charge. Ends
        where a group is left without the answers that the next would be made of. A group that is answered already may
        be given again: sites may be owed receipts.
        """
        ...

    def aggregate(self, public: Public, answers: Sequence[Answer]) -> Said:
        """What the study's stored answers say, of which there may be none yet."""
        ...

    def finish(self, lesson: Lesson, network: str) -> NetworkTraining | None:
        """How a network is trained: :data:`~server.protocols.controls.STUDENT` or one of the controls.

        None where the protocol has no such control of this lesson. InvalidInput where nothing was answered.
        """
        ...


def protocol_of(study: Study) -> QueryProtocol:
    """The server's half of the study's protocol."""
    made: QueryProtocol = registered(study.codec.terms.server)()
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


def check_study(study: Study) -> None:
    """InvalidInput for terms that the study's protocol cannot run; asked before the study is made."""
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
