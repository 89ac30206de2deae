"""What release 0.1.0 wrote is what this one writes, byte by byte, and what it left unfinished goes on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from common.codecs.codec import load_codec
from common.errors import InvalidInput
from common.ledger.keys import load_signing_key
from common.protocols.frame import Frame
from server.ledger.verify import verify
from server.study.workspace import Workspace
from tests.earlier_versions import unpack
from tests.golden.golden import HERE, KINDS, SITES, ask, begin, fixed, stored, written


def golden(name: str) -> dict[str, list[object]]:
    found: dict[str, list[object]] = json.loads((HERE / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_queries_and_answers_are_those_of_release_0_1_0(tmp_path: Path, kind: str) -> None:
    with fixed(seed=kind):
        begin(tmp_path, kind)
        ask(tmp_path)
    found, expected = json.loads(json.dumps(written(tmp_path))), golden(kind)
    for name in expected:
        assert found[name] == expected[name], name
    assert found.keys() == expected.keys()


OLDER_PYTHON = {"codec": load_codec, "frame-1": Frame.from_bytes}
"""Files whose ZIP headers Python 3.11.2 and Python 3.11.4 write differently, each with its reader."""


@pytest.mark.parametrize("name", OLDER_PYTHON)
def test_codec_and_frame_have_the_same_bytes_with_every_python_and_those_of_an_older_one_are_read(name: str) -> None:
    """Otherwise a hospital with Debian 12 (Python 3.11.2) would refuse a newer server's codec and send zero codes."""
    read, golden_bytes = OLDER_PYTHON[name], (HERE / f"{name}.npz").read_bytes()
    older = (HERE / f"{name}-python-3.11.2.npz").read_bytes()
    assert older != golden_bytes
    assert read(golden_bytes).to_bytes() == read(older).to_bytes() == golden_bytes


@pytest.mark.parametrize("file", ["codec.npz", "codec-python-3.11.2.npz"])
def test_no_byte_of_a_codecs_file_can_be_changed(file: str) -> None:
    data = (HERE / file).read_bytes()
    first, last = data.index(b"PK\1\2"), len(data)
    for at in (*range(60), *range(first, last)):
        with pytest.raises(InvalidInput):
            load_codec(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_directories_of_release_0_1_0_verify_resume_and_end_as_they_would_have(tmp_path: Path, kind: str) -> None:
    with tarfile.open(HERE / f"{kind}-0.1.0.tar.xz") as archive:
        unpack(archive, tmp_path)
    assert json.loads(json.dumps(written(tmp_path))) == golden(f"{kind}-half")
    workspace = Workspace(tmp_path / "study")
    ledgers = {"server": workspace.ledger_file}
    ledgers |= {f"site-{n}": tmp_path / f"site-{n}" / "site-ledger.sqlite" for n in range(SITES)}
    key = load_signing_key(workspace.signing_key_file).public_key()
    for file in ledgers.values():
        assert verify(file, server_key=key).ok
    with fixed(seed="afterwards"):
        ask(tmp_path)
    assert stored(workspace) == [answer["query"] for answer in golden(kind)["answers"]]  # type: ignore[index]
    after, half = json.loads(json.dumps(written(tmp_path))), golden(f"{kind}-half")
    for name in ledgers:
        assert after[name][: len(half[name])] == half[name]
        assert len(after[name]) > len(half[name])
    for file in ledgers.values():
        assert verify(file, server_key=key).ok
