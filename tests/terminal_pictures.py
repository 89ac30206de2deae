"""Makes the terminal pictures of the documents by ``python -m tests.terminal_pictures DEMO``.

DEMO is a finished demo's directory (``make demo``), in which each command of :data:`PICTURES` runs as people type it.
Its output, with colours, becomes ``docs/terminal/<name>.svg``. A picture needs no network access. Output that names a
folder of this machine is refused.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "docs" / "terminal"
WIDTH = 120
PICTURES = {
    "study-watch": "consilium study watch server",
    "verify": "consilium verify server/ledger.sqlite",
    "site-status": "consilium site status --site-dir sites/hospital-01",
    "refusal": "consilium study publish server --images nowhere",
}


def captured(command: str, *, cwd: Path) -> str:
    """Return what a command printed to a terminal of :data:`WIDTH` columns. Its exit status is ignored."""
    words = [sys.executable, "-P", "-c", "from consilium.cli.main import main; main()", *shlex.split(command)[1:]]
    told = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said = done.stdout.decode()
    for place in (str(cwd.resolve()), str(Path.home())):
        if place in said:
            raise SystemExit(f"`{command}` names {place}")
    return last_frame(said)


def last_frame(text: str) -> str:
    """Return the text that the terminal shows at the end, because a live bar is drawn over itself."""
    lines: list[str] = []
    row = 0
    for part in re.split(r"(\n|\r|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[lh])", text):
        if part == "\n":
            row += 1
        elif part == "\x1b[2K":
            lines[row : row + 1] = [""] if row < len(lines) else []
        elif move := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(move[1] or 1))
        elif part and part != "\r" and not part.startswith("\x1b[?25"):
            lines += [""] * (row + 1 - len(lines))
            lines[row] += part
    return "\n".join(lines)


def drawn(command: str, text: str) -> str:
    """Return a picture of a command and its output, as SVG without a web font."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {command}\n{text.rstrip()}"))
    picture = console.export_svg(title="consilium", unique_id=re.sub(r"\W", "", command))
    return re.sub(r"@font-face \{.*?\}\n\s*", "", picture, flags=re.DOTALL)


def main() -> None:
    """Draw every picture from a finished demo."""
    FOLDER.mkdir(exist_ok=True)
    for name, command in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawn(command, captured(command, cwd=Path(sys.argv[1]))), encoding="utf-8")


if __name__ == "__main__":
    main()
