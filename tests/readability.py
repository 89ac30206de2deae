"""Draw texts at random for a reader who has not seen the project: ``python -m tests.readability SEED [KIND]``.

Prints 150 docstrings, 50 messages (errors and help texts) and 30 paragraphs of the documents, numbered, each with its
place. A reader marks every text clear or unclear at first reading. docs/lab/readability.md keeps seeds and figures.
``python -m tests.readability words`` counts the words of the documents instead, page by page.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests import command_reference, message_reference

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"commands.md", "configuration.md", "messages.md", "contributing.md"}
"""Documents that are made from the source."""
Placed = tuple[str, str]


def docstrings() -> list[Placed]:
    """Return every docstring of modules, classes and functions of the four packages."""
    found = []
    for folder in message_reference.FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text:
                        name = getattr(node, "name", "(module)")
                        found.append((f"{path.relative_to(ROOT)} {name}", text))
    return found


def messages() -> list[Placed]:
    """Return every error message, and the help of every command and option."""
    found = [
        (
            each.place,
            "; ".join(
                filter(
                    None,
                    (each.cause, each.limit and f"allowed: {each.limit}", each.remedy and f"to fix: {each.remedy}"),
                )
            ),
        )
        for each in message_reference.messages()
    ]
    for name, command in command_reference.commands():
        if command.help:
            found.append((name, " ".join(command.help.split())))
        found += [(f"{name} {p.opts[0]}", p.help) for p in command.params if getattr(p, "help", None)]
    return found


def paragraphs() -> list[Placed]:
    """Return every paragraph of running text of the README and of the hand-written documents."""
    found = []
    pages = ROOT / "docs"
    for path in (
        ROOT / "README.md",
        *sorted(pages.glob("*.md")),
        *sorted(pages.glob("start/*.md")),
        *sorted(pages.glob("concepts/*.md")),
    ):
        if path.name not in GENERATED:
            text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
            for block in re.split(r"\n\s*\n", text):
                if len(block.split()) > 12 and not re.match(r"\s*(\||#|<!--)", block):
                    found.append((path.relative_to(ROOT).as_posix(), block.strip()))
    return found


KINDS: dict[str, tuple[int, Callable[[], list[Placed]]]] = {
    "docstrings": (150, docstrings),
    "messages": (50, messages),
    "paragraphs": (30, paragraphs),
}


def drawn(kind: str, seed: int) -> list[Placed]:
    """Return the texts of one kind that a seed draws."""
    count, texts = KINDS[kind]
    return random.Random(seed).sample(texts(), count)


def words() -> dict[str, int]:
    """Count the words of every hand-written document of docs/, without the tables of modules and public names."""
    found = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in GENERATED:
            text = path.read_text(encoding="utf-8")
            if path.name == "architecture.md":
                text = re.sub(r"^\| `\w+` \|.*\n", "", text, flags=re.MULTILINE)
            if path.name == "api.md":
                text = text.partition("\n## Every public name")[0]
            found[path.name] = len(text.split())
    return found


if __name__ == "__main__":
    if sys.argv[1] == "words":
        counted = words()
        for _page, _count in counted.items():
            print(f"{_count:6} {_page}")
        print(f"{sum(counted.values()):6} in all")
        sys.exit()
    for _kind in sys.argv[2:] or KINDS:
        print(f"# {_kind}, seed {sys.argv[1]}, of {len(KINDS[_kind][1]())}\n")
        for _number, (_place, _words) in enumerate(drawn(_kind, int(sys.argv[1])), 1):
            print(f"{_number}. [{_place}] {_words}\n")
