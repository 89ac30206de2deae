"""Types docs/tutorial.md: every command in its order, and checks the output that the page shows.

The test replaces the page's simulation by one of few steps, its ports by free ones, and its fingerprints by fresh ones.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.sockets import free_ports
from consilium.cli.main import app
from tests.shown import hold
from tests.waiting import until

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
MAIN = (sys.executable, "-c", "from consilium.cli.main import main; main()")
STAY = {"server up": "server is up", "site up": "connected: "}
"""Commands that keep running, and their output once they are up."""
SHORT = " --voters 1 --public-images 4 --label-maps 6 --teacher-steps 1 --student-steps 8 --no-joint"


def typed() -> list[tuple[str, list[str]]]:
    """Return every command of the page with the output lines that the page shows for it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ consilium "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONSILIUM_STATE_DIR", str(tmp_path / "state"))
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for daemon in reversed(started):
        daemon.send_signal(signal.SIGTERM)
    for daemon in started:
        daemon.wait(600)


def up(command: str, log: Path, said: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        daemon = subprocess.Popen([*MAIN, *shlex.split(command)[1:]], stdout=out, stderr=out)
    until(lambda: said in log.read_text(), lambda: log.read_text()[-3000:], alive=lambda: daemon.poll() is None)
    return daemon


def run(command: str) -> str:
    """Run a command and return what it printed. Only `study run` runs in another process, which it leaves running."""
    words = shlex.split(command)[1:]
    if words[:2] == ["study", "run"]:
        return subprocess.run([*MAIN, *words], stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (command, done.output, done.exception)
    return done.stdout


@pytest.mark.slow
def test_the_tutorial_s_commands_do_what_it_says(tmp_path: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    (study,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "study.toml").write_text(study)
    ports = dict(zip(("18443", "18500"), map(str, free_ports(2)), strict=True))
    fingerprints: dict[str, str] = {}
    commands = typed()
    assert len(commands) > 25
    for command, shown in commands:
        for old, new in (ports | fingerprints).items():
            command = command.replace(old, new)
        if "consilium simulate" in command:
            command += SHORT
        stays = next((said for words, said in STAY.items() if f"consilium {words} " in command), None)
        if stays:
            daemons.append(up(command, tmp_path / f"{len(daemons)}.log", stays))
            continue
        stdout = run(command)
        hold(list(filter(None, shown)), stdout)
        if "site init" in command:
            fingerprints[shown[-1]] = re.findall(r"SHA256:\S+", stdout)[-1]
    for made in ("simulated/report.html", "certificate/certificate.pdf", "trial-student/MODEL_CARD.md"):
        assert (tmp_path / made).exists(), made
    assert (tmp_path / "trial" / "bundle" / "configs" / "metadata.json").exists()
    assert any((tmp_path / "predictions").rglob("*.nii.gz"))
    assert os.listdir(tmp_path / "north" / "evaluation")
