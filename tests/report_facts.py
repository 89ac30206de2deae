"""Makes up facts of a study's report, with pictures."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from common.config import CodecConfig
from common.ledger.charges import Spend
from common.ledger.spending import Spending
from common.measured_gain import Score
from common.study_mechanism import study_mechanism
from consilium.reports.report_facts import (
    CaseDice,
    DaemonFact,
    NamedScore,
    ReportFacts,
    SiteFact,
)
from consilium.reports.report_pictures import Picture
from server.study.consent_text import BatchRoster
from tests.worlds import make_study


def phantom(seed: int, grid: tuple[int, int, int] = (40, 56, 40)) -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy bean in two parts and its label map."""
    rng = np.random.default_rng(seed)
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in grid), indexing="ij")
    bend = z - 0.35 * y**2 + 0.15
    inside = (x / 0.42) ** 2 + (y / 0.72) ** 2 + (bend / 0.34) ** 2 + 0.12 * np.sin(5 * y + seed) < 1
    label = np.where(inside, np.where(y > 0.05, 1, 2), 0).astype(np.uint8)
    head = (x / 0.98) ** 2 + (y / 0.98) ** 2 + (z / 0.98) ** 2 < 1
    image = 0.5 * head + 0.45 * (label == 1) + 0.3 * (label == 2) + 0.25 * np.sin(6 * x) * np.cos(5 * z) * head
    return (image + 0.06 * rng.standard_normal(grid)).astype(np.float32), label


def make_picture(title: str, kind: str, seed: int) -> Picture:
    image, truth = phantom(seed)
    outlines = {"truth": truth, "student": np.roll(truth, (1, -1, 1), (0, 1, 2))}
    if kind == "public":
        outlines["pseudo-label"] = np.roll(truth, (-2, 1, 0), (0, 1, 2))
    return Picture(title=title, kind=kind, image=image, outlines=outlines)  # type: ignore[arg-type]


def make_facts(*, hospitals: int = 4, pictures: int = 4, unit: str = "hospital") -> ReportFacts:
    """Return made-up but coherent facts, in which all planned queries are answered and spent."""
    terms = {"planned_queries": 80, "quorum": 3, "unit": unit, "codec": CodecConfig()}
    study = make_study("anterior", "posterior", name="hippocampus-pilot", grid=(40, 56, 40), **terms)
    spent = 80 * study_mechanism(study, dimension=1).mu_squared(study.privacy.protection)
    return ReportFacts(
        study=study,
        spending=Spending.of(study.privacy, Spend(spent)),
        queries=80,
        voters=hospitals,
        teachers=tuple(
            NamedScore(f"hospital-{i + 1}", Score((0.85 - 0.01 * i, 0.83 - 0.01 * i), 0.84 - 0.01 * i))
            for i in range(hospitals)
        ),
        ensemble=Score((0.871, 0.853), 0.862),
        mean_shape=Score((0.634, 0.590), 0.612),
        student=Score((0.661, 0.635), 0.648),
        controls={
            "zero_code": Score((0.604, 0.590), 0.597),
            "shuffled_codes": Score((0.608, 0.592), 0.6),
            "public_only": Score((0.601, 0.589), 0.595),
        },
        decoded_labels=Score((0.645, 0.617), 0.631),
        daemons=(
            DaemonFact("superlink", 41201),
            DaemonFact("superexec", 41233),
            *(DaemonFact(f"supernode hospital-{i + 1}", 41260 + 7 * i) for i in range(hospitals)),
            *(DaemonFact(f"worker hospital-{i + 1}", 41340 + 3 * i) for i in range(hospitals)),
        ),
        refused_node="supernode with an unknown key exited after 0.4 s: PERMISSION_DENIED, node is not registered",
        sites=tuple(
            SiteFact(
                name=f"hospital-{i + 1}",
                pool=f"hospital-{i + 1}/2024",
                patients=31 + i,
                codes_sent=80,
                epsilon_spent=7.99998,
            )
            for i in range(hospitals)
        ),
        releases=tuple(
            BatchRoster(f"{n}" * 64, 20, tuple(f"hospital-{i + 1}" for i in range(hospitals) if n != 2 or i))
            for n in range(4)
        ),
        seconds={
            "data": 4.21,
            "teachers": 187.4,
            "federation": 9.8,
            "study run": 160.3,
        },
        run_seconds={"collect": 61.2, "decode": 2.9, "student": 96.0},
        pictures=tuple(
            make_picture(f"{'Public' if i % 2 == 0 else 'Test'} case {i + 17:03d}", ("public", "test")[i % 2], i)
            for i in range(pictures)
        ),
        ledger_head="3f9c1e64b2a75d08e1c4479a0d5b86f2c7713e90ab4d2f6885c0196e3d7ab154",
        ledger_rows=86,
        version="0.1.0",
        seeds={"data": 7, "split": 11, "student": 3},
        finished=datetime(2026, 1, 14, 9, 41, tzinfo=UTC),
        test_cases=tuple(CaseDice(f"case_{n:03d}", 0.7 - 0.1 * (n % 3), (0.7, 0.7 - 0.2 * (n % 3))) for n in range(12)),
    )
