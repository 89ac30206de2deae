"""Runs docs/notebook.ipynb from its first cell to its last: ``python -m tests.notebook`` writes its outputs anew.

Cells run in one namespace, as in Jupyter, without needing Jupyter. A picture is what ``plt.show`` would show.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

DOCUMENT = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def run(document: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs that its cells give now."""
    mpl.use("Agg")
    names: dict[str, Any] = {}
    cells = [_run(cell, names) if cell["cell_type"] == "code" else cell for cell in document["cells"]]
    return {**document, "cells": cells}


def texts(document: dict[str, Any]) -> list[str]:
    """Return every printed output."""
    outputs = [output for cell in document["cells"] for output in cell.get("outputs", [])]
    return ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]


def _run(cell: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("".join(cell["source"]).replace("plt.show()", ""), str(DOCUMENT), "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, dpi=110, metadata={"Software": None})
        picture = base64.b64encode(drawn.getvalue()).decode()
        outputs.append({"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return {**cell, "outputs": outputs}


if __name__ == "__main__":
    made = run(json.loads(DOCUMENT.read_text(encoding="utf-8")))
    DOCUMENT.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
