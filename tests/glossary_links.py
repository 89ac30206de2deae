"""Links the documents to the glossary: ``python -m tests.glossary_links`` writes the links anew.

On each page the first use of a glossary word in running text (not in a table, a heading or code) is a link to its row.
A word that stands in another link before is left as it is. Everyday words of the glossary are not linked, because a
search cannot tell which sense is meant.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GLOSSARY = DOCS / "glossary.md"
LEFT_OUT = {
    "commands.md",
    "configuration.md",
    "messages.md",
    "contributing.md",
    "glossary.md",
    "notebook.md",
    "vectors.md",
}
"""Pages that are made from the source or included, the glossary itself, and the specification in formulas."""
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(
        path
        for folder in (DOCS, DOCS / "start", DOCS / "concepts")
        for path in folder.glob("*.md")
        if path.name not in LEFT_OUT
    ),
]
EVERYDAY = {"answer", "batch", "code", "core", "draw", "frame", "head", "m", "offer", "per volume", "unit", "z", "μ"}
"""Words of the glossary that also have another meaning in these documents."""

_LINK = re.compile(r"\[([^\]\[]+)\]\((?:\.\./|docs/)?glossary\.md#[\w-]+\)")
_BEFORE = r"""(?<![\w/.{"-])(?<!\w\()"""
"""Text after which no word is linked: parts of names, formulas and quotations."""
_KEPT = re.compile(
    r"^ *```.*?^ *```$|<!-- (?:recorded|results): .*?<!-- (?:\w+: )?end -->|^\|[^\n]*$|^#[^\n]*$|^    [^\n]*$"
    r"|^- `\w+`: [^\n]*$"
    r"|`(?:[^`\n]|\n(?!\n))*`|!?\[(?:[^\]\[]|\[[^\]]*\])*\]\([^)]*\)|<[^>\n]*>",
    re.DOTALL | re.MULTILINE,
)
"""Text that is not running text: code, tables, headings, links, tags and the list of public names."""


def words() -> dict[str, str]:
    """Return every word of the glossary that is linked, with its anchor."""
    found = re.findall(r'^\| <a id="([\w-]+)"></a>\*\*(.+?)\*\*', GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return {word: anchor for anchor, word in found if word not in EVERYDAY}


def linked(path: Path, text: str) -> str:
    """Return a page's text with correct links to the glossary."""
    text = _LINK.sub(r"\1", text)
    target = os.path.relpath(GLOSSARY, path.parent)
    for word, anchor in words().items():
        spaced = r"\s+".join(map(re.escape, word.split()))
        spelled = re.compile(_BEFORE + spaced + r"s?(?![\w/-])", re.IGNORECASE if word.isascii() else 0)
        kept = [(each.start(), each.end(), each[0]) for each in _KEPT.finditer(text)]
        for match in spelled.finditer(text):
            within = next((whole for start, end, whole in kept if start <= match.start() < end), None)
            if within is None:
                text = f"{text[: match.start()]}[{match[0]}]({target}#{anchor}){text[match.end() :]}"
            if within is None or within.startswith("["):
                break
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(linked(document, document.read_text(encoding="utf-8")), encoding="utf-8")
