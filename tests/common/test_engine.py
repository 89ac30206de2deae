"""Tests Flower's internals that are used: each is where the table says, and has the members that are used."""

from __future__ import annotations

import importlib.metadata
import re
import sqlite3
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from common import engine
from common.engine import INTERNALS, TABLES, Internal
from tests.attacks.link import Link

ROOT = Path(__file__).resolve().parents[2]


def test_every_internal_of_flower_is_where_the_table_says_and_has_what_is_used_of_it() -> None:
    assert {name: one.missing() for name, one in INTERNALS.items() if one.missing()} == {}
    assert all(getattr(engine, name) is one.load() for name, one in INTERNALS.items())


def test_every_listed_internal_of_flower_has_an_explanation_and_a_user() -> None:
    assert [name for name, one in INTERNALS.items() if len(one.stands_for) < 8] == []
    files = (path for top in ("client", "common", "server") for path in (ROOT / top).rglob("*.py"))
    used = {word for path in files if path.stem != "engine" for word in re.findall(r"\w+", path.read_text("utf-8"))}
    assert INTERNALS.keys() - used == set(), "used nowhere: take it out of common/engine.py"


@pytest.mark.parametrize(
    ("where", "needs", "said"),
    [
        ("flwr.moved:Thing", (), "flwr.moved:Thing is gone"),
        ("flwr.common.constant:NO_SUCH_NAME", (), "NO_SUCH_NAME is gone"),
        ("flwr.proto.node_pb2:Node", ("node_id", "colour"), "flwr.proto.node_pb2:Node has no colour"),
        ("flwr.supernode.runtime.run_clientapp:push_message", ("shape",), "has no shape"),
    ],
)
def test_a_flower_that_moved_something_is_told_by_name(where: str, needs: tuple[str, ...], said: str) -> None:
    assert said in (Internal(where, "a test", needs).missing() or "")


def test_the_check_of_an_installed_flower_names_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.problems() == []
    monkeypatch.setitem(INTERNALS, "Node", replace(INTERNALS["Node"], needs=("colour",)))
    monkeypatch.setitem(INTERNALS, "log", replace(INTERNALS["log"], where="flwr.nowhere:log"))
    assert [line.split(" ")[0] for line in engine.problems()] == ["Node", "log"]


def test_a_name_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"SuperNode.*INTERNALS"):
        _ = engine.SuperNode


@pytest.mark.slow
def test_superlinks_tables_have_the_columns_that_are_read_and_written(tmp_path: Path) -> None:
    link = Link(tmp_path / "superlink.db")
    with sqlite3.connect(link.path) as database:
        has = {table: {row[1] for row in database.execute(f"PRAGMA table_info({table})")} for table in TABLES}
    assert {table: set(columns) - has[table] for table, columns in TABLES.items()} == {table: set() for table in TABLES}
    written = (ROOT / "server" / "operations" / "storage.py").read_text("utf-8")
    named = set(re.findall(r"\b(?:FROM|JOIN|UPDATE) ([a-z_]+)", written)) - {"consilium_stored"}
    assert named == set(TABLES)


def test_a_grid_asks_superlink_through_the_attribute_that_is_named() -> None:
    assert issubclass(HttpGrid, Grid)
    assert hasattr(HttpGrid, engine.RUNTIME_CLIENT)


@pytest.mark.slow
def test_asking_for_a_name_loads_nothing_of_superlink_at_a_site() -> None:
    program = (
        "import sys, common.engine\n"
        "assert not any(name.split('.')[0] == 'flwr' for name in sys.modules)\n"
        "from common.engine import RuntimeHttpClient\n"
        "assert not any(name.startswith(('flwr.superlink', 'sqlalchemy')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_pinned_flower_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pin,) = (line for line in project["dependencies"] if line.startswith("flwr"))
    least, below = re.fullmatch(r"flwr>=([\d.]+),<([\d.]+)", pin).groups()  # type: ignore[union-attr]
    version = tuple(map(int, importlib.metadata.version("flwr").split(".")[:2]))
    assert tuple(map(int, least.split("."))) <= version < tuple(map(int, below.split(".")))
