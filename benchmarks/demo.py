"""Measures `consilium demo` from start to report: wall time by stage, processor seconds by kind of process. Linux
only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.run import Figure, process_cpu_s

LOOK_S = 0.2
KINDS = {
    "forkserver": "training",
    "client.operations.serve": "workers",
    "client.app": "launchers",
    "flower-supernode": "SuperNodes",
    "operations.superlink": "SuperLink",
    "superexec": "SuperExec",
    "flwr": "Flower's commands",
    "aggregation.core": "core",
    "gateway": "gateway",
    "fleet": "fleet routes",
    "dashboard": "dashboard",
    "demo": "the demo itself",
}
"""Kind of process by a word in its command line; the first match counts."""


def figures() -> Iterator[Figure]:
    """Yield wall time and processor seconds of one demo."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        program = "from consilium.cli.main import main; main()"
        started = time.monotonic()
        command = [sys.executable, "-P", "-c", program, "demo", "--out", f"{folder}/out"]
        demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds: dict[int, tuple[str, float]] = {}
        while demo.poll() is None:
            seconds |= _family(demo.pid)
            time.sleep(LOOK_S)
        if demo.returncode:
            raise SystemExit(f"the demo ended with status {demo.returncode}")
        yield Figure("wall", round(time.monotonic() - started, 1), "s", aim="≤ 75 s on two quiet cores")
        for stage, took in json.loads(Path(folder, "out", "seconds.json").read_text()).items():
            yield Figure(f"wall of {stage}", round(took, 1), "s")
    total: dict[str, float] = defaultdict(float)
    for words, took in seconds.values():
        total[next((kind for word, kind in KINDS.items() if word in words), "others")] += took
    yield Figure("processor", round(sum(total.values()), 1), "s")
    for kind, took in sorted(total.items(), key=lambda item: -item[1]):
        yield Figure(f"processor of {kind}", round(took, 1), "s")


def _family(root: int) -> dict[int, tuple[str, float]]:
    """Return command line and processor seconds so far of a process and all its descendants."""
    parents: dict[int, int] = {}
    seen: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            seen[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " "), process_cpu_s(entry.name)
        except OSError:  # the process has just ended
            continue
    found, wanted = {}, [root]
    while wanted:
        pid = wanted.pop()
        if pid in seen:
            found[pid] = seen[pid]
        wanted += [child for child, parent in parents.items() if parent == pid]
    return found
