"""Tests which packages may import each other, by reading every source file, and that no file names a local path."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from symtable import symtable

import pytest
from packaging.specifiers import SpecifierSet
from setuptools import find_packages
from typer.testing import CliRunner

from benchmarks.house import LONG_MODULE, circles, lines_but_docstrings
from common.errors import InvalidInput
from common.protocol_terms import PROTOCOLS
from consilium.cli.bench import commands as bench_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "server", "client", "consilium")

ENGINE = "common/engine.py"
FLWR_PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
FLWR_FILES = {"client/app.py", "common/wire.py", "server/aggregation/inbox.py", "server/app.py"}
FASTAPI_FOLDER = "server/dashboard/"
PRIVACY_PATH = (
    "client/app.py",
    "client/policy.py",
    "server/aggregation/aggregator.py",
    "server/aggregation/exchange.py",
    "server/aggregation/receipts.py",
    "server/aggregation/pipeline.py",
    "common/wire.py",
)
PRIVACY_FOLDERS = (
    "common/privacy/",
    "common/ledger/",
    "server/ledger/",
    "client/ledger/",
    "server/planning/",
    "common/protocols/",
)

PROTOCOL_MODULES = {
    target.partition(":")[0].removesuffix(".protocol")
    for terms in PROTOCOLS.values()
    for target in (terms.site, terms.server)
}
PROTOCOL_ROOMS = (
    "common/protocols/",
    "common/protocol_terms.py",
    *(module.replace(".", "/") for module in PROTOCOL_MODULES),
)

# The names are spelled in pieces, so that the search does not find this file.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("pytorch", "org/whl"),
        ("pypi", "nvidia", "com"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("anaconda", "org"),
    )
)
MACHINE_PATH = re.compile(r"(?<![\w.$})-])/(?:" + "|".join(("work", "root")) + r")/")
TEXT_SUFFIXES = {".cfg", ".conf", ".css", ".html", ".js", ".json", ".md", ".proto", ".py", ".sh", ".toml", ".txt"} | {
    ".yaml",
    ".yml",
    "",
}
NOT_OURS = {".git", ".venv", "build", "dist", "demo-out", "__pycache__", "node_modules"}


def sources() -> list[str]:
    """Return every Python file of the product, relative to the root."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 20
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@dataclass(frozen=True)
class Source:
    """Holds what a file ``imports``, its ``classes``, and what it asks for by a protocol's name."""

    imports: frozenset[str]
    classes: frozenset[str]
    protocols: tuple[str, ...]


@cache
def source(file: str) -> Source:
    """Read a file, once for all tests."""
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=file)))
    imported = _imports(file, nodes)
    classes = frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return Source(imported, classes, tuple(_protocols(nodes, imported)))


def imports(file: str) -> frozenset[str]:
    return source(file).imports


def _imports(file: str, nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Return full names of everything a file imports, also inside functions; relative names are resolved."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    package = Path(file).with_suffix("").parts[: -node.level]
                    base = ".".join((*package, base)).rstrip(".")
                names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="__import__" | "import_module")):
                names |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
            case _:
                pass
    return frozenset(names)


def imports_any(file: str, *packages: str) -> set[str]:
    return {name for name in imports(file) if name.split(".")[0] in packages}


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def on_privacy_path(file: str) -> bool:
    return file in PRIVACY_PATH or file.startswith(PRIVACY_FOLDERS)


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("server", ("client", "consilium")),
        ("client", ("server", "consilium")),
        ("common", ("server", "client", "consilium")),
    ],
)
def test_a_layer_never_imports_across_or_upwards(layer: str, forbidden: tuple[str, ...]) -> None:
    found = {file: imports_any(file, *forbidden) for file in sources() if file.startswith(layer + "/")}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, because a reader has to follow them as well."""
    modules = {module_of(file): imports(file) for file in sources()}
    graph = {name: {other for other in names if other in modules and other != name} for name, names in modules.items()}
    assert circles(graph) == set()


def test_no_module_is_longer_than_one_sitting() -> None:
    """Docstrings do not count: a public function needs room for its arguments, its errors and an example."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in sources()}
    long = [file for file, text in texts.items() if len(text.splitlines()) > LONG_MODULE]
    assert len(long) > 20
    assert [file for file in long if lines_but_docstrings(texts[file]) > LONG_MODULE] == []


def test_the_search_finds_a_circle_and_nothing_else() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == {frozenset("abc")}


def test_the_privacy_core_takes_terms_and_never_a_study() -> None:
    core = [file for file in sources() if file.startswith("common/privacy/")]
    assert len(core) > 10
    assert [file for file in core if "common.config" in imports(file)] == []


def test_nothing_of_the_server_stands_on_the_dashboard() -> None:
    rest = [file for file in sources() if file.startswith("server/") and not file.startswith(FASTAPI_FOLDER)]
    assert [file for file in rest if any(name.startswith("server.dashboard") for name in imports(file))] == []


def test_a_protocol_is_named_in_its_room_alone() -> None:
    """Other folders read its terms (``common/protocol_terms.py``) and use no key, name, half or codec class of it.

    A document's key that equals a protocol's name is allowed, because formats keep their keys.
    """
    found = {file: source(file).protocols for file in sources() if not file.startswith(PROTOCOL_ROOMS)}
    assert {file: names for file, names in found.items() if names} == {}


def _protocols(nodes: Sequence[ast.AST], imported: frozenset[str]) -> list[str]:
    """Return every place in a file that names a protocol, imports one, or tests a codec's class."""
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys if key is not None}
    found = [name for name in imported if name.startswith(tuple(PROTOCOL_MODULES))]
    for node in nodes:
        match node:
            case ast.Attribute(attr="joint"):
                found.append(f"line {node.lineno}: .joint")
            case ast.Constant(value=str() as value) if value in PROTOCOLS and id(node) not in keys:
                found.append(f"line {node.lineno}: {value!r}")
            case ast.Call(func=ast.Name(id="isinstance")) if re.search(r"\b\w+Codec\b", ast.unparse(node)):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
            case _:
                pass
    return found


def test_the_search_for_protocols_by_name_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'import server.protocols.joint.belief\nif study.codec.joint or kind == "appearance": isinstance(c, PcaCodec)\n'
    )
    (tmp_path / "a.py").write_text(text + 'table = {"joint": 1}\n')
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source.cache_clear()
    assert len(source("a.py").protocols) == 4
    source.cache_clear()


def test_a_class_name_serves_one_module() -> None:
    """No two modules define a class of the same name."""
    named: dict[str, set[str]] = {}
    research = [path.relative_to(ROOT).as_posix() for path in (ROOT / "research").glob("*.py")]
    assert len(research) > 20
    for file in [*sources(), *research]:
        for name in source(file).classes:
            named.setdefault(name, set()).add(file)
    assert {name: files for name, files in named.items() if len(files) > 1} == {}


def test_folders_beside_each_other_import_in_one_direction() -> None:
    """Of two folders only one imports from the other; a folder counts together with the folders inside it."""
    modules = {module_of(file): file for file in sources()}
    between: dict[tuple[str, str], list[str]] = {}
    for name, file in modules.items():
        for other in imports(file):
            if other in modules:
                ends = (file.rpartition("/")[0], modules[other].rpartition("/")[0])
                if not ends[0].startswith(ends[1]) and not ends[1].startswith(ends[0]):
                    between.setdefault(ends, []).append(f"{name} imports {other}")
    mutual = sorted(ends for ends in between if ends < ends[::-1] and ends[::-1] in between)
    assert {ends: (between[ends], between[ends[::-1]]) for ends in mutual} == {}


def test_the_product_never_imports_its_tests() -> None:
    assert [file for file in sources() if imports_any(file, "tests", "pytest", "hypothesis")] == []


def test_research_is_imported_by_the_bench_command_alone_and_only_where_a_clone_has_it() -> None:
    assert {file for file in sources() if imports_any(file, "research")} == {"consilium/cli/bench.py"}
    tree = ast.parse((ROOT / "consilium/cli/bench.py").read_text(encoding="utf-8"))
    assert not any(
        (node.module or "").startswith("research") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    )


def test_research_imports_the_product_and_none_of_its_tests() -> None:
    files = [path for path in (ROOT / "research").rglob("*.py") if "tests" not in path.relative_to(ROOT).parts]
    assert len(files) > 20
    found = {path.name for path in files if imports_any(path.relative_to(ROOT).as_posix(), "tests", "pytest")}
    assert found == set()


def test_the_wheel_holds_the_product_without_its_research() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=found["include"])
    assert {"server", "client", "common", "consilium.cli", "consilium.audit"} <= set(packages)
    assert [name for name in packages if "research" in name or name.startswith("tests")] == []


@pytest.mark.slow
def test_a_benchmark_imports_only_names_that_exist() -> None:
    """Most benchmarks are imported only when somebody runs them, so no other test would notice a moved name."""
    missing = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for name in imports(f"benchmarks/{path.name}"):
            module, _, own = name.rpartition(".")
            file = ROOT / f"{module.replace('.', '/')}.py"
            if file.is_file() and own not in symtable(file.read_text(), module, "exec").get_identifiers():
                missing.append(f"{path.name}: {name}")
    assert missing == []


@pytest.mark.parametrize("words", [["papers", "--data", "data", "--out", "out"], [], ["utility", "--json"]])
def test_bench_says_in_one_line_what_it_needs_where_research_is_missing(tmp_path: Path, words: list[str]) -> None:
    refused = CliRunner().invoke(bench_of(tmp_path), words).exception
    assert isinstance(refused, InvalidInput)
    assert "clone the repository" in str(refused)
    assert "pip install -e ." in str(refused)
    assert len(str(refused).splitlines()) == 1


def test_bench_in_a_clone_takes_no_foreign_package_called_research(tmp_path: Path) -> None:
    foreign = tmp_path / "research"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("print('foreign code ran')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from consilium.cli.main import main; main()", "bench", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "foreign code ran" not in done.stdout
    assert {"papers", "utility", "pate", "networks", "poison", "private"} <= set(re.findall(r"[a-z]+", done.stdout))


def test_no_test_module_imports_another() -> None:
    """What tests share is in modules without tests."""
    folders = (ROOT / "tests", ROOT / "research" / "tests")
    files = [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 100
    told = re.compile(r"\b(from|import)\s[^=:]*\btest_|__import__|import_module")
    some = [file for file in files if told.search((ROOT / file).read_text(encoding="utf-8"))]
    assert [file for file in some if any(re.search(r"(^|\.)test_", name) for name in imports(file))] == []


def test_flower_is_imported_in_these_files_only_and_what_is_not_public_through_one_door() -> None:
    found = {file: imports_any(file, "flwr") for file in sources()}
    assert {file for file, names in found.items() if names} == FLWR_FILES
    assert all(name.startswith(FLWR_PUBLIC) for names in found.values() for name in names)
    named = {
        file for file in sources() if re.search(r"['\"]flwr\.(?!proto\.Runtime)", (ROOT / file).read_text("utf-8"))
    }
    assert named == {ENGINE}


def test_fastapi_is_imported_in_the_dashboard_only() -> None:
    strays = [file for file in sources() if imports_any(file, "fastapi") and not file.startswith(FASTAPI_FOLDER)]
    assert strays == []


def test_no_file_of_the_privacy_path_names_torch() -> None:
    guarded = [file for file in sources() if on_privacy_path(file)]
    assert len(guarded) > len(PRIVACY_PATH)
    assert [file for file in guarded if imports_any(file, "torch", "monai")] == []


def test_importing_the_privacy_path_loads_no_torch() -> None:
    """Indirect imports count: a fresh interpreter imports the modules in turn and reports which one loads torch."""
    modules = [module_of(file) for file in sources() if on_privacy_path(file)]
    program = (
        "import importlib, json, sys\n"
        "found = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        found.append(name)\n"
        "        break\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def texts() -> Iterator[tuple[str, str]]:
    """Return every text file that git tracks or would track; without git, all files except for build output."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)]
    for path in sorted(set(files)):
        if path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace")


def test_no_file_names_a_package_registry_or_a_folder_of_one_machine() -> None:
    found = []
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or any(host in line for host in REGISTRY_HOSTS):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []


@pytest.mark.parametrize("text", ["cd /{}/x", "'/{}/main'", "file:///{}/a", "=/{}/"])
@pytest.mark.parametrize("folder", ["work", "root"])
def test_the_search_for_machine_paths_finds_them(text: str, folder: str) -> None:
    assert MACHINE_PATH.search(text.format(folder))


def test_the_search_for_machine_paths_leaves_other_paths_alone() -> None:
    for text in ("client/work/x", "$HOME/root/x", "{base}/work/x", "a /workspace/ b", "./root/x"):
        assert not MACHINE_PATH.search(text)


def test_constraints_pin_every_package_without_a_host_or_a_local_build() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert len(lines) > 50
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*", line)]
    assert wrong == []
    assert "consilium" not in {line.partition("==")[0].lower() for line in lines}


def test_every_pinned_version_installs_on_the_oldest_python_that_is_supported() -> None:
    """Debian 12 has Python 3.11.2. A pinned package that needs a newer Python would stop `make venv` there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest,) = re.findall(r">=([0-9.]+)", project["requires-python"])
    pinned, wrong = 0, []
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split():
        name, _, version = line.partition("==")
        with suppress(PackageNotFoundError):
            found = distribution(name)
            if found.version.partition("+")[0] == version:
                pinned += 1
                needed = found.metadata.get("Requires-Python", "")
                if not SpecifierSet(needed).contains(f"{oldest}.0"):
                    wrong.append(f"{line} needs Python {needed}")
    assert pinned > 50
    assert wrong == []
