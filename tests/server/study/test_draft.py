"""Tests that a study created from a file equals the one that `study init` makes of the same settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import GateConfig, PoolConfig, load_study, parse_study, render_study
from common.errors import InvalidInput
from common.ledger.keys import create_signing_key
from common.study_mechanism import pool_sentence
from consilium.cli.study import study_app
from server.ledger.server_ledger import Ledger
from server.study import create_study as setup
from server.study import templates
from server.study.draft import parse_draft
from server.study.workspace import Workspace
from tests.federation import make_study

FILE = """schema = 1
name = "trial"

[data]
labels = ["background", "lesion"]
spacing_mm = [1.0, 1.0, 1.0]
grid = [64, 64, 64]

[privacy] # a comment
epsilon = 8.0
delta = 1e-5
planned_queries = 40
quorum = {quorum}
"""


@pytest.mark.parametrize("quorum", [1, 2, 3, 5])
def test_study_create_and_study_init_choose_the_same_aggregation_by_default(tmp_path: Path, quorum: int) -> None:
    (tmp_path / "study.toml").write_text(FILE.format(quorum=quorum))
    created = CliRunner().invoke(study_app, ["create", str(tmp_path / "a"), "--study", str(tmp_path / "study.toml")])
    asked = ["--labels", "background,lesion", "--grid", "64,64,64", "--queries", "40", "--quorum", str(quorum)]
    begun = CliRunner().invoke(study_app, ["init", str(tmp_path / "b"), "--name", "trial", *asked])
    assert created.exit_code == begun.exit_code == 0, created.output + begun.output
    one, other = (load_study(tmp_path / name / "study.toml") for name in "ab")
    assert one.privacy.sealed == other.privacy.sealed == (quorum >= 3)
    assert one.gate == other.gate
    assert one.pool == other.pool
    assert one.pool.epsilon > one.privacy.epsilon == 8.0
    assert created.stdout.count(pool_sentence(one)) == 1
    said = "aggregation: sealed-sum" if quorum >= 3 else "aggregation: open"
    assert said in created.stdout


def test_a_files_settings_are_kept_and_nothing_is_added_to_them() -> None:
    stated = FILE.format(quorum=5) + 'aggregation = "open"\n\n[pool]\nepsilon = 10.0\n'
    assert parse_draft(stated).study == parse_study(stated)
    assert parse_draft(stated).filled_in == ()
    for name in templates.names():  # the paper's own setting trusts its aggregator
        assert not parse_draft(templates.template(name)).study.privacy.sealed


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
@pytest.mark.parametrize("verdicts", [0, 2])
def test_the_file_of_a_study_makes_the_same_study_when_it_is_taken_for_a_draft(aggregation: str, verdicts: int) -> None:
    study = make_study()
    study = replace(study, privacy=replace(study.privacy, quorum=4, aggregation=aggregation), gate=GateConfig(verdicts))
    assert parse_draft(render_study(study)).study.id == study.id == parse_study(render_study(study)).id
    roomy = replace(study, pool=PoolConfig(20.0))
    assert parse_draft(render_study(roomy)).study.id == roomy.id == parse_study(render_study(roomy)).id != study.id


def test_a_file_that_cannot_be_filled_in_is_refused_with_the_line_to_write() -> None:
    inline = 'schema = 1\nname = "t"\nprivacy = { epsilon = 8.0, delta = 1e-5, planned_queries = 4, quorum = 3 }\n'
    with pytest.raises(InvalidInput, match='aggregation = "sealed-sum"'):
        parse_draft(inline)


def test_a_file_of_0_1_0_that_says_nothing_stays_the_open_study_it_was() -> None:
    assert not parse_study(FILE.format(quorum=5)).privacy.sealed


@pytest.mark.parametrize(
    ("labels", "channels"),
    [
        (["background", "Left", "left"], ["T1"]),
        (["background", "left", "left "], ["T1"]),
        (["background", "left core", "Left_Core"], ["T1"]),
        (["background", "L\u00e4sion", "La\u0308sion"], ["T1"]),
        (["background", "core", "\uff43ore"], ["T1"]),
        (["background", "stra\u00dfe", "STRASSE"], ["T1"]),
        (["background", " "], ["T1"]),
        (["background", "core"], ["T1", "t1w"]),
        (["background", "core"], ["T1", "T1 "]),
        (["background", "core"], ["FLAIR", "T2-FLAIR"]),
        (["background", "core"], ["T1+", "T1 -"]),
    ],
)
def test_a_study_whose_names_hospitals_cannot_tell_apart_is_not_made_and_an_older_one_is_read(
    tmp_path: Path, labels: list[str], channels: list[str]
) -> None:
    data = f"labels = {json.dumps(labels, ensure_ascii=False)}\nchannels = {json.dumps(channels, ensure_ascii=False)}"
    text = FILE.format(quorum=3).replace('labels = ["background", "lesion"]', data)
    (what, wrong) = ("labels", labels[-2:]) if len(channels) == 1 else ("channels", channels)
    older = parse_study(text)
    assert older.data.labels == tuple(labels)
    made = Workspace(tmp_path / "trial")
    for create in (lambda: parse_draft(text), lambda: setup.create_study(made, older)):
        with pytest.raises(InvalidInput, match=rf"data\.{what}.*tell apart") as caught:
            create()
        assert wrong[-1] in caught.value.value
    assert not made.root.exists()


def test_no_ledger_registers_a_new_study_whose_names_hospitals_cannot_tell_apart(tmp_path: Path) -> None:
    older = parse_study(FILE.format(quorum=3).replace('"lesion"', '"Left", "left"'))
    key = create_signing_key(tmp_path / "key.pem")
    with Ledger.create(tmp_path / "ledger.sqlite", signing_key=key) as ledger:
        with pytest.raises(InvalidInput, match=r"data\.labels.*tell apart"):
            ledger.register_study(older)
        assert ledger.register_study(older, older=True) == ledger.register_study(older) == older.id
