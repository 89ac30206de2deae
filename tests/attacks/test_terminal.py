"""Attack: a server, a file's name, a ledger's row or an event contains text that controls the terminal.

| attack | defence |
|---|---|
| an escape sequence clears the screen or writes to the clipboard | all output to a terminal is escaped |
| a line end in a name begins a false row of fingerprints | line ends in a quoted name are escaped |
| characters of writing direction or without width make two names look alike | they are escaped as well |
| the library that draws tables takes brackets for markup | markup is switched off |
| a log on a terminal contains such text | the formatter of all logs escapes it |
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import shutil
import sqlite3
import sys
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import click
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConsiliumError, DaemonFailed, InvalidInput, LedgerCorrupt, Refused
from common.plain import log_to_stderr, plain, plain_lines
from common.process import plain_text
from consilium.cli.main import app, main
from consilium.cli.say import console, say_unexpected
from server.aggregation.progress import StudyProgress, stage_bars
from server.study.workspace import Workspace
from tests.client.operations.answering import answering
from tests.trained_sites import one_after_another

FORGED = "north  SHA256:forged"
HOSTILE = (
    f"\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\x08\u202egnol\u200b\u2066\u034f[bold]x[/bold][link=file:///]\r\n{FORGED}\u2028"
)
"""A text that clears a screen, writes to the clipboard, reverses text, contains markup, and has a line end."""
ONE_LINE = HOSTILE.replace("\r", "").replace("\n", "").replace("\u2028", "")
FILE = HOSTILE.replace("/", "")


def acts(text: str) -> list[str]:
    """Return the characters that would act on a terminal, by their Unicode category. This is the oracle."""
    found = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]
    return [*found, *(line for line in text.splitlines() if line.startswith(FORGED))]


class Hostile(BaseHTTPRequestHandler):
    """Stands in for a server that sends a false table in its HTTP reason phrase."""

    def do_GET(self) -> None:
        phrase = ONE_LINE.encode("latin-1", "replace")
        self.wfile.write(b"HTTP/1.1 418 " + phrase + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.close_connection = True


@dataclass(frozen=True)
class World:
    """Holds a site with a hostile server, each of whose files another person may have written."""

    root: Path
    site: Path
    study: Workspace


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("terminal")
    with answering(root, Hostile) as (site, study, _):
        made = World(root, site, study)
        write_files(made)
        yield made


def write_files(world: World) -> None:
    """Write hostile files of every kind below ``root``."""
    root = world.root
    shutil.copytree(root / "kit-study-north", root / "kit-name")
    text = (root / "kit-study-north" / "study.toml").read_text()
    (root / "kit-name" / "study.toml").write_text(text.replace('name = "test"', f"name = {json.dumps(HOSTILE)}"))
    (root / "study.toml").write_text(text.replace('"body"', json.dumps(HOSTILE)))
    (root / "key.toml").write_text(text + f"\n{json.dumps(HOSTILE)} = 1\n")
    for name, record in {
        "peers.json": {"schema": 1, "study": HOSTILE, "peers": [{"site": HOSTILE, "key": HOSTILE}]},
        "request.json": {"site": HOSTILE, HOSTILE: 1},
        "notice.json": {"sealing_key": HOSTILE},
        "users.json": {"schema": 1, "users": [{"name": HOSTILE}]},
        "judgement.json": {"verdict": HOSTILE},
        "head.json": {"role": HOSTILE},
        "spectrum.json": [HOSTILE],
    }.items():
        (root / name).write_text(json.dumps(record, ensure_ascii=False))
    cases = {"listed": 1, "patients": 1, "patient_identity": "table", "schema": 1}
    problem = {"case": HOSTILE, "reason": HOSTILE}
    (world.site / "teachers").mkdir(exist_ok=True)
    (world.site / "teachers" / "cases.json").write_text(json.dumps(cases | {"problems": [problem], "doubled": []}))
    msd = root / "msd"
    (msd / "imagesTr").mkdir(parents=True)
    (msd / "imagesTr" / f"{FILE}.nii.gz").write_bytes(b"no scan")
    entry = {"image": f"./imagesTr/{FILE}.nii.gz", "label": f"./labelsTr/{FILE}.nii.gz"}
    index = {"name": HOSTILE, "labels": {"0": "background", "1": HOSTILE}, "modality": {"0": HOSTILE}}
    (msd / "dataset.json").write_text(json.dumps(index | {"training": [entry, {HOSTILE: HOSTILE}]}))
    (root / "images").mkdir()
    (root / "images" / f"{FILE}.nii.gz").write_bytes(b"no scan")
    with zipfile.ZipFile(root / "model.zip", "w") as archive:
        archive.writestr("configs/inference.json", "{}")
        archive.writestr("configs/metadata.json", json.dumps({"network_data_format": {"outputs": {"pred": DEFINED}}}))
        archive.writestr(f"configs/../{HOSTILE}", "x")
    ledger = root / "ledger.sqlite"
    shutil.copy(world.study.root / "ledger.sqlite", ledger)
    with sqlite3.connect(ledger) as rows:
        for trigger in rows.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            rows.execute(f"DROP TRIGGER {trigger[0]}")
        body = json.dumps({"pool": HOSTILE, "text": HOSTILE, "ledger_id": HOSTILE}, ensure_ascii=False)
        rows.execute("UPDATE rows SET body = ?, kind = ?", (body, HOSTILE))
    events = [
        {"event": kind, "schema": 1, "time": HOSTILE, "study": HOSTILE, "site": HOSTILE, "reason": HOSTILE}
        for kind in (HOSTILE, "reply-missing", "offer-answered", "run-started")
    ]
    (world.study.root / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


DEFINED = {"channel_def": {"0": HOSTILE}}

Words = Callable[[World], list[list[str]]]


def of(*words: str) -> Words:
    """Return a command line with the world's paths for ``{root}``, ``{site}`` and ``{study}``, and a hostile text for
    ``{hostile}``.
    """
    return lambda world: [
        [
            word.format(root=world.root, site=world.site, study=world.study.root, hostile=HOSTILE, file=FILE)
            for word in words
        ]
    ]


def both(*lines: Words) -> Words:
    return lambda world: [line for words in lines for line in words(world)]


KIT = ("--kit", "{root}/kit-name")
FOREIGN: dict[str, Words] = {
    "audit": of("--study", "{root}/study.toml"),
    "bench utility": of("--data", "{root}/msd"),
    "certificate": of("{root}", "--out", "{root}/c.pdf"),
    "governance": of("{root}", "--out", "{root}/papers"),
    "codec fit": of("{study}", "--label-maps", "{root}/images", "--sites", "3"),
    "dashboard user list": of("--state", "{root}"),
    "data split": of("--data", "{root}/msd", "--out", "{root}/split", "--seed", "1", "--sites", "2"),
    "dispute evidence": of("{study}", "{hostile}"),
    "dispute judge": of(
        "{root}/head.json",
        "{root}/notice.json",
        "--folder",
        "{root}",
        "--peers",
        "{root}/peers.json",
        "--out",
        "{root}/j.json",
    ),
    "dispute show": of("{root}/judgement.json", "--auditor", "{hostile}"),
    "ledger backup": of("{root}/head.json", "--out", "{root}/backup.sqlite"),
    "ledger compare": of("{root}/ledger.sqlite", "{root}/ledger.sqlite", "--server-key", "0" * 64),
    "ledger head": of("{root}/ledger.sqlite"),
    "ledger log": both(of("{root}/ledger.sqlite"), of("{root}/ledger.sqlite", "--json")),
    "ledger receipts": of("{root}/ledger.sqlite"),
    "ledger recover": of("{root}/ledger.sqlite", "--key", "{root}/head.json", "--receipts", "{root}/head.json"),
    "ledger rotate-key": of("{root}/ledger.sqlite", "--key", "{root}/head.json", "--new-key", "{root}/new.pem"),
    "plan": both(of("--study", "{root}/study.toml"), of("--study", "{root}/key.toml")),
    "predict": of("{root}/images", "--model", "{root}/msd", "--out", "{root}/predicted"),
    "provision approve": of(
        "{study}", "{root}/request.json", "--site", "{hostile}", "--pool", "{hostile}", "--fingerprint", "{hostile}"
    ),
    "provision kit": of("{study}", "{hostile}", "--out", "{root}/kit-2"),
    "provision list": of("{study}"),
    "provision peers": of("{study}"),
    "provision revoke": of("{study}", "{hostile}"),
    "provision forget": of("{study}", "{hostile}"),
    "server status": of("{study}"),
    "simulate": of("--data", "{root}/msd", "--hospitals", "3", "--out", "{root}/sim"),
    "site cases": both(of("--site-dir", "{site}"), of("--site-dir", "{site}", "--json")),
    "site disclose": of("{hostile}", "--site-dir", "{site}", "--to", "{hostile}"),
    "site doctor": both(of("--site-dir", "{site}"), of("--data", "{root}/msd"), of("--data", "{root}/{file}")),
    "site adapt": both(
        of("--site-dir", "{site}", "--data", "{root}/msd"), of("--site-dir", "{site}", "--way", "{hostile}")
    ),
    "site evaluate": of("--site-dir", "{site}", "--data", "{root}/msd"),
    "site heads": of("--site-dir", "{site}", "--compare", "{root}/head.json"),
    "site init": of(*KIT, "--data", "{root}/data", "--site-dir", "{root}/site-2", "--pool", "p"),
    "site join": of(*KIT, "--from", "{site}"),
    "site consent": of("--site-dir", "{site}", "--by", "Ada", "--yes"),
    "site pause": of("{hostile}", "--site-dir", "{site}"),
    "site peers": both(
        of("--site-dir", "{site}", "--fetch"),
        of("--site-dir", "{site}", "--take", "{root}/peers.json"),
        of("--site-dir", "{site}", "--distrust", "{hostile}"),
    ),
    "site recover": of("--site-dir", "{site}"),
    "site request": of("--site-dir", "{site}"),
    "site resume": of("{hostile}", "--site-dir", "{site}"),
    "site status": of("--site-dir", "{site}"),
    "site student pull": of("--site-dir", "{site}"),
    "site take-sealing-key": of("{root}/notice.json", "--site-dir", "{site}"),
    "site teacher add": both(
        of("{root}/model.zip", "--site-dir", "{site}"),
        of("{root}/model.zip", "--site-dir", "{site}", "--labels", "background,{hostile}"),
    ),
    "site teacher remove": of("--site-dir", "{site}"),
    "site train": of("--site-dir", "{site}"),
    "site withdraw": of("{hostile}", "--site-dir", "{site}", "--yes"),
    "site withdraw-patient": of("{hostile}", "--site-dir", "{site}", "--yes"),
    "student export": of("{study}"),
    "student publish": of("{study}", "--out", "{root}/published"),
    "student train": of("{study}"),
    "student verdict": of("{study}", "{hostile}"),
    "study archive": of("{study}", "--out", "{root}/archive.tar.gz"),
    "study create": of("{root}/made", "--study", "{root}/study.toml"),
    "study evaluate": both(of("{study}"), of("{study}", "{root}/head.json")),
    "study publish": of("{study}", "--images", "{root}/images"),
    "study show": both(of("{root}/study.toml"), of("{root}/key.toml"), of("{root}/kit-name")),
    "study status": both(of("{study}"), of("{study}", "--json")),
    "study stop": of("{study}"),
    "verify": both(of("{root}/ledger.sqlite"), of("{root}/ledger.sqlite", "--json"), of("{root}/head.json")),
}
"""Every command that prints text of other parties, with a command line that makes it do so."""

OWN = {
    "bench papers": "public figures",
    "bench private": "public figures, and the same reader of data as bench utility",
    "bench pate": "the same reader of data as bench utility",
    "bench networks": "the same reader of data as bench utility",
    "bench poison": "the same reader of data as bench utility",
    "dashboard user add": "what its user types",
    "dashboard user password": "what its user types",
    "dashboard user remove": "what its user types",
    "data synth": "made here",
    "demo": "made here",
    "dispute keys": "made here",
    "ledger new-key": "made here",
    "ledger rotate-sealing-key": "made here",
    "provision renew": "its own certificate",
    "provision server": "what its user types",
    "server log": "words in forms without a control: test_no_field_takes_free_text",
    "server up": "words of its daemons: test_the_last_lines_of_a_daemon_are_plain",
    "site dashboard": "an address; its page is escaped: tests/server/dashboard/test_hospital.py",
    "site log": "words in forms without a control: test_no_field_takes_free_text",
    "site serve": "its log: test_a_log_is_plain",
    "site up": "words of its daemons: test_the_last_lines_of_a_daemon_are_plain",
    "study init": "what its user types",
    "study resume": "events: test_events_of_a_run_are_plain",
    "study run": "events: test_events_of_a_run_are_plain",
    "study template": "made here",
    "study watch": "events: test_events_of_a_run_are_plain",
}
"""Every other command, with the reason why it prints no text of other parties, or the place of its test."""


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name


def test_every_command_has_a_test_or_a_reason_here() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    assert sorted(commands(group)) == sorted({**FOREIGN, **OWN})


@pytest.mark.parametrize("command", FOREIGN)
def test_no_text_of_another_party_acts_on_a_terminal(
    world: World, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.site.fetch.PAUSE_S", 0)
    monkeypatch.setattr("client.training.command.side_by_side", one_after_another)
    monkeypatch.setenv("COLUMNS", "100")
    for words in FOREIGN[command](world):
        monkeypatch.setattr(sys, "argv", ["consilium", *command.split(), *words])
        hook = sys.excepthook
        try:
            main()
        except SystemExit:
            pass
        finally:
            sys.excepthook = hook
        found = capsys.readouterr()
        assert acts(found.out + "\n" + found.err) == []


def test_a_reason_phrase_stays_one_quoted_line(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.site.fetch.PAUSE_S", 0)
    monkeypatch.setattr(sys, "argv", ["consilium", "site", "peers", "--site-dir", str(world.site), "--fetch"])
    with pytest.raises(SystemExit):
        main()
    waiting, *still, error = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting for ")
    assert all(line.startswith("still waiting for ") for line in still)
    assert error.startswith("error: ")
    assert all("\\u001b[2J\\u001b]52;c;aGk=\\u0007" in line for line in (*still, error))


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput(HOSTILE, value=HOSTILE, limit=HOSTILE, remedy=HOSTILE),
        ConsiliumError(HOSTILE),
        DaemonFailed(HOSTILE),
        LedgerCorrupt(HOSTILE, row=1),
        Refused("busy", HOSTILE),
    ],
)
def test_no_deliberate_error_acts_on_a_terminal(error: ConsiliumError) -> None:
    allowed = [] if isinstance(error, InvalidInput) else [FORGED + "\\u2028"]
    assert acts(str(error)) == allowed  # the last lines of a daemon's log stay separate lines


def test_the_traceback_of_an_unexpected_error_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(ONE_LINE)
    except ValueError as error:
        say_unexpected(ValueError, error, error.__traceback__)
    assert acts(capsys.readouterr().err) == []


def test_a_log_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    log_to_stderr(stream)
    try:
        raise ValueError(ONE_LINE)
    except ValueError:
        logging.getLogger("x").exception("event=bad why=%s", HOSTILE)
    assert "\\u001b[2J" in stream.getvalue()
    assert acts(stream.getvalue()) == []


def test_the_last_lines_of_a_daemon_are_plain(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(ONE_LINE, encoding="utf-8")
    said = plain_text(tmp_path / "log")
    assert said
    assert acts(said) == []


@pytest.mark.parametrize("kind", ["offer-answered", "reply-missing", "code-refused", "ledger-contradicted"])
def test_events_of_a_run_are_plain(kind: str) -> None:
    stream = io.StringIO()
    screen = console(file=stream, force_terminal=False, width=200)
    with stage_bars(screen) as bars:
        event = {"event": kind, "site": HOSTILE, "reason": HOSTILE, "accepted": False, "ledger_row": 1, "codes": 1}
        StudyProgress(bars).on_event(event)
    assert "[bold]x[/bold]" in stream.getvalue()
    assert acts(stream.getvalue()) == []


def test_a_table_takes_no_markup_and_no_escapes() -> None:
    from rich.table import Table

    stream = io.StringIO()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(ONE_LINE)
    console(file=stream, width=300).print(table, "[red]x[/red]")
    assert "[red]x[/red]" in stream.getvalue()
    assert acts(re.sub(rf"^\W*{FORGED}", "", stream.getvalue())) == []


@given(st.text())
def test_plain_text_never_acts_and_is_the_same_json(text: str) -> None:
    assert acts(plain(text)) == []
    assert "\n" not in plain(text)
    assert plain(plain(text)) == plain(text)
    with_lines = [c for c in acts(plain_lines(text)) if c != FORGED]
    assert with_lines == []
    try:
        document = json.dumps({"a": text}, ensure_ascii=False)
        document.encode()
    except UnicodeEncodeError:
        return
    assert json.loads(plain(document)) == {"a": text}


@pytest.mark.parametrize("name", ["Müller", "Αθήνα", "北京", "ε = 8 (exact), δ = 1e-3", "47 % – σ²·√K′ ≤ 1"])
def test_letters_of_every_language_stay(name: str) -> None:
    assert plain(name) == name


SAY = {"typer": {"echo", "secho"}, "click": {"echo", "secho"}, "rich": {"print"}}


@pytest.mark.parametrize("path", sorted(Path("consilium/cli").glob("*.py")), ids=str)
def test_a_command_has_one_way_to_a_terminal(path: Path) -> None:
    if path.name == "say.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="print" | "Console")):
                raise AssertionError(f"{path}:{node.lineno}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=called)) if called in SAY.get(module, ()):
                raise AssertionError(f"{path}:{node.lineno}")
            case ast.Attribute(value=ast.Attribute(attr="stdout" | "stderr"), attr="write"):
                raise AssertionError(f"{path}:{node.lineno}")


def test_a_process_has_one_way_to_a_log() -> None:
    for room in ("client", "server", "common", "consilium"):
        for path in Path(room).rglob("*.py"):
            if path != Path("common/plain.py"):
                assert "basicConfig(" not in path.read_text(encoding="utf-8"), path
