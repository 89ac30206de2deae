"""Tests ``consilium dashboard``: no password crosses a network unencrypted, and commands manage the users."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from common.errors import InvalidInput
from consilium.cli.dashboard import app, certificate_command, read_token
from server.dashboard import auth
from server.dashboard.auth import Role, UserFile
from server.dashboard.serve import is_loopback

PASSWORD = "a long enough secret"


@pytest.fixture(autouse=True)
def _quick_passwords(monkeypatch):
    """Make hashing a hundred times faster; ``tests/server/dashboard/test_sign_in.py`` tests its strength."""
    monkeypatch.setattr(auth, "_SCRYPT", {"n": 1 << 10, "r": 8, "p": 1})


def run(*arguments: str, given: str = ""):
    return CliRunner().invoke(app, list(arguments), input=given)


def test_users_are_added_listed_given_another_password_and_removed(tmp_path):
    state = ("--state", str(tmp_path))
    added = run("user", "add", "ada", "--role", "operator", *state, "--password-stdin", given=f"{PASSWORD}\n")
    assert added.exit_code == 0, added.output
    assert "ada" in run("user", "list", *state).output
    users = UserFile(tmp_path / "users.json")
    user = users.check("ada", PASSWORD)
    assert user is not None
    assert user.role is Role.OPERATOR
    assert run("user", "password", "ada", *state, "--password-stdin", given="another long secret\n").exit_code == 0
    assert users.check("ada", PASSWORD) is None
    assert users.check("ada", "another long secret") is not None
    assert run("user", "remove", "ada", *state).exit_code == 0
    assert users.users() == {}


def test_a_user_is_not_added_twice_nor_an_unknown_one_changed(tmp_path):
    state = ("--state", str(tmp_path), "--password-stdin")
    run("user", "add", "ada", "--role", "operator", *state, given=f"{PASSWORD}\n")
    again = run("user", "add", "ada", "--role", "operator", *state, given=f"{PASSWORD}\n")
    assert isinstance(again.exception, InvalidInput)
    assert isinstance(run("user", "password", "eve", *state, given=f"{PASSWORD}\n").exception, InvalidInput)


@pytest.mark.parametrize("words", [("add", "ada", "--role", "operator"), ("password", "ada")])
def test_an_input_that_ends_without_a_password_is_a_clear_error_and_changes_nothing(tmp_path, words):
    users = UserFile(tmp_path / "users.json")
    if words[0] == "password":
        users.add("ada", Role.OPERATOR, PASSWORD)
    before = users.users()
    ended = run("user", *words, "--state", str(tmp_path))
    assert isinstance(ended.exception, InvalidInput)
    assert ended.exception.exit_code == 2
    assert "no password was typed" in str(ended.exception)
    assert "--password-stdin" in (ended.exception.remedy or "")
    assert users.users() == before


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.4", "::", "dashboard.example.org"])
def test_without_tls_or_a_proxy_it_listens_on_this_machine_only(tmp_path, bind):
    refused = run("--study", str(tmp_path), "--state", str(tmp_path), "--bind", bind)
    assert isinstance(refused.exception, InvalidInput)
    assert "unencrypted" in str(refused.exception)


def test_a_certificate_needs_its_key_and_a_study_is_needed_at_all(tmp_path):
    pem = tmp_path / "server.crt"
    pem.touch()
    half = run("--study", str(tmp_path), "--state", str(tmp_path), "--certificate", str(pem))
    assert "--key" in str(half.exception)
    assert "--study is missing" in str(run("--state", str(tmp_path)).exception)


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.1.1.1", False)],
)
def test_only_a_loopback_address_counts_as_this_machine(address, here):
    assert is_loopback(address) is here


def test_the_help_is_whole_on_a_terminal_of_80_columns(monkeypatch):
    """Formerly names of environment variables were cut, so readers could not tell them apart."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "…" not in shown
    assert "CONSILIUM_DASHBOARD_STUDY" in shown


def test_a_metrics_token_is_long_enough_to_be_one(tmp_path):
    path = tmp_path / "token"
    path.write_text("  0123456789abcdef\n")
    assert read_token(path) == "0123456789abcdef"
    path.write_text("short")
    with pytest.raises(InvalidInput, match="metrics token"):
        read_token(path)
    with pytest.raises(InvalidInput, match="readable file"):
        read_token(tmp_path / "none")


def test_the_certificates_command_is_the_one_the_command_line_has(tmp_path):
    study, out, reports = (tmp_path / name for name in ("study", "out", "reports"))
    words = ["certificate", str(study), "--out", str(out), "--reports", str(reports), "--no-copy"]
    assert list(certificate_command(study, out, reports)[-7:]) == words
