"""Tests several studies behind one port: a site reaches its own study and nothing of another."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from common.errors import InvalidInput
from common.node_auth import AdmittedNode, RequestAdmission, signed_headers, write_admitted
from common.objects import ObjectStore
from common.pki import NodeKeys, create_node_keys, load_node_key, read_node_public_key
from common.supervision import KeptRunning
from server.operations import provision, supervisor
from server.operations.gateway import GatewayFiles, gateway_app
from server.operations.one_port import BEHIND, BehindPort, OnePort, read_behind, write_behind
from server.operations.port_certificate import port_certificate
from server.study.workspace import Endpoint, Workspace
from tests.federation import make_study
from tests.studies import approve, join, made_study, served_study

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def entry(root: Path, letter: str) -> BehindPort:
    """Make a study's folder with one object and one site of its own."""
    store = ObjectStore(root / letter / "objects")
    store.put(letter.encode() * 8)
    keys = create_node_keys(root / letter / "site")
    write_admitted(root / letter / "nodes.json", (AdmittedNode(f"of-{letter}", read_node_public_key(keys.public), 1),))
    paths = (root / letter, root / letter / "objects", root / letter / "nodes.json", root / letter / "fleet.sock")
    return BehindPort(letter * 64, *map(str, paths))


def ask(port: OnePort, keys: NodeKeys | None, path: str) -> httpx.Response:
    """Send a GET, or a POST for one of Flower's routes, signed by these keys."""
    method = "POST" if "/fleet/" in path else "GET"
    headers = signed_headers(load_node_key(keys.private), method=method, path=path, now=NOW) if keys else {}

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=port)
        async with httpx.AsyncClient(transport=transport, base_url="https://gateway") as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(one())


def site_keys(root: Path, letter: str) -> NodeKeys:
    return create_node_keys(root / letter / "site")


@pytest.fixture
def port(tmp_path: Path) -> OnePort:
    """Return the gateway of study a, whose port study b shares."""

    def serve(study: BehindPort, keys: RequestAdmission) -> tuple[object, httpx.AsyncClient]:
        answer = httpx.MockTransport(lambda _request: httpx.Response(200, content=study.study[:1].encode()))
        upstream = httpx.AsyncClient(base_url="http://superlink", transport=answer)
        nodes = Path(study.nodes)
        files = GatewayFiles(objects=Path(study.objects), nodes=nodes, certificate=nodes, key=nodes)
        app = gateway_app(files, upstream=upstream, hosts=lambda: ("gateway",), keys=keys, clock=lambda: NOW)
        return app, upstream

    write_behind(tmp_path / BEHIND, entry(tmp_path, "b"))
    return OnePort(entry(tmp_path, "a"), folder=tmp_path / BEHIND, serve=serve)


def object_of(root: Path, letter: str) -> str:
    """Return the path of the one object that a study has."""
    (path,) = (path for path in (root / letter / "objects").rglob("*") if path.is_file())
    return f"/public/{path.name}"


@pytest.mark.parametrize("letter", ["a", "b"])
def test_a_site_reaches_the_superlink_and_the_objects_of_its_own_study(
    port: OnePort, tmp_path: Path, letter: str
) -> None:
    keys = site_keys(tmp_path, letter)
    assert ask(port, keys, "/v1/fleet/pull-messages").content == letter.encode()
    assert ask(port, keys, object_of(tmp_path, letter)).content == letter.encode() * 8


@pytest.mark.parametrize(("letter", "other"), [("a", "b"), ("b", "a")])
def test_a_site_reaches_no_object_of_another_study(port: OnePort, tmp_path: Path, letter: str, other: str) -> None:
    assert ask(port, site_keys(tmp_path, letter), object_of(tmp_path, other)).status_code == 404


def test_a_key_that_no_study_admits_is_refused(port: OnePort, tmp_path: Path) -> None:
    stranger = create_node_keys(tmp_path / "stranger")
    refused = ask(port, stranger, "/v1/fleet/pull-messages")
    assert (refused.status_code, refused.text) == (401, "unknown-key\n")
    assert ask(port, None, "/").status_code == 401


def test_a_key_that_is_named_and_did_not_sign_opens_nothing(port: OnePort, tmp_path: Path) -> None:
    path = object_of(tmp_path, "b")
    forged = signed_headers(load_node_key(site_keys(tmp_path, "a").private), method="GET", path=path, now=NOW)
    forged["consilium-key"] = read_node_public_key(site_keys(tmp_path, "b").public)

    async def one() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=port), base_url="https://gateway") as http:
            return await http.get(path, headers=forged)

    refused = asyncio.run(one())
    assert (refused.status_code, refused.text) == (401, "signature\n")


def test_a_study_put_behind_the_port_is_served_at_once_and_one_taken_away_is_not(port: OnePort, tmp_path: Path) -> None:
    made = entry(tmp_path, "c")
    keys = site_keys(tmp_path, "c")
    assert ask(port, keys, "/v1/fleet/pull-messages").status_code == 401
    write_behind(tmp_path / BEHIND, made)
    assert ask(port, keys, "/v1/fleet/pull-messages").content == b"c"
    (tmp_path / BEHIND / f"{made.study}.json").unlink()
    assert ask(port, keys, "/v1/fleet/pull-messages").status_code == 401


def test_a_study_whose_directory_was_put_back_from_a_backup_is_served_anew(port: OnePort, tmp_path: Path) -> None:
    """The client of the study's socket still holds the old directory open, where nobody listens."""
    for _ in range(2):
        assert ask(port, site_keys(tmp_path, "b"), "/v1/fleet/pull-messages").content == b"b"
    first = port._all()
    shutil.move(tmp_path / "b", tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "b")
    assert ask(port, site_keys(tmp_path, "b"), "/v1/fleet/pull-messages").content == b"b"
    again = port._all()
    assert [one is other for one, other in zip(first, again, strict=True)] == [True, False]
    assert first[1].upstream.is_closed


def test_a_broken_entry_keeps_no_other_study_from_its_sites(port: OnePort, tmp_path: Path) -> None:
    assert ask(port, site_keys(tmp_path, "b"), "/v1/fleet/pull-messages").content == b"b"
    (tmp_path / BEHIND / f"{'d' * 64}.json").write_text("{torn")
    for letter in "ab":
        assert ask(port, site_keys(tmp_path, letter), "/v1/fleet/pull-messages").content == letter.encode()


@pytest.fixture
def studies(tmp_path: Path) -> tuple[Workspace, Workspace]:
    """Return two studies; the second shares the first one's port."""
    first = served_study(tmp_path / "first")
    second = made_study(tmp_path / "second", replace(make_study(), name="second"))
    provision.set_up_behind(second, first, internal_port=8001)
    return first, second


def test_a_kit_of_the_second_study_names_the_one_port_and_its_authority(
    studies: tuple[Workspace, Workspace], tmp_path: Path
) -> None:
    first, second = studies
    provision.make_kit(second, "north", tmp_path / "kit")
    assert (tmp_path / "kit" / "ca.crt").read_bytes() == (first.gateway_dir / "ca.crt").read_bytes()
    assert '"localhost:8443"' in (tmp_path / "kit" / "kit.json").read_text()
    assert not (second.gateway_dir / "server.key").exists(), "the port's key lies with the study that keeps the port"
    (behind,) = read_behind(first.gateway_dir / BEHIND)
    assert (behind.study, Path(behind.directory)) == (second.study().id, second.root.resolve())


def test_a_study_that_was_deleted_by_hand_is_not_made_again_and_can_be_taken_off_the_port(
    studies: tuple[Workspace, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly ``server up`` made a new folder for its log and advised to set up a server there."""
    first, second = studies
    started: list[KeptRunning] = []
    monkeypatch.setattr(supervisor, "keep_running", lambda _logs, kept, *, on_ready: started.extend(kept))
    supervisor.serve(first, bind="127.0.0.1")
    here, count = started[-1].obstacle(), len(started)
    shutil.rmtree(second.root)
    gone = started[-1].obstacle()
    assert (here, str(second.root) in gone) == ("", True)
    subprocess.run(shlex.split(re.search("`(rm .*?)`", gone)[1]), check=True)
    started.clear()
    supervisor.serve(first, bind="127.0.0.1")
    assert len(started) == count - 1


def test_putting_a_study_behind_a_port_again_changes_nothing(studies: tuple[Workspace, Workspace]) -> None:
    first, second = studies
    before = {path: path.read_bytes() for path in second.root.rglob("*") if path.is_file()}
    provision.set_up_behind(second, first, internal_port=8001)
    assert {path: path.read_bytes() for path in second.root.rglob("*") if path.is_file()} == before


def test_the_certificate_of_the_port_is_renewed_from_any_of_its_studies(studies: tuple[Workspace, Workspace]) -> None:
    first, second = studies
    until = provision.renew(second, valid_days=700)
    assert port_certificate(first, now=NOW).until == port_certificate(second, now=NOW).until == until


def test_a_study_that_cannot_share_another_studys_port_is_refused_with_a_remedy(
    studies: tuple[Workspace, Workspace], tmp_path: Path
) -> None:
    first, second = studies
    third = made_study(tmp_path / "third", replace(make_study(), name="third"))
    for port in (8000, 8001):
        with pytest.raises(InvalidInput, match=r"--internal-port.*to fix: give --internal-port 8002"):
            provision.set_up_behind(third, first, internal_port=port)
    with pytest.raises(InvalidInput, match=f"to fix: give --behind {first.root}"):
        provision.set_up_behind(third, second, internal_port=8002)
    with pytest.raises(InvalidInput, match=r"--behind.*another study"):
        provision.set_up_behind(first, first, internal_port=8002)
    provision.set_up_server(third, Endpoint(host="localhost", port=9443, internal_port=8002))
    with pytest.raises(InvalidInput, match=str(third.authority_dir)):
        provision.set_up_behind(third, first, internal_port=8002)


def test_one_node_key_is_admitted_to_one_study_of_a_port(studies: tuple[Workspace, Workspace], tmp_path: Path) -> None:
    """The gateway knows only by the key to which study a request belongs."""
    first, second = studies
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    request = join(first, tmp_path / "one", "north")
    approve(first, request)
    copied = join(second, tmp_path / "two", "north")
    object.__setattr__(copied, "node_key", request.node_key)
    with pytest.raises(InvalidInput, match="node key"):
        approve(second, copied, fingerprint=copied.fingerprint)
