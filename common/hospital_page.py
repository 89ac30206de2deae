"""Defines the data that a hospital's own web page shows. The site provides the data; a web server renders the page.

Nothing here leaves the site. Cases have the names that the site's own evaluation gives them, because the page is served
to this machine only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

from common.site_facts import SiteFacts, SiteStudy


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A batch of queries that the site accepted or declined: time, number of queries, and reason (empty if
    accepted).
    """

    time: str
    queries: int
    reason: str


@dataclass(frozen=True, slots=True)
class OwnPeer:
    """Another hospital of the study, as this site sees it.

    Attributes:
        name: Its name.
        fingerprint: Fingerprint of its public key.
        standing: State of its key in words, such as confirmed or changed.
        confirmed: True if a person at this site has confirmed the key that the hospital uses now.
    """

    name: str
    fingerprint: str
    standing: str
    confirmed: bool


@dataclass(frozen=True, slots=True)
class OwnAlarm:
    """A problem at the site: what is wrong, what to do, and whether the site answers no query as long as it lasts."""

    text: str
    remedy: str
    stops: bool


@dataclass(frozen=True, slots=True)
class OwnNetwork:
    """A network that this hospital has: ``student``, ``own`` or ``adapted``, and a sentence about it.

    ``verdict`` says whether the network is better than the hospital's own teachers. It is empty for ``own``, which is
    these teachers, and for the student if cases of another folder are shown.
    """

    name: str
    sentence: str
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class OfferedCase:
    """A case that the page can show.

    Attributes:
        number: Its number in the dataset, from 1.
        name: Its name in the dataset and in the site's evaluations.
        dice: The student's Dice in the newest evaluation; None if it was not scored there.
    """

    number: int
    name: str
    dice: float | None = None


@dataclass(frozen=True, slots=True)
class HospitalFacts:
    """Everything on the page except pictures.

    Attributes:
        site: The figures of the site's ledger over all studies.
        here: The figures of this directory's study in the site's ledger; None before anybody consented to the study.
        study: Name of this directory's study.
        state: State of the site in this study: ``alarm``, ``away`` (a daemon is not ready), ``unconsented``,
            ``paused``, ``withdrawn``, ``spent``, ``answering`` or ``joined``.
        sheet: Text of the consent sheet, which states the study's terms.
        answers: Accepted and declined batches, the newest first.
        sealed: True if the study uses a sealed sum, so that the site must confirm its peers.
        own_fingerprint: Fingerprint of this site's key.
        peers: The other hospitals.
        alarms: Problems, the worst first.
        networks: Networks that this hospital has.
        pause: The command that pauses the study, or ends the pause.
        site_dir: The site's directory, quoted as the commands of this page need it.
        cases: The cases that can be shown, those with the lowest Dice first.
        withdrawn: Number of labelled cases of withdrawn patients, which are not shown.
        left_out: Number of further cases that this site leaves out, which are not shown either.
        not_shown: Why no case can be shown; empty if nothing forbids it.
        adapted_on: Number of the shown cases whose patients trained the adapted network; None if that network is not
            shown.
        evaluated: Day of the evaluation that the cases' Dice comes from; empty if there is none.
        elsewhere: True if the cases are not those of the site's own dataset.
    """

    site: SiteFacts
    here: SiteStudy | None
    study: str
    state: str
    sheet: str
    answers: tuple[OwnAnswer, ...]
    sealed: bool
    own_fingerprint: str
    peers: tuple[OwnPeer, ...]
    alarms: tuple[OwnAlarm, ...]
    networks: tuple[OwnNetwork, ...]
    pause: str
    site_dir: str
    cases: tuple[OfferedCase, ...]
    withdrawn: int
    left_out: int
    not_shown: str
    adapted_on: int | None = None
    evaluated: str = ""
    elsewhere: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ShownCase:
    """One of the hospital's cases as the viewer shows it, on the study's grid.

    Attributes:
        arrays: ``image``, ``label`` and each network's label map, by name.
        labels: Names of the label values.
        spacing_mm: Size of a voxel.
        dice: Mean Dice of each network against the annotated label; None if there is no label to compare with.
    """

    arrays: Mapping[str, UInt8[np.ndarray, "x y z"]]
    labels: tuple[str, ...]
    spacing_mm: tuple[float, float, float]
    dice: Mapping[str, float | None]


class OwnPage(Protocol):
    """The interface by which the page's web server reads a site's data."""

    def facts(self) -> HospitalFacts:
        """Return everything on the page except pictures, as of now."""
        ...

    def case(self, number: int) -> ShownCase:
        """Return a case.

        Args:
            number: Number of the case in ``facts().cases``.

        Returns:
            The case with its image, label and the networks' label maps.

        Raises:
            InvalidInput: If there is no such case, or it cannot be used.
        """
        ...
