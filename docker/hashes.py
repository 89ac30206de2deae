"""Print pip's report of an installation as requirements with hashes: ``hashes.py REPORT CONSTRAINTS``.

Refuses a package that CONSTRAINTS does not pin, another version than it pins, and a file without a SHA-256. Where a
file came from is left out: the hash says which file it is. Standard library alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEAD = "# Made by docker/hashes.sh: what an image installs, each file by its SHA-256 (pip install --require-hashes)."


def requirements(report: dict[str, object], pins: dict[str, str]) -> list[str]:
    """Return a line for each package to install, sorted by name."""
    lines = []
    for item in report["install"]:  # type: ignore[attr-defined]
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
        if name == "consilium":
            continue
        public = version.partition("+")[0]  # a local build of a version is that version to a pin
        if pins.get(name) != public:
            sys.exit(f"{name} {version} is not what constraints.txt pins ({pins.get(name)}); pin it there first")
        found = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not re.fullmatch(r"[0-9a-f]{64}", found):
            sys.exit(f"{name} {version}: pip names no SHA-256 of its file")
        lines.append(f"{name}=={public} --hash=sha256:{found}")
    return sorted(lines)


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print the requirements."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    words = Path(sys.argv[2]).read_text(encoding="utf-8").split()
    pins = {canonical(name): version for name, _, version in (word.partition("==") for word in words)}
    print("\n".join([HEAD, *requirements(report, pins)]))


if __name__ == "__main__":
    main()
