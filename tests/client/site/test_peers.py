"""Tests that people at hospitals decide with which hospitals codes are added; the server's list is only shown."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from client.operations.findings import State
from client.operations.readiness import check_site
from client.operations.serve import open_worker
from client.operations.staff_decisions import consent, has_consented
from client.policy import load_site
from client.site.books import open_books
from client.site.enrolment import SiteKit, create_site
from client.site.peers import LISTED, MAX_OFFERED, OFFERED, PeerTrust, confirm, note_offered, peers_view, store_list
from client.site.registry import Registry
from client.site.status import site_status
from common.admission import read_request
from common.config import load_study, render_study
from common.errors import InvalidInput
from common.peers import Peer, Peers, fingerprint, write_peers
from consilium.cli.main import app
from consilium.cli.study import study_app
from server.operations import provision
from tests.federation import make_study
from tests.studies import served_study

NAMES = ("north", "south", "west")
INVENTED = "e" * 64


@dataclass(frozen=True)
class World:
    """Holds three hospitals of a study with a sealed sum, and the list of sites that the consortium sends them."""

    listed: Peers
    sites: dict[str, Path]

    def key(self, site: str) -> str:
        return next(peer.key for peer in self.listed.peers if peer.site == site)

    def saying(self, **keys: str) -> Peers:
        """Return the list with these keys exchanged or these sites added."""
        said = {peer.site: peer.key for peer in self.listed.peers} | keys
        return Peers.of(self.listed.study, [Peer(site, key) for site, key in said.items()])

    def standings(self, site: str = "north") -> dict[str, str]:
        return {
            f"{known.peer.site} {known.peer.key[:4]}": str(known.trust) for known in peers_view(self.sites[site]).peers
        }

    def offer(self, *peers: Peer) -> None:
        directory = self.sites["north"]
        with open_books(load_site(directory)) as ledger:
            note_offered(directory, peers, study=self.listed.study, ledger=ledger)

    def ask(self, *arguments: str, typed: str = "", site: str = "north") -> Result:
        return CliRunner().invoke(app, ["site", "peers", "--site-dir", str(self.sites[site]), *arguments], input=typed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("peers")
    workspace = served_study(root / "study", make_study(quorum=3, aggregation="sealed-sum"))
    sites = {}
    for node_id, name in enumerate(NAMES, start=1):
        sites[name] = root / name
        provision.make_kit(workspace, name, root / "kits" / name)
        (root / "data" / name).mkdir(parents=True)
        create_site(
            sites[name],
            pool=name,
            data=root / "data" / name,
            kit=SiteKit.load(root / "kits" / name),
            registry=Registry(root / f"{name}.json"),
        )
        consent(sites[name], by="A. Noether", sheet="the sheet")
        request = read_request(sites[name] / "request.json")
        provision.approve(
            workspace,
            request,
            site=name,
            pool=name,
            fingerprint=request.fingerprint,
            register=lambda _key, _name, node_id=node_id: node_id,  # type: ignore[misc]
        )
    return World(provision.publish_peers(workspace), sites)


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """Copy the three hospitals of :func:`made`, which have confirmed nobody yet."""
    shutil.copytree(made.sites["north"].parent, tmp_path / "all")
    shutil.copytree(made.sites["north"].parent / "kits" / "west", tmp_path / "kit")
    return World(made.listed, {name: tmp_path / "all" / name for name in NAMES})


def test_confirming_a_peer_is_no_consent_and_needs_one(world: World, tmp_path: Path) -> None:
    """A person who refused the consent sheet and then confirms a peer has consented to nothing."""
    directory = tmp_path / "new"
    kit = SiteKit.load(world.sites["north"].parents[1] / "kit")
    (tmp_path / "more data").mkdir()
    create_site(directory, pool="new", data=tmp_path / "more data", kit=kit, registry=Registry(tmp_path / "new.json"))
    store_list(directory, world.listed)
    before = len(_kinds(directory))
    with pytest.raises(InvalidInput, match=r"no consent.*site consent"):
        confirm(directory, "south", fingerprint(world.key("south")))
    assert len(_kinds(directory)) == before
    assert not has_consented(directory)
    with pytest.raises(InvalidInput, match=r"no consent.*site consent"):
        open_worker(directory)
    consent(directory, by="A. Noether", sheet="the sheet")
    confirm(directory, "south", fingerprint(world.key("south")))
    assert has_consented(directory)


def _kinds(directory: Path) -> list[str]:
    with open_books(load_site(directory)) as ledger:
        return [row.kind for row in ledger.rows()]


def test_a_site_shows_its_own_fingerprint_and_believes_no_list(world: World, tmp_path: Path) -> None:
    write_peers(tmp_path / "peers.json", world.listed)
    shown = world.ask("--take", str(tmp_path / "peers.json"))
    assert shown.exit_code == 0, shown.output
    for name in NAMES:
        assert fingerprint(world.key(name)) in shown.stdout
    assert shown.stdout.count("NOT CONFIRMED") == 2
    assert set(world.standings().values()) == {PeerTrust.NOT_CONFIRMED}
    assert peers_view(world.sites["north"]).own == Peer("north", world.key("north"))


def test_a_peer_is_confirmed_by_what_it_read_out_and_by_nothing_else(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    for wrong in ("SHA256:AAAA", fingerprint(world.key("west")), fingerprint(INVENTED), world.key("south")):
        refused = world.ask("--confirm", "south", "--fingerprint", wrong)
        assert isinstance(refused.exception, InvalidInput)
        assert fingerprint(world.key("south")) not in str(refused.exception)
    assert world.ask("--confirm", "south").exit_code == 1  # nothing typed
    assert world.ask("--confirm", "south", typed="SHA256:AAAA\n").exit_code != 0
    assert PeerTrust.CONFIRMED not in world.standings().values()
    right = fingerprint(world.key("south"))
    assert world.ask("--confirm", "south", typed=f"{right}\n").exit_code == 0
    assert world.ask("--confirm", "west", "--fingerprint", fingerprint(world.key("west"))).exit_code == 0
    assert set(world.standings().values()) == {PeerTrust.CONFIRMED}
    with open_books(load_site(world.sites["north"])) as ledger:
        assert ledger.peers(world.listed.study) == {name: world.key(name) for name in ("south", "west")}


def test_an_invented_site_stays_unconfirmed_until_somebody_reads_its_key_out(world: World) -> None:
    store_list(world.sites["north"], world.saying(invented=INVENTED))
    confirm(world.sites["north"], "south", fingerprint(world.key("south")))
    with pytest.raises(InvalidInput, match="has received"):
        confirm(world.sites["north"], "nobody", fingerprint(INVENTED))
    assert world.standings()["invented eeee"] == PeerTrust.NOT_CONFIRMED


def test_an_exchanged_key_is_shown_beside_the_confirmed_one_and_replaces_nothing(world: World) -> None:
    north, south = world.sites["north"], world.key("south")
    store_list(north, world.listed)
    confirm(north, "south", fingerprint(south))
    store_list(north, world.saying(south=INVENTED))
    assert world.standings() | {"south eeee": PeerTrust.KEY_CHANGED, f"south {south[:4]}": PeerTrust.CONFIRMED} == (
        world.standings()
    )
    with pytest.raises(InvalidInput, match="all at once"):
        _confirm_all(world)
    assert "KEY CHANGED" in world.ask().stdout
    (finding,) = [one for one in check_site(north) if one.check == "peers" and "a new key" in one.text]
    assert finding.state is State.FAIL
    confirm(north, "south", fingerprint(INVENTED))  # the peer confirms by telephone that it renewed its key
    assert world.standings()["south eeee"] == PeerTrust.CONFIRMED


def test_two_sites_listed_under_each_others_names_are_not_confirmed_by_telephone(world: World) -> None:
    """The list shows south's key under west's name. The fingerprint that south reads out is not the one listed for
    south.
    """
    store_list(world.sites["north"], world.saying(south=world.key("west"), west=world.key("south")))
    with pytest.raises(InvalidInput, match="tampered"):
        confirm(world.sites["north"], "south", fingerprint(world.key("south")))


def test_a_key_under_two_names_is_confirmed_under_one(world: World) -> None:
    north = world.sites["north"]
    store_list(north, world.listed)
    confirm(north, "south", fingerprint(world.key("south")))
    world.offer(Peer("doubled", world.key("south")))
    assert f"doubled {world.key('south')[:4]}" in {
        name for name, standing in world.standings().items() if standing == PeerTrust.KEY_OF_ANOTHER
    }
    with pytest.raises(InvalidInput, match="one site"):
        confirm(north, "doubled", fingerprint(world.key("south")))


def test_a_site_learns_that_another_key_is_given_out_for_it(world: World) -> None:
    store_list(world.sites["north"], world.saying(north=INVENTED))
    assert world.standings()["north eeee"] == PeerTrust.NOT_OURS
    with pytest.raises(InvalidInput, match="peer: got 'north'"):
        confirm(world.sites["north"], "north", fingerprint(INVENTED))
    assert any(finding.check == "peers" and "own name" in finding.text for finding in check_site(world.sites["north"]))


def test_a_list_of_another_study_is_refused_also_where_it_lies_already(world: World) -> None:
    other = Peers(INVENTED, world.listed.peers)
    with pytest.raises(InvalidInput, match=f"{INVENTED[:16]}.*{world.listed.study[:16]}"):
        store_list(world.sites["north"], other)
    write_peers(world.sites["north"] / LISTED, other)
    with pytest.raises(InvalidInput, match=f"{INVENTED[:16]}.*{world.listed.study[:16]}"):
        peers_view(world.sites["north"])


def test_all_are_confirmed_at_once_only_by_who_was_shown_them_and_said_so(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    for answer in ("", "n\n", "\n"):
        assert _confirm_all(world, typed=answer).exit_code == 1
    assert PeerTrust.CONFIRMED not in world.standings().values()
    asked = _confirm_all(world, typed="y\n")
    assert asked.exit_code == 0
    for name in ("south", "west"):
        assert fingerprint(world.key(name)) in asked.stderr
    assert set(world.standings().values()) == {PeerTrust.CONFIRMED}


def test_an_input_that_ends_without_an_answer_says_what_to_do(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    asked = world.ask("--confirm", "south", typed="")
    assert isinstance(asked.exception, InvalidInput)
    assert "--fingerprint" in str(asked.exception)
    assert "nothing was confirmed; to fix: " in world.ask("--confirm-all", typed="").stderr


def test_a_site_is_refused_as_its_own_peer_before_a_fingerprint_is_asked_for(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    asked = world.ask("--confirm", "north", typed="")
    assert isinstance(asked.exception, InvalidInput)
    assert "got 'north'; allowed: another site than this one; to fix: " in str(asked.exception)
    assert "read out" not in asked.stderr


def test_a_site_heard_of_with_two_keys_is_not_confirmed_in_passing(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    world.offer(Peer("south", INVENTED))
    with pytest.raises(InvalidInput, match="south"):
        _confirm_all(world)


def _confirm_all(world: World, *, typed: str = "y\n") -> Result:
    result = world.ask("--confirm-all", typed=typed)
    if isinstance(result.exception, InvalidInput):
        raise result.exception
    return result


def test_peers_named_in_offers_are_shown_and_not_trusted(world: World) -> None:
    world.offer(Peer("north", world.key("north")), Peer("south", world.key("south")))
    assert [(known.peer.site, known.trust, known.heard) for known in peers_view(world.sites["north"]).peers] == [
        ("south", PeerTrust.NOT_CONFIRMED, ("an offer",))
    ]
    confirm(world.sites["north"], "south", fingerprint(world.key("south")))
    before = (world.sites["north"] / OFFERED).stat().st_mtime_ns
    world.offer(Peer("south", world.key("south")))
    assert (world.sites["north"] / OFFERED).stat().st_mtime_ns == before


def test_a_server_that_names_ever_new_peers_fills_no_disk(world: World) -> None:
    for start in (0, MAX_OFFERED):
        world.offer(*(Peer(f"s{n}", f"1{n:063x}") for n in range(start, start + MAX_OFFERED)))
    known = peers_view(world.sites["north"]).peers
    assert {one.peer.site for one in known} == {f"s{n}" for n in range(MAX_OFFERED, 2 * MAX_OFFERED)}
    assert (world.sites["north"] / OFFERED).stat().st_size < 200 * MAX_OFFERED


@pytest.mark.parametrize("damage", [b"", b"{}", b"[[", b"\xff", b'{"schema":1,"study":"x","peers":[]}'])
def test_damaged_notes_stop_no_worker_and_are_named_to_a_person(damage: bytes, world: World) -> None:
    (world.sites["north"] / OFFERED).write_bytes(damage)
    with pytest.raises(InvalidInput, match="delete the file"):
        peers_view(world.sites["north"])
    assert [one.check for one in check_site(world.sites["north"]) if one.state is State.FAIL].count("peers") == 1
    world.offer(Peer("south", world.key("south")))
    assert list(world.standings()) == [f"south {world.key('south')[:4]}"]


def test_a_confirmation_can_be_taken_back(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    confirm(world.sites["north"], "south", fingerprint(world.key("south")))
    assert world.ask("--distrust", "south").exit_code == 0
    assert PeerTrust.CONFIRMED not in world.standings().values()


def test_doctor_and_status_say_how_many_are_missing_and_what_to_do(world: World) -> None:
    north = world.sites["north"]

    def found() -> tuple[State, str, str]:
        (finding,) = [one for one in check_site(north) if one.check == "peers"]
        return finding.state, finding.text, finding.remedy

    assert found()[0] is State.FAIL
    assert "--fetch" in found()[2]
    store_list(north, world.listed)
    confirm(north, "south", fingerprint(world.key("south")))
    state, text, remedy = found()
    assert (state, "west" in text, "south" in text) == (State.FAIL, True, False)
    assert "--confirm" in remedy
    confirm(north, "west", fingerprint(world.key("west")))
    assert found() == (State.OK, "2 confirmed", "")
    assert site_status(north)["peers"] == {"confirmed": 2, "problems": []}
    store_list(north, world.saying(invented=INVENTED))
    assert found()[0] is State.NOTE
    shown = CliRunner().invoke(app, ["site", "status", "--site-dir", str(north)])
    assert re.search("warning: .*not confirmed.*: invented", shown.stdout)


def test_an_open_study_asks_for_no_peers(world: World) -> None:
    north = world.sites["north"]
    study = load_study(north / "study.toml")
    privacy = replace(study.privacy, aggregation="open")
    (north / "study.toml").write_text(render_study(replace(study, privacy=privacy)))
    assert [one for one in check_site(north) if one.check == "peers"] == []
    assert "peers" not in site_status(north)


def test_the_consent_sheet_names_the_hospitals_by_their_fingerprints(world: World) -> None:
    north = world.sites["north"]
    store_list(north, world.listed)
    confirm(north, "south", fingerprint(world.key("south")))
    sheet = CliRunner().invoke(study_app, ["show", str(north), "--for-site"]).stdout
    for name in NAMES:
        assert fingerprint(world.key(name)) in sheet
    assert sheet.count("NOT CONFIRMED") == 1


def test_machines_read_the_same(world: World) -> None:
    store_list(world.sites["north"], world.listed)
    facts = json.loads(world.ask("--json").stdout)
    assert facts["own"] == {
        "site": "north",
        "key": world.key("north"),
        "fingerprint": fingerprint(world.key("north")),
    }
    assert [(one["site"], one["standing"]) for one in facts["peers"]] == [
        ("south", "NOT CONFIRMED"),
        ("west", "NOT CONFIRMED"),
    ]


def test_a_study_file_exchanged_after_the_join_request_is_refused(world: World) -> None:
    """If the file was changed to an open study or to other colluders, no worker starts and no peer can be confirmed."""
    north = world.sites["north"]
    study = load_study(north / "study.toml")
    for terms in ({"aggregation": "open"}, {"colluders": 0}, {"spare_draws": 3}):
        other = replace(study, privacy=replace(study.privacy, **terms))
        (north / "study.toml").write_text(render_study(other))
        with pytest.raises(InvalidInput, match=f"{other.id[:16]}.*{study.id[:16]}.*join request"):
            open_worker(north)
        store_list(north, replace(world.listed, study=other.id))
        with pytest.raises(InvalidInput, match=f"{other.id[:16]}.*{study.id[:16]}.*join request"):
            confirm(north, "south", fingerprint(world.key("south")))
        (failed,) = (one for one in check_site(north) if one.check == "data")
        assert (failed.state, "site request" in failed.remedy) == (State.FAIL, True)
    with open_books(load_site(north)) as ledger:
        assert other.id not in ledger._books.studies
