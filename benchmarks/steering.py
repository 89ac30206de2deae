"""Computes how far one site can push a sealed sum before the sum's norm test detects it: ``python -m
benchmarks.steering``.

For each setting it gives the largest push of one site, in units of m·R, that 95 % of sums let pass while all other
sites send the zero code: by the norm test before 2026-11 and by today's, with and without the site's own share of the
noise. "In every sum" is the same push in all N sums, which are tested together. The last column is the largest push
that 95 % of the tests of that one site in a dispute let pass. Everything is computed from the noncentral χ² law of the
norm. It writes ``benchmarks/results/tables/steering.json``.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import ceil, isqrt, log, sqrt
from subprocess import check_output

from scipy.optimize import brentq
from scipy.stats import ncx2

from benchmarks.run import RESULTS
from common.privacy.calibration import calibrate
from common.privacy.figures import epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit
from common.privacy.shares import FALSE_ALARM, share_std, site_bound, sum_bound

DELTA, RADIUS, PASSED = 1e-3, 1 << 16, 0.95
SETTINGS = (
    (Unit.HOSPITAL, 1, 8.0, 4, 8, 24),
    (Unit.HOSPITAL, 1, 8.0, 4, 8, 64),
    (Unit.HOSPITAL, 1, 2.0, 4, 8, 64),
    (Unit.HOSPITAL, 1, 1.0, 16, 8, 12),
    (Unit.PATIENT, 8, 8.0, 4, 8, 48),
    (Unit.PATIENT, 4, 8.0, 4, 4, 64),
)
"""Unit, voters per site m, ε, queries N, sites K, dimension l."""
HEAD = ["unit, m", "ε", "N", "K", "l", "before", "now", "now, own noise left out", "now, in every sum", "in a dispute"]


def bound_before(mechanism: Mechanism, *, sites: int) -> int:
    """Return the earlier bound by the triangle inequality: K·m·R plus a bound on noise and rounding.

    Noise and rounding exceed their bound with probability below 2⁻⁸⁰.
    """
    noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
    root = isqrt(mechanism.dimension) + 1
    return sites * mechanism.site_radius_int + ceil(noise * (root + sqrt(2 * 80 * log(2))) + root * sites / 2)


def push(bound: float, *, noise_std: float, dimension: int, unit: float) -> float:
    """Return the push whose sum stays within ``bound`` with probability :data:`PASSED`.

    Args:
        bound: Bound on the norm of the sum.
        noise_std: Standard deviation of the noise on a coordinate.
        dimension: Number of coordinates.
        unit: Unit of the result.
    """

    def missed(multiple: float) -> float:
        return float(ncx2.cdf((bound / noise_std) ** 2, dimension, (multiple * unit / noise_std) ** 2)) - PASSED

    return float(brentq(missed, 1e-9, 1e6))


def push_in_every(mechanism: Mechanism, *, sites: int, sums: int) -> float:
    """Return the largest push that may be made in each of ``sums`` sums, which are tested together."""
    noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
    longest, dimension = mechanism.site_radius_int, sums * mechanism.dimension
    limit = float(ncx2.isf(FALSE_ALARM, dimension, sums * (sites * longest / noise) ** 2))
    return push(sqrt(limit), noise_std=1.0, dimension=dimension, unit=1) * noise / longest / sqrt(sums)


def row(unit: Unit, voters: int, epsilon: float, queries: int, sites: int, dimension: int) -> list[str]:
    """Return one row of the table, as text.

    Args:
        unit: Unit of privacy.
        voters: Voters of each site, m.
        epsilon: ε, at δ = :data:`DELTA`.
        queries: Number of queries N.
        sites: Number of sites K.
        dimension: Length of a code l.
    """
    std = calibrate(
        budget=Budget(epsilon, DELTA),
        accountant=AccountantName.EXACT,
        queries=queries,
        radius_int=RADIUS,
        voters_per_site=voters,
        protection=Protection(unit, Relation.REPLACE_ONE),
    )
    mechanism = Mechanism(dimension, RADIUS, voters, std, colluders=1)
    share, longest = float(share_std(mechanism, sites=sites)), mechanism.site_radius_int
    before, now = bound_before(mechanism, sites=sites), sum_bound(mechanism, sites=sites)
    cases = (
        (before, share * sqrt(sites)),
        (now, share * sqrt(sites)),
        (now, share * sqrt(sites - 1)),
        (site_bound(mechanism, sites=sites), share),
    )
    found = [push(bound, noise_std=noise, dimension=dimension, unit=longest) for bound, noise in cases]
    every = push_in_every(mechanism, sites=sites, sums=queries)
    found.insert(3, every)
    words = [f"{unit}, {voters}", epsilon_text(epsilon), str(queries), str(sites), str(dimension)]
    return [*words, *(f"{value:.1f}" for value in found)]


def main() -> None:
    rows = [row(*setting) for setting in SETTINGS]
    commit = check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    record = {
        "how": "measured",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "command": "`python -m benchmarks.steering`",
        "head": HEAD,
    }
    lines = [json.dumps(line, ensure_ascii=False) for line in rows]
    text = json.dumps(record, indent=1, ensure_ascii=False)[:-2] + ',\n "rows": [\n  '
    path = RESULTS / "tables" / "steering.json"
    path.write_text(text + ",\n  ".join(lines) + "\n ]\n}\n", encoding="utf-8")
    print("\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
