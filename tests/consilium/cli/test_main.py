"""Tests the command line as a user runs it: `main` with its arguments, its output and its exit."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

import click
import pytest
from typer.testing import CliRunner

from common.errors import ConsiliumError, DaemonFailed, InvalidInput, LedgerCorrupt
from common.sockets import free_ports
from consilium.cli.main import _GROUPS, _bounded, app, main
from consilium.cli.say import ask_yes_no, interrupt_once, interruptible, json_text, say
from server.operations.daemons import list_nodes
from server.operations.supervisor import flower_server
from server.study.workspace import Workspace
from tests import command_reference
from tests.commands import typed

ROOT = Path(__file__).resolve().parents[3]


def consilium(*arguments):
    """Run `consilium ARGUMENTS` in this process, and end it as the interpreter would."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = interrupt_once()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["consilium", *arguments])
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except (ConsiliumError, OSError):
            code = 1
            traceback.print_exc()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "trial"
    result = consilium(
        *("study", "init", str(directory), "--name", "trial", "--labels", "background,lesion"),
        *("--grid", "16,16,16", "--queries", "4", "--quorum", "2", "--epsilon", "8", "--delta", "1e-3"),
    )
    assert result.returncode == 0, result.stderr
    return directory, result.stdout


def test_no_help_swallows_a_default_in_brackets() -> None:
    """`--help` prints every option's text in full, brackets included."""
    seen = 0
    for name, command in command_reference.commands():
        if (shown := [p for p in command.params if "[" in (getattr(p, "help", "") or "")]) and name != "consilium":
            words = "".join(
                CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "500"}).output.split()
            )
            for one in shown:
                assert "".join(one.help.replace("\\[", "[").split()) in words, (name, one.name)
                seen += 1
    assert seen > 10


def test_no_command_takes_a_number_that_is_nan_infinite_negative_or_huge() -> None:
    """Formerly such a number caused a traceback of numpy, torch or Python in some command."""
    seen, taken = 0, []
    for name, command in command_reference.commands():
        for one in command.params:
            if one.type.name.split()[0] in ("integer", "float"):
                seen += 1
                wrong = ["nan", "inf", "-inf", "-1", "9223372036854775808", "1e400", ""]
                wrong += ["0", "1000001"] if one.name in ("seeds", "jobs", "threads") else []
                taken += [(name, one.opts, value) for value in wrong if accepts(one, command, value)]
    assert seen > 100
    assert not taken


def test_a_number_written_in_another_way_than_with_plain_digits_is_refused_and_its_form_is_shown() -> None:
    """Formerly ``--epsilon 1_0``, which may be a mistyped 1.0, made a study of ε = 10."""
    wrong = {"--epsilon": ("1_0", "８", "1,5", "0x8", "9" * 50 + "_"), "--hospitals": ("1_0", "８", "8.0", "9" * 5000)}
    for option, values in wrong.items():
        form = "8, 0.5 or 1e-5." if option == "--epsilon" else "a whole number such as 8."
        for value in values:
            done = CliRunner().invoke(app, ["plan", option, value], env={"COLUMNS": "500"})
            last = done.stderr.splitlines()[-1]
            assert (done.exit_code, last.endswith(form), len(last) < 200) == (2, True, True), (option, value[:9], last)
    done = CliRunner().invoke(app, ["plan", "--epsilon", "9" * 5000], env={"COLUMNS": "500"})
    assert "is too large" in done.stderr
    assert len(done.stderr) < 300
    for value in ("8", "+8", " 8", "8.", ".5", "0.5", "1e-5", "1E+1"):
        assert _bounded(click.FLOAT).convert(value, None, None) == float(value)


def test_a_folder_that_the_user_may_not_read_is_refused_with_who_runs_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read every folder
    done = CliRunner().invoke(app, ["site", "status", "--site-dir", str(tmp_path)], env={"COLUMNS": "500"})
    assert done.exit_code == 2
    owner = f"give user {os.getuid()}, who runs this command, access, or run the command as the owner."
    assert done.stderr.endswith(f"Invalid value for '--site-dir': {tmp_path}: Permission denied; to fix: {owner}\n")


def accepts(one: click.Parameter, command: click.Command, value: str) -> bool:
    try:
        one.type_cast_value(click.Context(command), [value] if one.multiple else value)
    except click.BadParameter:
        return False
    return True


OUTPUTS = {
    "bench networks": "--data set --out",
    "bench papers": "--data set --only x --out",
    "bench pate": "--data set --out",
    "bench poison": "--data set --out",
    "bench private": "--data set --out",
    "bench utility": "--data set --out",
    "certificate": "study --out",
    "data split": "--data set --seed 1 --out",
    "data synth": "--cases 1 --seed 1 --out",
    "demo": "--out",
    "governance": "study --out",
    "ledger backup": "study/ledger.sqlite",
    "plan": "--chart",
    "predict": "set --model bundle --out",
    "simulate": "--phantoms --out",
    "site adapt": "--site-dir site --out",
    "site doctor": "--site-dir site --report",
    "site evaluate": "--site-dir site --verdict",
    "student publish": "study --out",
    "study archive": "study --out",
}


@pytest.mark.parametrize("command", sorted(OUTPUTS))
def test_an_output_that_cannot_be_written_is_refused_before_the_work_begins(tmp_path, monkeypatch, command) -> None:
    """A file stands in place of the folder, or the disk is full or read-only."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out.png"
    words = (*command.split(), *OUTPUTS[command].split(), str(out))
    told = consilium(*words)
    assert told.returncode == 1
    assert told.stderr.endswith(f"error: {out}: Not a directory; to fix: check the path\n")

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    told = consilium(*words[:-1], str(tmp_path / "new" / "out.png"))
    assert (told.returncode, "make room on this disk" in told.stderr) == (9, True), told.stderr


def test_every_command_that_names_an_output_and_works_long_tests_it_first() -> None:
    """A new option --out must be listed here as quick, or be tested before the work."""
    quick = {"dispute evidence", "dispute judge", "ledger rotate-sealing-key", "provision kit", "provision peers"}
    quick |= {"site disclose", "site heads", "site student pull"}
    named = {
        name.removeprefix("consilium ")
        for name, command in command_reference.commands()
        for one in command.params
        if {"--out", "--chart", "--report", "--verdict", "--figures"} & set(one.opts) and not getattr(one, "is_flag", 0)
    }
    assert named <= quick | OUTPUTS.keys()


def test_a_dashboard_refuses_a_used_port_and_an_invalid_port(study, tmp_path) -> None:
    directory, _ = study
    words = ("dashboard", "--study", str(directory), "--state", str(tmp_path / "state"), "--port")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        told = consilium(*words, port)
    assert told.returncode == 2
    assert told.stderr.endswith("a port that no other program uses; to fix: end that program, or give another port\n")
    assert "http" not in told.stdout
    for wrong in ("0", "65536", "4294967296"):
        assert consilium(*words, wrong).returncode == 2


def test_an_internal_port_of_zero_is_refused_and_not_taken_as_not_given(study) -> None:
    directory, _ = study
    told = consilium("provision", "server", str(directory), "--host", "localhost", "--internal-port", "0")
    assert (told.returncode, "--internal-port: got 0; allowed: 1 to 65535" in told.stderr) == (2, True)


@pytest.mark.parametrize("command", ["codec fit --label-maps m --sites 3", "study status", "provision renew"])
def test_a_command_of_the_server_says_that_it_was_given_a_site_s_directory(tmp_path, command) -> None:
    """Otherwise the command would name a missing file, and its remedy would make a study in the site's directory."""
    (tmp_path / "site.toml").touch()
    refused = consilium(*command.split(), str(tmp_path))
    assert refused.returncode == 2
    assert "not a site's directory" in refused.stderr


def test_version_needs_no_torch():
    code = "import sys; sys.argv=['consilium','--version']\nfrom consilium.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'monai' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("consilium ")


@pytest.mark.parametrize(
    ("raised", "remedies"), [("row 5: the hash differs", 1), ("no ledger; to fix: give a ledger's file", 1)]
)
def test_a_damaged_ledger_always_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raised: str, remedies: int
) -> None:
    def damaged(**_: object) -> None:
        raise LedgerCorrupt(raised)

    monkeypatch.setattr("consilium.cli.main.app", damaged)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == LedgerCorrupt.exit_code
    assert raised in said
    assert said.count("to fix: ") == remedies


def test_a_mistyped_command_is_suggested_once(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["consilium", "site", "evalute"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.count("evaluate") == 1


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_an_output_that_cannot_hold_epsilon_gets_an_escape_and_no_traceback(monkeypatch, encoding) -> None:
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding=encoding))
    monkeypatch.setattr("consilium.cli.main.app", lambda **_: say(json_text({"spent": "ε = 8"})))
    main()
    sys.stdout.flush()
    assert b"\\u03b5 = 8" in held.getvalue()
    assert json.loads(held.getvalue()) == {"spent": "ε = 8"}, "JSON reads the escape back"


def test_no_command_takes_an_empty_path_for_the_folder_in_which_it_was_started(tmp_path, monkeypatch) -> None:
    """An unset variable of a shell leaves an empty argument."""
    paths = [one for _, command in command_reference.commands() for one in command.params if one.type.name == "path"]
    assert len(paths) > 100
    for one in paths:
        for blank in ("", " "):
            with pytest.raises(click.BadParameter, match="the path is empty"):
                one.type.convert(blank, one, None)
    monkeypatch.chdir(tmp_path)
    told = consilium("dispute", "keys", "")
    assert told.returncode == 2
    assert "the path is empty: give a path, or . for the current folder." in " ".join(told.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_itself_and_a_text_that_is_not_utf8_are_refused_without_a_traceback(tmp_path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    kit = ("site", "init", "--kit", str(tmp_path), "--data", str(tmp_path), "--site-dir", str(tmp_path / "loop"))
    case = ("site", "withdraw-patient", os.fsdecode(b"\xff"), "--site-dir", str(tmp_path))
    for words, why in ((kit, "leads to itself"), (case, "is not UTF-8")):
        told = consilium(*words)
        assert told.returncode == 2
        assert why in " ".join(told.stderr.split())


def test_every_command_checks_its_output_before_it_does_anything(tmp_path) -> None:
    """Formerly `ledger rotate-sealing-key` changed the key and then failed to write the notice."""
    outputs = [one for _, command in command_reference.commands() for one in command.params if one.name == "out"]
    assert len(outputs) > 20
    (tmp_path / "file").write_text("")
    for one in outputs:
        with pytest.raises(OSError, match="Not a directory"):
            one.process_value(click.Context(click.Command("x")), str(tmp_path / "file" / "below"))


def test_no_command_replaces_a_file_that_its_option_out_names(tmp_path) -> None:
    """`ledger rotate-sealing-key`, `provision peers` and `site heads` formerly did. Benchmarks may do so."""
    (tmp_path / "file").touch()
    for name, command in command_reference.commands():
        for one in command.params:
            if "--out" in one.opts and not name.startswith("consilium bench"):
                with pytest.raises(InvalidInput):
                    one.process_value(click.Context(click.Command(name)), str(tmp_path / "file"))


def test_a_closed_standard_input_reads_as_one_that_ended(monkeypatch) -> None:
    """Python has no ``sys.stdin`` if the file descriptor is closed."""
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr("consilium.cli.main.app", lambda **_: None)
    main()
    with sys.stdin as stdin:
        assert stdin.readline() == ""


def test_a_command_that_is_interrupted_says_so(tmp_path, monkeypatch):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("common.data.synthetic.write_phantoms", interrupted)
    result = consilium("data", "synth", "--out", str(tmp_path / "out"), "--cases", "2", "--seed", "1")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ("consilium.demo.run.run_demo", ("demo", "--out", "{}/out")),
        ("consilium.demo.run.run_demo", ("simulate", "--phantoms", "--out", "{}/out")),
        ("server.aggregation.pipeline.locked_events", ("student", "train", "{}")),
    ],
)
def test_a_command_that_resumes_says_so_when_it_is_interrupted(tmp_path, monkeypatch, starts, words):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(starts, interrupted)
    result = consilium(*(word.format(tmp_path) for word in words))
    assert result.returncode == 130
    assert result.stderr.endswith("interrupted: run the same command again to resume\n")


def test_a_command_that_is_interrupted_while_its_modules_load_says_so() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["consilium"]
    module, _, function = script.partition(":")
    started = f"""
import sys

class Interrupted:
    def find_spec(self, name, *given):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from {module} import {function}
{function}()
"""
    result = subprocess.run([sys.executable, "-P", "-c", started], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def started(program: str, folder: Path, prepare: Callable[[], object]) -> tuple[subprocess.Popen[str], IO[str], Path]:
    """Start a program as `consilium data synth` in a process that ran ``prepare``, with a temporary folder of its own.

    Returns the process, its output and its temporary folder.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", program, "data", "synth", "--out", str(folder / "out"), "--cases", "2", "--seed", "1"],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )
    assert child.stdout is not None
    return child, child.stdout, scratch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ended_by_its_terminal_or_by_sigterm_says_so_and_leaves_no_temporary_files(tmp_path, number):
    """The temporary files of `data split` and `predict --dicom` are copies of patients' scans."""
    held = """
import sys, tempfile, time
import common.data.synthetic
from consilium.cli.main import main

def write_phantoms(*given, **more):
    with tempfile.TemporaryDirectory():
        print("held", flush=True)
        time.sleep(60)

common.data.synthetic.write_phantoms = write_phantoms
main()
"""
    child, output, scratch = started(held, tmp_path, lambda: signal.signal(number, signal.SIG_DFL))
    assert output.readline() == "held\n"
    assert list(scratch.iterdir())
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said, list(scratch.iterdir())) == (130, "interrupted\n", [])


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_further_signals_stop_neither_the_cleaning_up_nor_the_end_of_an_interrupted_command(tmp_path, first):
    """An impatient second Ctrl-C printed a traceback, and could leave copies of patients' scans behind."""
    held = """
import atexit, sys, tempfile, time
import common.data.synthetic
from consilium.cli.main import main

def tell(words):
    print(words, flush=True)
    time.sleep(0.5)

def write_phantoms(*given, **more):
    with tempfile.TemporaryDirectory():
        try:
            print("held", flush=True)
            time.sleep(60)
        finally:
            tell("cleaning")

atexit.register(tell, "leaving")
common.data.synthetic.write_phantoms = write_phantoms
main()
"""
    child, output, scratch = started(
        held, tmp_path, lambda: [signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, first)]
    )
    for words, signals in (
        ("held", [first]),
        ("cleaning", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
        ("leaving", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]),
    ):
        assert output.readline() == f"{words}\n"
        for number in signals:
            child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said, list(scratch.iterdir())) == (130, "interrupted\n", [])


def test_signals_after_the_end_of_a_command_change_neither_its_output_nor_its_exit_code(tmp_path):
    """Libraries clean up for some time after a training; Ctrl-C printed a traceback of theirs."""
    held = """
import atexit, time
from consilium.cli.main import main

def leave():
    print("leaving", flush=True)
    time.sleep(0.5)

atexit.register(leave)
main()
"""
    child, output, _ = started(held, tmp_path, lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert "leaving\n" in iter(output.readline, "")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, [line.split(":")[0] for line in said.splitlines()]) == (0, ["phantoms"] * 2)


def test_ctrl_c_at_a_question_answers_no_and_the_next_one_ends_the_command(monkeypatch):
    """As at the question whether to spend a budget although the plan advises against it."""

    def interrupted(*given, **more):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr("click.termui.visible_prompt_func", interrupted)
    with interruptible("interrupted"):
        assert not ask_yes_no("spend?")
        with pytest.raises(KeyboardInterrupt):
            interrupted()


def test_a_command_that_asks_a_stopped_server_says_that_it_does_not_answer(study):
    directory, _ = study
    inside = str(free_ports(1, host="127.0.0.1")[0])
    given = ("provision", "server", str(directory), "--host", "localhost", "--internal-port", inside)
    assert consilium(*given).returncode == 0
    with pytest.raises(DaemonFailed, match=r"SuperLink .*127\.0\.0\.1:.*; to fix: `consilium server up`"):
        list_nodes(flower_server(Workspace(directory)))


@pytest.mark.parametrize("group", sorted(_GROUPS))
def test_every_group_has_help(group):
    result = typed(app, group, "--help")
    assert "Usage" in result.output


def test_a_new_study_prints_its_noise_multiplier_and_both_epsilons_with_their_terms(study):
    _, text = study
    assert "noise multiplier z = 0.96002" in text  # .480014 · √4 = .960028, rounded down
    for line in text.splitlines():
        if "ε =" in line:
            assert all(word in line for word in ("δ", "unit", "relation")), line


def test_a_new_appearance_study_is_not_promised_a_joint_query_s_gain(tmp_path):
    terms = ("--labels", "background,lesion", "--grid", "16,16,16", "--queries", "4", "--quorum", "2")
    text = consilium("study", "init", str(tmp_path / "made"), "--name", "trial", *terms, "--protocol", "appearance")
    assert re.search(r"an appearance query .*4 rounds; `consilium plan --label-maps`", text.stdout)


def test_what_a_hospital_reads_names_unit_relation_budget_norm_and_who_sees_what(study):
    directory, _ = study
    text = consilium("study", "show", str(directory), "--for-site").stdout
    for fact in ("ε = 8", "δ = 0.001", "unit hospital", "relation replace-one", "C = 1", "TRUSTED", "WHO SEES WHAT"):
        assert fact in text


def test_a_study_is_made_with_the_sealed_sums_terms_or_refused(tmp_path):
    def made(folder, *terms):
        return CliRunner().invoke(
            app,
            [
                *("study", "init", str(tmp_path / folder), "--name", "trial", "--labels", "background,lesion"),
                *("--grid", "16,16,16", "--queries", "4", "--delta", "1e-3", *terms),
            ],
        )

    assert made("pair", "--quorum", "2").exit_code == 0
    assert made("open", "--quorum", "3", "--aggregation", "open").exit_code == 0
    assert all('aggregation = "open"\n' in (tmp_path / name / "study.toml").read_text() for name in ("pair", "open"))
    assert made("usual", "--quorum", "3").exit_code == 0
    assert 'aggregation = "sealed-sum"\ncolluders = 1\n' in (tmp_path / "usual" / "study.toml").read_text()
    sealed = made("sealed", "--quorum", "4", "--aggregation", "sealed-sum", "--colluders", "2", "--spare-draws", "1")
    assert sealed.exit_code == 0, sealed.output
    text = (tmp_path / "sealed" / "study.toml").read_text()
    assert 'aggregation = "sealed-sum"\ncolluders = 2\nspare_draws = 1\n' in text
    assert isinstance(made("few", "--quorum", "2", "--aggregation", "sealed-sum").exception, InvalidInput)


def test_a_hospital_reads_the_plain_sentence_and_what_groups_lose_before_it_consents(study):
    directory, created = study
    text = " ".join(consilium("study", "show", str(directory), "--for-site").stdout.split())
    right = "right at most 85.2 % of the time"  # Φ(1 / .480014 / 2) = .85121
    for said in (text, " ".join(created.split())):
        assert right in said
        assert "any other hospital's" in said
        assert "knows everything else" in said
        assert "50 %" in said
    assert "your hospital's data" in text
    assert "ε = 8 for 1, 20.82 for 2, 38.04 for 3, 59.63 for 4, 85.57 for 5 (exact accountant, δ = 0.001, unit" in text


def test_a_delta_too_large_for_the_units_is_warned_about_where_their_number_is_known(tmp_path):
    terms = ("--labels", "a,b", "--grid", "16,16,16", "--queries", "4", "--quorum", "2", "--delta", "1e-3")
    few = consilium("study", "init", str(tmp_path / "few"), "--name", "few", *terms)
    assert "warning" not in few.stdout  # 1e-3 suits up to 100 hospitals
    assert "up to 100 hospitals" in few.stdout
    many = consilium("study", "init", str(tmp_path / "many"), "--name", "many", *terms[:-3], "200", *terms[-2:])
    assert re.search(r"warning: δ = 0\.001 .*1/\(10 · 200 hospitals\)", many.stdout)
    patients = consilium("study", "init", str(tmp_path / "p"), "--name", "p", *terms, "--unit", "patient").stdout
    assert "warning" not in patients
    assert "up to 100 patients" in patients
    shown = [consilium("study", "show", str(tmp_path / "p"), "--for-site", "--patients", n) for n in ("100", "101")]
    assert ["1/(10 · 101 patients)" in one.stdout for one in shown] == [False, True]


def test_show_and_status_speak_json(study):
    directory, _ = study
    shown = json.loads(consilium("study", "show", str(directory / "study.toml"), "--json").stdout)
    assert shown["planned_queries"] == 4
    status = json.loads(consilium("study", "status", str(directory), "--json").stdout)
    assert (status["answers"], status["running"]) == (0, False)


def test_a_second_study_in_the_same_directory_is_refused_with_one_line_and_code_2(study):
    directory, _ = study
    result = consilium(
        *("study", "init", str(directory), "--name", "trial", "--labels", "background,lesion"),
        *("--grid", "16,16,16", "--queries", "4", "--quorum", "2"),
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"got '{directory}'" in result.stderr
    assert "Traceback" not in result.stderr


def test_verbose_shows_the_traceback(tmp_path):
    assert "Traceback" in consilium("study", "show", str(tmp_path), "--verbose").stderr


@pytest.mark.parametrize(
    ("number", "remedy", "code"),
    [
        (errno.EACCES, f"give user {os.getuid()}, who runs this", 1),
        (errno.EROFS, "use a folder on a file system that can be written", 1),
        (errno.ENOSPC, "make room", 9),
        (errno.EDQUOT, "make room", 9),
        (errno.EIO, "backup", 9),
        (errno.ELOOP, "check the path", 1),
        (errno.EBUSY, "--verbose", 1),
    ],
)
def test_what_the_system_refuses_is_one_line_with_a_remedy(number, remedy, code, monkeypatch):
    """A full or failing disk has the same exit code in every command."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), "/srv/x")

    monkeypatch.setattr(os, "mkdir", refuse)
    words = ("study", "init", "/srv/x/y", "--name", "n", "--labels", "a,b", "--grid", "16,16,16", "--queries", "4")
    result = consilium(*words, "--quorum", "2")
    assert result.returncode == code
    assert result.stderr.count("\n") == 1, result.stderr
    assert f"/srv/x: {os.strerror(number)}; to fix: " in result.stderr
    assert remedy in result.stderr
    assert "Traceback" in consilium(*words, "--quorum", "2", "--verbose").stderr


def test_a_file_system_without_locks_is_one_line_with_a_remedy(monkeypatch):
    """flock(2) names no path in its error."""

    def no_locks(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "mkdir", no_locks)
    words = ("study", "init", "/srv/x/y", "--name", "n", "--labels", "a,b", "--grid", "16,16,16", "--queries", "4")
    result = consilium(*words, "--quorum", "2")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "No locks available; to fix: use a folder on a file system with locks" in result.stderr


def test_a_locale_that_cannot_name_a_file_is_one_line_with_a_remedy(monkeypatch):
    def latin(*_, **__):
        "Iğdır".encode("iso8859-1")

    monkeypatch.setattr(os, "mkdir", latin)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    words = ("study", "init", "/srv/x/y", "--name", "n", "--labels", "a,b", "--grid", "16,16,16", "--queries", "4")
    result = consilium(*words, "--quorum", "2")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "can express; to fix: set LC_ALL=C.UTF-8" in result.stderr


def test_the_new_ledger_verifies(study):
    directory, _ = study
    key = directory / "keys" / "ledger.key"
    result = consilium("verify", str(directory / "ledger.sqlite"), "--public-key", str(key))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_installed_command_is_main_and_completes_in_a_shell():
    program = [sys.executable, "-c", "from consilium.cli.main import main; main()"]
    asked = {"_CONSILIUM_COMPLETE": "complete_bash", "COMP_WORDS": "consilium st", "COMP_CWORD": "1"}
    result = subprocess.run(program, env=asked, capture_output=True, text=True, timeout=600, check=False)
    assert "study" in result.stdout
    refused = subprocess.run(
        [*program, "study", "show", "/none"], capture_output=True, text=True, timeout=600, check=False
    )
    assert refused.returncode == 2, refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_command_in_a_folder_that_vanished_says_so(tmp_path, monkeypatch, capsys):
    """For example, its disk was removed. Relative paths then have no meaning."""
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "disk")
    (tmp_path / "disk").rmdir()
    monkeypatch.setattr(sys, "argv", ["consilium", "verify", "ledger.sqlite"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = "error: the folder in which this command was started is gone; to fix: `cd` into another one\n"
    assert capsys.readouterr().err == said
