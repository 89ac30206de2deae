"""Tests that the documents agree with the code: every command in them exists with the options that it is given."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

from common import __version__, errors
from common.config import GateConfig, PoolConfig, StartConfig
from common.errors import LEDGER_REMEDY
from common.event_kinds import EVENTS
from common.ledger.records import KINDS
from common.messages import REASONS
from common.wording import DECLINED, MISSED
from consilium.cli.main import app
from tests import (
    command_reference,
    configuration_reference,
    glossary_links,
    message_reference,
    module_table,
    notebook,
    recorded_tables,
    results_table,
)
from tests.documents import WALKS, walk
from tests.worlds import make_study

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted((*ROOT.glob("*.md"), ROOT / "research" / "README.md", *(ROOT / "docs").rglob("*.md")))
COMMAND = typer.main.get_command(app)


def typed() -> list[str]:
    """Return every command line in a code block of any document, without remarks, redirections and alternatives."""
    found = set()
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md":
            text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
            for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
                for line in re.findall(r"^ *(?:\$ )?(consilium [a-z].*)$", block, re.MULTILINE):
                    found.add(re.sub(r" \| \S+|[\[\]…]", "", re.split(r" {2}| > ", line)[0]).strip())
    return sorted(found)


def named() -> list[str]:
    """Return every command that a document or a message of the program names in running text: `consilium study run`."""
    sources = (path for top in ("client", "common", "consilium", "server") for path in (ROOT / top).rglob("*.py"))
    found = set()
    for path in (*(each for each in DOCUMENTS if each.name != "CHANGELOG.md"), *sources):
        spans = re.findall(r"`consilium ([a-z][^`\n]*)`", path.read_text(encoding="utf-8"))
        found |= {" ".join(re.match(r"(?:[a-z-]+ ?){0,3}", span)[0].split()) for span in spans}
    return sorted(found - {""})


def command_of(words: list[str]) -> tuple[click.Command, list[str], click.Context]:
    """Return the command that words lead to, and the remaining words; raise AssertionError if they lead to none."""
    command: click.Command = COMMAND
    context = click.Context(command, info_name="consilium")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        below = command.get_command(context, words[0])
        if below is None and command.invoke_without_command:
            break
        assert below is not None, f"{command.name} has no {words[0]}"
        command, words = below, words[1:]
        context = click.Context(command, parent=context)
    return command, words, context


def wrong_with(line: str) -> str:
    """Return what is wrong with a command line; empty if it can be parsed."""
    try:
        command, words, context = command_of(shlex.split(line)[1:])
        command.make_context(command.name, list(words), parent=context.parent, resilient_parsing=True)
    except (AssertionError, ValueError, click.ClickException) as error:
        return str(error) or type(error).__name__
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return f"unknown options {sorted(given - known)}" if given - known else ""


def test_every_command_line_in_a_document_parses():
    lines = typed()
    assert len(lines) > 100
    assert {line: wrong for line in lines if (wrong := wrong_with(line))} == {}


@pytest.mark.parametrize("line", ["consilium study fly", "consilium plan --no-such-option 3"])
def test_a_command_line_that_does_not_parse_is_found(line):
    assert wrong_with(line)


def test_every_option_that_a_text_gives_a_command_is_that_command_s():
    """The test reads running text, with or without the program's name: `site recover --own-ledger`."""
    commands = {name.removeprefix("consilium "): command for name, command in command_reference.commands()}
    seen = 0
    for path in (each for each in DOCUMENTS if each.name != "CHANGELOG.md"):
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`(?:consilium )?([^`\n]+)`", text):
            name = max((name for name in commands if f"{span} ".startswith(f"{name} ")), key=len, default=None)
            given = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span))
            if name and given:
                parameters = commands[name].params
                assert given <= {option for one in parameters for option in (*one.opts, *one.secondary_opts)}, span
                seen += 1
    assert seen > 40


def test_every_command_that_a_text_or_a_message_names_exists():
    found = named()
    assert len(found) > 100
    for words in found:
        command_of(words.split())


def test_no_text_leaves_it_to_the_reader_whether_something_is_one_or_several():
    """No text of the program or of a page contains a plural such as "round(s)"."""
    sources = [path for folder in ("client", "common", "consilium", "server") for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in sources]
    texts = [str(node.value) for tree in trees for node in tree if isinstance(node, ast.Constant)]
    shown = [path for folder in ("client", "docs", "server") for path in (ROOT / folder).rglob("*.[hm][td]*")]
    texts += [path.read_text(encoding="utf-8") for path in shown if path.suffix in (".html", ".md")]
    assert len(texts) > 1000
    assert [found for text in texts if "(s)" in text for found in re.findall(r".{,30}[a-z]\(s\)", text)] == []


def test_the_runbook_has_every_alarm_every_word_of_refusal_and_every_exit_code_and_no_other():
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    tables = [set(re.findall(r"^\| `?([\w-]+)`? \|", part, re.MULTILINE)) for part in text.split("\n## ")[1:]]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "server" / "dashboard").rglob("*.py")]
    raised = set()
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "Alarm":
            raised |= {each.value for each in ast.walk(call.args[0]) if isinstance(each, ast.Constant)} - {True, False}
    assert tables[0] - {"alarm"} == raised
    assert tables[1] - {"word", "flower-N"} == set(DECLINED)
    said = dict(re.findall(r"^\| `?([\w-]+)`? \| (site|server|both) \|", text, re.MULTILINE))
    assert said.keys() == tables[1] - {"word"}
    assert {word for word, by in said.items() if by != "server"} == set(REASONS) - {"accepted"}
    assert all(f"`{word}`" in text for word in MISSED)
    codes = {str(kind.exit_code) for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert tables[2] - {"code"} == codes | {"0", "8", "10", "11", "12", "130"}


@pytest.mark.parametrize("role", ["server", "site"])
def test_the_ledger_page_has_every_kind_of_row_and_no_other(role: str) -> None:
    """The rows that both ledgers have stand in the server's table."""
    text = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## Rows of a {role} ledger\n(.*?)(?=^## )", text, re.M | re.S)
    shown = set(re.findall(r"^\| `([\w-]+)` \|", part, re.M))
    both = {"genesis", "key", "note"} if role == "site" else set()
    assert shown == set(KINDS[role]) - both


def test_the_configuration_reference_names_every_section_that_a_hospital_consents_to():
    page = configuration_reference.DOCUMENT.read_text(encoding="utf-8")
    sentence = page.split("A hospital consents to")[1].split(":")[0]
    gate, pool, start = GateConfig(verdicts=2), PoolConfig(epsilon=64.0), StartConfig(weights="a" * 64)
    hashed = make_study(quorum=4, gate=gate, pool=pool, start=start).to_json().keys() - {"name", "schema"}
    assert set(re.findall(r"\[(\w+)\]", sentence)) == hashed


def test_the_configuration_reference_names_every_key_as_it_is_now():
    assert configuration_reference.DOCUMENT.read_text(encoding="utf-8") == configuration_reference.reference(), (
        "docs/configuration.md is old: python -m tests.configuration_reference writes it anew"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_documents_make_a_site_in_which_every_page_has_its_place_and_no_link_leads_nowhere(site):
    assert "http" not in "".join(
        re.findall(r'<(?:script|link)[^>]*(?:src|href)="(http[^"]*)', (site / "index.html").read_text())
    )


STOP_WORDS = {"all", "from", "like", "to"}
"""Options that are stop words, which the search ignores on every page."""


@pytest.mark.slow
def test_every_refusal_alarm_event_option_and_key_is_a_word_of_the_search_on_its_page(site):
    """Words are split as the site's search does; ``tests/browser/test_site.py`` types some of them."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    words: dict[str, set[str]] = {}
    for entry in index["docs"]:
        text = html.unescape(re.sub(r"<[^>]+>", "", f"{entry['title']} {entry['text']}")).lower()
        words.setdefault(entry["location"].partition("#")[0], set()).update(
            re.split(index["config"]["separator"], text)
        )
    runbook = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"), re.M)
    keys = re.findall(r"^\| `(\w+)` \|", configuration_reference.reference(), re.M)
    options = {
        option.lstrip("-")
        for _, command in command_reference.commands()
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and parameter.name != "help"
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    assert set(DECLINED) | set(MISSED) | set(runbook) <= words["runbook.html"]
    assert set(EVENTS) <= words["events.html"]
    assert options - STOP_WORDS <= words["commands.html"]
    assert set(keys) <= words["configuration.html"]
    assert min(map(len, (runbook, keys, options))) > 30


@pytest.mark.slow
@pytest.mark.parametrize("start", ["README", "index.html"])
def test_an_answer_is_three_clicks_away_at_most(site, start):
    ways = {question: walk(site, start, WALKS[question]) for question in WALKS}
    assert {question: way for question, way in ways.items() if not 2 <= len(way) <= 4} == {}


def test_the_readme_has_its_two_commands():
    assert "$ make demo" in README
    assert "$ make test" in README


def test_the_results_tables_are_the_recorded_results():
    for path in results_table.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text.count(results_table.BEGIN) == 1
        assert text == results_table.page(text), f"{path.name} is old: python -m tests.results_table writes it anew"
    for result in results_table.recorded():
        assert result["command"].startswith("consilium bench utility ")
        assert result["commit"]


def test_every_measured_table_is_its_record_and_no_record_is_left_out():
    shown = set()
    for path in recorded_tables.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text == recorded_tables.page(text), f"{path.name} is old: python -m tests.recorded_tables writes it anew"
        shown |= {mark[2] for mark in recorded_tables.MARK.finditer(text)}
    for folder, begins in (("codecs", "codecs/"), ("tables", "tables/"), ("papers", "")):
        there = {f"{begins}{path.stem}" for path in (recorded_tables.RESULTS / folder).glob("*.json")}
        assert {name for name in shown if name.rpartition("/")[0] == begins.strip("/")} == there


NO_RESULTS = {
    ("docs/lab/codecs-measured.md", "paper"): "settings of the paper and ours",
    ("docs/lab/papers.md", "source, item"): "items of the papers; held by tests/test_papers_table.py",
    ("docs/lab/performance.md", "what | at 10,000"): "a calculation; its text says so",
    ("docs/lab/privacy-measured.md", "what was broken"): "what was broken; the audit's slow tests hold the alarms",
    ("docs/privacy.md", "what holds"): "theorems, their bounds and tests",
    ("docs/privacy.md", "ε, δ"): "constants; held by tests/common/privacy/test_accounting.py",
}
"""Document and first words of a table whose figures are no measurements → what they are."""
GENERATED = {"docs/commands.md", "docs/configuration.md", "docs/messages.md"}


def unrecorded(name: str, text: str) -> list[str]:
    """Return the heads of tables that show two decimals or more and are neither code nor a record's table."""
    text = re.sub(r"<!-- (?:recorded|results|measured): .*?<!-- (?:\w+: )?end -->", "", text, flags=re.DOTALL)
    found = []
    for head, rows in re.findall(r"^(\|.*)\n\|[-| :]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        figures = re.findall(r"(?<![\w.])[-+−]?\d*\.\d+(?![\w.]*\w)", re.sub(r"`[^`]*`|\]\([^)]*\)", "", rows))
        if len(figures) > 1 and not any(name == page and first in head[:60] for page, first in NO_RESULTS):
            found.append(head)
    return found


def test_every_table_of_figures_is_made_of_a_record():
    for path in DOCUMENTS:
        name = path.relative_to(ROOT).as_posix()
        if name not in GENERATED:
            assert unrecorded(name, path.read_text(encoding="utf-8")) == [], name


def test_a_table_of_figures_without_a_record_is_found():
    text = "| a | Dice |\n|---|---|\n| student | .804 |\n| control | **.758** |\n"
    assert unrecorded("docs/data.md", text) == ["| a | Dice |"]
    assert unrecorded("docs/data.md", f"<!-- recorded: tables/x -->\n{text}<!-- end -->\n") == []
    assert unrecorded("docs/data.md", text.replace(".758", "`0.2.0`")) == []


def test_every_epsilon_in_the_readme_has_its_delta_unit_and_relation_nearby():
    for match in re.finditer(r"ε = [\d.]+", README):
        around = README[match.start() - 400 : match.end() + 400]
        assert all(word in around for word in ("δ", "unit", "replace-one")), match.group()


def test_the_list_of_messages_is_that_of_the_source_and_every_message_says_what_to_do():
    """A limit or a remedy for bad input; other errors state what happened and change nothing."""
    assert message_reference.DOCUMENT.read_text(encoding="utf-8") == message_reference.reference(), (
        "docs/messages.md is old: python -m tests.message_reference writes it anew"
    )
    found = message_reference.messages()
    assert len(found) > 1000
    silent = [each.place for each in found if each.kind == "InvalidInput" and not each.limit and not each.remedy]
    assert len(silent) <= 6, silent


OF_A_DISPUTE = (
    "client/ledger/site_sealed.py",
    "consilium/audit/dispute.py",
    "server/study/evidence.py",
    "server/study/spoiled.py",
)


def test_every_error_of_a_dispute_says_what_a_draw_is():
    found = [each for each in message_reference.messages() if each.place.partition(":")[0] in OF_A_DISPUTE]
    said = [each for each in found if re.search(r"\bdraw\b", f"{each.cause} {each.limit}")]
    assert len(said) >= 6
    assert [each.place for each in said if "attempt at a sealed sum" not in f"{each.cause} {each.limit}"] == []


@pytest.mark.parametrize("kind", ["Refused", "DaemonFailed", "LedgerCorrupt"])
def test_every_refusal_failure_and_damaged_ledger_states_a_remedy(kind: str) -> None:
    silent = [each.place for each in message_reference.messages() if each.kind == kind and not each.remedy]
    assert silent == []


def test_no_message_about_a_servers_receipt_tells_a_site_to_stop_what_writes_its_own_ledger() -> None:
    of_receipts = [each for each in message_reference.messages() if re.match("(the|a) (receipt|release)", each.cause)]
    assert len(of_receipts) > 20
    assert [each.place for each in of_receipts if each.remedy == LEDGER_REMEDY] == []


def test_the_command_reference_names_every_command_and_option_as_they_are_now():
    assert command_reference.DOCUMENT.read_text(encoding="utf-8") == command_reference.reference(), (
        "docs/commands.md is old: python -m tests.command_reference writes it anew"
    )
    assert len(list(command_reference.commands())) > 50


@pytest.mark.parametrize("document", module_table.DOCUMENTS, ids=lambda path: path.parent.name)
def test_a_folders_document_names_every_module_and_none_that_is_gone(document):
    named = module_table.named(document.read_text(encoding="utf-8"))
    there = module_table.modules(module_table.DOCUMENTS[document])
    assert {folder: set(names) for folder, names in named.items() if names} == {
        folder: set(names) for folder, names in there.items() if names
    }, f"{document.name} is old: python -m tests.module_table brings it up to date"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_gives_now():
    stored = json.loads(notebook.DOCUMENT.read_text(encoding="utf-8"))
    now = notebook.run(stored)
    assert notebook.texts(now) == notebook.texts(stored), "python -m tests.notebook writes its outputs anew"
    assert [len(cell.get("outputs", [])) for cell in now["cells"]] == [
        len(cell.get("outputs", [])) for cell in stored["cells"]
    ]
    assert notebook.DOCUMENT.stat().st_size < 300_000
    assert any(re.search("nobody: True", text) for text in notebook.texts(now))


def test_the_newest_release_in_the_changelog_is_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d\n\nTag `v\1`", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


ADRS = sorted(path for path in (ROOT / "docs" / "adr").glob("*.md") if path.name != "README.md")


def test_every_decision_has_number_status_and_date_and_stands_in_the_index():
    form = r"# (\d+)\. (.+)\n\nStatus: ((?:accepted|proposed|replaced).*)\. Date: (\d{4}-\d\d-\d\d)\.\n"
    rows = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8").splitlines()
    for path in ADRS:
        stated = re.match(form, path.read_text(encoding="utf-8"))
        assert stated is not None, f"{path.name}: '# N. Title', an empty line, 'Status: … Date: YYYY-MM-DD.'"
        assert f"{int(stated[1]):04d}" == path.name.partition("-")[0]
        assert f"| [{stated[1]}]({path.name}) | {stated[2]} | {stated[3]} | {stated[4]} |" in rows, path.name


def test_decisions_are_numbered_one_after_the_other():
    assert [int(path.name.partition("-")[0]) for path in ADRS] == list(range(1, len(ADRS) + 1))


def test_every_page_opens_with_whom_it_is_for_and_what_they_can_do_after_it():
    """``contributing.md`` includes CONTRIBUTING.md."""
    folders = [ROOT / "docs" / name for name in ("", "start", "concepts", "lab")]
    for path in (path for folder in folders for path in folder.glob("*.md")):
        if path.name != "contributing.md":
            second = path.read_text(encoding="utf-8").split("\n\n")[1]
            assert second.startswith("For "), path.name
            assert "After this page" in " ".join(second.split()), path.name


def test_a_reader_of_a_clone_comes_from_the_page_contributing_to_the_guide():
    """The built site includes the guide there; a forge shows the page as it is."""
    assert "[CONTRIBUTING.md](../CONTRIBUTING.md)" in (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")


def test_the_scientists_three_commands_are_about_one_study():
    text = (ROOT / "docs" / "start" / "scientist.md").read_text(encoding="utf-8")
    first = [
        line.split() for line in text.splitlines() if re.match(r"consilium (plan|simulate|bench utility) --", line)
    ]
    terms = [dict(re.findall(r"--(\S+) (\S+)", " ".join(words))) for words in first]
    named = ("hospitals", "unit", "voters", "epsilon", "delta", "aggregation")
    assert len(terms) == 3
    assert len({tuple(one[name] for name in named) for one in terms}) == 1


def test_the_first_command_of_a_page_for_beginners_stands_after_how_to_install():
    """What a clone needs before its first command; a hospital's page leads to its own way of installing."""
    pages = ("operator", "privacy-officer", "scientist")
    for name in ("README.md", "docs/index.md", *(f"docs/start/{page}.md" for page in pages)):
        text = (ROOT / name).read_text(encoding="utf-8")
        first = re.search(r"(?m)^(\$ )?(make demo|consilium )|^.*`consilium (plan|study show) ", text)
        assert first is not None, name
        before = text[: first.start()]
        assert "`make venv`" in before, name
        assert ".venv/bin" in before, name


def test_a_glossary_word_is_a_link_where_a_page_uses_it_first():
    for path in glossary_links.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert glossary_links.linked(path, text) == text, (
            f"{path.name}: python -m tests.glossary_links writes the links"
        )


def test_nobody_is_told_to_install_consilium_by_name_from_an_index():
    """On the public index that name belongs to another project; docs/deployment.md warns of it."""
    sources = (path for folder in message_reference.FOLDERS for path in (ROOT / folder).rglob("*.py"))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *sources):
        text = " ".join(path.read_text(encoding="utf-8").split()).replace("**Never `pip install consilium`**", "")
        assert not re.search(r"pip install ['\"]?consilium\b", text), path.name


def test_no_link_to_the_glossary_stands_in_a_command_that_runs_over_two_lines():
    word = next(iter(glossary_links.words()))
    text = f"Run `consilium --{word}\n{word}.json` now.\n\nOne {word}.\n"
    assert glossary_links.linked(glossary_links.DOCS / "page.md", text).startswith(text.partition("One")[0])


@pytest.mark.parametrize(
    ("subject", "status"),
    [("Refuse a pool that is spent", 0), ("ε" * 72, 0), ("ε" * 73, 1), ("", 1), ("Refuse a pool.", 1)],
)
def test_the_commit_hook_takes_subjects_of_72_characters_and_no_longer_ones(subject, status, tmp_path):
    (tmp_path / "message").write_text(f"{subject}\n\nDetails.\n", encoding="utf-8")
    done = subprocess.run([ROOT / ".githooks" / "commit-msg", tmp_path / "message"], capture_output=True, check=False)
    assert done.returncode == status


def test_every_list_has_an_empty_line_before_it():
    """Without an empty line the site renders the list as a paragraph."""
    for path in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        torn = re.findall(r"^(?![-*] |\d+\. |[ |#]|$)[^\n]*\n(?:[-*]|1\.) \S[^\n]*", text, re.MULTILINE)
        assert torn == [], path.name
        inside = re.findall(r"^[ \-].*[.:] - [*A-Z].*", text, re.MULTILINE)  # two items on one line
        assert inside == [], path.name


def test_what_belongs_to_an_item_of_a_list_is_indented_by_four():
    """Otherwise the site ends the list there and restarts its numbers."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\n\n {1,3}\S[^\n]*", text) == [], path.name


def test_every_link_between_documents_leads_somewhere():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
        for target in re.findall(r"`(docs/[\w/.-]+\.md)`", path.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_every_source_file_that_a_document_names_exists():
    """Exceptions are files that a document reports as given up, and files that the reader is to write."""
    given_up = {"common/privacy/ledger.py", "common/ledger/checkpoint.py"}
    tops = "server|client|common|consilium|research|tests|benchmarks|docker"
    there = {path.name for top in tops.split("|") for path in (ROOT / top).rglob("*.py")} | {"prepare.py"}
    given_up |= set(re.findall(r"Write\s`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for name in re.findall(
            rf"(?<![\w/.-])((?:{tops})/[\w/.-]+\.(?:py|sh|yml))\b", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists() or name in given_up, f"{path.name}: {name}"
        for name in re.findall(r"`(\w+\.py)`", path.read_text(encoding="utf-8")):
            assert name in there, f"{path.name}: {name}"
