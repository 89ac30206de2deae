"""Tests the set-up of a site: it needs existing data, leaves nothing if it fails, and can be repeated."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from client.policy import load_site
from client.site import enrolment
from client.site.enrolment import SiteKit, create_site, join_site
from common.errors import InvalidInput
from server.operations import provision
from tests.federation import make_study
from tests.studies import served_study


@pytest.fixture
def kit(tmp_path: Path) -> SiteKit:
    return make_kit(tmp_path, "first")


def make_kit(folder: Path, name: str) -> SiteKit:
    (folder / "studies").mkdir(exist_ok=True)
    workspace = served_study(folder / "studies" / name, replace(make_study(), name=name))
    provision.make_kit(workspace, "north", folder / f"kit-{name}")
    (folder / "data").mkdir(exist_ok=True)
    return SiteKit.load(folder / f"kit-{name}")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("wrong", ["nowhere", "a-file"])
def test_data_that_are_not_there_are_refused_and_nothing_is_made(tmp_path: Path, kit: SiteKit, wrong: str) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(InvalidInput, match=r"dataset.*: got"):
        create_site(tmp_path / "site", pool="north", data=tmp_path / wrong, kit=kit)
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("kit.json", text) for text in (b"[1]", b"\xff\xfe{", b"[" * 100_000, b'{"site": 3}')),
        *(("ca.crt", text) for text in (b"nonsense", b"")),
        *(("study.toml", text) for text in (b"x = [", b"x = 1")),
    ],
)
def test_a_kit_that_is_damaged_is_refused_whole(tmp_path: Path, kit: SiteKit, name: str, content: bytes) -> None:
    folder = kit.study_file.parent
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=r"^startup kit.*kit\.json, ca\.crt, study\.toml; to fix: "):
        SiteKit.load(folder)
    (folder / name).unlink()
    with pytest.raises(InvalidInput, match=r"^startup kit.*kit\.json, ca\.crt, study\.toml; to fix: "):
        SiteKit.load(folder)


def led_elsewhere(folder: Path, name: str) -> None:
    """Put a link to a file that only this user can read in the place of a kit's file."""
    private = folder.with_name("private")
    private.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"private")
    private.chmod(0o600)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)


@pytest.mark.parametrize("name", ["start.pt", "kit.json", "ca.crt", "study.toml"])
def test_a_kit_whose_file_leads_elsewhere_is_refused(kit: SiteKit, name: str) -> None:
    """Otherwise the linked file's content would be copied into the site, where others can read it."""
    led_elsewhere(kit.study_file.parent, name)
    with pytest.raises(InvalidInput, match="startup kit"):
        SiteKit.load(kit.study_file.parent)


@pytest.mark.parametrize("name", ["start.pt", "ca.crt", "study.toml"])
def test_a_kit_whose_file_leads_elsewhere_since_it_was_read_copies_nothing(
    tmp_path: Path, kit: SiteKit, name: str
) -> None:
    led_elsewhere(kit.study_file.parent, name)
    with pytest.raises(InvalidInput, match=f"{name}.*symbolic link"):
        create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_a_kit_whose_weights_are_no_file_is_refused_without_waiting(
    tmp_path: Path, kit: SiteKit, make: Callable[[Path], None]
) -> None:
    make(kit.study_file.parent / "start.pt")
    with pytest.raises(InvalidInput, match="startup kit"):
        SiteKit.load(kit.study_file.parent)


def test_files_from_a_kit_are_closed_to_other_users(tmp_path: Path, kit: SiteKit) -> None:
    (kit.study_file.parent / "start.pt").write_bytes(b"weights")
    create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=SiteKit.load(kit.study_file.parent))
    assert (tmp_path / "site" / "start.pt").read_bytes() == b"weights"
    assert (tmp_path / "site" / "start.pt").stat().st_mode & 0o077 == 0


def test_the_data_stand_in_site_toml_as_one_would_name_them(tmp_path: Path, kit: SiteKit) -> None:
    create_site(tmp_path / "a" / "b" / "site", pool="north", data=tmp_path / "data", kit=kit)
    assert load_site(tmp_path / "a" / "b" / "site").data == str(tmp_path / "data")


def test_setting_up_again_changes_nothing_and_gives_the_same_request(tmp_path: Path, kit: SiteKit) -> None:
    first = create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    before = everything(tmp_path / "site")
    again = create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    assert again == first
    assert again.fingerprint == first.fingerprint
    assert everything(tmp_path / "site") == before


def test_two_people_who_set_up_one_pool_at_once_make_one_ledger(
    tmp_path: Path, kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ledgers would each allow the whole budget."""
    lay_out, begun, said = enrolment._lay_out, threading.Event(), []

    def slowly(*given: object) -> object:
        begun.set()
        time.sleep(0.05)
        return lay_out(*given)

    def second() -> None:
        begun.wait()
        try:
            create_site(tmp_path / "b", pool="p", data=tmp_path, kit=kit)
        except InvalidInput as error:
            said.append(str(error))

    monkeypatch.setattr(enrolment, "_lay_out", slowly)
    thread = threading.Thread(target=second)
    thread.start()
    create_site(tmp_path / "a", pool="p", data=tmp_path, kit=kit)
    thread.join()
    assert "already have a ledger" in said[0]
    assert not (tmp_path / "b").exists()


def test_setting_up_again_ends_what_was_interrupted(tmp_path: Path, kit: SiteKit) -> None:
    first = create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    (tmp_path / "site" / "request.json").unlink()
    assert create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit).node_key == first.node_key


def test_another_pool_or_kit_in_the_same_directory_is_refused(tmp_path: Path, kit: SiteKit) -> None:
    create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    before = everything(tmp_path / "site")
    for pool, other in (("south", kit), ("north", make_kit(tmp_path, "second"))):
        with pytest.raises(InvalidInput, match=f"{tmp_path}/site.*site join"):
            create_site(tmp_path / "site", pool=pool, data=tmp_path / "data", kit=other)
    assert everything(tmp_path / "site") == before


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_directory: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(enrolment, "new_request", fail)


def test_a_setup_that_fails_leaves_nothing_half_made_and_what_was_there_before(
    tmp_path: Path, kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()  # as a mounted folder is
    (tmp_path / "site" / "notes.txt").write_text("ours")
    with monkeypatch.context() as patch:
        broken(patch)
        for name in ("site", "new"):
            with pytest.raises(OSError, match="disk full"):
                create_site(tmp_path / name, pool="north", data=tmp_path / "data", kit=kit)
    assert everything(tmp_path / "site") == {"notes.txt": b"ours"}
    assert not (tmp_path / "new").exists()
    create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)


def test_a_study_whose_joining_failed_is_on_no_list_and_can_be_joined_again_and_again(
    tmp_path: Path, kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    second = make_kit(tmp_path, "second")
    with monkeypatch.context() as patch:
        broken(patch)
        with pytest.raises(OSError, match="disk full"):
            join_site(None, kit=second, existing=tmp_path / "site")
    directory, request = join_site(None, kit=second, existing=tmp_path / "site")
    assert join_site(None, kit=second, existing=tmp_path / "site") == (directory, request)


def test_a_new_site_toml_contains_every_optional_section_with_an_explanation(tmp_path: Path, kit: SiteKit) -> None:
    create_site(tmp_path / "site", pool="north", data=tmp_path / "data", kit=kit)
    path = tmp_path / "site" / "site.toml"
    text = path.read_text()
    for section in ("server", "caps", "dataset", "labels", "channels", "bids.T1w", "allow", "share"):
        (at,) = [n for n, line in enumerate(text.splitlines()) if line.removeprefix("# ") == f"[{section}]"]
        if section != "channels":
            assert text.splitlines()[at - 1].startswith("# "), section
    setting = re.compile(r'# (\[|"|layout|patients = |acq|studies|codecs|volumes|case_counts)')
    uncommented = [line.removeprefix("# ") if setting.match(line) else line for line in text.splitlines()]
    path.write_text("\n".join(uncommented))
    config = load_site(tmp_path / "site")
    assert config.dataset.labels == {"left hippocampus": "anterior"}
    assert not config.share.case_counts
