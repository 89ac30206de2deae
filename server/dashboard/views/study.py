"""Computes the Study page: ε after each charge, batches, refusals, and the noise beside the variation of codes.

The pages and the API use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from common.privacy.calibration import noise_multiplier
from common.privacy.figures import epsilon_text, noise_text
from server.dashboard.event_fold import BatchState
from server.dashboard.ledger_fold import RefusalSeen
from server.dashboard.read_model import Follower
from server.dashboard.views.budget import BudgetView, epsilon_of, mechanism_of, study_budget

CURVES = ("exact", "rdp", "paper")
CURVE_POINTS = 160
MOST_BATCHES = 100

ACCOUNTANT_NOTE = (
    "The same mechanism has several upper bounds on ε. The exact curve is the tightest bound. Rényi DP keeps only "
    "moments of the privacy loss, and converting them to ε loses a little, so its ε is higher for the same noise. The "
    "paper's formula loses more. Only the ε of the deciding accountant stops the study."
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """ε after a number of charges, by every accountant: as a number for the chart, and as text rounded up.

    A charge is entered for an answer, for an answer of another study that this study uses as well, and for a lost draw
    (a sealed sum that could not be completed). Charges recovered from receipts after a restore count, too.
    """

    charges: int
    time: str
    exact: float | None
    rdp: float | None
    paper: float | None
    exact_text: str
    rdp_text: str
    paper_text: str


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch of queries: its answers, how many sites accepted its offer, and how long their replies took."""

    id: str
    time: str
    answers: int
    refused: int
    accepted: int
    offered: int
    quorum: int
    quorum_missed: bool
    attempts: int
    first_row: int | None
    last_row: int | None
    median_s: float | None
    slowest_s: float | None
    slowest: str | None


@dataclass(frozen=True, slots=True)
class StudyPage:
    """The content of the Study page; batches and refusals are listed newest first.

    Attributes:
        refusals: Queries that the ledger refused.
        declined: Site, reason, and number of offers that the site declined or missed for this reason. A batch that is
            offered again counts as another offer, as on the Sites page.
    """

    name: str
    id: str
    structures: tuple[str, ...]
    grid: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    unit: str
    relation: str
    delta: float
    planned: int
    quorum: int
    voters_per_site: int
    clipping_norm: float
    noise_multiplier: float
    budget: BudgetView
    curve: tuple[CurvePoint, ...]
    accountant_note: str
    batches: tuple[BatchView, ...]
    batch_count: int
    refusals: tuple[RefusalSeen, ...]
    declined: tuple[tuple[str, str, int], ...]


def study_page(follower: Follower) -> StudyPage:
    """Return the content of the Study page.

    Args:
        follower: The read model.

    Returns:
        The page's content.
    """
    study = follower.study
    privacy = study.privacy
    views = [_batch(follower, name) for name in _batch_names(follower)[:MOST_BATCHES]]
    declined = [
        (name, reason, times)
        for name, site in follower.events.sites.items()
        for reason, times in site.turned_down.items()
    ]
    return StudyPage(
        name=study.name,
        id=study.id,
        structures=study.data.labels[1:],
        grid=study.data.grid,
        spacing_mm=study.data.spacing_mm,
        unit=str(privacy.unit),
        relation=str(privacy.relation),
        delta=privacy.delta,
        planned=privacy.planned_queries,
        quorum=privacy.quorum,
        voters_per_site=privacy.voters_per_site,
        clipping_norm=study.codec.radius,
        noise_multiplier=noise_multiplier(mechanism_of(study), privacy.protection),
        budget=study_budget(follower.facts()),
        curve=tuple(epsilon_curve(follower)),
        accountant_note=ACCOUNTANT_NOTE,
        batches=tuple(views),
        batch_count=len(_batch_names(follower)),
        refusals=tuple(reversed(follower.ledger.refusals[-100:])),
        declined=tuple(sorted(declined)),
    )


def epsilon_curve(follower: Follower) -> list[CurvePoint]:
    """Return ε after each charge by every accountant, thinned out to about :data:`CURVE_POINTS` points.

    Args:
        follower: The read model.

    Returns:
        The points, oldest first; the newest charge is always included.
    """
    points, budget = follower.ledger.points, follower.study.privacy.budget
    step = 1
    while len(points) // step > CURVE_POINTS:
        step *= 2  # a power of two, so that computed points are used again as the curve grows
    chosen = list(range(step - 1, len(points), step))
    if points and (not chosen or chosen[-1] != len(points) - 1):
        chosen.append(len(points) - 1)
    curve = []
    for index in chosen:
        point = points[index]
        by = {name: epsilon_of(name, point.worst, budget) for name in CURVES}
        texts = {f"{name}_text": "–" if value is None else epsilon_text(value) for name, value in by.items()}
        curve.append(CurvePoint(point.charges, point.time, by["exact"], by["rdp"], by["paper"], **texts))
    return curve


def _batch_names(follower: Follower) -> list[str]:
    """Return every batch that the ledger or the log knows, newest first."""
    ledger, events = follower.ledger.batches, follower.events.batches
    names = {**{name: batch.time for name, batch in events.items()}, **{n: b.time for n, b in ledger.items()}}
    return sorted(names, key=lambda name: names[name][:19], reverse=True)


def _batch(follower: Follower, name: str) -> BatchView:
    stored, seen = follower.ledger.batches.get(name), follower.events.batches.get(name, BatchState(""))
    slowest = max(seen.replies, key=lambda reply: reply[1], default=None)
    accepted = sum(reason == "accepted" for reason in seen.accepted.values())
    return BatchView(
        id=name,
        time=stored.time if stored else seen.time,
        answers=stored.answers if stored else 0,
        refused=seen.refused,
        accepted=max(accepted, len(stored.roster) if stored else 0),
        offered=len(seen.accepted),
        quorum=follower.study.privacy.quorum,
        quorum_missed=seen.quorum_missed and not stored,
        attempts=seen.attempts,
        first_row=stored.first_row if stored else None,
        last_row=stored.last_row if stored else None,
        median_s=median(seconds for _, seconds in seen.replies) if seen.replies else None,
        slowest_s=slowest[1] if slowest else None,
        slowest=slowest[0] if slowest else None,
    )


@dataclass(frozen=True, slots=True)
class NoiseView:
    """Compares how much the coordinates of a code vary over public shapes with the noise on an answer.

    Attributes:
        stds: Standard deviation of each coordinate over public shapes, largest first, in code units.
        noise: Standard deviation of the noise on each coordinate of the mean of ``voters`` codes.
        written: ``noise`` as text.
        voters: Number of voters' codes in an answer.
        above: Number of coordinates whose standard deviation is larger than ``noise``.
        words: The comparison as a sentence.
    """

    stds: tuple[float, ...]
    noise: float
    written: str
    voters: int
    above: int
    words: str


def noise_view(follower: Follower, stds: Sequence[float]) -> NoiseView:
    """Compare the standard deviation of each code coordinate over public shapes with the noise on an answer.

    Only public values are used. The number of voters is that of the newest release. Before the first release, it is
    that of all admitted sites, or of a quorum if fewer sites are registered.

    Args:
        follower: The read model.
        stds: Standard deviation of each coordinate in code units.

    Returns:
        The comparison.
    """
    study = follower.study
    batches = list(follower.ledger.batches.values())
    voters = (
        batches[-1].voters
        if batches
        else max(study.privacy.quorum, len(follower.admitted)) * study.privacy.voters_per_site
    )
    noise = mechanism_of(study).mean_noise_std(voters=voters)
    above = sum(std > noise for std in stds)
    return NoiseView(
        stds=tuple(stds),
        noise=noise,
        written=noise_text(noise, 4),
        voters=voters,
        above=above,
        words=f"{above} of {len(stds)} coordinates vary more over public shapes than the noise on the mean of {voters} "
        f"codes; the decoder shrinks every coordinate according to its own signal-to-noise ratio.",
    )
