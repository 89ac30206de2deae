"""Audits a study: runs it many times with production code, in neighbouring worlds, and tests all that is released.

`consilium audit` calls it. A *life* is one complete run of the study. There are four kinds:

* Ledger lives continue beyond the end of the budget. In some of them a pool has a smaller or a larger budget than the
  study's, a site sends codes beyond the clipping norm, or only as many sites as the quorum take part.
* Fault lives have a lost draw (an attempt at a sealed sum), a stopped server and a site restored from a backup. One has
  all sites, another only as many as the quorum.
* Exchange lives run in neighbouring worlds, which differ in the data of one unit (a patient or a hospital). They use
  the same random bytes, so that their noise is equal and cancels in the difference of the answers. The effect of the
  unit is therefore measured exactly.
* Measurement lives measure the noise.

If the claim holds, an audit alarms with probability at most :data:`FALSE_ALARM`: at most 20 findings are statistical,
each with the false alarm rate :data:`~consilium.audit.noise.ALPHA`. An audit cannot prove privacy, and says nothing
about a server that runs other code.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, e, isfinite, log2, pi, sqrt
from pathlib import Path
from unittest import mock

import numpy as np
from scipy.stats import chi2

from common.canonical import check_integer
from common.privacy.accounting import MAX_EPSILON
from common.privacy.audit import AuditFinding, AuditOutcome
from common.privacy.claim import claimed_epsilon
from consilium.audit.books import allowed, further_findings, liar_findings, life_findings, noise_of
from consilium.audit.noise import ALPHA, noise_findings, smallest_fault
from consilium.audit.service import AuditedRun, Service, read_life
from consilium.audit.subject import Limit, Subject, shrunk
from consilium.audit.whole_life import whole_life
from consilium.audit.world import ABSENT, FAILS, VoterAnswers

FALSE_ALARM = 20 * ALPHA
DRAWS = 200_000
"""Default number of draws of noise to measure. Noise that is 1 % too small is then detected in 97 % of audits."""

MOST_LIVES = 1_000
PARTS = ("books", "life", "exchange", "noise")

WORLDS = (
    VoterAnswers("near+"),
    VoterAnswers("far-"),
    VoterAnswers(ABSENT, others=(ABSENT,)),
    VoterAnswers("near+", others=("near+",)),
    VoterAnswers("far+", others=("far-", "inside")),
    VoterAnswers(FAILS),
)
"""The worlds in which the noise is measured. The voters of the audited unit give the same predictions as the other
voters or different ones, or they are absent, or they fail.
"""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ServiceReport(AuditOutcome):
    """The result of an audit.

    Attributes:
        subject: The study that was audited.
        lives: Number of complete runs of the study.
        draws: Number of measured noise values.
        findings: The worst result of each test.
    """

    subject: Subject
    lives: int
    draws: int
    findings: tuple[AuditFinding, ...]

    @property
    def summary(self) -> str:
        """The audit's verdict as a sentence."""
        limit = self.subject.limit
        return self._summary(
            (limit.epsilon, limit.delta),
            limit.accountant,
            self.subject.study.privacy.protection,
            measured=next((f.measured for f in self.findings if f.test == MEASURED), 0.0),
            claimed=self.subject.claimed_mu,
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for JSON; infinite measurements are strings."""
        privacy = self.subject.study.privacy
        return {
            "accountant": self.subject.limit.accountant,
            "claimed_mu": self.subject.claimed_mu,
            "claimed_noise_std": self.subject.claimed_noise_std,
            "confidence": 1 - FALSE_ALARM,
            "delta": self.subject.limit.delta,
            "dimension": self.subject.dimension,
            "draws": self.draws,
            "epsilon": self.subject.limit.epsilon,
            "exceeded": self.exceeded,
            "findings": [
                {
                    "alarm": finding.alarm,
                    "limit": finding.limit,
                    "meaning": finding.meaning,
                    "measured": finding.measured if isfinite(finding.measured) else str(finding.measured),
                    "test": finding.test,
                }
                for finding in self.findings
            ],
            "hospitals": len(self.subject.limits),
            "joint": self.subject.frame is not None,
            "queries": self.subject.queries,
            "relation": str(privacy.relation),
            "runs": self.lives,
            "smallest_fault": smallest_fault(self.draws) if self.draws else None,
            "summary": self.summary,
            "unit": str(privacy.unit),
            "voters_per_site": privacy.voters_per_site,
        }


MEASURED = "measured μ"


class _Verdict(Exception):
    """Raised when the audit has an alarm and was asked to stop at the first one."""


def audit_service(
    subject: Subject,
    *,
    draws: int = DRAWS,
    parts: Sequence[str] = PARTS,
    stop_at_first_alarm: bool = False,
    progress: Progress | None = None,
) -> ServiceReport:
    """Run a study repeatedly until enough noise values are measured, and test everything that it releases.

    Args:
        subject: The study to audit.
        draws: Number of noise values to measure.
        parts: Parts of the audit to run, of :data:`PARTS`; all by default.
        stop_at_first_alarm: End the audit at its first alarm.
        progress: Called with the number of finished runs and the number of all runs.

    Returns:
        The report.

    Raises:
        InvalidInput: If ``draws`` is out of range.
    """
    check_integer("draws of an audit", draws, least=1, most=100_000_000, limit="1 to 100000000")
    audit = _Audit(subject, draws=draws, stops=stop_at_first_alarm, progress=progress or (lambda _done, _of: None))
    steps = {
        "books": audit.follow_the_books,
        "life": audit.live_through_everything,
        "exchange": audit.exchange,
        "noise": audit.measure,
    }
    with suppress(_Verdict):
        for part in parts:
            steps[part]()
    return ServiceReport(subject=subject, lives=audit.done, draws=audit.measured, findings=tuple(audit.worst.values()))


@dataclass(slots=True)
class _Audit:
    """An audit in progress, with the worst result of each test so far."""

    subject: Subject
    draws: int
    stops: bool
    progress: Progress
    worst: dict[str, AuditFinding] = field(default_factory=dict)
    done: int = 0
    measured: int = 0
    _moved: float = 0.0

    def follow_the_books(self) -> None:
        """Run the study and ask further queries; also run it with other budgets, fewer sites and a lying site."""
        subject, small = self.subject, shrunk(self.subject)
        self._follow(subject, VoterAnswers("near+"), further=True)
        self._follow(small, VoterAnswers("far-"), further=True, wider=True)
        self._follow(small, VoterAnswers("near+", others=("aside",)), tight="server")
        self._follow(small, VoterAnswers("near+", others=("aside",)), tight="site")
        self._follow(small, VoterAnswers("near+"), sites=small.study.privacy.quorum)
        for far in (True, False):
            with _folder() as root:
                service = Service(root, small, VoterAnswers("near+"))
                if min(allowed(service).values()) >= 1:
                    refused, ended = service.live_with_a_liar(far=far)
                    self._add(liar_findings(service, read_life(service), refused=refused, ended=ended))
            self._lived()

    def live_through_everything(self) -> None:
        """Run small studies from start to end in which faults occur, and check their ledgers.

        The faults are a lost draw (attempt at a sealed sum), a server that is stopped and restarted, a site restored
        from a backup, and answers that are reused.
        """
        small = shrunk(self.subject)
        for sites in {small.study.privacy.quorum, len(small.limits)}:
            with _folder() as root:
                service = Service(root, small, VoterAnswers("near+", others=("aside",)), sites=sites)
                self._add(whole_life(service))
            self._lived()

    def exchange(self) -> None:
        """Run the study in neighbouring worlds with the same random bytes, and compare the answers.

        The noise is then the same and cancels, so the effect of one unit is measured exactly.
        """
        small = shrunk(self.subject)
        for subject, words in ((self.subject, ("near+", "far-")), (small, ("near+", "far-", FAILS, ABSENT))):
            lives = {}
            for word in words:
                with _folder() as root, _stream(b"audit") as entropy:
                    service = Service(root, subject, VoterAnswers(word))
                    life = self._live(service)
                    lives[word] = noise_of(service, life), [release.answer for release in life.releases]
                    self._add([_entropy_used(service, life, entropy.drawn)])
                self._lived()
            self._add([_same_noise(noise for noise, _ in lives.values())])
            self._add([self._movement(subject, {word: answers for word, (_, answers) in lives.items()})])

    def measure(self) -> None:
        """Run the study, in all worlds in turn, until enough noise values are collected, and test them."""
        small = shrunk(self.subject)
        lives = self._lives(small)
        noise = []
        for number in range(lives):
            with _folder() as root:
                service = Service(root, small, WORLDS[number % len(WORLDS)])
                life = self._live(service)
                noise.append(noise_of(service, life, turn=number))
            self._lived()
        shortest = min(len(one) for one in noise)
        if shortest == 0:
            self._add([AuditFinding.at_least("noise", 0, 1, "releases in the shortest run")])
            return
        size = min(vector.size for one in noise for vector in one)  # differs only if there is a fault
        together = np.array([[vector[:size] for vector in one[:shortest]] for one in noise])
        self.measured = together.size
        std = small.claimed_noise_std
        self._add(noise_findings(together, std))
        most = sqrt(float((together.astype(float) ** 2).sum()) / chi2.ppf(ALPHA, together.size))
        mu = self._moved * sqrt(small.study.privacy.charges) / max(most, 1e-300)
        claimed, what = small.claimed_mu, "lower bound by the measurements; claimed"
        self._add([AuditFinding(MEASURED, mu, claimed, mu > claimed, what)])

    # --- helpers

    def _live(self, service: Service) -> AuditedRun:
        """Run the study to its end, check its ledgers, and return their contents."""
        ended = service.live()
        life = read_life(service)
        self._add(life_findings(service, life, ended=ended))
        return life

    def _follow(
        self,
        subject: Subject,
        world: VoterAnswers,
        *,
        further: bool = False,
        wider: bool = False,
        tight: str = "",
        sites: int | None = None,
    ) -> None:
        server = site = None
        if wider:  # room for one further query, but not for two
            wide = _limit(subject, subject.queries + 1.995)
            if wide.epsilon <= MAX_EPSILON:
                server = site = (wide,) * len(subject.limits)
        if tight:  # the first pool's budget is slightly below two releases
            first = _limit(subject, 1.995 if subject.queries > 1 else 0.995)
            narrow = (first, *subject.limits[1:])
            server, site = (narrow, None) if tight == "server" else (None, narrow)
        with _folder() as root:
            size = 1 if tight else None
            service = Service(
                root, subject, world, sites=sites, batch_size=size, server_limits=server, site_limits=site
            )
            self._live(service)
            if further:
                self._add(further_findings(service))
        self._lived()

    def _movement(self, subject: Subject, answers: dict[str, list[np.ndarray]]) -> AuditFinding:
        """Measure the largest distance between the first answers in two neighbouring worlds.

        The sensitivity must bound it.
        """
        zero_out = str(subject.study.privacy.relation) == "zero-out"
        moved = 0.0
        for one, other in combinations(answers, 2):
            neighbours = not zero_out or (one in subject.sayings) != (other in subject.sayings)
            if neighbours and answers[one] and answers[other]:
                apart = answers[one][0].astype(object) - answers[other][0].astype(object)
                moved = max(moved, sqrt(sum(int(value) ** 2 for value in apart)))
        self._moved = max(self._moved, moved)
        what = "distance between the answers of two worlds that differ in one unit, divided by Δ"
        return AuditFinding.at_most("movement", moved / subject.reach, 1.0, what, slack=1e-12)

    def _lives(self, subject: Subject) -> int:
        return min(MOST_LIVES, max(len(WORLDS), ceil(self.draws / (subject.queries * subject.dimension))))

    def _add(self, findings: Iterable[AuditFinding]) -> None:
        """Keep the worst result of each test: an alarm, or else the value nearest its limit."""
        for finding in findings:
            known = self.worst.get(finding.test, finding)
            worse = finding.alarm, -abs(finding.measured - finding.limit)
            if worse >= (known.alarm, -abs(known.measured - known.limit)):
                self.worst[finding.test] = finding

    def _lived(self) -> None:
        self.done += 1
        self.progress(self.done, 15 + self._lives(self.subject))
        if self.stops and any(finding.alarm for finding in self.worst.values()):
            raise _Verdict


def _limit(subject: Subject, releases: float) -> Limit:
    """Return a budget for a given number of the study's releases."""
    delta, accountant = subject.limit.delta, subject.limit.accountant
    return Limit(claimed_epsilon(sqrt(releases * subject.cost), delta, accountant=accountant), delta, accountant)


def _same_noise(lives: Iterable[list[np.ndarray]]) -> AuditFinding:
    first, *others = lives
    differing = sum(not _alike(first, other) for other in others)
    what = "worlds with the same random bytes whose noise differs"
    return AuditFinding.at_most("noise comes from the system's entropy", differing, 0, what)


def _alike(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Return whether two simulated runs drew the same noise, up to the first round in which their dimensions differ."""
    for vector, its in zip(one, other, strict=False):
        if vector.size != its.size:
            return True
        if not np.array_equal(vector, its):
            return False
    return len(one) == len(other)


def _entropy_used(service: Service, life: AuditedRun, drawn: int) -> AuditFinding:
    """Check that the number of random bits read (8 for each of ``drawn`` bytes) is at least the entropy of the noise.

    Noise of standard deviation σ has log₂(σ√(2πe)) bits of entropy for each coordinate.
    """
    colluders, bits = service.study.privacy.sealed_colluders, 0.0
    for release in life.releases:
        shares = 1 if colluders is None else len(release.roster)
        std = release.noise_std / sqrt(shares - (colluders or 0))
        bits += shares * release.dimension * log2(std * sqrt(2 * pi * e))
    share = 8 * drawn / bits if bits else 1.0
    return AuditFinding.at_least(
        "entropy read", share, 1.0, "random bits read from the operating system for each bit of noise"
    )


class _Stream:
    """Replaces the operating system's random bytes by a stream that depends on a key, and counts the bytes drawn."""

    def __init__(self, key: bytes) -> None:
        self._key, self.drawn, self._calls = key, 0, 0

    def __call__(self, size: int) -> bytes:
        self._calls += 1
        self.drawn += size
        return hashlib.shake_256(self._key + self._calls.to_bytes(8, "big")).digest(size)


@contextmanager
def _stream(key: bytes) -> Iterator[_Stream]:
    stream = _Stream(key)
    with mock.patch.object(os, "urandom", stream):
        yield stream


@contextmanager
def _folder() -> Iterator[Path]:
    """Provide a folder for one run of the study, in memory if possible, because ledgers sync to disk at every step."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="audit-", dir=memory if os.access(memory, os.W_OK) else None) as root:
        yield Path(root)
