"""Tests kits, join requests, admission, renewal and revocation; only SuperLink's registration is a stub."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.policy import load_site
from client.site.books import open_books
from client.site.enrolment import new_request
from common.admission import JoinRequest, read_request, write_request
from common.config import CodecConfig
from common.errors import DaemonFailed, InvalidInput, StorageFailed
from common.ledger.keys import load_signing_key
from common.ledger.rollback_guard import standing_path
from common.node_auth import read_admitted
from common.peers import read_peers
from common.pki import expires, node_fingerprint
from common.privacy.mechanism import Protection, Relation, Unit
from consilium.cli.main import app
from consilium.cli.provision import online_text
from server.ledger.backup import backup
from server.ledger.recovery import recover_charges
from server.ledger.server_ledger import Ledger
from server.operations import provision
from server.operations.exact import CertificateHosts
from server.operations.leaving import forget
from server.operations.port_certificate import certificate_obstacle, port_certificate
from server.public.material import CodecRecord
from server.public.public_files import PEERS, said_file
from server.study import create_study as setup
from server.study import status
from server.study.create_study import open_ledger
from server.study.revocations import check_revoked
from server.study.workspace import Endpoint, Site, Workspace
from tests.backups import anothers_standing
from tests.commands import refusal_of, typed
from tests.federation import make_study
from tests.studies import approve, join, served_study

pytestmark = pytest.mark.slow


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "study")


def stated(site: Path, path: Path, **changes: object) -> JoinRequest:
    """Return a site's join request that states something else about its ledger, with both of the site's signatures."""
    asked = read_request(site / "request.json")
    assert asked.books is not None
    of = {"study": asked.study, "site": asked.site, "pool": asked.pool, "node_key": site / "node" / "keys" / "node"}
    with open_books(load_site(site)) as ledger:
        return write_request(path, **of, books=replace(asked.books, **changes), sign=ledger.sign)


@pytest.mark.parametrize("apart", [True, False])
def test_an_operator_sees_for_which_unit_and_relation_an_admitted_pool_is_counted(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A join request states them. Another unit than the study's can end the pool's budget sooner."""
    monkeypatch.setattr("server.operations.daemons.register_node", lambda _server, _key, name: 7)
    study = workspace.study().privacy.protection
    other = next(one for one in (Relation.ZERO_OUT, Relation.REPLACE_ONE) if one is not study.relation)
    wanted = Protection(Unit.HOSPITAL, other) if apart else study
    join(workspace, tmp_path, "north")
    request = stated(tmp_path / "site", tmp_path / "request.json", protection=wanted)
    words = ["--site", "north", "--pool", "north", "--fingerprint", request.fingerprint]
    done = CliRunner().invoke(
        app, ["provision", "approve", str(workspace.root), str(tmp_path / "request.json"), *words]
    )
    assert f"admitted north, patient pool north ({wanted}), as node 7" in done.output, done.output
    assert (f"the study states {study}; the budget of pool north is counted for {wanted}" in done.output) is apart


@pytest.mark.parametrize("first", ["liar", "honest"])
def test_stating_another_hospitals_ledger_id_bars_nobody_and_names_both(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """As witnesses, hospitals learn each other's ledger ids. A site is identified by its key, which it must prove."""
    nodes = iter((7, 8))
    monkeypatch.setattr("server.operations.daemons.register_node", lambda _server, _key, name: next(nodes))
    requests = {}
    for name in ("honest", "liar"):
        (tmp_path / name).mkdir()
        requests[name] = join(workspace, tmp_path / name, name)
    theirs = requests["honest"].books.ledger_id
    path = tmp_path / "liar" / "site" / "request.json"
    requests["liar"] = stated(path.parent, path, ledger_id=theirs)
    for name in (first, "honest" if first == "liar" else "liar"):
        words = ["--site", name, "--pool", name, "--fingerprint", requests[name].fingerprint]
        given = ["provision", "approve", str(workspace.root), str(tmp_path / name / "site" / "request.json"), *words]
        done = CliRunner().invoke(app, given)
        assert f"admitted {name}" in done.output, done.output
    assert {site.name for site in workspace.registered()} == {"honest", "liar"}
    second = "honest" if first == "liar" else "liar"
    said = f"pools {first} and {second} both state the site ledger {theirs}"
    assert said in " ".join(done.output.split())
    with Ledger.open(workspace.ledger_file) as ledger:
        assert ledger.books.pool_books == {first: theirs}
        assert any(theirs in row.body for row in ledger.rows() if row.kind == "note")


def test_changing_the_servers_address_prints_a_warning_with_the_old_one(workspace: Workspace) -> None:
    words = ["provision", "server", str(workspace.root), "--host", workspace.endpoint().host, "--port"]
    same = CliRunner().invoke(app, [*words, str(workspace.endpoint().port)])
    assert (same.exit_code, "warning" in same.stderr) == (0, False)
    before = workspace.endpoint().superlink
    other = typed(app, *words, "9444")
    assert f"warning: the server's address was {before}" in other.stderr


@pytest.mark.parametrize("host", ["::1", "2001:0DB8:0::0001"])
def test_sites_reach_a_server_at_an_ipv6_address_by_the_address_in_their_kit(workspace: Workspace, host: str) -> None:
    endpoint = Endpoint(host=host, port=9443, internal_port=8000)
    provision.set_up_server(workspace, endpoint)
    asked = urllib.request.Request(endpoint.objects_url).host
    assert asked == endpoint.superlink
    assert asked.removesuffix(":9443") in CertificateHosts(workspace.gateway_dir / "server.crt")()
    with pytest.raises(InvalidInput, match="IP address"):
        Endpoint(host="1:2", port=9443, internal_port=8000)


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("pate_server.example.org", "underscore"),
        ("pate.example.org.", "a dot at the end"),
        ("[::1]", "brackets"),
        ("pate.example.org:443", "a port"),
        ("pate..example.org", "a dot at the end"),
        ("999.1.1.1", "correct the IPv4 address"),
        ("10.1", "correct the IPv4 address"),
    ],
)
def test_a_host_that_no_site_can_reach_is_refused_with_its_remedy_before_anything_is_written(
    workspace: Workspace, host: str, remedy: str
) -> None:
    before = sorted(workspace.root.rglob("*"))
    with pytest.raises(InvalidInput, match=f"to fix: .*{remedy}"):
        provision.set_up_server(workspace, Endpoint(host=host, port=9443, internal_port=8000))
    assert sorted(workspace.root.rglob("*")) == before


def test_two_approvals_at_once_admit_both(workspace: Workspace, tmp_path: Path) -> None:
    requests = []
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        requests.append(join(workspace, tmp_path / name, name))
    meet = threading.Barrier(2, timeout=0.5)

    def register(key: Path, _name: str) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait()  # if both threads get here before either ends
        return {"north": 7, "south": 8}[key.stem]

    def admit(request: JoinRequest) -> Site:
        words = {"site": request.site, "pool": request.pool, "fingerprint": request.fingerprint}
        return provision.approve(workspace, request, **words, register=register)

    with ThreadPoolExecutor() as both:
        list(both.map(admit, requests))
    assert [site.name for site in workspace.sites()] == ["north", "south"]
    assert {node.site for node in read_admitted(workspace.nodes_file)} == {"north", "south"}


class Killed(BaseException):
    """Ends the process here, so no error handler runs."""


class SuperLinkStandIn:
    """Stands in for SuperLink: each key gets one node, and gets the same one if asked again."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self.asked = 0

    def register(self, key: Path, _name: str) -> int:
        self.asked += 1
        return self.nodes.setdefault(key.read_text().split()[1], len(self.nodes) + 7)


def dies(step: Callable[..., object], *, after: int = 0) -> Callable[..., object]:
    """Return a step of an approval whose call after the first ``after`` calls ends the process."""
    taken = itertools.count()

    def taken_or_killed(*given: object, **words: object) -> object:
        if next(taken) < after:
            return step(*given, **words)
        raise Killed

    return taken_or_killed


@pytest.mark.parametrize(
    ("where", "name"),
    [(provision, "write_admitted"), (setup, "add_site"), (Workspace, "save_sites"), (provision, "publish_peers")],
)
def test_approvals_that_were_broken_off_anywhere_are_finished_by_the_same_approvals(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    superlink, requests = SuperLinkStandIn(), []
    for site in ("north", "south"):
        (tmp_path / site).mkdir()
        requests.append(join(workspace, tmp_path / site, site))

    def admit(request: JoinRequest) -> Site:
        words = {"site": request.site, "pool": request.pool, "fingerprint": request.fingerprint}
        return provision.approve(workspace, request, **words, register=superlink.register)

    for request in requests:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, dies(getattr(where, name), after=int(name == "publish_peers")))
            with pytest.raises(Killed):
                admit(request)
    begun = {"add_site": ["north", "south"], "save_sites": ["north", "south"]}.get(name, [])
    assert provision.broken_off(workspace) == begun
    shown = CliRunner().invoke(app, ["provision", "list", str(workspace.root)]).stdout
    again = [line for line in shown.splitlines() if "`consilium provision approve` again" in line]
    assert [line.partition(":")[0] for line in again] == begun
    assert "revoked" not in shown
    for request in requests:
        admit(request)
    assert provision.broken_off(workspace) == []
    assert {site.name: site.node_id for site in workspace.sites()} == {"north": 7, "south": 8}
    assert {(node.site, node.key, node.node_id) for node in read_admitted(workspace.nodes_file)} == {
        (request.site, request.node_key, node) for request, node in zip(requests, (7, 8), strict=True)
    }


def test_a_site_that_broke_off_may_ask_again_with_another_key_or_be_revoked(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink, withdrawn = SuperLinkStandIn(), []
    requests = []
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        requests.append(join(workspace, tmp_path / folder, "north"))

    def admit(request: JoinRequest) -> Site:
        words = {"site": request.site, "pool": request.pool, "fingerprint": request.fingerprint}
        return provision.approve(workspace, request, **words, register=superlink.register)

    with monkeypatch.context() as patch:
        patch.setattr(setup, "add_site", dies(setup.add_site))
        for request in requests:
            with pytest.raises(Killed):
                admit(request)
    (node,) = read_admitted(workspace.nodes_file)
    assert (node.key, node.node_id) == (requests[1].node_key, 8)
    assert provision.revoke(workspace, "north", unregister=withdrawn.append)
    assert withdrawn == [8]
    assert read_admitted(workspace.nodes_file) == ()
    assert admit(requests[0]).node_id == 7


def test_an_approval_that_fails_admits_nobody(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidInput("ledger is locked")

    monkeypatch.setattr(setup, "add_site", refuse)
    with pytest.raises(InvalidInput, match="locked"):
        approve(workspace, join(workspace, tmp_path, "north"))
    assert read_admitted(workspace.nodes_file) == ()
    assert provision.broken_off(workspace) == []


def test_a_site_is_bound_to_its_key_its_pool_and_its_node(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path, "north", pool="north/adults")
    assert request.books is not None
    site = Site(name="north", pool="north/adults", node_id=2**63 + 1, answer_key=request.books.answer_key)
    assert approve(workspace, request, node_id=2**63 + 1) == site
    assert workspace.sites() == (site,)
    (node,) = read_admitted(workspace.nodes_file)
    assert (node.site, node.key, node.node_id) == ("north", request.node_key, 2**63 + 1)
    (standing,) = provision.standings(workspace, nodes={7: "online"})
    assert (standing.site, standing.admitted, standing.fingerprint) == (
        "north",
        True,
        node_fingerprint(request.node_key),
    )
    assert standing.node == "unknown"


def test_no_private_key_leaves_either_side(workspace: Workspace, tmp_path: Path) -> None:
    join(workspace, tmp_path, "north")
    sent = [*(tmp_path / "kit").iterdir(), tmp_path / "site" / "request.json"]
    private = [
        *(p.read_text() for p in (workspace.authority_dir / "ca.key", workspace.gateway_dir / "server.key")),
        (tmp_path / "site" / "node" / "keys" / "node").read_text(),
    ]
    lines = {line for key in private for line in key.splitlines() if not line.startswith("-----")}
    for path in sent:
        text = path.read_text()
        assert "PRIVATE" not in text
        assert not any(line in text for line in lines)


@pytest.mark.parametrize("field", ["study", "site", "pool", "node_key"])
def test_an_altered_request_is_refused(workspace: Workspace, tmp_path: Path, field: str) -> None:
    join(workspace, tmp_path / "a", "north")
    other = join(workspace, tmp_path / "b", "south")
    path = tmp_path / "a" / "site" / "request.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {field: getattr(other, field) if field != "study" else "0" * 64}))
    with pytest.raises(InvalidInput, match="signature"):
        read_request(path)


def test_a_request_that_was_exchanged_on_the_way_is_seen_by_its_fingerprint(workspace, tmp_path: Path) -> None:
    read_out = join(workspace, tmp_path / "a", "north").fingerprint
    exchanged = join(workspace, tmp_path / "b", "north")
    with pytest.raises(InvalidInput, match="replaced the request"):
        approve(workspace, exchanged, fingerprint=read_out)
    assert workspace.registered() == read_admitted(workspace.nodes_file) == ()


def test_names_pools_keys_and_studies_are_not_mixed_up(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    with pytest.raises(InvalidInput, match=r"^site is registered"):
        approve(workspace, join(workspace, tmp_path / "b", "north", pool="else"), node_id=8)
    with pytest.raises(InvalidInput, match="pool is registered"):
        approve(workspace, join(workspace, tmp_path / "c", "south", pool="north"), node_id=8)
    other = served_study(tmp_path / "other", make_study(planned_queries=5))
    with pytest.raises(InvalidInput, match=f"{other.study().id[:16]}.*{workspace.study().id[:16]}"):
        approve(workspace, join(other, tmp_path / "d", "east"), node_id=9)


def test_a_list_of_an_earlier_version_goes_on_and_learns_its_nodes(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    approve(workspace, join(workspace, tmp_path / "b", "south"), node_id=8)
    now = read_admitted(workspace.nodes_file)
    old = [{"site": node.site, "key": node.key} for node in now]
    workspace.nodes_file.write_text(json.dumps(old))
    assert [(node.site, node.node_id) for node in read_admitted(workspace.nodes_file)] == [("north", 0), ("south", 0)]
    provision.set_up_server(workspace, workspace.endpoint())
    assert read_admitted(workspace.nodes_file) == now
    workspace.nodes_file.write_text(json.dumps(old))
    assert provision.revoke(workspace, "south", unregister=lambda node: None)
    assert [(node.site, node.node_id) for node in read_admitted(workspace.nodes_file)] == [("north", 7)]


def test_a_revoked_site_is_out_at_once_and_stays_on_record(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    approve(workspace, join(workspace, tmp_path / "b", "south"), node_id=8)
    gone = []
    assert provision.revoke(workspace, "north", unregister=gone.append)
    assert gone == [7]
    assert [node.site for node in read_admitted(workspace.nodes_file)] == ["south"]
    assert [(s.site, s.admitted) for s in provision.standings(workspace, nodes={7: "online"})] == [
        ("north", False),
        ("south", True),
    ]
    assert [site.name for site in workspace.sites()] == ["north", "south"]  # past releases name it
    assert [site.name for site in workspace.admitted()] == ["south"]  # the next run asks only this site
    with pytest.raises(InvalidInput, match="no such site"):
        provision.revoke(workspace, "north", unregister=gone.append)

    def away(_node: int) -> None:
        raise DaemonFailed("SuperLink is not running")

    assert not provision.revoke(workspace, "south", unregister=away)
    assert read_admitted(workspace.nodes_file) == ()


def test_a_revoked_site_does_not_come_back_with_an_older_list_of_sites(workspace: Workspace, tmp_path: Path) -> None:
    """A site that was revoked after a dispute takes part in no run after the study's directory was restored."""
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    approve(workspace, join(workspace, tmp_path / "b", "south"), node_id=8)
    older, study = workspace.nodes_file.read_bytes(), workspace.study()
    with open_ledger(workspace) as ledger:
        check_revoked(workspace, ledger, study)
        provision.revoke(workspace, "north", unregister=lambda node: None)
        check_revoked(workspace, ledger, study)
        workspace.nodes_file.write_bytes(older)
        workspace.revoked_file.unlink()
        assert "north" in {site.name for site in workspace.admitted()}
        with pytest.raises(InvalidInput, match="north") as refused:
            check_revoked(workspace, ledger, study)
        assert "provision revoke" in (refused.value.remedy or "")
        provision.revoke(workspace, "north", unregister=lambda node: None)
        check_revoked(workspace, ledger, study)


def test_a_revoked_site_does_not_come_back_with_an_older_list_of_the_gateway_alone(
    workspace: Workspace, tmp_path: Path
) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    approve(workspace, join(workspace, tmp_path / "b", "south"), node_id=8)
    older = workspace.nodes_file.read_bytes()
    provision.revoke(workspace, "north", unregister=lambda node: None)
    workspace.nodes_file.write_bytes(older)
    with open_ledger(workspace) as ledger, pytest.raises(InvalidInput, match="north"):
        check_revoked(workspace, ledger, workspace.study())
    provision.revoke(workspace, "north", unregister=lambda node: None)
    with open_ledger(workspace) as ledger:
        check_revoked(workspace, ledger, workspace.study())


def test_a_site_that_only_the_gateways_older_list_lacks_is_admitted_by_the_same_approval(
    workspace: Workspace, tmp_path: Path
) -> None:
    older = workspace.nodes_file.read_bytes()
    request = join(workspace, tmp_path / "a", "north")
    approve(workspace, request)
    newest, sites = workspace.nodes_file.read_bytes(), workspace.sites()
    assert provision.unlisted(workspace) == []
    for restored in (None, older):
        workspace.nodes_file.unlink()
        if restored is not None:
            workspace.nodes_file.write_bytes(restored)
        assert provision.unlisted(workspace) == ["north"]
        approve(workspace, request)
        assert (workspace.nodes_file.read_bytes(), workspace.sites()) == (newest, sites)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    assert provision.unlisted(workspace) == []
    for restored in (workspace.nodes_file.read_bytes(), newest):  # without the site, and with it
        workspace.nodes_file.write_bytes(restored)
        with pytest.raises(InvalidInput, match="registered already"):
            approve(workspace, request)


def test_a_site_whose_node_superlink_lost_gets_a_new_one_by_the_same_approval(
    workspace: Workspace, tmp_path: Path
) -> None:
    requests = [join(workspace, tmp_path / name, name) for name in ("north", "south")]
    for node, request in enumerate(requests, start=7):
        approve(workspace, request, node_id=node)
    keys = {site.name: site.answer_key for site in workspace.sites()}
    for node, request in enumerate(requests, start=21):
        approve(workspace, request, node_id=node)
    assert [(site.name, site.node_id) for site in workspace.sites()] == [("north", 21), ("south", 22)]
    assert {site.name: site.answer_key for site in workspace.sites()} == keys
    assert [(node.site, node.node_id) for node in read_admitted(workspace.nodes_file)] == [("north", 21), ("south", 22)]
    with Ledger.open(workspace.ledger_file) as ledger:
        assert [row.kind for row in ledger.rows()].count("pool") == 2, "nothing is declared again"


@pytest.mark.parametrize("listed", [True, False])
def test_another_key_or_pool_under_the_name_of_a_site_is_not_admitted_by_another_approval(
    workspace: Workspace, tmp_path: Path, listed: bool
) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    if not listed:
        workspace.nodes_file.unlink()
    for folder, pool in (("b", "north"), ("c", "else")):
        with pytest.raises(InvalidInput, match="registered already"):
            approve(workspace, join(workspace, tmp_path / folder, "north", pool=pool), node_id=8)
    assert [(site.name, site.node_id) for site in workspace.sites()] == [("north", 7)]


def test_a_run_without_the_gateways_list_says_how_to_bring_it_back(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")
    approve(workspace, request)
    workspace.nodes_file.unlink()
    with open_ledger(workspace) as ledger:
        with pytest.raises(InvalidInput, match=r"list of admitted sites.*provision approve"):
            check_revoked(workspace, ledger, workspace.study())
        approve(workspace, request)
        check_revoked(workspace, ledger, workspace.study())


def test_a_revoked_site_does_not_come_back_with_an_older_ledger(workspace: Workspace, tmp_path: Path) -> None:
    """A recovery records the missing revocation again, so older lists of sites are still refused."""
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    older = workspace.nodes_file.read_bytes()
    backup(workspace.ledger_file, tmp_path / "monday.sqlite")
    provision.revoke(workspace, "north", unregister=lambda node: None)
    shutil.copy(tmp_path / "monday.sqlite", workspace.ledger_file)
    workspace.nodes_file.write_bytes(older)
    workspace.revoked_file.unlink()
    key = load_signing_key(workspace.signing_key_file)
    recover_charges(workspace.ledger_file, signing_key=key, receipts=(), standing=None, studies=())
    with open_ledger(workspace) as ledger, pytest.raises(InvalidInput, match="north"):
        check_revoked(workspace, ledger, workspace.study())


def test_a_revocation_that_could_not_be_noted_is_noted_by_the_next_run(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    older = workspace.nodes_file.read_bytes()
    standing = standing_path(workspace.ledger_file)
    standing.rename(tmp_path / "away")
    done = CliRunner().invoke(app, ["provision", "revoke", str(workspace.root), "north"])
    assert "the next run notes the revocation" in done.stderr
    (tmp_path / "away").rename(standing)
    with open_ledger(workspace) as ledger:
        check_revoked(workspace, ledger, workspace.study())
        workspace.nodes_file.write_bytes(older)
        workspace.revoked_file.unlink()
        with pytest.raises(InvalidInput, match="north"):
            check_revoked(workspace, ledger, workspace.study())
        assert sum(row.kind == "note" for row in ledger.rows()) == 1


def test_a_revocation_is_noted_whatever_the_sites_name(workspace: Workspace, tmp_path: Path) -> None:
    name = "a is revoked in study b"
    with open_ledger(workspace) as ledger:
        workspace.save_revoked([name])
        with contextlib.suppress(InvalidInput):  # nobody is admitted here
            check_revoked(workspace, ledger, workspace.study())
        assert ledger.revoked(workspace.study().id) == {name}


def served_certificate(workspace: Workspace, authority: Path) -> bytes:
    """Return the certificate on disk as a TLS client receives it; the client trusts ``authority``."""
    folder = workspace.gateway_dir
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            with listener.accept()[0] as connection, server.wrap_socket(connection, server_side=True):
                pass

        thread = threading.Thread(target=once)
        thread.start()
        client = ssl.create_default_context(cafile=str(authority))
        raw = socket.create_connection(listener.getsockname())
        with raw, client.wrap_socket(raw, server_hostname="localhost") as tls:
            certificate = tls.getpeercert(binary_form=True)
        thread.join()
    assert certificate is not None
    return certificate


def test_a_renewed_certificate_satisfies_a_kit_handed_out_before(workspace: Workspace, tmp_path: Path) -> None:
    provision.make_kit(workspace, "north", tmp_path / "kit")
    before = served_certificate(workspace, tmp_path / "kit" / "ca.crt")
    until = provision.renew(workspace, valid_days=30)
    assert timedelta(days=29) < until - datetime.now(UTC) <= timedelta(days=30)
    assert expires(workspace.gateway_dir / "server.crt") == until
    assert served_certificate(workspace, tmp_path / "kit" / "ca.crt") != before


@pytest.mark.parametrize("start", [b"the public start", b""], ids=["with a start", "whose shapes do not overlap"])
def test_no_kit_is_handed_out_before_the_codec_is_fitted_which_may_make_what_teachers_begin_from(
    tmp_path: Path, start: bytes
) -> None:
    framed = served_study(tmp_path / "study", make_study(codec=CodecConfig(joint=True)))
    command = ("provision", "kit", str(framed.root), "north", "--out", str(tmp_path / "kit"))
    assert "to fix: run `consilium codec fit` first" in str(refusal_of(app, *command))
    assert not (tmp_path / "kit").exists()
    if start:
        framed.start_file.write_bytes(start)
    framed.save_codec(CodecRecord(sha256="0" * 64, dimension=4))
    typed(app, *command)
    assert [file.read_bytes() for file in tmp_path.glob("kit/start.pt")] == [start] * bool(start)


@pytest.mark.parametrize("command", [("provision", "renew"), ("server", "status")])
def test_a_folder_that_is_missing_is_named_with_its_remedy(tmp_path: Path, command: tuple[str, str]) -> None:
    refused = refusal_of(app, *command, tmp_path / "typo")
    assert re.search(r"got '.*/typo'; .*to fix: check the path", str(refused))


def test_a_server_without_a_certificate_is_told_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"server\.crt'; .*to fix: make one with `consilium provision server"):
        provision.renew(Workspace(tmp_path))


def test_the_operator_is_told_of_a_certificate_that_expired_or_is_not_valid_yet(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, root = datetime.now(UTC), str(workspace.root)
    provision.renew(workspace, valid_days=22)
    for days, words in ((0, "certificate valid until"), (10, "; to fix: `consilium"), (23, "CERTIFICATE EXPIRED on")):
        assert words in port_certificate(workspace, now=now + timedelta(days=days)).line
    assert re.search("EXPIRED on .* UTC", port_certificate(workspace, now=now + timedelta(days=23)).line)
    early = port_certificate(workspace, now=now - timedelta(days=1))  # by a clock that was set back
    assert early.over
    assert re.search(
        "NOT YET VALID.* UTC.*to fix: set this server's clock if it is wrong, otherwise `consilium provision renew",
        early.line,
    )
    expired = (now - timedelta(days=9), now - timedelta(days=1))
    monkeypatch.setattr("server.operations.port_certificate.validity", lambda _: expired)
    told = [
        CliRunner().invoke(app, command).stdout for command in (["provision", "list", root], ["server", "status", root])
    ]
    told.append(certificate_obstacle(workspace))  # `server up` prints it and does not start the gateway
    for said in told:
        assert re.search("EXPIRED.*to fix: `consilium provision renew", said)


def test_a_server_whose_certificate_is_damaged_says_so_and_keeps_its_other_daemons(workspace: Workspace) -> None:
    assert certificate_obstacle(workspace) == ""
    (workspace.gateway_dir / "server.crt").write_bytes(b"damaged")
    assert "server.crt" in certificate_obstacle(workspace)
    (workspace.gateway_dir / "server.crt").unlink()
    assert "server.crt" in certificate_obstacle(workspace)


def test_the_server_s_status_says_that_an_older_copy_of_the_ledger_was_put_in_its_place(
    workspace: Workspace, tmp_path: Path
) -> None:
    command = ["server", "status", str(workspace.root)]
    before = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(before.stdout)["ledger"] is None
    assert "LEDGER" not in CliRunner().invoke(app, command).stdout
    anothers_standing(tmp_path, standing_path(workspace.ledger_file))
    shown, machine = (CliRunner().invoke(app, [*command, *more]) for more in ((), ("--json",)))
    assert shown.exit_code == machine.exit_code == 5
    problem = json.loads(machine.stdout)["ledger"]
    assert "of another ledger" in problem
    assert "consilium ledger recover" in problem
    assert f"LEDGER: {problem}" in shown.stdout
    assert json.loads(CliRunner().invoke(app, ["study", "status", *command[2:], "--json"]).stdout)["warnings"] == [
        problem
    ]


def test_the_server_s_status_names_each_site_that_is_not_online() -> None:
    north, south = (
        provision.SiteStanding(site=name, pool=name, node_id=1, admitted=True, fingerprint="", node=node)
        for name, node in (("north", "online"), ("south", "offline"))
    )
    assert online_text([north]) == "sites: 1 of 1 online"
    assert re.search(r"^sites: 1 of 2 online; .*south \(offline\); to fix: ", online_text([north, south]))
    lost = replace(south, node="unknown")
    assert "`consilium provision list` says" in online_text([north, lost])
    assert "`consilium site status`" not in online_text([replace(north, node="unknown"), lost])  # no site can mend it
    assert "gateway.log" not in online_text([replace(north, node="unknown"), lost])
    assert "`consilium site status`" in online_text([replace(north, node="offline"), lost])


def test_a_server_whose_disk_is_full_says_so_and_blames_no_gateway_or_hospital(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SuperLink then cannot record which sites are online, so each site seems offline for no fault of its own."""

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(status, "check_room", full)
    done = CliRunner().invoke(app, ["server", "status", str(workspace.root)])
    assert done.exit_code == StorageFailed.exit_code
    assert f"DISK: {workspace.root}: No space left on device; to fix: make room" in done.stdout
    assert "states above may be old" in done.stdout, "a dead gateway's recorded state is still ready"
    away = provision.SiteStanding(site="s", pool="s", node_id=1, admitted=True, fingerprint="", node="offline")
    assert "gateway.log" not in online_text([away], disk_full=True)
    assert "`consilium site status`" not in online_text([away], disk_full=True)


def test_a_server_s_status_leaves_no_file_behind_and_needs_no_right_to_write(workspace: Workspace) -> None:
    before = sorted(workspace.root.rglob("*"))
    assert status.disk_problem(workspace) is None
    assert sorted(workspace.root.rglob("*")) == before


def test_the_network_s_part_of_a_server_has_no_ledger_to_speak_of(workspace: Workspace) -> None:
    workspace.ledger_file.unlink()
    done = CliRunner().invoke(app, ["server", "status", str(workspace.root), "--json"])
    assert done.exit_code == 7
    assert json.loads(done.stdout) == {
        "daemons": [],
        "certificate": (shown := port_certificate(workspace, now=datetime.now(UTC))).line,
        "certificate_until": shown.until.isoformat(),
        "ledger": None,
        "disk": None,
        "sites": {},
    }


def test_the_gateway_s_folder_holds_neither_the_ca_s_key_nor_the_ledger_s(workspace: Workspace) -> None:
    names = {path.name for path in workspace.gateway_dir.rglob("*") if path.is_file()}
    assert names == {"ca.crt", "server.crt", "server.key", "nodes.json"}


def test_a_site_that_was_admitted_without_a_key_for_its_replies_is_given_it_and_nothing_else(
    workspace: Workspace, tmp_path: Path
) -> None:
    request = join(workspace, tmp_path, "north")
    admitted = approve(workspace, request)
    workspace.save_sites((replace(admitted, answer_key=""),))
    anew = new_request(tmp_path / "site")
    assert anew.fingerprint == request.fingerprint
    assert approve(workspace, anew, node_id=99) == admitted
    assert workspace.sites() == (admitted,)
    assert approve(workspace, anew) == admitted


def test_a_request_that_names_no_key_for_replies_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    request = replace(join(workspace, tmp_path, "north"), books=None)
    with pytest.raises(InvalidInput, match="site request"):
        approve(workspace, request)
    assert workspace.registered() == ()


def sealed(folder: Path) -> Workspace:
    workspace = Workspace(folder / "sealed")
    study = make_study()
    setup.create_study(
        workspace, replace(study, privacy=replace(study.privacy, quorum=3, aggregation="sealed-sum", colluders=1))
    )
    provision.set_up_server(workspace, Endpoint(host="localhost", port=8443, internal_port=8000))
    return workspace


def test_where_sites_add_up_under_seal_the_admitted_are_listed_with_the_keys_they_sign_by(tmp_path: Path) -> None:
    workspace = sealed(tmp_path)
    keys = {}
    for node_id, name in enumerate(("south", "north"), start=1):
        (tmp_path / name).mkdir()
        request = join(workspace, tmp_path / name, name)
        approve(workspace, request, node_id=node_id)
        assert request.books is not None
        keys[name] = request.books.answer_key
    said = said_file(workspace.objects_dir, PEERS, workspace.study().id)
    listed = read_peers(said)
    assert listed.study == workspace.study().id
    assert [(peer.site, peer.key) for peer in listed.peers] == sorted(keys.items())
    provision.revoke(workspace, "south", unregister=lambda node_id: None)
    assert [peer.site for peer in read_peers(said).peers] == ["north"]


def test_an_open_study_publishes_no_list_of_its_sites(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path, "north"))
    assert [peer.site for peer in provision.publish_peers(workspace).peers] == ["north"]
    assert not said_file(workspace.objects_dir, PEERS, workspace.study().id).exists()


def test_two_sites_with_one_key_are_not_both_admitted(tmp_path: Path) -> None:
    workspace = sealed(tmp_path)
    requests = []
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        requests.append(join(workspace, tmp_path / name, name))
    approve(workspace, requests[0])
    assert requests[0].books is not None
    assert requests[1].books is not None
    copied = replace(requests[1], books=replace(requests[1].books, answer_key=requests[0].books.answer_key))
    with pytest.raises(InvalidInput, match=r"^key of"):
        approve(workspace, copied, node_id=8)


def test_a_name_or_pool_that_differs_from_another_in_letter_case_only_is_not_admitted(
    workspace: Workspace, tmp_path: Path
) -> None:
    """On some file systems the files named after two such sites are one file, such as the evidence of a dispute."""
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    for place, name, pool, what in (("b", "North", "other", "site is"), ("c", "south", "NORTH", "patient pool is")):
        other = replace(join(workspace, tmp_path / place, name), pool=pool)
        with pytest.raises(InvalidInput, match=what):
            approve(workspace, other, node_id=8)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    forget(workspace, "north")
    with pytest.raises(InvalidInput, match=r"^site is"):
        approve(workspace, join(workspace, tmp_path / "d", "North"), node_id=8)


def test_the_error_for_a_revoked_site_says_revoked_and_not_registered(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path, "north")
    approve(workspace, request)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    with pytest.raises(InvalidInput, match=r"was revoked.*study init.*site join"):
        approve(workspace, request)


def test_a_site_that_was_forgotten_is_admitted_no_more_by_its_name_or_its_key(
    workspace: Workspace, tmp_path: Path
) -> None:
    request = join(workspace, tmp_path / "a", "north")
    approve(workspace, request)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    forget(workspace, "north")
    assert workspace.registered() == ()
    with pytest.raises(InvalidInput, match="revoked"):
        approve(workspace, request)
    other = replace(join(workspace, tmp_path / "b", "south"), node_key=request.node_key)
    with pytest.raises(InvalidInput, match="revoked"):
        approve(workspace, other)


def test_a_forgotten_site_is_not_admitted_after_the_list_of_forgotten_sites_was_restored_from_before(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The ledger has a note of the revocation."""
    request = join(workspace, tmp_path, "north")
    approve(workspace, request)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    forget(workspace, "north")
    (workspace.root / "left.json").unlink()
    with pytest.raises(InvalidInput, match="was revoked"):
        approve(workspace, request)


def test_no_new_site_is_admitted_while_the_list_of_forgotten_sites_and_their_keys_is_lost(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The ledger knows the names of revoked sites, but not their node keys."""
    request = join(workspace, tmp_path / "a", "north")
    approve(workspace, request)
    provision.revoke(workspace, "north", unregister=lambda node: None)
    forget(workspace, "north")
    lost, other = (workspace.root / "left.json").rename(tmp_path / "lost"), join(workspace, tmp_path / "b", "south")
    with pytest.raises(InvalidInput, match=r"unknown which node keys.*north.*left\.json"):
        approve(workspace, replace(other, node_key=request.node_key))
    lost.rename(workspace.root / "left.json")
    assert approve(workspace, other).name == "south"


def test_each_fingerprint_is_printed_with_the_name_of_its_key(workspace: Workspace, tmp_path: Path) -> None:
    approve(workspace, join(workspace, tmp_path / "a", "north"))
    (site,) = provision.standings(workspace, nodes={})
    listed = CliRunner().invoke(app, ["provision", "list", str(workspace.root)]).stdout
    assert f"node key {site.fingerprint}" in listed
    assert "`consilium site doctor`" in listed
    peers = CliRunner().invoke(app, ["provision", "peers", str(workspace.root)]).stdout
    (signing,) = re.findall(r"SHA256:\S+", peers)
    assert signing != site.fingerprint
    assert f"{signing}  signing key" in peers
