"""Write what an image contains: CycloneDX 1.5 JSON with the Python packages of an environment and Debian's packages.

``sbom.py PYTHON FOLDER``: asks ``PYTHON -m pip inspect`` and ``dpkg-query``; standard library alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def python_components(python: str) -> list[dict[str, object]]:
    """Every installed distribution of an environment, with its licence where it names one."""
    said = subprocess.run([python, "-m", "pip", "inspect"], check=True, capture_output=True, text=True)
    found = []
    for entry in json.loads(said.stdout)["installed"]:
        facts = entry["metadata"]
        licence = facts.get("license_expression") or facts.get("license", "").partition("\n")[0]
        found.append(
            component(f"pkg:pypi/{facts['name'].lower()}@{facts['version']}", facts["name"], facts["version"], licence)
        )
    return found


def debian_components() -> list[dict[str, object]]:
    """Every package of the base system."""
    form = "${Package}\t${Version}\t${Architecture}\n"
    said = subprocess.run(["dpkg-query", "--show", f"--showformat={form}"], check=True, capture_output=True, text=True)
    rows = [line.split("\t") for line in said.stdout.splitlines()]
    return [component(f"pkg:deb/debian/{name}@{version}?arch={arch}", name, version) for name, version, arch in rows]


def component(purl: str, name: str, version: str, licence: str = "") -> dict[str, object]:
    """One entry of the list."""
    entry: dict[str, object] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return entry | ({"licenses": [{"license": {"name": licence[:200]}}]} if licence else {})


def main() -> None:
    """Write ``sbom.json`` into the folder."""
    python, folder = sys.argv[1], Path(sys.argv[2])
    components = sorted([*python_components(python), *debian_components()], key=lambda entry: str(entry["purl"]))
    folder.mkdir(parents=True, exist_ok=True)
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}
    (folder / "sbom.json").write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
