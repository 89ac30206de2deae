"""Makes a study in the middle of its run, and a dashboard that shows it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.dashboard import auth
from server.dashboard.app import Options, create_app
from server.dashboard.auth import Role, Session, users_file
from server.dashboard.security import SessionReader
from tests.dashboard_study import Recorded, make_study_directory
from tests.waiting import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette warns that it prefers another HTTP client
    from starlette.testclient import TestClient

PASSWORD = "a long enough secret"
SCRYPT = dict(auth._SCRYPT)
"""Production settings of the password hash; the tests use a hundredth of the time, except for one."""


@contextmanager
def quick_passwords() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "_SCRYPT", {"n": 1 << 10, "r": 8, "p": 1})
        yield


@pytest.fixture(autouse=True)
def _quick_passwords() -> Iterator[None]:
    with quick_passwords():
        yield


class Clock:
    """Stands in for a clock; it moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def collected(tmp_path_factory) -> Recorded:
    """Return a study with eight answers released and no student yet. Tests only read it."""
    study = make_study_directory(tmp_path_factory.mktemp("dashboard"))
    study.collect()
    return study


@pytest.fixture(scope="session")
def users_text(tmp_path_factory) -> bytes:
    """Return the users file with an operator, ada, and a privacy officer, paul."""
    folder = tmp_path_factory.mktemp("users")
    users = users_file(folder)
    with quick_passwords():
        users.add("ada", Role.OPERATOR, PASSWORD)
        users.add("paul", Role.PRIVACY_OFFICER, PASSWORD)
    return (folder / "users.json").read_bytes()


@pytest.fixture
def state(tmp_path: Path, users_text: bytes) -> Path:
    """Return a state directory with ada and paul."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "users.json").write_bytes(users_text)
    return folder


@pytest.fixture(scope="module")
def reader(collected: Recorded, users_text: bytes, tmp_path_factory) -> Iterator[TestClient]:
    """Yield a client with the privacy officer signed in, for all tests of a module that only read."""
    state = tmp_path_factory.mktemp("state")
    (state / "users.json").write_bytes(users_text)
    with quick_passwords(), looked_at(Options(study=collected.workspace.root, state=state), user="paul") as client:
        yield client


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(collected: Recorded, state: Path, clock: Clock) -> Iterator[TestClient]:
    """Yield a client that is not signed in and follows no redirects."""
    options = Options(study=collected.workspace.root, state=state, clock=clock, metrics_token="m" * 20)
    with TestClient(create_app(options), base_url="http://localhost", follow_redirects=False) as client:
        until_followed(client)
        yield client


@contextmanager
def looked_at(options: Options, *, user: str = "ada") -> Iterator[TestClient]:
    """Run a dashboard that has read the study, with a user signed in. Its client follows no redirects."""
    with TestClient(create_app(options), base_url="http://localhost", follow_redirects=False) as client:
        until_followed(client)
        assert client.post("/login", data={"name": user, "password": PASSWORD}).status_code == 303
        yield client


def glance(options: Options) -> TestClient:
    """Return a dashboard that reads the study only once, with the privacy officer signed in."""
    app = create_app(options)
    session = Session("paul", Role.PRIVACY_OFFICER, "token", 1e12, None)
    app.state.gate = SessionReader(cookie="any", lookup=lambda _token: session)
    app.state.service.follower.poll()
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


def until_followed(client: TestClient) -> None:
    """Wait for the first look at the study."""
    until(lambda: client.get("/healthz").json()["up_to_date"], pause_s=0.02)


@pytest.fixture
def signed_in(client: TestClient):
    """Sign somebody in and return the client with its session."""

    def sign_in(name: str = "ada") -> TestClient:
        answer = client.post("/login", data={"name": name, "password": PASSWORD})
        assert answer.status_code == 303, answer.text
        return client

    return sign_in
