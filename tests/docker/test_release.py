"""Tests that an image installs only what hashes name, and that a build is signed: lists and scripts, read and run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.ledger.keys import load_signing_key
from server.operations import provision
from tests.studies import made_study, served_study

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.]*) --hash=sha256:[0-9a-f]{64}")
LISTS = ("build", "gateway", "party")


def lines_of(name: str) -> list[str]:
    head, *lines = (ROOT / "docker" / f"requirements-{name}.txt").read_text(encoding="utf-8").splitlines()
    assert head.startswith("#")
    return lines


@pytest.mark.parametrize("name", LISTS)
def test_every_file_that_an_image_installs_has_a_hash_and_is_the_pinned_version(name: str) -> None:
    words = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pins = {re.sub(r"[-_.]+", "-", pin.lower()) for pin in words}
    found = [LINE.fullmatch(line) for line in lines_of(name)]
    assert found
    assert all(found)
    assert {re.sub(r"[-_.]+", "-", f"{match[1]}=={match[2]}") for match in found if match} <= pins


def test_the_images_install_nothing_that_is_not_in_the_lists() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"-m pip (?:install|wheel)([^&\n]*)", text)
    assert len(installs) >= 6
    for words in installs:
        ours = "--no-deps" in words and ("--no-index" in words or "--no-build-isolation" in words)
        assert ours or re.search(r"--require-hashes .*-r requirements-(build|gateway|party)\.txt", words), words


def test_a_report_with_another_version_or_without_a_hash_makes_no_list(tmp_path: Path) -> None:
    sums = {"archive_info": {"hashes": {"sha256": "a" * 64}}}

    def made(version: str, info: dict) -> subprocess.CompletedProcess[str]:
        item = {"metadata": {"name": "Torch_x", "version": version}, "download_info": info}
        (tmp_path / "report.json").write_text(json.dumps({"install": [item]}))
        (tmp_path / "pins.txt").write_text("torch.x==2.0\n")
        command = [sys.executable, "docker/hashes.py", str(tmp_path / "report.json"), str(tmp_path / "pins.txt")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert made("2.0+cpu", sums).stdout.splitlines()[1:] == [f"torch-x==2.0 --hash=sha256:{'a' * 64}"]
    assert re.search("2.1 .*constraints.txt", made("2.1", sums).stderr)
    assert "names no SHA-256" in made("2.0", {"archive_info": {}}).stderr


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker/server.yml", "docker/site.yml"])
def test_every_container_has_a_bound_on_its_memory(file: str) -> None:
    for name, service in yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"].items():
        assert re.fullmatch(r"\d+[mg]|\$\{[A-Z_]+:-\d+[mg]\}", service["mem_limit"]), name


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """Return a bundle's folder signed with a study's key, and a site's kit."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    workspace = served_study(tmp_path / "study")
    provision.make_kit(workspace, "north", tmp_path / "kit")
    bundle = tmp_path / "bundle"
    (bundle / "docs").mkdir(parents=True)
    (bundle / "images.tar.gz").write_bytes(b"layers")
    (bundle / "docs" / "a b.md").write_text("words")
    subprocess.run([ROOT / "docker" / "sign.sh", bundle, workspace.signing_key_file], check=True, cwd=tmp_path)
    return bundle, tmp_path / "kit"


def holds(bundle: Path, kit: Path) -> bool:
    """Run the two lines of the install steps; return whether both succeed."""
    verify = ("openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(kit / "consortium.pem"))
    steps = (
        (*verify, "-sigfile", "SHA256SUMS.sig", "-in", "SHA256SUMS"),
        ("sha256sum", "-c", "--ignore-missing", "SHA256SUMS"),
    )
    return all(subprocess.run(step, cwd=bundle, capture_output=True, check=False).returncode == 0 for step in steps)


def test_a_signed_bundle_holds_and_a_changed_one_does_not(signed: tuple[Path, Path]) -> None:
    bundle, kit = signed
    assert holds(bundle, kit)
    (bundle / "images.tar.gz").write_bytes(b"other layers")
    assert not holds(bundle, kit)
    sums = subprocess.run(["sha256sum", "images.tar.gz"], cwd=bundle, capture_output=True, text=True, check=True).stdout
    text = (bundle / "SHA256SUMS").read_text()
    (bundle / "SHA256SUMS").write_text(re.sub(r"[0-9a-f]{64}  \./images.tar.gz\n", sums.replace("  ", "  ./"), text))
    assert not holds(bundle, kit)  # an attacker can change the sum, too, but cannot sign it


def test_a_bundle_signed_by_another_consortium_does_not_hold(signed: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, kit = signed
    other = made_study(tmp_path / "other")
    assert load_signing_key(other.signing_key_file)
    subprocess.run([ROOT / "docker" / "sign.sh", bundle, other.signing_key_file], check=True, cwd=tmp_path)
    assert not holds(bundle, kit)


def test_a_list_of_contents_carries_the_hash_that_pip_was_held_to() -> None:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "docker" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    held = sbom.required_hashes(ROOT / "docker" / "requirements-party.txt")
    assert len(held) == len(lines_of("party"))
    assert f"torch==2.13.0 --hash=sha256:{held['torch']}" in lines_of("party")
