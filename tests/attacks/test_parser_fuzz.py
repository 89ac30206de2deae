"""Attack: a consortium, a hospital, a scanner or somebody in between writes a malformed file.

| attack | defence |
|---|---|
| a malformed file ends a command, a worker or a run | every parser raises InvalidInput and nothing else |
| a deeply nested or very long file costs hours or gigabytes | sizes, counts and depths are limited before parsing |
| an unpaired surrogate is read and cannot be written again | the reader and canonical JSON refuse it |

A seed changes valid files (tests/attacks/parsers.py). Files that once caused an error are listed below.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from client.teachers.comparison import codec_of
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt
from tests.attacks import parsers
from tests.attacks.parsers import DEEP, HEADERS, Parser

ROOT = Path(__file__).resolve().parents[2]
THOROUGH_S = float(os.environ.get("CONSILIUM_FUZZ_SECONDS", "20"))
"""Seconds of changed files in the slow tests; `make test-fuzz` takes ten minutes."""

EACH = 40
SECONDS = 3.0
"""Limit on the processor time for one file."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parser]:
    return parsers.parsers(tmp_path_factory.mktemp("parsers"))


def attack(name: str, parser: Parser, data: bytes) -> None:
    """Check that a file is read, or refused by InvalidInput with a text, within the time limit."""
    started = time.thread_time()
    said = "good"
    try:
        parser.read(data)
    except ConsiliumError as error:
        said = str(error)
        assert isinstance(error, InvalidInput | LedgerCorrupt), name  # noqa: PT017
    except Exception as error:
        error.add_note(f"{name}: {data[:2_000]!r}")
        raise
    assert 0 < len(said) < 3_000, name
    assert said.isprintable(), (name, said)
    size = max(1, len(data) / 10_000_000)  # a change can repeat a part 600 times, three times over
    assert time.thread_time() - started < SECONDS * size, (name, len(data), data[:500])


def test_the_unchanged_files_are_read(known: dict[str, Parser]) -> None:
    for name, parser in known.items():
        try:
            parser.read(parser.valid)
        except InvalidInput as error:
            raise AssertionError(name) from error


@pytest.mark.slow
def test_a_changed_file_is_read_or_refused_with_what_is_wrong(known: dict[str, Parser]) -> None:
    for name, parser in known.items():
        draw = random.Random(zlib.crc32(name.encode()))
        for _ in range(EACH):
            attack(name, parser, parser.changed(draw))


@pytest.mark.slow
def test_many_changed_files_are_read_or_refused_with_what_is_wrong(known: dict[str, Parser]) -> None:
    ends = time.monotonic() + THOROUGH_S
    for seed in itertools.count(int(time.time()) if "CONSILIUM_FUZZ_SECONDS" in os.environ else 1):
        for name, parser in known.items():
            draw = random.Random(f"{seed} {name}")
            for _ in range(20):
                attack(name, parser, parser.changed(draw))
            if time.monotonic() > ends:
                return


def catches(node: ast.Try) -> set[str]:
    types = [handler.type for handler in node.handlers if handler.type is not None]
    return {name.id for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)}


@pytest.mark.slow
def test_invalid_json_is_refused_by_one_reader_that_also_refuses_deep_nesting(tmp_path: Path) -> None:
    """Python's own reader raises RecursionError for deep nesting, which is no ValueError."""
    found = []
    for path in (path for name in ("common", "client", "server", "consilium") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and "ValueError" in catches(node) and not catches(node) & {"Exception"}:
                called = {ast.unparse(one.func) for part in node.body for one in ast.walk(part) if hasattr(one, "func")}
                found += [path.relative_to(ROOT).as_posix()] if called & {"json.load", "json.loads"} else []
    assert found == []
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "privacy.json").write_text('{"a":' * 100_000)
    assert codec_of(tmp_path) is None


Made = Callable[[bytes], bytes]


def table(row: str) -> Made:
    return lambda valid: valid + row.encode()


def replaced(old: bytes, new: bytes) -> Made:
    def made(valid: bytes) -> bytes:
        assert old in valid
        return valid.replace(old, new, 1)

    return made


def with_point_form(line: bytes, form: int) -> bytes:
    """Return an OpenSSH line whose point begins with another byte; 2 or 3 mean a compressed point."""
    name, body, *comment = line.split()
    raw = bytearray(b64decode(body))
    place = raw.index(b"\0\0\0\x61\x04") + 4
    raw[place] = form
    return b" ".join((name, b64encode(bytes(raw)), *comment))


FOUND: tuple[tuple[str, Made], ...] = (
    ("study.toml", replaced(b"epsilon = 8.0", b"epsilon = " + b"9" * 400)),
    ("study.toml", replaced(b"epsilon = 8.0", b"epsilon = nan")),
    ("study.toml", replaced(b"epsilon = 8.0", b"epsilon = " + b"9" * 5_000)),
    ("study.toml", replaced(b"epsilon = 8.0", b"epsilon = 0x" + b"f" * 9_000)),
    ("study.toml", replaced(b"spacing_mm = [1.0", b"spacing_mm = [0b1" + b"0" * 20_000)),
    ("study.toml", replaced(b"labels = [", b"labels = [" + DEEP.encode() + b",")),
    ("study.toml", table("a." * 100_000 + "a = 1")),
    ("study.toml", table("x = " + "{a=" * 900 + "1" + "}" * 900)),
    ("site.toml", replaced(b"[caps]", b"[caps]\nqueries_per_day = " + b"9" * 400)),
    ("site.toml", replaced(b"epsilon = 8.0", b"epsilon = " + b"9" * 400)),
    ("site.toml", replaced(b"epsilon = 8.0", b"epsilon = 0o" + b"7" * 8_000)),
    ("site.toml", table("x = " + DEEP)),
    ("oidc.toml", table("x = " + DEEP)),
    ("oidc.toml", replaced(b"https://id", b"https://[id")),
    ("names.toml", table("x = " + DEEP)),
    ("patients.csv", table("a," + "x" * 200_000)),
    ("patients.csv", table('"' + "x" * 200_000)),
    ("patients.csv", table("," * 2_000_000)),
    ("peers.json", lambda valid: b"[" * 100_000),
    ("kit.json", lambda valid: b'{"site": "\\ud800"}'),
    ("split.json", lambda valid: b'{"validation": [], "test": [], "sites": {"a": [{"label": []}]}}'),
    ("spectrum.json", lambda valid: b"[" + b"9" * 400 + b"]"),
    ("users", replaced(b'"salt": "00', b'"salt": "0,')),
    ("written", lambda valid: b'"\\ud800"'),
    ("canonical", lambda valid: b'{"\\ud800":1}'),
    ("node-key", lambda valid: with_point_form(valid, 3)),
)
"""Files that once raised another error than InvalidInput, or took minutes."""


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_found_is_refused(known: dict[str, Parser], number: int) -> None:
    name, made = FOUND[number]
    data = made(known[name].valid)
    with pytest.raises(InvalidInput):
        known[name].read(data)
    attack(name, known[name], data)


def test_a_mapping_with_a_key_twice_is_refused(known: dict[str, Parser]) -> None:
    """Two programs could otherwise read two values."""
    tried = 0
    for name, parser in known.items():
        if parser.kind == "json" and parser.valid.startswith(b"{") and name != "written":
            key = json.dumps(next(iter(json.loads(parser.valid)))).encode()
            with pytest.raises(InvalidInput):
                parser.read(parser.valid.replace(b"{", b"{%b:0," % key, 1))
            tried += 1
    assert tried > 15


@pytest.mark.parametrize("name", ["codec", "frame"])
@pytest.mark.parametrize("header", HEADERS)
def test_no_header_of_an_array_is_python_that_ends_a_program(
    known: dict[str, Parser], name: str, header: bytes
) -> None:
    data = parsers.with_array_header(known[name].valid, header)
    with pytest.raises(InvalidInput):
        known[name].read(data)


def test_a_file_of_each_kind_is_refused_where_there_is_a_folder_or_a_pipe(tmp_path: Path) -> None:
    from common.reading import read_text

    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "absent"):
        with pytest.raises(InvalidInput):
            read_text(tmp_path / name, what="file", most_bytes=10)
