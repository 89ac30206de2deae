"""Tests that an interrupted demo ends soon, although work runs beside it in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilium.demo import run
from consilium.demo.options import DemoOptions

SILENT = run.DemoProgress(*[lambda *_given: None] * 5)


@pytest.mark.parametrize("at", ["the study", "the report"])
def test_an_interrupted_demo_does_not_wait_until_all_teachers_are_scored(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly Ctrl-C and SIGTERM during the study or the report took effect only after the scoring, minutes later."""

    def score_teachers(_places: object, on_volume: Callable[[], None] = lambda: None) -> None:
        for _volume in range(200):
            on_volume()
            time.sleep(0.1)

    def interrupted(*_given: object, **_more: object) -> None:
        if at == "the study":
            raise KeyboardInterrupt

    study = SimpleNamespace(
        places=SimpleNamespace(workspace=None), source=tmp_path, publish=dict, train=lambda _s: None
    )
    monkeypatch.setattr(run, "import_libraries", lambda: None)
    monkeypatch.setattr(run, "create_demo_study", lambda *_given, **_more: study)
    monkeypatch.setattr(run, "simulate", interrupted)
    monkeypatch.setattr("consilium.demo.evaluate.score_teachers", score_teachers)
    if at == "the report":
        monkeypatch.setattr("concurrent.futures.Future.result", interrupt_a_wait)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.run_demo(tmp_path / "out", DemoOptions(simulated=True), watch=SILENT)
    assert time.monotonic() - began < 10


def interrupt_a_wait(_future: object, timeout: float | None = None) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_demo_does_not_wait_for_the_task_of_its_other_process() -> None:
    def interrupted() -> None:
        with run._another_process() as process:
            process.submit(time.sleep, 30)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < 15
