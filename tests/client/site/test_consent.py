"""Tests that a person must consent before anything is served, and that a failed start is no consent."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.operations.serve import open_worker
from client.operations.staff_decisions import consent
from client.operations.staff_decisions import has_consented as consented
from client.policy import load_site
from client.site.books import open_books
from common.errors import InvalidInput
from consilium.cli.main import app
from tests.commands import refusal_of, typed
from tests.studies import join, served_study

RUN = CliRunner()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    join(served_study(tmp_path / "study"), tmp_path)
    return tmp_path / "site"


def test_the_sheet_is_shown_and_nothing_is_on_record_before_somebody_says_yes(site: Path) -> None:
    said = RUN.invoke(app, ["site", "consent", "--site-dir", str(site), "--by", "Ada"])
    assert isinstance(said.exception, InvalidInput)
    for words in ("WHAT IS ASKED OF YOU", "Purpose", "Patients", "Duration", "Withdrawal", "Kept", "site withdraw"):
        assert words in said.stdout
    assert not consented(site)
    with open_books(load_site(site)) as ledger, pytest.raises(InvalidInput):
        ledger.decide(ledger.study_named("").id, "pause")


def test_the_sites_ledger_records_who_consented_and_when(site: Path) -> None:
    typed(app, "site", "consent", "--site-dir", site, "--by", "Ada, data protection", "--yes")
    assert consented(site)
    text = load_site(site).ledger_file.read_bytes()
    assert b"Ada, data protection consented to study" in text
    refusal_of(app, "site", "consent", "--site-dir", site, "--by", "\x1b[2J", "--yes")


def test_nothing_is_trained_before_consent_and_the_refusal_names_the_command(site: Path) -> None:
    refused = refusal_of(app, "site", "train", "--site-dir", site)
    assert "no consent" in str(refused)
    assert "`consilium site consent`" in refused.remedy
    assert not (site / "teachers").exists()
    with open_books(load_site(site)) as ledger:
        assert "training" not in [row.kind for row in ledger.rows()]


def test_no_start_consents_by_itself_at_a_terminal_or_off_it(site: Path) -> None:
    """The site is started as by systemd, by compose and by a person. The worker alone refuses, too."""
    for words in (["up"], ["up", "--only", "worker"], ["serve"]):
        done = RUN.invoke(app, ["site", *words, "--site-dir", str(site)])
        assert isinstance(done.exception, InvalidInput), done.output
        assert "consent to study" in str(done.exception)
        assert "`consilium site consent`" in str(done.exception)
        assert "{" not in done.output
    with pytest.raises(InvalidInput, match="consent to study"):
        open_worker(site)
    assert not consented(site)


def test_a_hospital_that_declines_is_told_that_nothing_was_recorded_and_how_to_consent_later(site: Path) -> None:
    refused = refusal_of(app, "site", "consent", "--site-dir", site, "--by", "Ada")
    assert refused.exit_code == 2
    assert "nothing was recorded" in str(refused)
    assert "`consilium site consent`" in refused.remedy
    assert not consented(site)


def test_a_site_without_a_teacher_says_so_once_and_starts_nothing(site: Path) -> None:
    consent(site, by="Ada", sheet="")
    refused = refusal_of(app, "site", "up", "--site-dir", site)
    assert "`consilium site train`" in str(refused)
    assert not (site / "logs").exists()


def test_a_consent_is_to_one_study_and_an_exchanged_file_has_none(site: Path) -> None:
    consent(site, by="Ada", sheet="")
    (site / "request.json").unlink()  # a site of 0.1.0, whose request does not bind the study
    text = (site / "study.toml").read_text()
    (site / "study.toml").write_text(text.replace("planned_queries = 6", "planned_queries = 7"))
    with pytest.raises(InvalidInput, match="consent to study"):
        open_worker(site)
