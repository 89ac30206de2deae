from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import ncx2

from common.config import Study, parse_study, render_study
from common.errors import InvalidInput, Refused
from common.privacy import shares
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Mechanism, Protection, Relation, Unit
from common.study_mechanism import study_mechanism
from tests.worlds import make_study


def mechanism(*, dimension: int = 64, noise_std: Fraction = Fraction(70_000), colluders: int | None = 1) -> Mechanism:
    return Mechanism(dimension, 65_536, 1, noise_std, colluders=colluders)


@pytest.mark.parametrize(("sites", "colluders"), [(3, 1), (4, 2), (8, 1), (64, 5), (1000, 0)])
def test_the_shares_of_the_honest_carry_the_whole_noise(sites: int, colluders: int) -> None:
    one = mechanism(colluders=colluders)
    share = shares.share_std(one, sites=sites)
    assert one.noise_std**2 <= (sites - colluders) * share**2 < one.noise_std**2 * (1 + Fraction(1, 2**40))
    assert one.noise_in_sum(sites) == pytest.approx(float(share) * sites**0.5, rel=1e-9)


def test_what_colluders_know_does_not_change_what_a_release_costs() -> None:
    protection = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
    assert mechanism().mu_squared(protection) == mechanism(colluders=None).mu_squared(protection)


@pytest.mark.parametrize("sites", [2, 1, 0])
def test_a_roster_with_fewer_than_two_honest_sites_has_no_share(sites: int) -> None:
    with pytest.raises(InvalidInput, match="roster"):
        shares.share_std(mechanism(), sites=sites)


def test_a_share_too_small_for_the_lemma_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^share.*: got"):
        shares.share_std(mechanism(noise_std=Fraction(30)), sites=64)


def test_an_honest_sum_is_within_its_bound_even_where_every_site_sends_the_longest_code() -> None:
    one, sites = mechanism(), 5
    code = np.zeros(64, dtype=np.int64)
    code[0] = one.site_radius_int
    total = np.zeros(64, dtype=np.uint64)
    for _ in range(sites):
        noise = rounded_gaussian(64, shares.share_std(one, sites=sites))
        total += (code + noise).view(np.uint64)
    assert shares.unmasked(total, one, sites=sites).shape == (64,)


@pytest.mark.parametrize("extra", [1 << 22, -(1 << 22), 1 << 40, 1 << 62, -(1 << 63)])
def test_a_sum_that_honest_sites_cannot_have_made_is_refused(extra: int) -> None:
    total = np.zeros(64, dtype=np.int64)
    total[7] = extra
    with pytest.raises(Refused, match="sum is larger"):
        shares.unmasked(total.view(np.uint64), mechanism(), sites=5)


@pytest.mark.parametrize(("dimension", "sites"), [(1, 3), (24, 8), (64, 4), (4096, 64), (100_000, 8)])
def test_the_worst_honest_sites_are_refused_once_in_a_million_sums_and_not_more_often(
    dimension: int, sites: int
) -> None:
    """The test uses Boost's noncentral χ²: every site sends the longest code, all in one direction."""
    one = mechanism(dimension=dimension)
    std = float(one.noise_std) * (sites / (sites - 1)) ** 0.5
    longest, rounding = sites * 65_536, dimension**0.5 * sites / 2
    norm = shares.sum_bound(one, sites=sites) - rounding
    alarm = ncx2.sf((norm / std) ** 2, dimension, (longest / std) ** 2)
    assert 0.99e-6 < alarm < 1e-6 * (1 + 1e-3)
    own = shares.site_bound(one, sites=sites) - dimension**0.5 / 2
    share = std / sites**0.5
    assert 0.99e-6 < ncx2.sf((own / share) ** 2, dimension, (65_536 / share) ** 2) < 1e-6 * (1 + 1e-3)


def test_a_bound_beyond_the_reach_of_the_exact_quantile_alarms_no_more_often() -> None:
    for dimension, noncentrality in ((1, 1.1e9), (1 << 20, 5e9)):
        limit = shares._quantile(dimension, noncentrality, shares.FALSE_ALARM)
        assert 1e-9 < ncx2.sf(limit, dimension, noncentrality) < 1e-6


def test_a_push_of_twenty_five_balls_is_refused_where_it_passed_before() -> None:
    """At the note's first setting (hospital, ε = 8, N = 4, K = 8, l = 24), up to 35·m·R passed in 95 % of sums."""
    one, sites, rng = mechanism(dimension=24, noise_std=Fraction(125_834)), 8, np.random.default_rng(3)
    share = float(shares.share_std(one, sites=sites))

    def refused(push: float) -> float:
        caught = 0
        for _ in range(200):
            total = np.rint(rng.normal(scale=share, size=(sites, 24))).astype(np.int64).sum(axis=0)
            total[0] += int(push * 65_536)
            caught += not shares.norm_within(total, shares.sum_bound(one, sites=sites))
        return caught / 200

    assert refused(25) > 0.95
    assert refused(8) == 0.0  # what only a dispute can find


@pytest.mark.parametrize(("dimension", "sites", "sums"), [(24, 8, 4), (12, 4, 16), (64, 3, 2)])
def test_honest_sums_are_together_too_long_once_in_a_million_and_several_small_pushes_are_found(
    dimension: int, sites: int, sums: int
) -> None:
    """The test uses Boost's noncentral χ² for sums at the edge of the honest range, and for a push that each sum
    allows.
    """
    one, worst = mechanism(dimension=dimension), sites * 65_536
    std = float(one.noise_std) * (sites / (sites - 1)) ** 0.5
    noncentrality = (worst / std) ** 2

    def together(squared: float) -> shares.Length:
        """Return the joint length of ``sums`` sums, each of this squared norm in units of its noise."""
        sum_ = np.zeros(dimension, dtype=np.int64)
        sum_[0] = round(std * squared**0.5 + dimension**0.5 * sites / 2)
        total = shares.Length()
        for _ in range(sums):
            total += shares.Length.of(sum_, one, sites=sites)
        return total

    limit = float(ncx2.isf(1e-6, sums * dimension, sums * noncentrality)) / sums
    assert together(limit * 0.999).is_honest
    assert not together(limit * 1.001).is_honest
    alone = float(ncx2.isf(1e-6, dimension, noncentrality))
    assert limit < 0.95 * alone
    assert shares.Length().is_honest


def test_a_sum_spread_over_all_coordinates_is_held_to_the_norm_and_not_to_each_entry() -> None:
    bound = shares.sum_bound(mechanism(), sites=5)
    total = np.full(64, bound // 8 + 1, dtype=np.int64)
    with pytest.raises(Refused):
        shares.unmasked(total.view(np.uint64), mechanism(), sites=5)
    inside = np.full(64, bound // 8, dtype=np.int64)
    assert np.array_equal(shares.unmasked(inside.view(np.uint64), mechanism(), sites=5), inside)


@pytest.mark.parametrize("size", [1, 63, 4096])
def test_the_norm_of_a_sum_is_exact_in_integers(size: int) -> None:
    rng = np.random.default_rng(size)
    for reach in (1 << 10, 1 << 53):
        vector = rng.integers(-reach, reach, size)
        assert shares._norm_squared(vector) == sum(int(x) ** 2 for x in vector)


def study(**privacy: object) -> Study:
    return make_study(**{"planned_queries": 4, "quorum": 3} | privacy)


def test_a_sealed_study_is_another_study_and_an_open_one_says_nothing_of_it() -> None:
    sealed = study(aggregation="sealed-sum")
    assert parse_study(render_study(sealed)) == sealed
    assert 'aggregation = "open"' in render_study(study()), "said in the file, and in no id"
    assert "aggregation" not in str(study().to_json())
    ids = {
        study().id,
        sealed.id,
        *(
            study(aggregation="sealed-sum", **{k: 0 if k == "colluders" else 2}).id
            for k in ("colluders", "spare_draws")
        ),
    }
    assert len(ids) == 4


def test_noise_is_calibrated_for_the_draws_that_may_be_lost_too() -> None:
    plain, spare = (study_mechanism(study(aggregation="sealed-sum", spare_draws=n), dimension=1) for n in (0, 4))
    assert float(spare.noise_std / plain.noise_std) == pytest.approx(2**0.5)
    assert plain.colluders == 1
    assert study_mechanism(study(), dimension=1).colluders is None


@pytest.mark.parametrize(
    "privacy",
    [
        {"aggregation": "closed"},
        {"aggregation": "sealed-sum", "quorum": 2},
        {"aggregation": "sealed-sum", "colluders": 2},
        {"aggregation": "sealed-sum", "colluders": -1},
        {"aggregation": "sealed-sum", "colluders": True},
        {"aggregation": "sealed-sum", "spare_draws": -1},
        {"colluders": 2},
        {"spare_draws": 1},
    ],
)
def test_a_study_that_no_sum_can_protect_is_refused(privacy: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="privacy"):
        study(**privacy)
