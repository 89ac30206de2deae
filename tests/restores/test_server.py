"""Tests a study's server after any restore of its files: it refuses with a remedy, or its figures count every draw.

The oracle counts draws where noise is drawn. One thing nobody can know (docs/ledger.md, "What nobody notices"): a draw
whose row and standing are gone and whose receipt reached no site. :func:`knowable` is computed from what is left after
a restore, not from what the product found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

import pytest

from tests.restores.harness import Case, Moment, cases, files, look_at, mixed, unclassified
from tests.restores.server_life import HARMLESS, PARTS, Facts, live, look

SHARES = 4 if os.environ.get("CONSILIUM_RESTORES") == "all" else 1
"""By default one of four shares of all sets of parts is tested."""


PAGE = Path(__file__).parents[2] / "docs" / "lab" / "ledger-tried.md"


def every_set(moments: list[Moment[Facts]]) -> Iterator[Case]:
    return chain(cases(PARTS, moments), mixed(PARTS[:3], moments))


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[Moment[Facts]]:
    return live(tmp_path_factory.mktemp("life"))


def test_every_file_of_a_study_is_a_part_or_named_as_harmless(moments: list[Moment[Facts]]) -> None:
    for moment in moments:
        assert unclassified(moment.folder, PARTS, HARMLESS) == []
    last = files(moments[-1].folder)
    assert [part.name for part in PARTS if not any(map(part.holds, last))] == []
    assert unclassified(moments[-1].folder, PARTS[1:], HARMLESS) == ["ledger.sqlite"], "a file of no part is noticed"


def test_the_page_says_how_many_restores_there_are(moments: list[Moment[Facts]]) -> None:
    count = sum(1 for _ in chain(cases(PARTS, moments, most=1), every_set(moments)))
    assert f" {count:,} restores of" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_some_restores_make_no_draw_free(moments: list[Moment[Facts]], tmp_path: Path) -> None:
    """Receipts reveal a machine that was rolled back, and the standing an older ledger. One ledger has no standing."""
    machine = ("ledger", "standing")
    some = [Case(machine, 0, 1), Case(machine, 1, 5), Case(("ledger",), 1, 2), Case(("ledger",), 2, 5, ("standing",))]
    outcomes = look_at(iter(some), PARTS, moments, tmp_path / "study", partial(look, tmp_path, moments))
    assert outcomes == {"stopped by what sites hold": 2, "refused": 1, "refused, all charged": 1}


@pytest.mark.slow
def test_no_restore_of_one_part_makes_a_draw_free(moments: list[Moment[Facts]], tmp_path: Path) -> None:
    outcomes = look_at(
        cases(PARTS, moments, most=1), PARTS, moments, tmp_path / "study", partial(look, tmp_path, moments)
    )
    said = {"went on", "refused", "refused, all charged", "refused for good", "stopped by what sites hold"}
    assert set(outcomes) == said


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_no_restore_of_any_parts_makes_a_draw_free(moments: list[Moment[Facts]], tmp_path: Path, share: int) -> None:
    chosen = islice(every_set(moments), share, None, 4)
    outcomes = look_at(chosen, PARTS, moments, tmp_path / "study", partial(look, tmp_path, moments))
    print(outcomes)
