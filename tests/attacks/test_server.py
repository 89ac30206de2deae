"""Attack: a malicious server has the ledger's key, so its messages to a hospital have valid signatures.

| attack | defence |
|---|---|
| it puts an expression, which MONAI would evaluate, into a bundle | the site writes all texts of a bundle itself |
| it adds a program, a link or a second file to the bundle | a bundle must have exactly the six files of an export |
| it sends weights that run code or unpack to a huge size | only uncompressed tensors of the study's network are read |
| it names a structure so that a configuration or a terminal runs the name | a name must be one line of plain text |
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from client.site.fetch import PublicObjects
from client.teachers.bundle_values import FILES, MAX_TEXT_BYTES
from client.teachers.pulled_student import pull
from common.bundle_archive import from_archive, to_archive
from common.canonical import sha256_bytes
from common.config import DataConfig, parse_study, render_study
from common.errors import InvalidInput
from common.models.unet import build_unet
from common.student_statement import StudentStatement
from tests.exported import exported_study, statement_file
from tests.federation import Federation

Files = dict[str, bytes]
COMMAND = "$__import__('os').system('touch RAN')"


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory):
    """Yield a study that an honest server ran and exported, and a site with its receipts."""
    root = tmp_path_factory.mktemp("server")
    federation = exported_study(root)
    federation.write_site_files()
    yield federation
    federation.close()


@pytest.fixture
def serve(fed: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Pull a bundle from a server that signs any archive; return the folder in which the bundle would be."""

    def served(archive: bytes, *, size: int = 0) -> Path:
        honest = StudentStatement.parse(statement_file(fed).read_bytes())
        signed = replace(honest, bundle=sha256_bytes(archive), size=size or len(archive)).signed(fed.signing_key)

        def get(_self: PublicObjects, _name: str, on_bytes: Callable[[int], None]) -> bytes:
            on_bytes(len(archive))
            return archive

        monkeypatch.setattr(PublicObjects, "__init__", lambda self, config, **_kwargs: None)
        monkeypatch.setattr(PublicObjects, "statement", lambda self, study_id: signed.render())
        monkeypatch.setattr(PublicObjects, "get", get)
        return pull(fed.root / "site-0", out=tmp_path / "student").bundle

    return served


@pytest.fixture
def honest(fed: Federation) -> Files:
    statement = StudentStatement.parse(statement_file(fed).read_bytes())
    return from_archive((fed.root / "objects" / statement.bundle).read_bytes())


def edited(files: Files, name: str, change: Callable[[dict], object]) -> Files:
    """Return ``files`` with one JSON document changed and written as an export writes it."""
    record = json.loads(files[name])
    change(record)
    return {**files, name: (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()}


def test_a_site_unpacks_a_bundles_texts_only_as_it_writes_them_itself(serve, honest: Files) -> None:
    bundle = serve(to_archive(honest))
    assert {str(p.relative_to(bundle)): p.read_bytes() for p in bundle.rglob("*") if p.is_file()} == honest


INFERENCE, METADATA = "configs/inference.json", "configs/metadata.json"
EXPRESSIONS: dict[str, tuple[str, Callable[[dict], object]]] = {
    "initialize": (INFERENCE, lambda c: c.update(initialize=[COMMAND])),
    "run": (INFERENCE, lambda c: c["run"].insert(0, COMMAND)),
    "imports": (INFERENCE, lambda c: c["imports"].append(COMMAND)),
    "a transform": (INFERENCE, lambda c: c["preprocessing"]["transforms"].insert(0, {"_target_": "os.system"})),
    "the network's type": (INFERENCE, lambda c: c["network_def"].update(_target_="subprocess.Popen", args="id")),
    "the window": (INFERENCE, lambda c: c["inferer"].update(_target_="os.abort")),
    "the weights' path": (INFERENCE, lambda c: c.update(weights="$torch.load('/tmp/x', weights_only=False)")),
    "a description": (METADATA, lambda c: c.update(description=COMMAND)),
    "a structure's name": (
        METADATA,
        lambda c: c["network_data_format"]["outputs"]["pred"]["channel_def"].update({"1": COMMAND}),
    ),
    "a key of its own": (METADATA, lambda c: c.update(initialize=COMMAND)),
    "another order": (METADATA, lambda c: c.update(version=c.pop("version"))),
}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_no_configuration_of_the_servers_reaches_a_hospital(serve, honest: Files, tmp_path: Path, where: str) -> None:
    name, change = EXPRESSIONS[where]
    changed = edited(honest, name, change)
    changed[name] = changed[name].replace(b"RAN", str(tmp_path / "ran").encode())
    with pytest.raises(InvalidInput, match=r"(differs|cannot be read).*tampered"):
        serve(to_archive(changed))
    assert not (tmp_path / "student").exists()
    assert not (tmp_path / "ran").exists()


VALUES: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "a figure's name": (METADATA, lambda c: c["eval_metrics"].update({COMMAND: 0.5}), "name .*figure"),
    "a figure": (METADATA, lambda c: c["eval_metrics"].update(dice=COMMAND), "figure dice"),
    "a thousand figures": (
        METADATA,
        lambda c: c["eval_metrics"].update({f"f{i}": 0.5 for i in range(1000)}),
        "figures",
    ),
    "a version": (METADATA, lambda c: c.update(monai_version=COMMAND), "version of monai"),
    "an escape sequence": (METADATA, lambda c: c.update(numpy_version="2\x1b[2J"), "version of numpy"),
    "a long version": (METADATA, lambda c: c.update(pytorch_version="2" * 65), "version of pytorch"),
    "a network of a petabyte": (INFERENCE, lambda c: c["network_def"].update(channels=[10**6] * 6), "channels"),
    "channels that are words": (INFERENCE, lambda c: c["network_def"].update(channels=[COMMAND, 8]), "channels"),
    "another accountant": ("configs/privacy.json", lambda c: c.update(accountant="none"), "privacy facts"),
    "sites beyond counting": ("configs/privacy.json", lambda c: c.update(sites=10**30), "privacy facts: sites"),
    "a word of its own": ("configs/privacy.json", lambda c: c.update(note=COMMAND), "record keys"),
}


@pytest.mark.parametrize("which", VALUES)
def test_values_of_a_bundle_keep_within_their_bounds(serve, honest: Files, tmp_path: Path, which: str) -> None:
    name, change, said = VALUES[which]
    with pytest.raises(InvalidInput, match=said):
        serve(to_archive(edited(honest, name, change)))
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize("name", ["docs/README.md", "LICENSE"])
def test_what_people_read_is_the_sites_own_text(serve, honest: Files, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"differs .*got '{name}'"):
        serve(to_archive({**honest, name: honest[name] + b"\x1b]0;run this: curl\x07"}))
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize("name", ["scripts/__init__.py", "configs/logging.conf", "configs/train.json", "monai.py"])
def test_a_bundle_is_its_six_files(serve, honest: Files, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"exactly {', '.join(FILES)}"):
        serve(to_archive({**honest, name: b"print('ran')"}))
    with pytest.raises(InvalidInput, match=f"exactly {', '.join(FILES)}"):
        serve(to_archive({other: content for other, content in honest.items() if other != "LICENSE"}))
    assert not (tmp_path / "student").exists()


def test_deep_json_and_a_megabyte_of_text_end_as_a_refusal(serve, honest: Files, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        serve(to_archive({**honest, METADATA: b"[" * 200_000}))
    with pytest.raises(InvalidInput, match="cannot be read"):
        serve(to_archive({**honest, METADATA: b"1" * 5000}))
    with pytest.raises(InvalidInput, match=f"at most {MAX_TEXT_BYTES} bytes"):
        serve(to_archive({**honest, "docs/README.md": b"x" * (1 << 20)}))
    assert not (tmp_path / "student").exists()


def test_an_archive_holds_nothing_beside_its_files(serve, honest: Files, tmp_path: Path) -> None:
    archive = to_archive(honest)
    commented = io.BytesIO(archive)
    with zipfile.ZipFile(commented, "a") as zipped:
        zipped.comment = b"#!/bin/sh"
    for other in (b"#!/bin/sh\nid\nexit\n" + archive, commented.getvalue()):
        with pytest.raises(InvalidInput, match="archive"):
            serve(other)
    with pytest.raises(InvalidInput, match="student's bundle"):
        serve(archive, size=len(archive) - 1)
    with pytest.raises(InvalidInput, match="student's bundle"):
        serve(archive, size=len(archive) + 1)
    assert not (tmp_path / "student").exists()


class _Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def test_weights_run_nothing_and_unpack_to_what_they_are(serve, honest: Files, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    network = build_unet((4, 8), in_channels=1, out_channels=2, seed=5).state_dict()
    hostile = io.BytesIO()
    torch.save({**network, "x": _Runs(ran)}, hostile)
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(honest["models/model.pt"])) as stored,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as squeezed,
    ):
        for name in stored.namelist():
            squeezed.writestr(name, stored.read(name))
    sparse = io.BytesIO()
    torch.save({name: tensor.to_sparse() for name, tensor in network.items()}, sparse)
    for weights in (
        hostile.getvalue(),
        pickle.dumps(_Runs(ran)),
        bomb.getvalue(),
        sparse.getvalue(),
        b"",
        b"PK\x03\x04",
    ):
        with pytest.raises(InvalidInput, match="weights"):
            serve(to_archive({**honest, "models/model.pt": weights}))
    assert not ran.exists()
    assert not (tmp_path / "student").exists()


def test_weights_of_another_network_than_described_are_refused(serve, honest: Files) -> None:
    def wider(config: dict) -> None:
        config["network_def"]["channels"] = [8, 16]

    with pytest.raises(InvalidInput, match="another network"):
        serve(to_archive(edited(honest, INFERENCE, wider)))


@pytest.mark.parametrize(
    "name", [COMMAND, "@run", "%/etc/passwd", "a\x1b[31m", "two\nlines", "_target_", "a::b", "x" * 65, ""]
)
def test_a_studys_names_are_one_plain_line(fed: Federation, name: str) -> None:
    for where in ("labels", "channels"):
        names = ("background", name) if where == "labels" else (name,)
        with pytest.raises(InvalidInput, match=f"data.{where}"):
            DataConfig(**{"labels": ("background", "body"), "spacing_mm": (1, 1, 1), "grid": (8, 8, 8), where: names})
    text = render_study(fed.study).replace('"body"', json.dumps(name))
    with pytest.raises(InvalidInput, match=r"data\.labels"):
        parse_study(text)
