"""Types all commands of docs/lab/paper-experiment.md, up to student, controls and certificate, with small volumes.

It runs real daemons for minutes, so only ``make test-experiment`` runs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.sockets import free_ports
from server.study.read_facts import read_measured
from server.study.workspace import Workspace
from tests.e2e.ended import Ended, is_the_papers_release

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PAGE = (Path(__file__).parents[2] / "docs" / "lab" / "paper-experiment.md").read_text(encoding="utf-8")
FEWER = (
    "planned_queries = .*/planned_queries = 2",
    "quorum = .*/quorum = 2",
    "augment.* = 2.*/augmentations = 20",
)
SMALLER = (
    ("--cases 484", "--cases 22"),
    ("--hospitals 8", "--hospitals 2"),
    ("--paired 80", "--paired 6"),
    ("--test 84", "--test 4"),
    ("--sites 8", "--sites 2"),
    ("01 02 03 04 05 06 07 08", "01 02"),
    ("steps = 30/'", "steps = 3/' " + " ".join(f"-e 's/^{one}/'" for one in FEWER)),
)
"""Words of the page's commands, and the words typed in their place, which make the experiment small."""


def page_as_typed() -> list[str]:
    """Return the text of each block of commands in docs/lab/paper-experiment.md, without the prompts."""
    found = re.findall(r"^```(console|sh)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^\$ ", "", text, flags=re.MULTILINE) for _, text in found]


def walked(root: Path) -> tuple[Ended, str]:
    """Run the page's study with synthetic volumes to its end; return the ended study and the output of the shell."""
    task01, synthetic, as_it_fits, *rest = page_as_typed()
    assert "Task01_BrainTumour" in task01
    study, asked, hospitals, *last = rest
    up = "consilium server up trial >server.log 2>&1 &\nuntil grep -q 'server is up' server.log; do sleep 0.2; done\n"
    typed = [f"(mkdir task01; cd task01; {as_it_fits})", synthetic, study, asked, hospitals, up, *last]
    script = "\n".join(["set -eu", "trap 'kill $(jobs -p); wait' EXIT", *typed])
    outside, inside = map(str, free_ports(2))
    for words, smaller in (*SMALLER, ("18443", outside), ("18444", inside)):
        assert words in script, words
        script = script.replace(words, smaller)
    commands = root / "bin" / "consilium"
    commands.parent.mkdir()
    commands.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from consilium.cli.main import main; main()" "$@"\n')
    commands.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands.parent}:{os.environ['PATH']}",
        "CONSILIUM_STATE_DIR": str(root / "state"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=root, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (root / "task01" / "trial" / "study.toml").exists()
    workspace = Workspace(root / "trial")
    sites = {site.name: root / "sites" / site.name for site in workspace.sites()}
    certificate = json.loads((root / "certificate" / "certificate.json").read_text(encoding="utf-8"))
    return Ended(workspace, sites, certificate), done.stdout + done.stderr


def test_the_pages_commands_run_algorithm_2_of_pate_up_to_the_certificate(tmp_path: Path) -> None:
    """The commands of docs/lab/paper-experiment.md print the lines and write the files that the page shows."""
    study, printed = walked(tmp_path)
    is_the_papers_release(study, codec="ball-ae")
    assert "mostly reflect" in printed, "as the page says of codec fit"
    scores = json.loads(study.workspace.scores_file.read_text(encoding="utf-8"))
    assert scores["cases"] == 4
    assert all(one["dice"]["mean"] is not None for one in (scores["student"], *scores["controls"].values()))
    (worth,) = [line for line in printed.splitlines() if line.startswith("Dice on the validation set: ")]
    assert "student" in worth
    measured = read_measured(study.workspace.root, study.workspace.study().id)
    assert measured is not None
    assert measured.line() in worth, "the dashboard shows it again"
    assert (tmp_path / "certificate" / "certificate.pdf").stat().st_size > 0
    assert study.certificate["study"]["name"] == "paper-ae"
