"""Tests that a whole study runs through real daemons during an attack on the server's port, and how long it takes."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.faults.deployment.attack import IDLE, SLOW
from tests.faults.deployment.parts import HOST, PORT, QUERIES, Federation, federation

pytestmark = [pytest.mark.faults, pytest.mark.slow]

FLOODED = 1000
"""Number of answers to the flood before the study begins."""
LONG_S = 3600.0
"""A limit in seconds that nothing reaches unless it hangs."""


def study(parties: Federation) -> float:
    """Run the study to its end; return how many seconds it took."""
    started = time.monotonic()
    parties.start_run()
    assert parties.finish_run(timeout_s=LONG_S) == 0, parties.tails()
    return time.monotonic() - started


def test_idle_slow_and_flooding_connections_keep_no_other_hospital_from_finishing_a_study(
    made: Path, tmp_path: Path
) -> None:
    """A stranger holds 600 idle and 200 slow connections. A flood from site-3's network has site-3's signature."""
    with federation(made, tmp_path / "calm") as parties:
        parties.up()
        calm = study(parties)
    with federation(made, tmp_path / "attacked") as parties:
        parties.up()
        home, said = parties.root / "site-3" / "node", tmp_path / "attack.json"
        script = str(Path(__file__).with_name("attack.py"))
        words = (HOST, str(PORT), str(home / "ca.crt"), str(home / "keys" / "node"), str(said))
        attack = parties.inside_in_background("site-3", sys.executable, script, *words)
        try:
            parties.until(lambda: said.exists() and is_on(counts(said)), "the attack is on", timeout_s=LONG_S)
            before = flooded(counts(said))
            attacked = study(parties)
            assert attack.poll() is None
        finally:
            attack.kill()
            attack.wait()
        parties.assert_whole()
        seen = counts(said)
        print(f"a study of {QUERIES} queries: {calm:.0f} s, {attacked:.0f} s under attack; {seen}")
        for event in parties.events("released"):
            assert {"site-1", "site-2"} <= set(event["roster"])
        assert parties.site_charges("site-1") == parties.site_charges("site-2") == QUERIES
        assert flooded(seen) > before


def is_on(seen: dict[str, int]) -> bool:
    """Return whether every part of the attack has reached the server."""
    return seen.get("idle-ever", 0) >= IDLE and seen.get("slow-ever", 0) >= SLOW and flooded(seen) > FLOODED


def flooded(seen: dict[str, int]) -> int:
    """Return how many of the flood's requests were answered with a status."""
    return sum(number for word, number in seen.items() if re.fullmatch("flood-[0-9]+", word))


def counts(said: Path) -> dict[str, int]:
    """Return the counts that the attack has written."""
    return dict(json.loads(said.read_text(encoding="utf-8")))
