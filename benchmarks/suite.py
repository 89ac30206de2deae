"""The fast tests by their JUnit report: ``JUNIT=report.xml`` names one, of a quiet run; without it
``make test`` runs them now.

``pytest --junitxml=report.xml`` writes one. Wall is the whole run's; a test's seconds are wall too, under whatever ran
beside it.
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
    with tempfile.TemporaryDirectory() as folder:
        report = Path(os.environ.get("JUNIT") or Path(folder) / "report.xml")
        if "JUNIT" not in os.environ:
            environment = os.environ | {"PYTEST_ADDOPTS": f"--junitxml={report}"}
            subprocess.run(["make", "test"], cwd=HERE.parent, env=environment, check=False)
        yield from read(report)


def read(report: Path) -> Iterator[Figure]:
    """The figures of a report; SystemExit where a test failed, since it may have ended early."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    if int(suite.attrib["failures"]) or int(suite.attrib["errors"]):
        raise SystemExit(f"{report}: some tests failed")
    took = sorted((float(case.attrib["time"]) for case in suite.iter("testcase")), reverse=True)
    yield Figure("wall", round(float(suite.attrib["time"]), 1), "s", aim="≤ 100 s on two quiet cores")
    yield Figure("tests", len(took), "")
    yield Figure("all tests one after another", round(sum(took), 1), "s")
    yield Figure("the longest test", round(took[0], 1), "s")
    yield Figure(f"the {SLOWEST} longest together", round(sum(took[:SLOWEST]), 1), "s")
