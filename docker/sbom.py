"""Write what an image contains: CycloneDX 1.5 JSON with the Python packages of an environment and Debian's packages.

``sbom.py PYTHON FOLDER REQUIREMENTS``: asks ``PYTHON -m pip inspect`` and ``dpkg-query``; the SHA-256 of a Python
package's file is the one that REQUIREMENTS held pip to. Standard library alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path


def python_components(python: str, hashes: dict[str, str]) -> list[dict[str, object]]:
    """List an environment's distributions, each with the licence that it names and the SHA-256 of its file."""
    said = subprocess.run([python, "-m", "pip", "inspect"], check=True, capture_output=True, text=True)
    found = []
    for installed in json.loads(said.stdout)["installed"]:
        facts = installed["metadata"]
        licence = facts.get("license_expression") or facts.get("license", "").partition("\n")[0]
        entry = component(
            f"pkg:pypi/{facts['name'].lower()}@{facts['version']}", facts["name"], facts["version"], licence
        )
        if hashed := hashes.get(canonical(facts["name"])):
            entry["hashes"] = [{"alg": "SHA-256", "content": hashed}]
        found.append(entry)
    return found


def required_hashes(requirements: Path) -> dict[str, str]:
    """Return package → SHA-256, read from the lines ``name==version --hash=sha256:…``."""
    lines = re.findall(r"^(\S+)==\S+ --hash=sha256:([0-9a-f]{64})$", requirements.read_text(encoding="utf-8"), re.M)
    return {canonical(name): hashed for name, hashed in lines}


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def debian_components() -> list[dict[str, object]]:
    """List every package of the base system."""
    form = "${Package}\t${Version}\t${Architecture}\n"
    said = subprocess.run(["dpkg-query", "--show", f"--showformat={form}"], check=True, capture_output=True, text=True)
    rows = [line.split("\t") for line in said.stdout.splitlines()]
    return [component(f"pkg:deb/debian/{name}@{version}?arch={arch}", name, version) for name, version, arch in rows]


def component(purl: str, name: str, version: str, licence: str = "") -> dict[str, object]:
    """Return one entry of the list."""
    entry: dict[str, object] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return entry | ({"licenses": [{"license": {"name": licence[:200]}}]} if licence else {})


def main() -> None:
    """Write ``sbom.json`` into the folder."""
    python, folder, requirements = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found = [*python_components(python, required_hashes(requirements)), *debian_components()]
    components = sorted(found, key=lambda entry: str(entry["purl"]))
    folder.mkdir(parents=True, exist_ok=True)
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}
    (folder / "sbom.json").write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
