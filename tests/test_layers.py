"""Who may import whom, by reading every source file; and that no file carries a host or path of one machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from setuptools import find_packages
from typer.testing import CliRunner

from benchmarks.house import LONG_MODULE, circles
from common.errors import InvalidInput
from consilium.cli.bench import app as bench_app

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "server", "client", "consilium")

FLWR_FILES = {
    "client/app.py",
    "common/wire.py",
    "server/app.py",
    "server/operations/registered_node.py",
    "server/operations/superlink.py",
}
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

# Spelled in pieces, so that this file does not find itself.
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
    """Every Python file of the product, relative to the root."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 20
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@cache
def imports(file: str) -> frozenset[str]:
    """Full names of all a file imports, at any depth and inside functions; relative imports are resolved."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=file)
    names: set[str] = set()
    for node in ast.walk(tree):
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
    """Imports inside functions count: a circle that is deferred is a circle to who reads it."""
    modules = {module_of(file): imports(file) for file in sources()}
    graph = {name: {other for other in names if other in modules and other != name} for name, names in modules.items()}
    assert circles(graph) == set()


def test_no_module_is_longer_than_one_sitting() -> None:
    found = {file for file in sources() if len((ROOT / file).read_text(encoding="utf-8").splitlines()) > LONG_MODULE}
    assert found == set()


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


def test_the_product_never_imports_its_tests() -> None:
    assert [file for file in sources() if imports_any(file, "tests", "pytest", "hypothesis")] == []


def test_research_is_imported_by_the_bench_command_alone_and_only_when_it_runs() -> None:
    bench = "consilium/cli/bench.py"
    product = [file for file in sources() if not file.startswith("consilium/research/")]
    found = {file for file in product if any(name.startswith("consilium.research") for name in imports(file))}
    assert found == {bench}
    top = [
        node for node in ast.parse((ROOT / bench).read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)
    ]
    assert not any((node.module or "").startswith("consilium.research") for node in top)


def test_the_wheel_holds_the_product_without_its_research() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=found["include"], exclude=found["exclude"])
    assert {"server", "client", "common", "consilium.cli", "consilium.audit"} <= set(packages)
    assert [name for name in packages if "research" in name or name.startswith("tests")] == []


def test_bench_says_in_one_line_what_it_needs_where_research_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = CliRunner().invoke(bench_app, ["papers", "--data", "data", "--out", "out"]).exception
    assert isinstance(refused, InvalidInput)
    assert "pip install -e ." in str(refused)
    assert len(str(refused).splitlines()) == 1


def test_no_test_module_imports_another() -> None:
    """What tests share stands in modules that hold no test."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if any(re.search(r"(^|\.)test_", name) for name in imports(file))] == []


def test_flower_is_imported_in_these_files_only() -> None:
    assert {file for file in sources() if imports_any(file, "flwr")} == FLWR_FILES


def test_fastapi_is_imported_in_the_dashboard_only() -> None:
    strays = [file for file in sources() if imports_any(file, "fastapi") and not file.startswith(FASTAPI_FOLDER)]
    assert strays == []


def test_no_file_of_the_privacy_path_names_torch() -> None:
    guarded = [file for file in sources() if on_privacy_path(file)]
    assert len(guarded) > len(PRIVACY_PATH)
    assert [file for file in guarded if imports_any(file, "torch", "monai")] == []


def test_importing_the_privacy_path_loads_no_torch() -> None:
    """Indirect imports too: one fresh interpreter imports the modules in turn and says after which torch was there."""
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
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def texts() -> Iterator[tuple[str, str]]:
    """Every text file that git tracks or would track; all files but build output where there is no git."""
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
