"""Tests that all commands have the same default privacy unit except two, which state it and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NoReturn

import click
import pytest
from typer.testing import CliRunner

from client.policy import Caps
from common.config import PrivacyConfig
from common.errors import InvalidInput
from common.privacy.mechanism import Unit
from consilium.cli.main import app
from tests.command_reference import commands

WHY = "The default here is patient, because"


def units() -> Iterator[tuple[str, click.Parameter]]:
    for name, command in commands():
        yield from ((name, one) for one in command.params if "--unit" in one.opts)


def test_a_study_protects_hospitals_unless_asked_for_less_and_each_exception_states_its_reason() -> None:
    found = {name.removeprefix("consilium "): one for name, one in units()}
    differ = {name for name, one in found.items() if one.default not in (None, Unit.HOSPITAL)}
    assert {"plan", "study init", "audit"} <= found.keys()
    assert differ == {"demo", "simulate"}
    assert {name for name, one in found.items() if WHY in str(getattr(one, "help", ""))} == differ
    in_files = {one.default for kind in (PrivacyConfig, Caps) for one in fields(kind) if one.name == "unit"}
    assert in_files == {Unit.HOSPITAL}


@pytest.mark.parametrize("command", [["demo"], ["simulate", "--phantoms"]])
@pytest.mark.parametrize(("unit", "noted"), [([], True), (["--unit", "hospital"], False)])
def test_a_trial_study_states_what_a_real_one_would_protect(
    command: list[str], unit: list[str], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> NoReturn:
        raise InvalidInput("nothing is run here")

    monkeypatch.setattr("consilium.demo.run.run_demo", stop)
    said = CliRunner().invoke(app, [*command, *unit]).stderr
    assert ("--unit patient" in said) == noted
