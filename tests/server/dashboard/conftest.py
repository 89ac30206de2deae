"""A study in the middle of a run, and the dashboard over it; every file is made here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.dashboard.app import Options, create_app, users_file
from server.dashboard.auth import Role
from tests.dashboard_study import Recorded, make_study_directory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it would rather have another HTTP client
    from starlette.testclient import TestClient

PASSWORD = "a long enough secret"


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def collected(tmp_path_factory) -> Recorded:
    """Eight answers released, no student yet. Tests only read it."""
    study = make_study_directory(tmp_path_factory.mktemp("dashboard"))
    study.collect()
    return study


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with an operator, ada, and a privacy officer, paul."""
    folder = tmp_path / "state"
    users = users_file(folder)
    users.add("ada", Role.OPERATOR, PASSWORD)
    users.add("paul", Role.PRIVACY_OFFICER, PASSWORD)
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(collected: Recorded, state: Path, clock: Clock) -> Iterator[TestClient]:
    """Nobody is signed in; redirects are not followed."""
    options = Options(study=collected.workspace.root, state=state, clock=clock, metrics_token="m" * 20)
    with TestClient(create_app(options), base_url="http://localhost", follow_redirects=False) as client:
        yield client


@pytest.fixture
def signed_in(client: TestClient):
    """Sign somebody in and return the client with its session."""

    def sign_in(name: str = "ada") -> TestClient:
        answer = client.post("/login", data={"name": name, "password": PASSWORD})
        assert answer.status_code == 303, answer.text
        return client

    return sign_in
