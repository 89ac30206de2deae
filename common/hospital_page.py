"""Defines what a hospital's own page shows, as values: the site reads them, the page's server draws them.

Holds nothing that leaves the site. A case is a number here; no name of a patient or a file is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True, slots=True)
class OwnStudy:
    """A study of the pool, and what it took of the budget.

    Attributes:
        name: The study's name.
        state: ``open``, ``pause``, ``withdraw`` or ``spent``.
        releases: Accepted queries.
        epsilon: ε of them, by the pool's accountant at the pool's δ.
        share: Their share of Σμ² that the cap allows, from 0 to 1.
        here: Whether it is the study of this directory.
    """

    name: str
    state: str
    releases: int
    epsilon: float
    share: float
    here: bool


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """An accepted batch or a declined one: when, how many queries, and the reason's word, empty where accepted."""

    time: str
    queries: int
    reason: str


@dataclass(frozen=True, slots=True)
class OwnPeer:
    """Another hospital: its name, its key's fingerprint, what is known of it, and whether that is in order."""

    name: str
    fingerprint: str
    standing: str
    confirmed: bool


@dataclass(frozen=True, slots=True)
class OwnAlarm:
    """What is wrong, what to do, and whether it stops answers."""

    text: str
    remedy: str
    stops: bool


@dataclass(frozen=True, slots=True)
class OwnNetwork:
    """A network that this hospital has: ``student``, ``own`` or ``adapted``, and a sentence about it."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class HospitalFacts:
    """Everything on the page but pictures.

    Attributes:
        site: The site's name.
        pool: Its patient pool.
        study: The study of this directory.
        state: ``alarm``, ``unconsented``, ``paused``, ``withdrawn``, ``spent``, ``answering`` or ``joined``.
        sheet: The consent sheet.
        consented: Who consented when, one sentence each.
        epsilon: ε spent, by ``accountant`` at ``delta``.
        cap: ε of the site's own cap.
        share: Share of Σμ² that is spent, from 0 to 1.
        accountant: Name of the accountant.
        delta: δ of both.
        unit: Unit of privacy.
        relation: Neighbouring relation.
        doubt: Why more may have been spent; empty where the books are whole.
        today: Queries accepted today.
        per_day: Queries that the site accepts in a day.
        studies: The pool's studies.
        trainings: Sentences about private trainings, which cost patients beside the releases.
        answers: Accepted and declined batches, the newest first.
        accepted: Number of accepted queries.
        refused: Number of declined offers on record.
        sealed: Whether the study adds up under seal, so that peers matter.
        own_fingerprint: Fingerprint of this site's key.
        peers: The other hospitals.
        alarms: What is wrong, the worst first.
        networks: Networks that this hospital has.
        pause: The command that pauses the study, or ends the pause.
        cases: Numbers, from 1, of the cases that can be shown.
        withdrawn: Number of labelled cases of withdrawn patients, which are not shown.
        left_out: Number of further cases that this site leaves out, which are not shown either.
        not_shown: Why no case can be shown; empty if nothing forbids it.
    """

    site: str
    pool: str
    study: str
    state: str
    sheet: str
    consented: tuple[str, ...]
    epsilon: float
    cap: float
    share: float
    accountant: str
    delta: float
    unit: str
    relation: str
    doubt: str
    today: int
    per_day: int
    studies: tuple[OwnStudy, ...]
    trainings: tuple[str, ...]
    answers: tuple[OwnAnswer, ...]
    accepted: int
    refused: int
    sealed: bool
    own_fingerprint: str
    peers: tuple[OwnPeer, ...]
    alarms: tuple[OwnAlarm, ...]
    networks: tuple[OwnNetwork, ...]
    pause: str
    cases: tuple[int, ...]
    withdrawn: int
    left_out: int
    not_shown: str


@dataclass(frozen=True, slots=True, eq=False)
class ShownCase:
    """One of the hospital's cases as the viewer draws it, on the study's grid.

    Attributes:
        arrays: ``image``, ``label`` and each network's label map, by name.
        labels: Names of the label values.
        spacing_mm: Size of a voxel.
        dice: Mean Dice of each network with the drawn label; None where nothing is to be compared.
    """

    arrays: Mapping[str, UInt8[np.ndarray, "x y z"]]
    labels: tuple[str, ...]
    spacing_mm: tuple[float, float, float]
    dice: Mapping[str, float | None]


class OwnPage(Protocol):
    """What the page's server asks of a site; reads only."""

    def facts(self) -> HospitalFacts:
        """Everything but pictures, as it is now."""
        ...

    def case(self, number: int) -> ShownCase:
        """A case by its number from 0; InvalidInput for one that is not there or cannot be used."""
        ...
