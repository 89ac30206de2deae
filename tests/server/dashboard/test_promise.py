"""Tests the Study page's promise: six plain sentences, a table of whom ε holds against, and folded details."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.ledger.spending import Spending
from server.dashboard.views.promise import promise
from tests.federation import make_study


@pytest.mark.parametrize("sealed", [False, True])
def test_the_promise_is_six_plain_sentences_and_a_table_of_against_whom_it_holds(sealed: bool) -> None:
    study = make_study()
    mode = "sealed-sum" if sealed else "open"
    study = replace(study, privacy=replace(study.privacy, quorum=4, aggregation=mode))
    found = promise(study, Spending.of(study.privacy), sites=6)
    assert len(found.plainly) == 6
    assert all(sentence.endswith(".") for sentence in found.plainly)
    holds = {whom: float(said.removeprefix("ε = ")) for whom, said in found.against if said.startswith("ε")}
    budget = study.privacy.epsilon
    if sealed:
        everybody, with_one, with_two, pair = holds.values()
        assert everybody < with_one == budget < with_two, "each further share of the noise that is known costs"
        assert "server's operator" in found.against[0][0]
    else:
        everybody, pair = holds.values()
        assert everybody == budget
        whom, holds_not = found.against[-1]
        assert "server's operator" in whom
        assert holds_not.startswith("none")
    assert pair > budget
    assert ("is trusted" in " ".join(found.plainly)) is not sealed


def test_the_study_page_shows_six_sentences_of_the_promise_and_folds_the_rest(reader) -> None:
    page = reader.get("/study").text
    panel = page.partition('id="promise"')[2].partition("</section>")[0]
    shown = re.sub(r"<details>.*?</details>", "", panel, flags=re.DOTALL)
    assert shown.count("<li>") == 6
    assert "Against" in shown
    assert "hidden less" in panel
    assert "hidden less" not in shown
    consent = page.partition('id="consent"')[2].partition("</section>")[0]
    assert consent.index("<details") < consent.index("asked of you")
