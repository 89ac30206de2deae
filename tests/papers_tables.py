"""The measured tables of docs/lab/papers.md, made of what the research commands recorded.

``python -m tests.papers_tables`` writes them anew. Each stands between two marks that name its file in
``benchmarks/results/papers``: what ``consilium bench pate`` or ``bench networks`` wrote with ``--out``, or the rows of
``bench papers``' ``papers.json`` that were measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from research.networks import networks_markdown
from research.papers import markdown
from research.pate import pate_markdown
from research.volumes import volume_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "papers"
DOCUMENT = ROOT / "docs" / "lab" / "papers.md"
TABLE = re.compile(r"(<!-- recorded: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """One recorded result as Markdown."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if isinstance(found, list):
        volumes = [row for row in found if row["data"] == "hippocampus"]
        return "\n".join(volume_markdown(volumes)) if volumes else markdown(found)
    return pate_markdown(found) if "arms" in found else networks_markdown(found)


def page(text: str) -> str:
    """The document with its tables as recorded."""
    return TABLE.sub(lambda mark: f"{mark[1]}{table(mark[2]).strip()}\n{mark[3]}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
