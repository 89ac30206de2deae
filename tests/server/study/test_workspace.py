import json
import os
import re
import shlex
import subprocess
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from client.site.enrolment import SiteKit, create_site, start_file
from common.config import Study
from common.errors import InvalidInput
from common.ledger.keys import load_signing_key
from server.ledger.server_ledger import Ledger
from server.operations.provision import standings
from server.operations.supervisor import flower_server, supervise
from server.public.material import CodecRecord
from server.study import create_study as setup
from server.study.locks import StudyBusy
from server.study.workspace import Endpoint, Site, Workspace
from tests.federation import make_study
from tests.studies import kit_without_keys, made_study


@pytest.fixture
def workspace(tmp_path):
    return made_study(tmp_path / "study")


def test_records_read_back(workspace):
    sites = (Site(name="north", pool="north/p", node_id=2**63 + 5), Site(name="south", pool="south/p", node_id=7))
    workspace.save_sites(sites)
    workspace.save_codec(CodecRecord(sha256="a" * 64, dimension=4))
    workspace.save_volumes(("b" * 64, "c" * 64))
    workspace.save_endpoint(Endpoint(host="localhost", port=8443, internal_port=8000))
    workspace.save_run_id(2**64 - 1)
    assert workspace.sites() == sites
    assert workspace.codec() == CodecRecord(sha256="a" * 64, dimension=4)
    assert workspace.volumes() == ("b" * 64, "c" * 64)
    assert workspace.endpoint().objects_url == "https://localhost:8443"
    assert workspace.run_id() == 2**64 - 1


@pytest.mark.parametrize("field", ["name", "pool", "node_id"])
def test_no_site_name_pool_or_node_occurs_twice(workspace, field):
    one = {"name": "north", "pool": "north/p", "node_id": 1}
    two = {"name": "south", "pool": "south/p", "node_id": 2} | {field: one[field]}
    with pytest.raises(InvalidInput, match="have the same"):
        workspace.save_sites((Site(**one), Site(**two)))


def test_a_missing_part_says_which_command_makes_it(workspace):
    for read, command in (
        (workspace.sites, "provision approve"),
        (workspace.volumes, "publish"),
        (workspace.codec, "codec fit"),
        (workspace.endpoint, "provision server"),
    ):
        with pytest.raises(InvalidInput, match=command):
            read()


def test_a_second_run_is_refused_while_one_goes_on(workspace):
    with workspace.locked():
        assert workspace.busy()
        with pytest.raises(StudyBusy, match="stop") as refused:
            supervise(workspace)
    assert refused.value.exit_code == 6, "as the runbook says: refused, and the message says what to do"
    assert not workspace.busy()


def test_keys_are_readable_by_their_owner_only(workspace):
    for path in (workspace.sealing_key_file, workspace.signing_key_file):
        assert path.stat().st_mode & 0o077 == 0


def test_a_joint_studys_public_start_travels_with_the_kit(workspace, tmp_path):
    workspace.start_file.write_bytes(b"weights")
    kit = SiteKit.load(kit_without_keys(workspace, tmp_path))
    create_site(tmp_path / "north", pool="north", data=tmp_path, kit=kit)
    assert start_file(tmp_path / "north").read_bytes() == b"weights"


def test_an_endpoint_of_an_earlier_version_is_read_and_superlink_is_on_loopback_from_then_on(workspace):
    record = {"host": "pate.example.org", "port": 443, "internal_host": "server", "internal_port": 8001}
    (workspace.root / "endpoint.json").write_text(json.dumps(record))
    assert workspace.endpoint() == Endpoint(host="pate.example.org", port=443, internal_port=8001)
    assert flower_server(workspace).address == "127.0.0.1:8001"


def test_the_kit_holds_public_parts_only(workspace, tmp_path):
    folder = kit_without_keys(workspace, tmp_path)
    kit = json.loads((folder / "kit.json").read_text())
    assert kit.keys() == {"site", "objects_url", "sealing_key", "signing_key", "superlink", "ledger"}
    assert sorted(p.name for p in folder.iterdir()) == ["ca.crt", "consortium.pem", "kit.json", "study.toml"]
    for path in folder.iterdir():
        assert "PRIVATE" not in path.read_text()


def test_a_study_that_cannot_be_made_leaves_nothing_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    for name, left in (("new", None), ("there", ["notes.txt"])):
        workspace = Workspace(tmp_path / name)
        with monkeypatch.context() as full:
            full.setattr(setup, "render_study", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                setup.create_study(workspace, make_study())
        assert (sorted(os.listdir(tmp_path / name)) if (tmp_path / name).exists() else None) == left
        setup.create_study(workspace, make_study())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("place", ["create_signing_key", "Ledger._keep_standing", "write_atomically"])
def test_after_a_kill_study_init_says_what_to_delete_and_then_works(
    tmp_path: Path, place: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    standing = tmp_path / "disk" / "it's.standing" if elsewhere else None
    workspace = Workspace(tmp_path / "study")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setup, "all_or_nothing", lambda *_: nullcontext())  # SIGKILL runs no handler
        patch.setattr(f"server.study.create_study.{place}", killed)
        with pytest.raises(KeyboardInterrupt):
            setup.create_study(workspace, make_study(), standing=standing)
    with pytest.raises(InvalidInput, match=r"without study\.toml") as refused:
        setup.create_study(workspace, make_study(), standing=standing)
    command = re.search(r"`(rm -r .*?)`", refused.value.remedy)
    assert command is not None
    subprocess.run(shlex.split(command[1]), check=True)
    setup.create_study(workspace, make_study(), standing=standing)


def test_a_study_that_two_operators_create_at_once_is_the_first_one_s_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the second operator's command printed advice that deletes the first one's sealing key."""
    workspace, render, begun, said = Workspace(tmp_path / "study"), setup.render_study, threading.Event(), []

    def slowly(study: Study) -> str:
        begun.set()
        time.sleep(0.05)
        return render(study)

    def second() -> None:
        begun.wait()
        try:
            setup.create_study(workspace, make_study())
        except InvalidInput as error:
            said.append(str(error))

    monkeypatch.setattr(setup, "render_study", slowly)
    thread = threading.Thread(target=second)
    thread.start()
    setup.create_study(workspace, make_study())
    thread.join()
    assert "already holds a study" in said[0]
    assert workspace.sealing_key_file.exists()


def test_a_directory_whose_study_toml_is_lost_is_never_told_to_delete_what_was_charged(workspace: Workspace) -> None:
    with Ledger.open(workspace.ledger_file, signing_key=load_signing_key(workspace.signing_key_file)) as ledger:
        ledger.note("anything")
    workspace.study_file.unlink()
    with pytest.raises(InvalidInput, match=r"restore .*study\.toml") as refused:
        setup.create_study(workspace, make_study())
    assert "rm" not in refused.value.remedy


def test_a_study_whose_shared_ledger_is_not_found_is_told_of_ledger_json(workspace: Workspace, tmp_path: Path) -> None:
    other = made_study(tmp_path / "other", make_study(epsilon=2.0), ledger=workspace.root)
    workspace.root.rename(tmp_path / "moved")
    with pytest.raises(InvalidInput, match=r"ledger\.json"):
        Ledger.open(other.ledger_file)
    record = other.root / "ledger.json"
    for damaged in ("null", '{"books": 3}', "[" * 100_000):
        record.write_text(damaged)
        with pytest.raises(InvalidInput, match=r"ledger\.json.* restore"):
            _ = other.ledger_file
    record.unlink()
    with pytest.raises(InvalidInput, match=r'needs its file ledger\.json, {"directory"'):
        Ledger.open(other.ledger_file)
    record.write_text('{"directory": "../moved"}')
    Ledger.open(other.ledger_file).close()


@pytest.mark.parametrize("damaged", [b"", b"{}", b"null", b'{"run_id":"x"}', b"\xff", b"[" * 100_000, b"[1]"])
def test_a_damaged_record_of_a_study_is_named_without_a_traceback(workspace: Workspace, damaged: bytes) -> None:
    for name, read in (("run.json", workspace.run_id), ("sites.json", workspace.sites), ("left.json", workspace.left)):
        (workspace.root / name).write_bytes(damaged)
        with pytest.raises(InvalidInput, match=re.escape(name)):
            read()


def test_a_node_key_that_is_not_text_is_named_without_a_traceback(workspace: Workspace) -> None:
    workspace.save_sites((Site(name="north", pool="north/p", node_id=7),))
    workspace.node_keys_dir.mkdir(exist_ok=True)
    (workspace.node_keys_dir / "north.pub").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"north\.pub"):
        standings(workspace, nodes={})


def test_volumes_added_to_a_joint_study_before_its_first_answer_need_no_other_study(tmp_path: Path) -> None:
    study = make_study()
    workspace = made_study(tmp_path / "study", replace(study, codec=replace(study.codec, joint=True)))
    with pytest.raises(InvalidInput, match="before the first answer, publish all volumes together, without --add"):
        setup.add_volumes(workspace, [tmp_path / "one.nii.gz"])
