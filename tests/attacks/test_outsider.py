"""An outsider: nobody admitted it. It can send mail, reach the one port, and stand between a site and the consortium.

| threat | what stands against it |
|---|---|
| a join request names a path, so that admitting it writes elsewhere | names are one segment, checked first |
| a request is exchanged on the way for another name, pool or key | the fingerprint read out covers all of it |
| it has the operator type the fingerprint that the refusal prints | a refusal never says the right one |
| a site that was revoked comes back under another name | a key is one site's for ever |
"""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from client.setup import SiteKit, create_site
from common.admission import JoinRequest, read_request
from common.canonical import canonical_bytes
from common.errors import DaemonFailed, InvalidInput
from common.node_auth import read_admitted
from common.pki import create_node_keys, load_node_key, read_node_public_key
from server import provision, setup
from server.provision_cli import provision_app
from server.workspace import Endpoint, Site, Workspace
from tests.federation import make_study

PATHS = (
    "../../../../tmp/x",
    "/etc/x",
    "a/b",
    "..",
    ".",
    "",
    ".ssh",
    "a\\b\0",
    "-oProxyCommand=x",
    "a b",
    "é",
    "x" * 65,
    "a\n",
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "study")
    setup.create_study(workspace, make_study())
    provision.set_up_server(workspace, Endpoint(host="localhost", port=8443, internal_port=8000))
    return workspace


def forged(path: Path, study: str, *, site: str, pool: str, node_key: str = "") -> Path:
    """A request that its sender signed itself, whatever it says."""
    keys = create_node_keys(path.parent / "keys")
    key = load_node_key(keys.private)
    fields = {"node_key": node_key or read_node_public_key(keys.public), "pool": pool, "site": site, "study": study}
    signature = key.sign(canonical_bytes({"join": 1, **fields}), ec.ECDSA(hashes.SHA384()))
    path.write_text(json.dumps({**fields, "signature": b64encode(signature).decode()}))
    return path


def join(workspace: Workspace, folder: Path, name: str, *, pool: str = "") -> JoinRequest:
    """What a hospital does with its kit."""
    provision.make_kit(workspace, name, folder / "kit")
    (folder / "data").mkdir(exist_ok=True)
    create_site(folder / "site", pool=pool or name, data=folder / "data", kit=SiteKit.load(folder / "kit"))
    return read_request(folder / "site" / "request.json")


def admit(workspace: Workspace, request: JoinRequest, *, fingerprint: str, **whom: str) -> Site:
    whom = {"site": "north", "pool": "north"} | whom
    return provision.approve(
        workspace,
        request,
        **whom,
        fingerprint=fingerprint,
        register=lambda _key, _name: len(workspace.registered()) + 7,
    )


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("site", PATHS)
def test_a_name_that_is_a_path_is_refused_before_anything_is_written(
    workspace: Workspace, tmp_path: Path, site: str
) -> None:
    request = forged(tmp_path / "request.json", workspace.study().id, site=site, pool="north")
    before = tree(tmp_path)
    given = [
        "approve",
        str(workspace.root),
        str(request),
        "--site",
        site,
        "--pool",
        "north",
        "--fingerprint",
        "SHA256:x",
    ]
    done = CliRunner().invoke(provision_app, given)
    assert isinstance(done.exception, InvalidInput | SystemExit)
    with pytest.raises(InvalidInput, match="site in the join request"):
        read_request(request)
    with pytest.raises(InvalidInput, match="name of the site"):
        provision.make_kit(workspace, site, tmp_path / "kit")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("pool", ["../x", "/x", "a//b", "a/../b", "a/", "", "x" * 65, "a\x1b[31m"])
def test_a_pool_is_a_name_too(workspace: Workspace, tmp_path: Path, pool: str) -> None:
    request = forged(tmp_path / "request.json", workspace.study().id, site="north", pool=pool)
    with pytest.raises(InvalidInput, match="pool in the join request"):
        read_request(request)


def test_a_kit_gives_a_site_no_path_for_a_name(workspace: Workspace, tmp_path: Path) -> None:
    provision.make_kit(workspace, "north", tmp_path / "kit")
    record = json.loads((tmp_path / "kit" / "kit.json").read_text())
    (tmp_path / "kit" / "kit.json").write_text(json.dumps(record | {"site": "../../x"}))
    with pytest.raises(InvalidInput, match="site in the startup kit"):
        SiteKit.load(tmp_path / "kit")


def test_a_fingerprint_covers_key_name_pool_and_study(workspace: Workspace, tmp_path: Path) -> None:
    honest = join(workspace, tmp_path / "a", "north")
    fields = {"study": honest.study, "site": "north", "pool": "north", "node_key": honest.node_key}
    others = {
        "study": "0" * 64,
        "site": "south",
        "pool": "south",
        "node_key": read_node_public_key(create_node_keys(tmp_path / "other").public),
    }
    for name, value in others.items():
        changed = JoinRequest(**{**fields, name: value})
        assert changed.fingerprint != honest.fingerprint, name
        assert not changed.has_fingerprint(honest.fingerprint)


def test_the_same_key_for_another_pool_or_name_is_not_what_was_read_out(workspace: Workspace, tmp_path: Path) -> None:
    honest = join(workspace, tmp_path / "a", "north")
    other = JoinRequest(study=honest.study, site="north", pool="south", node_key=honest.node_key)
    with pytest.raises(InvalidInput, match="fingerprint of the join request"):
        admit(workspace, other, fingerprint=honest.fingerprint, pool="south")
    for whom in ({"site": "south"}, {"pool": "south"}):
        with pytest.raises(InvalidInput, match=r"of the join request.*before you know who"):
            admit(workspace, honest, fingerprint=honest.fingerprint, **whom)
    assert workspace.registered() == read_admitted(workspace.nodes_file) == ()
    assert not workspace.node_keys_dir.exists()


def test_a_wrong_fingerprint_never_prints_the_right_one(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")
    right = request.fingerprint.removeprefix("SHA256:")
    wrong = (right[:-1], right + "A", right.lower(), right[::-1], "", "SHA256:", "SHA256:SHA256:" + right, "é" * 43)
    for given in (*wrong, *("SHA256:" + word for word in wrong)):
        with pytest.raises(InvalidInput, match="the one that the site reads out") as refused:
            admit(workspace, request, fingerprint=given)
        if right not in given:
            assert right not in str(refused.value)
    assert workspace.registered() == ()


@pytest.mark.parametrize("prefix", ["SHA256:", "", "  SHA256:"])
def test_a_right_fingerprint_admits_with_and_without_its_prefix(
    workspace: Workspace, tmp_path: Path, prefix: str
) -> None:
    request = join(workspace, tmp_path / "a", "north")
    admitted = admit(workspace, request, fingerprint=prefix + request.fingerprint.removeprefix("SHA256:"))
    assert (admitted.name, admitted.pool) == ("north", "north")


def test_a_revoked_key_comes_back_under_no_name(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")
    admit(workspace, request, fingerprint=request.fingerprint)
    provision.revoke(workspace, "north", unregister=lambda _node: None)
    again = JoinRequest(study=request.study, site="south", pool="south", node_key=request.node_key)
    with pytest.raises(InvalidInput, match="node key is registered already"):
        admit(workspace, again, fingerprint=again.fingerprint, site="south", pool="south")
    for spelled in (request.node_key + " comment", request.node_key + "\n", request.node_key.replace(" ", "  ")):
        with pytest.raises(InvalidInput, match="node key"):
            JoinRequest(study=request.study, site="south", pool="south", node_key=spelled)


def test_a_site_that_superlink_did_not_take_can_be_admitted_later(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")

    def away(_key: Path, _name: str) -> int:
        raise DaemonFailed("SuperLink is not up")

    with pytest.raises(DaemonFailed):
        provision.approve(
            workspace, request, site="north", pool="north", fingerprint=request.fingerprint, register=away
        )
    assert tree(workspace.node_keys_dir) == set()
    assert admit(workspace, request, fingerprint=request.fingerprint).name == "north"


def test_a_request_of_any_size_and_depth_ends_as_a_refusal(tmp_path: Path) -> None:
    for content in (b"[" * 60_000, b"x" * (1 << 20), b"{}", b"\xff", b"[]", b"1" * 5000):
        (tmp_path / "request.json").write_bytes(content)
        with pytest.raises(InvalidInput):
            read_request(tmp_path / "request.json")
