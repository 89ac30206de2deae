"""Tests that the demo's dashboard runs while the demo runs, and that the demo also works without it."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from common.errors import Refused
from consilium.demo import run
from consilium.demo.dashboard import dashboard, demo_password
from consilium.demo.options import DemoOptions
from server.dashboard.auth import UserFile
from tests.dashboard_study import make_study_directory

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_it_serves_the_study_and_ends_with_the_block(tmp_path):
    study = make_study_directory(tmp_path)
    said: list[str] = []
    with dashboard(study.workspace.root, tmp_path / "state", say=said.append) as wait:
        wait()
        (url,) = re.fullmatch(r"dashboard: (\S+)", said[0]).groups()
        name, password = re.fullmatch(r"sign in as (\S+) with (\S+)", said[1]).groups()
        body = urllib.parse.urlencode({"name": name, "password": password}).encode()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{url}login", data=body, timeout=600) as answer:
            assert "hippocampus-demo" in answer.read().decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=2)


def test_a_demo_starts_its_dashboard_in_the_thread_whose_end_also_ends_it(tmp_path, monkeypatch):
    """The kernel ends the daemons of a killed process only if its main thread started them."""
    threads: list[threading.Thread] = []

    @contextmanager
    def started(*_given: object, **_more: object):
        threads.append(threading.current_thread())
        raise Refused("busy", "this test has seen enough")
        yield

    places = SimpleNamespace(workspace=SimpleNamespace(root=tmp_path), dashboard=tmp_path)
    study = SimpleNamespace(places=places, publish=dict, train=lambda _sites: None)
    monkeypatch.setattr(run, "import_libraries", lambda: None)
    monkeypatch.setattr(run, "create_demo_study", lambda *_given, **_more: study)
    monkeypatch.setattr(run, "serving", lambda _workspace: nullcontext())
    monkeypatch.setattr(run, "enrolled", lambda *_given, **_more: None)
    monkeypatch.setattr(run, "refuse_stranger", lambda *_given: "")
    monkeypatch.setattr(run, "dashboard", started)
    silent = run.DemoProgress(*[lambda *_given: None] * 5)
    with pytest.raises(Refused, match="seen enough"):
        run.run_demo(tmp_path / "out", DemoOptions(), watch=silent)
    assert threads == [threading.main_thread()]


@pytest.mark.slow
def test_a_dashboard_that_cannot_start_is_told_and_changes_nothing(tmp_path):
    said: list[str] = []
    (tmp_path / "not-a-study").mkdir()
    with dashboard(tmp_path / "not-a-study", tmp_path / "state", say=said.append) as wait:
        wait()
    assert len(said) == 1
    assert said[0].startswith("no dashboard: ")


def test_the_password_stays_the_same_and_is_nobodys_elses_to_read(tmp_path):
    first = demo_password(tmp_path)
    assert demo_password(tmp_path) == first
    assert (tmp_path / "demo-password").stat().st_mode & 0o777 == 0o600
    assert UserFile(tmp_path / "users.json").check("operator", first) is not None
