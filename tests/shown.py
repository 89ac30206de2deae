"""Finds the output that documents show below a command, and checks that it was printed.

Text that differs from run to run (:data:`VARIES`) is masked on both sides; everything else must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
VARIES = (
    (r"SHA256:[\w+/]{43}", "SHA256:…"),
    (r"\d{4}-\d\d-\d\d(T[\d:.+]+)?", "DATE"),
    (r"\bnode \d{10,}", "node …"),
    (r"\b[0-9a-f]{16}…", "HASH"),
    (r"\d+\.\d GiB free", "… GiB free"),
    (r"within \d s of", "within … of"),
)
"""Patterns of text that varies: keys, dates, fresh ids, free disk space, and durations."""


def shown(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every command of a document that has output below it, with that output."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for block in re.findall(r"^ *```console\n(.*?)^ *```", text, re.M | re.S):
        for part in re.split(r"^ *\$ ", block.replace("\\\n", " "), flags=re.M)[1:]:
            command, *lines = part.splitlines()
            if any(line.strip() for line in lines):
                yield command.strip(), [line.strip() for line in lines if line.strip()]


def output_of(path: str, beginning: str) -> list[str]:
    """Return the output that a document shows below the one command that begins with ``beginning``."""
    (lines,) = [lines for command, lines in shown(path) if command.startswith(beginning)]
    return lines


def normal(line: str) -> str:
    for form, mask in VARIES:
        line = re.sub(form, mask, line)
    return line.strip()


def hold(lines: list[str], printed: str) -> None:
    """Check that every shown line was printed, in order; a line that ends in … is the beginning of a printed one."""
    there = iter([normal(line) for line in printed.splitlines()])
    for line in map(normal, lines):
        begun = line.rstrip("…} ") if line.endswith((" …", " …}")) else ""
        assert any(one == line or (begun and one.startswith(begun)) for one in there), (
            f"the document shows what was not printed: {line}\n{printed}"
        )
