"""Simulates the voters of an audited study, with an answer that the audit chooses for each voter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from client.worker import Ask
from consilium.audit.subject import Subject


@dataclass(frozen=True, slots=True)
class VoterAnswers:
    """The answer that each voter gives.

    Attributes:
        moved: Name of the synthetic prediction (:attr:`Subject.sayings`) of the audited unit's voters, at the first
            site.
        others: Names of the predictions of all other voters, who take the names in turn and begin again after the last.
            A name without a prediction stands for a voter that is absent or fails.
    """

    moved: str = "near+"
    others: tuple[str, ...] = ("inside", "aside")

    def sayings(self, subject: Subject, site: int) -> list[str]:
        """Return the name of the prediction that each voter of a site gives.

        Args:
            subject: The study under audit.
            site: Number of the site.

        Returns:
            The names, one for each voter.
        """
        privacy = subject.study.privacy
        voters = privacy.voters_per_site
        words = [self.others[(site + voter) % len(self.others)] for voter in range(voters)]
        unit = 0 if site else 1 if str(privacy.unit) == "patient" else voters
        return [self.moved] * unit + words[unit:]


FAILS, ABSENT = "fails", "absent"


@dataclass(frozen=True, slots=True)
class SiteVoters:
    """The voters of one site, with the interface that a worker calls."""

    subject: Subject
    world: VoterAnswers
    site: int

    def predict(self, volume: bytes) -> Sequence[Ask]:
        """Return for each voter a function that gives the voter's answer."""
        return [partial(self._say, word) for word in self.world.sayings(self.subject, self.site)]

    def _say(self, word: str) -> Float[np.ndarray, "k x y z"] | None:
        if word == FAILS:
            raise RuntimeError("a voter that fails")
        return self.subject.sayings.get(word)
