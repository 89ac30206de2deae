"""Runs `consilium demo` as a person does: interrupts it in the middle of the study, runs it again, reads the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.events import read_events

pytestmark = pytest.mark.slow


def start(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", "from consilium.cli.main import main; main()", "demo", "--out", str(out)]
    command += ["--hospitals", "2", "--queries", "4", "--seed", "3"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            parts = [(entry / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            continue
        if any(text.encode() in part for part in parts):
            found.append(entry.name)
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    process = start(out)
    events = out / "server" / "events.jsonl"
    until = time.monotonic() + 600
    while time.monotonic() < until and process.poll() is None:
        if any(event["event"] == "batch-dispatched" for event in read_events(events)):
            break
        time.sleep(0.2)
    assert process.poll() is None, process.communicate()[1][-2000:]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    time.sleep(1)
    left = processes_naming(str(out))
    again = start(out)
    stdout, stderr = again.communicate(timeout=600)
    assert again.returncode == 0, stderr[-3000:]
    return out, process.returncode, left, stdout


def test_ctrl_c_leaves_no_process_behind_and_says_so_by_its_exit_code(demo):
    _, code, left, _ = demo
    assert left == []
    assert code == 130


def test_the_same_command_finishes_what_was_interrupted(demo):
    out, _, _, stdout = demo
    report = json.loads((out / "report.json").read_text())
    assert report["privacy"]["queries"] == report["privacy"]["planned_queries"] == 2
    assert 8 * 0.999 <= report["privacy"]["epsilon_exact"] <= 8
    for fact in ("δ = 1e-05", "unit patient", "relation replace-one"):
        assert fact in stdout
    worth, lines = report["worth"], stdout.splitlines()
    best = max(one["dice"]["mean"] for one in report["controls"].values())
    student = report["student"]["dice"]["mean"]
    assert f"Dice {student:.3f}, {worth['reference']} {best:.3f}, " in lines[0]
    assert f" {student - best:+.3f} (95 % interval " in lines[0]
    assert [line.split()[0] for line in lines[:3]] == ["The", "All", "Each"]
    assert lines[-1].startswith("The report is ")
    assert all(line.endswith(".") for line in lines)


def test_the_report_has_what_was_promised(demo):
    out, *_ = demo
    report = json.loads((out / "report.json").read_text())
    keys = {"epsilon_exact", "epsilon_rdp", "delta", "unit", "relation", "noise_multiplier", "queries"}
    assert keys <= report["privacy"].keys()
    for name in ("student", "ensemble", "mean_shape"):
        assert 0 <= report[name]["dice"]["mean"] <= 1
        assert set(report[name]["dice"]["per_class"]) == {"anterior", "posterior"}
    assert list(report["controls"]) == ["zero_code", "shuffled_codes", "public_only"]
    for control in report["controls"].values():
        assert 0 <= control["dice"]["mean"] <= 1
        assert set(control["dice"]["per_class"]) == {"anterior", "posterior"}
    assert len(report["teachers"]) == 2 * 8  # the planner recommends three patients for each teacher
    assert report["controls"]["zero_code"] == report["controls"]["public_only"]
    assert len({daemon["pid"] for daemon in report["daemons"]}) == len(report["daemons"]) == 5 + 3 * 2
    assert [site["codes_sent"] for site in report["sites"]] == [2, 2]
    assert {"data", "study", "teachers", "federation", "study run"} <= report["seconds"].keys()
    assert {"collect", "student", "controls"} <= report["run_seconds"].keys()
    assert "2004" in report["refused_node"]


def test_a_hospital_took_the_student_home_and_its_figures_stayed_there(demo):
    out, _, _, stdout = demo
    (home,) = out.glob("sites/*/student/bundle")
    server = out / "server" / "bundle"
    files = {path.relative_to(server): path.read_bytes() for path in server.rglob("*") if path.is_file()}
    assert {path.relative_to(home): path.read_bytes() for path in home.rglob("*") if path.is_file()} == files
    (figures,) = out.glob("sites/*/evaluation/*/evaluation.json")
    score = json.loads(figures.read_text())["all"]["mean_dice"]
    assert re.search(rf"\d+ cases: Dice {score:.3f} ", stdout)
    assert str(score) not in (out / "server" / "events.jsonl").read_text() + (out / "report.json").read_text()


def test_the_page_asks_nothing_of_the_network(demo):
    out, *_ = demo
    page = (out / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "@import" not in page


def test_another_demo_in_the_same_directory_is_refused(demo):
    out, *_ = demo
    command = [
        sys.executable,
        "-c",
        "from consilium.cli.main import main; main()",
        "demo",
        "--out",
        str(out),
        "--seed",
        "9",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert "other options" in result.stderr
