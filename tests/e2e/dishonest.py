"""Lets hospitals send false codes or noise. Their daemons are otherwise unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from client.operations.daemons import worker
from common.process import DaemonSpec

SPOILS = "np.full(code.shape, 1 << 60, dtype=np.int64)"


def pushes_then(first: float, later: float, *, sites: int) -> str:
    """Push by ``first`` times m·R while the roster has ``sites`` members, and by ``later`` times m·R after that."""
    return pushes(f"({first} if len(roster.members) == {sites} else {later})")


def pushes(times: float | str) -> str:
    """Send ``times`` m·R in the direction opposite to the site's own vote. An honest code has at most length m·R."""
    along = "code / max(1.0, float(np.sqrt((code.astype(float) ** 2).sum())))"
    return f"np.rint(-{times} * longest * {along}).astype(np.int64)"


SEALED = """
import numpy as np
import client.worker
from client.masked import masks
def sent(code, query, share, *, roster, me, private, sampler):
    longest = query.mechanism.site_radius_int
    said = {said}
    return said.view(np.uint64) + masks(
        roster, me=me, private=private, query=query.id, dimension=query.mechanism.dimension)
client.worker.masked_code = sent
from client.operations.serve import main
main()
"""
OPEN = """
import numpy as np
import client.worker
seal = client.worker.Worker._seal
def sent(self, code, query, request):
    longest = query.mechanism.site_radius_int
    return seal(self, {said}, query, request)
client.worker.Worker._seal = sent
from client.operations.serve import main
main()
"""


def serving(says: Mapping[str, str], *, program: str = SEALED) -> Callable[..., DaemonSpec]:
    """Return a replacement for ``client.operations.daemons.worker``: sites in ``says`` send what it states."""

    def start(site_dir: Path, *, socket: Path | None = None) -> DaemonSpec:
        spec = worker(site_dir, socket=socket)
        if site_dir.name not in says:
            return spec
        module = spec.argv.index("-m")
        argv = ("-P", "-c", program.replace("{said}", says[site_dir.name]), *spec.argv[module + 2 :])
        return replace(spec, argv=(sys.executable, *argv))

    return start
