"""Tests a change of the sealing key during a study: no code is lost, since the old key decrypts until it is deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.operations import staff_decisions as control
from client.policy import load_site
from common.config import CollectionConfig
from common.errors import InvalidInput
from common.ledger.keys import create_sealing_key, create_signing_key, load_sealing_key, public_hex
from common.sealing_rotation import SealingNotice, load_sealing_keys, rotate_sealing_key, sealing_notice
from consilium.cli.ledger import app as ledger_app
from server.study.locks import StudyBusy
from server.study.workspace import Workspace
from tests.commands import typed
from tests.federation import Federation, make_study

RUN = CliRunner()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    """Yield a federation with its key files at the paths of a study."""
    study = make_study(planned_queries=8, collection=CollectionConfig(batch_size=2))
    with Federation(tmp_path, study=study) as federation:
        (tmp_path / "keys").mkdir()
        federation.sealing_key = create_sealing_key(tmp_path / "keys/sealing.key")
        federation.signing_key = create_signing_key(tmp_path / "keys/ledger.key")
        for site in federation.sites:
            folder = tmp_path / site.name
            (folder / "site.toml").write_text("# ours\n" + federation.site_toml(site.name, site.pool))
        use_keys(federation)
        yield federation


def use_keys(fed: Federation) -> None:
    """Restart core and workers: the server reads its keys from disk, the sites from site.toml."""
    fed.sealing_key = load_sealing_keys(fed.root / "keys/sealing.key")
    for site in fed.sites:
        worker = fed.workers[site.node_id]
        server = load_site(fed.root / site.name).server
        worker._config = replace(worker._config, server=replace(worker._config.server, sealing_key=server.sealing_key))


def run_batches(fed: Federation, count: int) -> None:
    fed.core().run(fed.transport, should_stop=iter([*[False] * count, True]).__next__)


def rotate(fed: Federation) -> SealingNotice:
    notice = fed.root / "notice.json"
    notice.unlink(missing_ok=True)
    typed(ledger_app, "rotate-sealing-key", fed.root, "--out", notice)
    return SealingNotice.load(notice)


def test_a_study_goes_on_while_some_sites_seal_to_the_old_key_and_some_to_the_new(fed: Federation) -> None:
    run_batches(fed, 1)
    notice = rotate(fed)
    assert control.take_sealing_key(fed.root / "site-0", notice)
    use_keys(fed)
    run_batches(fed, 1)
    assert len(fed.ledger.answers(fed.study.id)) == 4
    assert fed.events("code-refused") == []
    assert load_site(fed.root / "site-0").server.sealing_key == notice.sealing_key
    assert load_site(fed.root / "site-1").server.sealing_key in notice.replaces
    assert (fed.root / "site-0/site.toml").read_text().startswith("# ours\n")
    assert not control.take_sealing_key(fed.root / "site-0", notice), "a second time changes nothing"


def test_once_the_old_key_is_deleted_what_is_sealed_to_it_opens_no_more(fed: Federation) -> None:
    control.take_sealing_key(fed.root / "site-0", rotate(fed))
    control.take_sealing_key(fed.root / "site-2", SealingNotice.load(fed.root / "notice.json"))
    (old,) = (fed.root / "keys").glob("sealing.key.retired-*")
    assert old.stat().st_mode & 0o777 == 0o600
    old.unlink()
    use_keys(fed)
    fed.set_collection(patience_s=1.0)
    run_batches(fed, 1)
    assert {event["site"] for event in fed.events("code-refused")} == {"site-1"}
    assert {entry.site for entry in fed.ledger.answers(fed.study.id)[0].roster} == {"site-0", "site-1", "site-2"}


def test_a_site_accepts_a_new_sealing_key_only_from_a_known_signer_and_never_an_older_one(fed: Federation) -> None:
    folder = fed.root / "site-0"
    first = rotate(fed)
    forged = SealingNotice(first.sealing_key, first.replaces).signed(Ed25519PrivateKey.generate())
    with pytest.raises(InvalidInput, match=r"signature.*site\.toml"):
        control.take_sealing_key(folder, forged)
    with pytest.raises(InvalidInput, match=r"signature.*site\.toml"):
        control.take_sealing_key(folder, replace(first, sealing_key="1b" * 32))
    second = rotate(fed)
    control.take_sealing_key(folder, second)  # the site missed the first notice; the second names both old keys
    with pytest.raises(InvalidInput, match=f"got '{first.sealing_key}'.*{second.sealing_key}"):
        control.take_sealing_key(folder, first)
    assert load_site(folder).server.sealing_key == second.sealing_key


def test_a_key_that_root_changes_still_belongs_to_the_user_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = 65534 if os.geteuid() == 0 else os.geteuid()
    path = tmp_path / "sealing.key"
    create_sealing_key(path)
    os.chown(path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    rotate_sealing_key(path)
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (owner, 0o600)


def test_an_interrupted_rotation_is_finished_by_running_it_again(tmp_path: Path) -> None:
    path = tmp_path / "sealing.key"
    old = create_sealing_key(path)
    following = create_sealing_key(tmp_path / "sealing.key.next")  # killed after the next key was made
    rotate_sealing_key(path)
    assert [public_hex(key) for key in load_sealing_keys(path)] == [public_hex(following), public_hex(old)]
    assert public_hex(load_sealing_key(path)) == public_hex(following)
    assert sealing_notice(path, signing_key=Ed25519PrivateKey.generate()).replaces == (public_hex(old),)


def test_a_lost_sealing_key_is_replaced_and_sites_are_told(fed: Federation) -> None:
    path = fed.root / "keys/sealing.key"
    old = public_hex(load_sealing_key(path))
    arguments = ["rotate-sealing-key", str(fed.root), "--out", str(fed.root / "notice.json"), "--lost", old]
    assert isinstance(RUN.invoke(ledger_app, arguments).exception, InvalidInput), "it is not lost"
    path.unlink()
    assert RUN.invoke(ledger_app, arguments).exit_code == 0
    for site in fed.sites:
        assert control.take_sealing_key(fed.root / site.name, SealingNotice.load(fed.root / "notice.json"))
    use_keys(fed)
    run_batches(fed, 1)
    assert fed.events("code-refused") == []


@pytest.mark.parametrize("lost", [False, True])
def test_no_sealing_key_is_made_while_a_run_that_cannot_know_it_is_active(fed: Federation, lost: bool) -> None:
    """The run would refuse the codes of sites that took the notice, and count them as zero."""
    path, kept = fed.root / "keys" / "sealing.key", fed.root / "notice.json"
    old = public_hex(load_sealing_key(path))
    if lost:
        path.unlink()
    words = ["rotate-sealing-key", fed.root, "--out", kept, *(["--lost", old] if lost else [])]
    with Workspace(fed.root).locked(), pytest.raises(StudyBusy, match="`consilium study stop`"):
        typed(ledger_app, *words)
    assert not kept.exists()
    assert path.exists() is not lost
    assert lost or public_hex(load_sealing_key(path)) == old


@pytest.mark.parametrize("mistake", [["--out", "file/notice.json"], ["--out", "notice.json", "--lost", "no key"]])
def test_a_rotation_that_could_not_tell_the_sites_changes_no_key(fed: Federation, mistake: list[str]) -> None:
    keys = fed.root / "keys"
    (fed.root / "file").write_text("")
    if "--lost" in mistake:
        (keys / "sealing.key").rename(fed.root / "kept elsewhere")
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    mistake = [str(fed.root / word) if word.endswith(".json") else word for word in mistake]
    assert RUN.invoke(ledger_app, ["rotate-sealing-key", str(fed.root), *mistake]).exit_code != 0
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before
