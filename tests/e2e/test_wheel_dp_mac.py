"""Tests DP-MAC on real MRI from the built wheel in a fresh environment: killed, resumed, reported, charged
correctly.

Needs the Decathlon's hippocampus task (fixture ``hippocampus``). The ε is compared with this file's own accountant,
which composes the privacy loss of a subsampled Gaussian on a grid of its outputs by fast Fourier transform.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from client.ledger.site_ledger import SiteLedger
from common.config import DataConfig, TrainingConfig, render_study
from common.data.msd import read_dataset, write_dataset
from tests.waiting import until
from tests.worlds import make_study, site_toml

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, EPSILON, DELTA = 8, 8.0, 1e-3

pytestmark = pytest.mark.slow


def epsilon_by_hand(*, noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε of ``steps`` Poisson-subsampled Gaussians under add-remove: the larger of both directions."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 200_001)
    normal = lambda mean: np.exp(-((x - mean) ** 2) / (2 * noise**2)) / (noise * sqrt(2 * np.pi))  # noqa: E731
    plain, mixed = normal(0.0), (1 - rate) * normal(0.0) + rate * normal(1.0)
    width, size = 1e-4, 1 << 21
    losses = (np.arange(size) - size // 2) * width
    worst = 0.0
    for p, q in ((mixed, plain), (plain, mixed)):
        loss, mass = np.log(p) - np.log(q), p * (x[1] - x[0])
        at = np.clip(np.rint(loss / width).astype(int) + size // 2, 0, size - 1)
        one = np.bincount(at, weights=mass, minlength=size)
        all_steps = np.fft.fftshift(np.fft.ifft(np.fft.fft(np.fft.ifftshift(one)) ** steps).real).clip(min=0)
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            past = losses > middle
            short = (all_steps[past] * -np.expm1(middle - losses[past])).sum()
            low, high = (middle, high) if short > delta else (low, middle)
        worst = max(worst, high)
    return worst


def installed(folder: Path) -> Path:
    """Install the wheel into a new environment, with this environment's libraries; return its command line."""
    source = folder / "source"
    skip = shutil.ignore_patterns(".*", "tests", "docs", "benchmarks", "build", "*.egg-info", "shared", "bench-cache")
    shutil.copytree(REPOSITORY, source, ignore=skip)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *built], check=True, timeout=600)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=600)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("consilium-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, timeout=600)
    purelib = next((folder / "venv" / "lib").glob("python3*/site-packages"))
    (purelib / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    where = "import client.training.private.mac as m; print(m.__file__)"
    found = subprocess.run([python, "-P", "-c", where], cwd=folder, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(folder)), "the wheel's own code runs"
    return folder / "venv" / "bin" / "consilium"


def test_a_fresh_environment_trains_by_dp_mac_is_killed_resumes_and_its_ledger_says_what_an_accountant_says(
    tmp_path: Path, hippocampus: Path
) -> None:
    consilium = installed(tmp_path)
    dataset = read_dataset(hippocampus)
    write_dataset(
        tmp_path / "set", name="site", labels=dataset.labels, channels=dataset.channels, cases=dataset.labelled[:10]
    )
    site = tmp_path / "site"
    site.mkdir()
    (site / "site.toml").write_text(site_toml(data="../set", delta=DELTA), encoding="utf-8")
    data = DataConfig(("background", "anterior", "posterior"), (2, 2, 2), (16, 24, 16), tuple(dataset.channels))
    study = make_study(data=data, teacher=TrainingConfig(channels=(4, 8, 16)))
    (site / "study.toml").write_text(render_study(study), encoding="utf-8")
    agreed = [str(consilium), "site", "consent", "--site-dir", str(site), "--by", "Ada", "--yes"]
    subprocess.run(agreed, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=True, timeout=600)
    words = ["site", "train", "--site-dir", str(site), "--jobs", "1", "--strategy", "dp-mac", "--delta", str(DELTA)]
    command = [str(consilium), *words, "--epsilon", str(EPSILON), "--steps", str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}

    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert first.stdout is not None
    journals = until(
        lambda: [one for one in site.glob("teachers/voter-000/journal-*.jsonl") if _lines(one) >= 4],
        lambda: "" if first.poll() is None or first.stdout is None else first.stdout.read().decode(),
        pause_s=0.02,
        alive=lambda: first.poll() is None,
    )
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    spent = _lines(journals[0]) - 1
    assert 3 <= spent < STEPS

    again = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    (voter,) = report["voters"]
    assert (report["patients"], report["crashes"], voter["reused"]) == (10, [], False)
    assert STEPS - 1 <= voter["steps"] <= STEPS, "charged before the kill is spent, not taken again"
    assert len(voter["weights"]) == 64
    add_remove, replace_one = voter["guarantees"]
    for relation, guarantee in (("add-remove", add_remove), ("replace-one", replace_one)):
        assert all(fact in guarantee for fact in ("unit patient", f"relation {relation}", "(training)"))
    assert list(site.glob("teachers/voter-000/journal-*.jsonl")) == journals
    assert _lines(journals[0]) == 1 + STEPS, "no step more than planned, those before the kill included"

    with SiteLedger.read(site / "site-ledger.sqlite") as ledger:
        (training,) = ledger.trainings().all
        said = ledger.facts("site", present=()).trainings
    assert training.strategy == "dp-mac"
    assert training.event is not None
    assert (training.event.steps, training.event.rate) == (STEPS, 0.5)
    wanted = epsilon_by_hand(
        noise=float(training.event.noise_multiplier), rate=float(training.event.rate), steps=STEPS, delta=DELTA
    )
    assert wanted == pytest.approx(EPSILON, rel=2e-3), "planned for this ε"
    assert said.guarantees[0] is not None
    assert said.guarantees[0].epsilon == pytest.approx(wanted, rel=2e-3)
    status = subprocess.run(
        [str(consilium), "site", "status", "--site-dir", str(site), "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    told = json.loads(status.stdout)["trainings"]
    assert (told["count"], told["strategies"]) == (1, ["dp-mac"])
    assert told["guarantees"][0]["epsilon"] == pytest.approx(wanted, rel=2e-3)
    refused = subprocess.run(
        [*command, "--temperature", "1"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert all(word in refused.stderr for word in ("--temperature", "dp-mac"))
    assert _lines(journals[0]) == 1 + STEPS


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
