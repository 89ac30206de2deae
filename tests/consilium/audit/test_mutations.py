"""Measures the audit's power: each mutation breaks one production object in one way, and several audits must
find it.

A mutation patches the object that runs (the aggregator's sampler, a ledger's books, the worker's clip) and is put in
before anything of a study exists. The audits run in two processes, each with its own broken objects.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import count
from math import isqrt

import numpy as np
import pytest

from client import worker
from client.ledger import site_codes
from common import masking
from common.ledger import server_state as books
from common.ledger import site_state as site_books
from common.ledger import spending
from common.ledger.releases import ChargedTotals
from common.ledger.server_state import ServerBooks
from common.ledger.site_state import SiteBooks
from common.masking import MaskedRoster, Member
from common.privacy import accounting, calibration, mechanism, quantise, release
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Budget, QuerySpec, Unit
from common.protocols import site_protocol
from consilium.audit import sealed as sealed_view
from consilium.audit.run import DRAWS, audit_service
from consilium.audit.subject import Subject, stand_in
from server.aggregation import aggregator as query
from server.aggregation import batch
from server.aggregation.aggregator import Aggregator
from server.aggregation.receipts import ReceiptDelivery
from server.ledger.server_ledger import Ledger
from tests.worlds import make_privacy

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
Sampler = Callable[[int, Fraction], np.ndarray]
AUDITS = int(os.environ.get("CONSILIUM_AUDITS", "2"))
"""Number of audits of each broken production and of each sound one; `make test-audit` makes twenty.

All but one audit of a broken production must raise an alarm, and no audit of a sound one.
"""

EXACT = ("books", "life")
"""Parts of an audit that compare exactly. Every audit finds a break there, or none does."""


def of_two_queries(sites: int, **more: object) -> Subject:
    """Return a subject with two queries about one volume each, and as few sites as possible."""
    terms = make_privacy(**{"planned_queries": 2, "quorum": min(sites, 2)} | more)
    return stand_in(terms, hospitals=sites, dimension=256, radius=1.0, framed=False)


@cache
def alone() -> Subject:
    return of_two_queries(1)


@cache
def single() -> Subject:
    return of_two_queries(2)


@cache
def three() -> Subject:
    return of_two_queries(3)


@cache
def sealed() -> Subject:
    """Return a subject whose three sites mask their codes and draw the noise; the last tells the server all
    it knows.
    """
    return of_two_queries(3, quorum=3, aggregation="sealed-sum")


@cache
def sealed_batch() -> Subject:
    """Return a sealed subject with two queries in one draw."""
    return of_two_queries(3, quorum=3, aggregation="sealed-sum", planned_queries=4)


@cache
def sealed_spare() -> Subject:
    """Return a sealed subject whose draws may be lost, because the other sites reach the quorum."""
    return of_two_queries(4, quorum=3, aggregation="sealed-sum", spare_draws=2)


@cache
def hospital_voters() -> Subject:
    """Return a subject of unit hospital with two voters at each; an exchange moves both."""
    return of_two_queries(2, voters_per_site=2)


@cache
def uneven() -> Subject:
    """Return a subject whose radius is no multiple of the grid's step."""
    terms = make_privacy(planned_queries=2)
    return stand_in(terms, hospitals=2, dimension=256, radius=1.00001, framed=False)


@cache
def rounds() -> Subject:
    """Return a subject with three rounds of a joint query."""
    privacy = make_privacy(planned_queries=3)
    return stand_in(privacy, hospitals=2, dimension=64, radius=1.0, framed=True)


@cache
def voters() -> Subject:
    """Return a subject of unit patient with two voters at each hospital; an exchange moves one."""
    return of_two_queries(2, unit=Unit.PATIENT, voters_per_site=2)


@cache
def at_length() -> Subject:
    """Return a subject with as many draws as the largest default audit measures, in two runs."""
    privacy = make_privacy(planned_queries=10)
    return stand_in(privacy, hospitals=2, dimension=4096, radius=1.0, framed=False)


def use(patch: Patch, sampler: Sampler) -> None:
    defaults = Aggregator.__init__.__kwdefaults__
    assert defaults["sampler"] is rounded_gaussian
    patch.setitem(defaults, "sampler", sampler)


def weaker(factor: Fraction) -> Callable[[Patch], None]:
    return lambda patch: use(patch, lambda size, std: rounded_gaussian(size, std * factor))


def generated(seed: Callable[[], object]) -> Callable[[Patch], None]:
    """Return a mutation whose noise comes from a generator that is seeded anew for each draw."""

    def sampler(size: int, std: Fraction) -> np.ndarray:
        return np.rint(np.random.default_rng(seed()).normal(0, float(std), size)).astype(np.int64)

    return lambda patch: use(patch, sampler)


def later(draws: int, sign: int = 1) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        kept: deque[np.ndarray] = deque()

        def sampler(size: int, std: Fraction) -> np.ndarray:
            kept.append(sign * kept[0] if len(kept) == draws else rounded_gaussian(size, std))
            return kept[-1] if len(kept) <= draws else (kept.popleft(), kept[-1])[1]

        use(patch, sampler)

    return mutate


def same_in_every_transaction(patch: Patch) -> None:
    kept: list[np.ndarray] = []
    place = count()
    real = Aggregator._release

    def released(self: Aggregator, *args: object) -> int:
        nonlocal place
        place = count()
        return real(self, *args)

    def sampler(size: int, std: Fraction) -> np.ndarray:
        at = next(place)
        if at == len(kept):
            kept.append(rounded_gaussian(size, std))
        return kept[at]

    patch.setattr(Aggregator, "_release", released)
    use(patch, sampler)


def shuffled_again(patch: Patch) -> None:
    rng, kept = np.random.default_rng(), []

    def sampler(size: int, std: Fraction) -> np.ndarray:
        if not kept or len(kept[0]) != size:
            kept[:] = [rounded_gaussian(size, std)]
        return rng.permutation(kept[0])

    use(patch, sampler)


def tiled(patch: Patch) -> None:
    use(patch, lambda size, std: np.resize(rounded_gaussian(64, std), size))


def tiled_over_vectors(patch: Patch) -> None:
    kept, place = [], count()

    def sampler(size: int, std: Fraction) -> np.ndarray:
        if not kept:
            kept.append(rounded_gaussian(64, std))
        return np.array([kept[0][next(place) % 64] for _ in range(size)])

    use(patch, sampler)


def on(keep: Callable[[int], slice]) -> Callable[[Patch], None]:
    """Return a mutation that adds noise to some coordinates only."""

    def sampler(size: int, std: Fraction) -> np.ndarray:
        noise = np.zeros(size, dtype=np.int64)
        noise[keep(size)] = rounded_gaussian(size, std)[keep(size)]
        return noise

    return lambda patch: use(patch, sampler)


def correlated(patch: Patch) -> None:
    def sampler(size: int, std: Fraction) -> np.ndarray:
        common = rounded_gaussian(1, std) * 0.3
        return np.rint(rounded_gaussian(size, std) * 0.9539 + common).astype(np.int64)

    use(patch, sampler)


def moving_average(patch: Patch) -> None:
    def sampler(size: int, std: Fraction) -> np.ndarray:
        noise = rounded_gaussian(size + 1, std).astype(float)
        return np.rint(noise[1:] * 0.954 + noise[:-1] * 0.3).astype(np.int64)

    use(patch, sampler)


def laplace(patch: Patch) -> None:
    def sampler(size: int, std: Fraction) -> np.ndarray:
        noise = np.random.default_rng(int.from_bytes(os.urandom(8 * size), "big")).laplace(0, float(std) / 2**0.5, size)
        return np.rint(noise).astype(np.int64)

    use(patch, sampler)


def coarse(patch: Patch) -> None:
    use(patch, lambda size, std: rounded_gaussian(size, std) // 256 * 256)


class Kept(release.CodeSum):
    """Keeps the codes of a sum, unlike the class that it replaces."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.kept: list[np.ndarray] = []

    def add(self, code: np.ndarray) -> None:
        super().add(code)
        self.kept.append(code)

    def of_roster(self, sites: int) -> list[np.ndarray]:
        """Return every site's code, and the zero code for each site that sent none."""
        return self.kept + [np.zeros(self.mechanism.dimension, dtype=np.int64)] * (sites - len(self.kept))


def missing(when: Callable[[list[np.ndarray]], bool]) -> Callable[[Patch], None]:
    """Return a mutation that leaves out the noise in some releases, depending on their codes."""

    class Missing(Kept):
        def released(self, *, sites: int, sampler: Sampler) -> np.ndarray:
            codes = self.of_roster(sites)
            return np.sum(codes, axis=0) if when(codes) else super().released(sites=sites, sampler=sampler)

    return lambda patch: patch.setattr(batch, "CodeSum", Missing)


def after_the_first_round(patch: Patch) -> None:
    real = Aggregator._release

    def released(self: Aggregator, batch: object, *args: object) -> int:
        if batch.queries[0].round > 1:
            self._sampler = lambda size, std: np.zeros(size, dtype=np.int64)
        return real(self, batch, *args)

    patch.setattr(Aggregator, "_release", released)


def seen_from_the_codes(patch: Patch) -> None:
    class Seen(Kept):
        def released(self, *, sites: int, sampler: Sampler) -> np.ndarray:
            total = np.sum(self.of_roster(sites), axis=0)
            noise = super().released(sites=sites, sampler=sampler) - total
            return total + np.where(total[0] > 0, noise, -noise)

    patch.setattr(batch, "CodeSum", Seen)


def no_clip(patch: Patch) -> None:
    patch.setattr(quantise, "clip", lambda code, *, radius: code)
    patch.setattr(quantise, "within", lambda code, *, bound_int: True)


def clip_of_the_sum_only(patch: Patch) -> None:
    """Break the clip of single voters: a site's code stays within m·R, but one voter's part exceeds R."""
    patch.setattr(
        site_protocol, "quantise", lambda code, *, radius_int: quantise.quantise(code, radius_int=2 * radius_int)
    )


def one_code_counts_twice(patch: Patch) -> None:
    class Twice(Kept):
        def released(self, *, sites: int, sampler: Sampler) -> np.ndarray:
            return super().released(sites=sites, sampler=sampler) + self.of_roster(sites)[0]

    patch.setattr(batch, "CodeSum", Twice)


def no_norm_test(patch: Patch) -> None:
    patch.setattr(query, "within", lambda code, *, bound_int: True)
    patch.setattr(release, "within", lambda code, *, bound_int: True)


def limit(factor: Fraction, *modules: object) -> Callable[[Patch], None]:
    """Return a mutation of the accountant, which then allows factor · Σμ² in the given modules."""

    def mutate(patch: Patch) -> None:
        for module in modules:
            real = module.max_mu_squared
            patch.setattr(module, "max_mu_squared", lambda name, budget, real=real: real(name, budget) * factor)

    return mutate


def ten_deltas(patch: Patch) -> None:
    patch.setattr(Budget, "analytic_delta", property(lambda self: 10 * self.delta))


def plan_of(change: Callable[[ChargedTotals, tuple], object]) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        real = ServerBooks.plan

        def planned(self: ServerBooks, mechanism: object, *, study_id: str, roster: tuple) -> object:
            charge = real(self, mechanism, study_id=study_id, roster=roster)
            return change(charge, roster) if isinstance(charge, ChargedTotals) else charge

        patch.setattr(ServerBooks, "plan", planned)

    return mutate


def budget_reset_on_opening(patch: Patch) -> None:
    real = ServerBooks._apply
    patch.setattr(ServerBooks, "_apply", lambda self, charge: real(self, charge) if self._undo is not None else None)


def studies_not_added(patch: Patch) -> None:
    real = ServerBooks.plan

    def planned(self: ServerBooks, mechanism: object, *, study_id: str, roster: tuple) -> object:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self, "spent", lambda pool: self.spent_in(study_id, pool), raising=False)
            return real(self, mechanism, study_id=study_id, roster=roster)

    patch.setattr(ServerBooks, "plan", planned)


def site_counts_nothing_against_its_caps(patch: Patch) -> None:
    patch.setattr(SiteBooks, "shortfall", lambda *_args, **_more: None)


def site_charges_all_voters(patch: Patch) -> None:
    real = site_books.charge_of

    def charged(what: mechanism.Mechanism, *protections: object) -> Fraction:
        return real(what, *protections) * what.voters_per_site**2

    patch.setattr(site_books, "charge_of", charged)


def redrawn(patch: Patch) -> None:
    real = Ledger._stored

    def stored(self: Ledger, query_id: str) -> object:
        answer = real(self, query_id)
        return replace(answer, noisy_sum=answer.noisy_sum + rounded_gaussian(answer.noisy_sum.size, Fraction(100)))

    patch.setattr(Ledger, "_stored", stored)


def no_receipts(patch: Patch) -> None:
    patch.setattr(ReceiptDelivery, "send", lambda *_, **__: None)
    patch.setattr(ReceiptDelivery, "owed", lambda *_: [])


def told_too_low(patch: Patch) -> None:
    real = accounting._epsilon_exact
    patch.setattr(accounting, "_epsilon_exact", lambda *args: real(*args) * 0.9999)


def reach(change: Callable[[int, dict[str, object]], int]) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        real = mechanism.sensitivity
        for module in (mechanism, calibration):
            patch.setattr(module, "sensitivity", lambda **facts: change(real(**facts), facts))

    return mutate


def share(change: Callable[[Fraction, str, int], Fraction | int]) -> Callable[[Patch], None]:
    """Return a mutation of a share's standard deviation, computed from its true value, the site's name and the roster's
    size.
    """

    def mutate(patch: Patch) -> None:
        real = worker.masked_code

        def masked(
            code: np.ndarray, query: QuerySpec, share: Fraction, *, roster: MaskedRoster, me: str, **more: object
        ) -> np.ndarray:
            std = change(share, me, len(roster.members))
            sampler = rounded_gaussian if std else (lambda size, _: np.zeros(size, dtype=np.int64))
            return real(code, query, std or share, roster=roster, me=me, **{**more, "sampler": sampler})

        patch.setattr(worker, "masked_code", masked)

    return mutate


def shares_used_again(patch: Patch) -> None:
    kept: dict[tuple[int, Fraction], np.ndarray] = {}

    def sampler(size: int, std: Fraction) -> np.ndarray:
        if (size, std) not in kept:
            kept[size, std] = rounded_gaussian(size, std)
        return kept[size, std]

    real = worker.masked_code
    patch.setattr(worker, "masked_code", lambda *words, **more: real(*words, **{**more, "sampler": sampler}))


def masks_of_a_fixed_seed(patch: Patch) -> None:
    real = masking._stream
    patch.setattr(masking, "_stream", lambda _shared, *, info, words: real(bytes(32), info=b"", words=words))


def without_the_mask_of(*pairs: tuple[str, str]) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        real = masking.pair_mask

        def pair_mask(roster: MaskedRoster, *, me: str, peer: Member, dimension: int, **more: object) -> np.ndarray:
            if (me, peer.site) in pairs:
                return np.zeros(dimension, dtype=np.uint64)
            return real(roster, me=me, peer=peer, dimension=dimension, **more)

        patch.setattr(masking, "pair_mask", pair_mask)

    return mutate


def further_draws_free(patch: Patch) -> None:
    real = ServerBooks._apply

    def applied(self: ServerBooks, charge: ChargedTotals) -> None:
        lost = any(self.releases.lost_in(study) for study in self.studies)
        real(self, ChargedTotals({}, {}) if lost else charge)

    patch.setattr(ServerBooks, "_apply", applied)


def old_draws_stand(patch: Patch) -> None:
    """Let a restored ledger answer for earlier draws and keep the keys with which they were masked."""

    class Never(dict):  # type: ignore[type-arg]
        def clear(self) -> None:
            pass

    real = SiteBooks.__init__

    def begun(self: SiteBooks, *args: object, **more: object) -> None:
        real(self, *args, **more)
        self.sealed.nonces = Never()

    patch.setattr(SiteBooks, "__init__", begun)
    patch.setattr(SiteBooks, "draw_is_current", lambda _self, reservation, draw: reservation.draw == draw)


def mask_keys_without_nonce(patch: Patch) -> None:
    real = masking.mask_private_key
    for module in (site_codes, sealed_view):
        patch.setattr(module, "mask_private_key", lambda secret, draw, *, nonce: real(secret, draw, nonce=""))


def masks_of_no_query(patch: Patch) -> None:
    real = masking.pair_mask

    def pair_mask(roster: MaskedRoster, *, query: str, **more: object) -> np.ndarray:
        return real(roster, query="0" * 64, **more)

    for module in (masking, sealed_view):
        patch.setattr(module, "pair_mask", pair_mask)


@dataclass(frozen=True)
class Mutation:
    """Holds a change that breaks production, the study that is audited, and the part of the audit that must find it."""

    break_it: Callable[[Patch], None]
    subject: Callable[[], Subject] = alone
    part: str = "noise"
    draws: int = 100
    at_most: int = AUDITS

    @property
    def audits(self) -> int:
        """Return how many audits are run, half of them in each process; one if every audit finds the same."""
        return 1 if self.part in EXACT else min(self.at_most, AUDITS)


HALF = reach(lambda real, _: real // 2 if real % 2 == 0 else real)
MUTATIONS = {
    "σ · 0.99": Mutation(weaker(Fraction(99, 100)), at_length, draws=DRAWS, at_most=6),
    "σ · 0.9": Mutation(weaker(Fraction(9, 10))),
    "σ / 10 in the aggregator's sampler": Mutation(weaker(Fraction(1, 10))),
    "noise used again eight draws later": Mutation(later(8)),
    "noise used again with the other sign": Mutation(later(1, sign=-1)),
    "the same noise in every transaction": Mutation(same_in_every_transaction),
    "the same values in another order": Mutation(shuffled_again),
    "64 draws tiled over coordinates": Mutation(tiled),
    "64 draws tiled over vectors": Mutation(tiled_over_vectors),
    "noise on the first four coordinates": Mutation(on(lambda size: slice(0, 4))),
    "no noise on the last coordinate": Mutation(on(lambda size: slice(0, size - 1))),
    "no noise unless the dimension is 4": Mutation(on(lambda size: slice(0, size if size == 4 else 0))),
    "a share common to all coordinates": Mutation(correlated),
    "neighbours correlated": Mutation(moving_average),
    "Laplace noise of that variance": Mutation(laplace, draws=6_000),
    "noise without its low bits": Mutation(coarse),
    "noise that is never negative": Mutation(lambda patch: use(patch, lambda n, std: abs(rounded_gaussian(n, std)))),
    "noise that depends on the codes": Mutation(seen_from_the_codes, single, part="exchange"),
    "rounds after the first without noise": Mutation(after_the_first_round, rounds),
    "no noise for one site": Mutation(missing(lambda codes: len(codes) == 1), alone),
    "no noise where nobody says anything": Mutation(missing(lambda codes: not np.any(codes))),
    "no noise where all say the same": Mutation(missing(lambda codes: bool((np.array(codes) == codes[0]).all()))),
    "a generator seeded by the clock": Mutation(generated(time.time_ns), single, part="exchange"),
    "a generator seeded by four bytes": Mutation(
        generated(lambda: int.from_bytes(os.urandom(4), "big")), single, part="exchange"
    ),
    "a generator with a fixed seed": Mutation(generated(lambda: 7)),
    "clip skipped in the worker": Mutation(no_clip, single, part="exchange"),
    "a voter clipped to the site's bound": Mutation(clip_of_the_sum_only, voters, part="exchange"),
    "one site's code counts twice": Mutation(one_code_counts_twice, single, part="exchange"),
    "Δ of zero-out under replace-one": Mutation(HALF, single, part="books"),
    "Δ = R for a patient of m voters": Mutation(HALF, voters, part="books"),
    "norm test off at the server": Mutation(no_norm_test, single, part="books"),
    "norm test off at one of its two places": Mutation(
        lambda patch: patch.setattr(query, "within", lambda code, *, bound_int: True), single, part="books"
    ),
    "1.3 μ by every accountant": Mutation(
        limit(Fraction(169, 100), calibration, books, site_books), single, part="books"
    ),
    "1.3 μ in the server's filter": Mutation(limit(Fraction(169, 100), books), single, part="books"),
    "1.3 μ in the sites' filter": Mutation(limit(Fraction(169, 100), site_books), single, part="books"),
    "2 % too much in the server's filter": Mutation(limit(Fraction(102, 100), books), single, part="books"),
    "10 δ": Mutation(ten_deltas, single, part="books"),
    "charge skipped for rosters above two": Mutation(
        plan_of(lambda charge, roster: ChargedTotals({}, {}) if len(roster) > 2 else charge),
        three,
        part="books",
    ),
    "pool charge skipped": Mutation(plan_of(lambda charge, _: ChargedTotals({}, charge.studies)), single, part="books"),
    "study charge skipped": Mutation(plan_of(lambda charge, _: ChargedTotals(charge.pools, {})), single, part="books"),
    "budget forgotten when a ledger is opened": Mutation(budget_reset_on_opening, single, part="books"),
    "releases of a second study not added": Mutation(studies_not_added, single, part="books"),
    "caps of a site not kept": Mutation(site_counts_nothing_against_its_caps, single, part="books"),
    "a site charged for all voters": Mutation(site_charges_all_voters, voters, part="books"),
    "stored answers redrawn": Mutation(redrawn, single, part="books"),
    "receipts not sent": Mutation(no_receipts, single, part="books"),
    "ε told a ten-thousandth too low": Mutation(told_too_low, single, part="books"),
    "a site draws half its share": Mutation(share(lambda s, me, _: s / 2 if me == "site-0" else s), sealed),
    "a site draws nothing": Mutation(share(lambda s, me, _: 0 if me == "site-0" else s), sealed),
    "shares of K sites and not of K − t": Mutation(
        share(lambda s, _, k: s * Fraction(isqrt(10**8 * (k - 1) // k), 10**4)), sealed
    ),
    "shares used again in every sum": Mutation(shares_used_again, sealed),
    "masks of a fixed seed": Mutation(masks_of_a_fixed_seed, sealed, part="books"),
    "two sites that do not mask with each other": Mutation(
        without_the_mask_of(("site-0", "site-1"), ("site-1", "site-0")), sealed, part="books"
    ),
    "a mask that does not cancel": Mutation(without_the_mask_of(("site-0", "site-1")), sealed, part="books"),
    "the last site draws nothing": Mutation(share(lambda s, me, _: 0 if me == "site-2" else s), sealed),
    "the middle site draws half its share": Mutation(share(lambda s, me, _: s / 2 if me == "site-1" else s), sealed),
    "the last two sites do not mask with each other": Mutation(
        without_the_mask_of(("site-1", "site-2"), ("site-2", "site-1")), sealed, part="books"
    ),
    "further draws free": Mutation(further_draws_free, sealed_spare, part="life"),
    "a restored site masks old draws again": Mutation(old_draws_stand, sealed, part="life"),
    "mask keys without their nonce": Mutation(mask_keys_without_nonce, sealed, part="life"),
    "masks of the first query for the whole batch": Mutation(masks_of_no_query, sealed_batch, part="books"),
    "answers of another study drawn anew": Mutation(redrawn, single, part="life"),
}


def alarms_of(name: str, audits: int) -> list[tuple[str, ...]]:
    """Return the alarms of several audits of a broken production."""
    mutation, found = MUTATIONS[name], []
    subject = mutation.subject()
    for _ in range(audits):
        with pytest.MonkeyPatch.context() as patch:
            mutation.break_it(patch)
            accounting._max_mu_squared.cache_clear()
            spending._guarantee.cache_clear()
            report = audit_service(subject, draws=mutation.draws, parts=(mutation.part,), stop_at_first_alarm=True)
        accounting._max_mu_squared.cache_clear()
        spending._guarantee.cache_clear()
        found.append(report.alarms)
    return found


@pytest.fixture(scope="module")
def two_processes() -> Iterator[ProcessPoolExecutor]:
    """Yield two forked processes, which therefore have the same table of mutations."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_all_audits_but_one_of_each_broken_production_raise_an_alarm(
    name: str, two_processes: ProcessPoolExecutor
) -> None:
    audits = MUTATIONS[name].audits
    halves = [two_processes.submit(alarms_of, name, part) for part in (audits // 2, audits - audits // 2)]
    alarms = [bool(alarm) for half in halves for alarm in half.result()]
    assert sum(alarms) >= len(alarms) - (MUTATIONS[name].part not in EXACT)


@pytest.mark.parametrize(
    "name",
    [
        "σ / 10 in the aggregator's sampler",
        "a voter clipped to the site's bound",
        "pool charge skipped",
        "a site draws nothing",
        "the last site draws nothing",
        "a restored site masks old draws again",
    ],
)
def test_a_broken_production_raises_an_alarm(name: str) -> None:
    assert all(alarms_of(name, 1))


@pytest.mark.slow
@pytest.mark.parametrize("subject", [single, rounds, alone, three, voters, sealed])
def test_audits_of_production_as_it_is_raise_no_alarm(
    subject: Callable[[], Subject], two_processes: ProcessPoolExecutor
) -> None:
    halves = [two_processes.submit(alarms_as_it_is, subject.__name__, AUDITS // 2) for _ in range(2)]
    assert [alarm for half in halves for alarm in half.result()] == [()] * AUDITS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "part"),
    [
        (single, "exchange"),
        (alone, "exchange"),
        (alone, "noise"),
        (sealed, "noise"),
        *(
            (subject, "books")
            for subject in (single, uneven, voters, hospital_voters, sealed, sealed_batch, sealed_spare)
        ),
        *((subject, "life") for subject in (single, sealed, sealed_spare)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_one_part_of_an_audit_of_production_as_it_is_raises_no_alarm(subject: Callable[[], Subject], part: str) -> None:
    """``tests/privacy_mutants.py`` runs this for the audit of a mutant; it is short because it stops at the first
    alarm.
    """
    report = audit_service(subject(), draws=100, parts=(part,), stop_at_first_alarm=True)
    assert report.alarms == ()


def alarms_as_it_is(subject: str, audits: int) -> list[tuple[str, ...]]:
    return [audit_service(globals()[subject](), draws=100).alarms for _ in range(audits)]
