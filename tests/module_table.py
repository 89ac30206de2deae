"""Writes the tables of docs/architecture.md and research/README.md: ``python -m tests.module_table``.

A table belongs to the folder that the heading above it names. Rows keep their order. A row's promise is the first
sentence of its module's docstring. A new module is added at the end of its folder's table, and a removed module is left
out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {
    ROOT / "docs" / "architecture.md": ("common", "server", "client", "consilium"),
    ROOT / "research" / "README.md": ("research",),
}
"""A document, and the packages whose modules it names."""

_HEADING = re.compile(r"^### `([\w/]+)/`")
_ROW = re.compile(r"^\| `(\w+)` \|")


def modules(packages: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules of every folder of some packages, without tests; the list may be empty."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        names = found.setdefault(path.parent.relative_to(ROOT).as_posix(), [])
        if path.name != "__init__.py":
            names.append(path.stem)
    return found


def named(text: str) -> dict[str, list[str]]:
    """Return the modules that the document names, by the folder of the heading above them."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            found[heading[1]] = []
        elif (row := _ROW.match(line)) and found:
            list(found.values())[-1].append(row[1])
    return found


def promise(folder: str, module: str) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / folder / f"{module}.py").read_text(encoding="utf-8"))) or ""
    words = " ".join(text.split("\n\n")[0].replace("``", "`").replace("|", "\\|").split())
    return re.split(r"(?<!\bal)\.(?:\s|$)", words, maxsplit=1)[0]


def brought_up_to_date(text: str, packages: Iterable[str]) -> str:
    """Return the document with every table made from the present modules; folders that it does not name come last."""
    there, before = modules(packages), named(text)
    for folder in (folder for folder in there if folder not in before and there[folder]):
        text += f"\n### `{folder}/`\n\n| | |\n|---|---|\n"
        before[folder] = []
    lines: list[str] = []
    folder, due = "", False
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            folder, due = heading[1], True
        if not _ROW.match(line):
            lines.append(line)
        if due and line.startswith("|---"):
            old = [name for name in before[folder] if name in there.get(folder, ())]
            new = [name for name in there.get(folder, ()) if name not in old]
            lines += [f"| `{name}` | {promise(folder, name)} |" for name in (*old, *new)]
            due = False
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for document, packages in DOCUMENTS.items():
        document.write_text(brought_up_to_date(document.read_text(encoding="utf-8"), packages), encoding="utf-8")
