"""Tests the demo's trainings: by seed on data that Consilium made, at random on real patients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.records.lock import writing
from common.data.msd import write_dataset
from common.errors import Refused
from consilium.demo import training
from tests.trained_sites import one_after_another
from tests.worlds import DATA, STUDY, site_toml, write_case


def make_site(folder: Path, *, synthetic: bool) -> Path:
    cases = [write_case(folder / "raw", f"p{i}", i) for i in range(2)]
    given = {"labels": DATA.labels, "channels": DATA.channels, "cases": cases}
    write_dataset(folder / "set", name="site", synthetic=synthetic, **given)  # type: ignore[arg-type]
    (folder / "study.toml").write_text(STUDY)
    (folder / "site.toml").write_text(site_toml(pool="north-mri", delta=1e-5))
    return folder


def test_a_demo_deals_other_data_than_phantoms_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "side_by_side", one_after_another)
    monkeypatch.setattr(training, "record_trainings", lambda *_given, **_options: None)
    sites = {name: make_site(tmp_path / name, synthetic=name != "real") for name in ("one", "real", "two")}
    reports = training.train_all(sites, seed=5, processes=1, on_steps=lambda done, total: None)
    seeds = {name: json.loads((sites[name] / "teachers" / "slots.json").read_text())["seed"] for name in sites}
    assert (seeds["one"], seeds["two"]) == (5, 7)
    assert seeds["real"] > 100  # of 2^62
    assert all(report.voters[0].weights for report in reports.values())


def test_a_demo_waits_for_whoever_trains_at_one_of_its_sites(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", synthetic=True)
    with writing(site / "teachers"), pytest.raises(Refused, match="wait"):
        training.train_all({"site": site}, seed=5, processes=1, on_steps=lambda done, total: None)
