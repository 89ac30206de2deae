"""Writes docs/messages.md, the list of every error message: ``python -m tests.message_reference``.

The page is made from the source: each call that builds one of Consilium's errors gives a row with what happened, what
is allowed and what to do. Values are shown as ``{name}``. A test compares the page with the source
(``tests/test_docs.py``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common import errors

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "messages.md"
FOLDERS = "common", "client", "server", "consilium"
CODES = {
    "InvalidInput": 2,
    "QuorumNotReached": 4,
    "LedgerCorrupt": 5,
    "ReceiptContradiction": 5,
    "Refused": 6,
    "DaemonFailed": 7,
    "StorageFailed": 9,
}
"""Errors whose messages the page lists, with the exit code of a command that ends with one."""
CONVERTERS = {"parsing": "InvalidInput", "naming": "InvalidInput"}
"""Functions that build an error from their own arguments, with the error that each builds."""
HEAD = """# Error messages

For everybody who sees an error of a `consilium` command, of a daemon's log or of the dashboard. After this page you
know what is allowed and what to do.

Find the error's text below. Words in braces stand for values. A message reads
`what happened: got VALUE; allowed: LIMIT; to fix: REMEDY`. The number in a heading is the command's
[exit code](runbook.md#exit-codes). Where the last column is empty, give a value that is allowed.

Written by `python -m tests.message_reference`.
"""


@dataclass(frozen=True, order=True)
class Message:
    """Holds one error as the source builds it."""

    folder: str
    kind: str
    cause: str
    limit: str
    remedy: str
    place: str


@cache
def messages() -> tuple[Message, ...]:
    """Return every error message of the four packages, each once, in the order of folder, kind and text."""
    found: dict[tuple[str, ...], Message] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for each in _messages_of(path):
                found.setdefault((each.folder, each.kind, each.cause, each.limit, each.remedy), each)
    return tuple(sorted(found.values()))


def _messages_of(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    _CONSTANTS.clear()
    _CONSTANTS.update(_imported_constants(tree) | _constants_of(tree))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        kind = CONVERTERS.get(node.func.id, node.func.id)
        if kind not in CODES:
            continue
        given = {each.arg: each.value for each in node.keywords if each.arg}
        texts = [_text(each) for each in node.args if not isinstance(each, ast.Starred)]
        if kind == "Refused":
            texts = texts[1:] or texts
        cause, _, remedy = " ".join(texts).partition("; to fix: ")
        cause, _, limit = cause.partition("; allowed: ")
        limit = _text(given["limit"]) if "limit" in given else limit
        remedy = _text(given["remedy"]) if "remedy" in given else remedy
        if not remedy:
            remedy = getattr(getattr(errors, kind), "remedy", "")
        if "value" in given:
            cause += ": got {value}"
        if re.search(r"[A-Za-z]{3}", re.sub(r"\{.*?\}", "", cause)):
            place = path.relative_to(ROOT).as_posix()
            yield Message(path.relative_to(ROOT).parts[0], kind, cause, limit, remedy, f"{place}:{node.lineno}")


_CONSTANTS: dict[str, str] = {}
"""Texts of the constants that the module being read defines or imports, by name."""


def _constants_of(tree: ast.Module) -> dict[str, str]:
    """Return the texts that a module assigns to names at its top level."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
            text = isinstance(node.value, ast.JoinedStr) or isinstance(getattr(node.value, "value", None), str)
            found |= {name.id: _text(node.value)} if text else {}
    return found


def _imported_constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts of constants that a module imports from the four packages, by name."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FOLDERS:
            texts = _constants_in(ROOT / f"{node.module.replace('.', '/')}.py")
            found |= {each.name: texts[each.name] for each in node.names if each.name in texts}
    return found


@cache
def _constants_in(path: Path) -> dict[str, str]:
    return _constants_of(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _text(node: ast.expr) -> str:
    """Return the text that an expression builds, with values in braces."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in _CONSTANTS:
        return _CONSTANTS[node.value.id]
    if isinstance(node, ast.FormattedValue):
        return f"{{{_named(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return f"{{{_named(node)}}}"


def _named(node: ast.expr) -> str:
    """Return a short name for a value: the last name in its expression."""
    names = [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute | ast.Name)
    ]
    return names[0].strip("_") if names else "value"


def reference() -> str:
    """Return the whole page."""
    page, before = HEAD, ("", "")
    for each in messages():
        if each.folder != before[0]:
            page += f"\n## {each.folder}\n"
        if (each.folder, each.kind) != before:
            page += f"\n### {each.folder}: {each.kind} ({CODES[each.kind]})\n\n"
            page += "| message | allowed | to fix |\n|---|---|---|\n"
        before = each.folder, each.kind
        page += f"| {_cell(each.cause)} | {_cell(each.limit)} | {_cell(each.remedy)} |\n"
    return page


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text).strip()


if __name__ == "__main__":
    DOCUMENT.write_text(reference(), encoding="utf-8")
