"""Reports the times of the fast tests, from their JUnit report.

``JUNIT=report.xml`` names the report of a quiet run, as ``pytest --junitxml=report.xml`` writes it; without it, ``make
test`` runs now. The total is the wall time of the whole run; a test's seconds are wall time too, so they depend on what
ran in parallel.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.run import HERE, Figure

SLOWEST = 20


def figures() -> Iterator[Figure]:
    """Yield the figures of the report, running the tests first if none is named."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(os.environ.get("JUNIT") or Path(folder) / "report.xml")
        if "JUNIT" not in os.environ:
            environment = os.environ | {"PYTEST_ADDOPTS": f"--junitxml={report}"}
            subprocess.run(["make", "test"], cwd=HERE.parent, env=environment, check=False)
        yield from read(report)


def read(report: Path) -> Iterator[Figure]:
    """Yield the figures of a report.

    Raises:
        SystemExit: If a test failed, since the run may have ended early.
    """
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    if int(suite.attrib["failures"]) or int(suite.attrib["errors"]):
        raise SystemExit(f"{report}: some tests failed")
    took = sorted((float(case.attrib["time"]) for case in suite.iter("testcase")), reverse=True)
    yield Figure("wall", round(float(suite.attrib["time"]), 1), "s", aim="≤ 100 s on two quiet cores")
    yield Figure("tests", len(took), "")
    yield Figure("all tests one after another", round(sum(took), 1), "s")
    yield Figure("the longest test", round(took[0], 1), "s")
    yield Figure(f"the {SLOWEST} longest together", round(sum(took[:SLOWEST]), 1), "s")
