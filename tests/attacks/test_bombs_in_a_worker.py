"""Tests that a consortium's server cannot end a worker by public volumes within the memory of its container.

The daemon is the one that a hospital runs, in a control group with the memory that docker-compose.yml gives a worker.
If this user may not make a control group, the process's own data are limited to as much. The worker answers a volume
that does not fit with the zero code, and goes on to the next volume.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.app import call_worker
from client.ledger.site_ledger import SiteLedger
from client.operations import staff_decisions
from client.policy import load_site
from common.config import CollectionConfig
from common.data.synthetic import study_data
from common.envelope import body_of, sign_request
from common.ledger.keys import load_signing_key
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, decode, encode
from common.objects import ObjectStore
from server.protocols.per_volume import plan_queries
from tests.attacks.bombs import bomb
from tests.e2e.road import PRIVACY, build

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")]

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path("/sys/fs/cgroup")
SERVES = """
import sys
from functools import partial
from pathlib import Path
import common.data.volume as volume
from common.data.memory import free_memory_bytes
volume.free_memory_bytes = partial(free_memory_bytes, root=Path(sys.argv.pop(1)))
from client.operations.serve import main
main()
"""
"""The worker's daemon, which reads its control group from this folder."""


def limit_of_compose() -> int:
    """Return the memory in bytes that docker-compose.yml gives a worker."""
    text = (ROOT / "docker-compose.yml").read_text()
    found = re.search(r"^x-worker: .*?^  mem_limit: (\d+)g$", text, re.MULTILINE | re.DOTALL)
    assert found
    return int(found[1]) << 30


@contextmanager
def group(limit: int, folder: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield a control group with this memory limit: its folder as a container sees it, and its list of
    members.

    Without the right to make a group there is no list, and the folder's files state the limit of a process's own data.
    """
    name = f"consilium-{os.getpid()}"
    old, new = GROUPS / "memory" / name, GROUPS / name
    for path, most in ((old, "memory.limit_in_bytes"), (new, "memory.max")):
        try:
            path.mkdir()
            (path / most).write_text(str(limit))
        except OSError:
            if path.is_dir():
                path.rmdir()
            continue
        try:
            if path == old:
                (folder / "memory").symlink_to(old)
            yield (folder if path == old else new), path / "cgroup.procs"
        finally:
            path.rmdir()
        return
    (folder / "memory.max").write_text(str(limit))
    (folder / "memory.current").write_text(str(600 << 20))  # a worker with a model loaded
    (folder / "memory.stat").write_text("inactive_file 0\n")
    yield folder, None


def raw(shape: tuple[int, int, int], dtype: str, *, spacing: float = 1.4) -> bytes:
    """Return a volume of noise, which no packing makes smaller."""
    noise = np.random.default_rng(1).integers(0, 255, shape, dtype=np.uint8).astype(dtype)
    image = nib.Nifti1Image(noise, np.diag([spacing, spacing, spacing, 1.0]))
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


VOLUMES = {
    "a gibibyte of zeros in a megabyte": lambda: bomb((1024, 1024, 1024), "uint8"),
    "more voxels than there is memory for": lambda: raw((400, 400, 400), "uint8"),
    "few voxels that become many": lambda: bomb((160, 160, 160), "int16", spacing=4.0),
    "as many voxels as may be, of eight bytes": lambda: raw((300, 300, 300), "float64", spacing=1.395),
}
REFUSED = 3
"""Number of volumes that never fit and are refused by their headers; the last volume may be read."""


def test_no_public_volume_ends_a_worker_in_the_memory_of_its_container(tmp_path: Path) -> None:
    privacy = replace(PRIVACY, planned_queries=len(VOLUMES) + 1)
    data = replace(study_data(2), grid=(128, 128, 128))  # the larger the grid, the larger the scans that are read
    workspace, sites = build(
        tmp_path / "road", ["north", "south"], collection=CollectionConfig(), privacy=privacy, data=data, patients=1
    )
    directory, study = sites["north"], workspace.study()
    staff_decisions.consent(directory, by="A. Noether", sheet="the sheet")
    cache = ObjectStore(directory / "cache")
    cache.put(workspace.objects.get(workspace.codec().sha256))
    honest = workspace.volumes()[0]
    cache.put(workspace.objects.get(honest))
    names = [cache.put(make()) for make in VOLUMES.values()]
    queries = plan_queries(study, codec=workspace.codec(), volumes=[*names, honest])
    sign, limit = load_signing_key(workspace.signing_key_file).sign, limit_of_compose()

    with tempfile.TemporaryDirectory() as short, group(limit, tmp_path) as (seen, processes):

        def enter() -> None:
            if processes is not None:
                processes.write_text(str(os.getpid()))
            else:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        socket = Path(short) / "w.sock"
        command = [sys.executable, "-c", SERVES, str(seen), "--site-dir", str(directory), "--socket", str(socket)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, preexec_fn=enter, env=env, stderr=subprocess.PIPE, text=True) as daemon:
            try:

                def say(message: Offer | CodesRequest) -> object:
                    body = sign_request(encode(message), sign=sign, site="north")
                    return decode(body_of(call_worker(socket, body, timeout_s=600)))

                to = {"study": study.id, "ledger": load_site(directory).server.ledger, "batch": "b" * 64}
                offered = say(Offer(**to, queries=queries, issued=time.time_ns() // 1_000_000))
                assert isinstance(offered, OfferReply)
                assert offered.reason == "accepted"
                for attempt, query in enumerate(queries, start=1):
                    answered = say(CodesRequest(**to, attempt=attempt, deadline_s=100, queries=(query.id,)))
                    assert isinstance(answered, CodesReply)
                    assert len(answered.codes) == 1
                assert daemon.poll() is None
                peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{daemon.pid}/status").read_text())[1]) << 10  # type: ignore[index]
            finally:
                daemon.terminate()
                said = daemon.communicate()[1]
    assert peak < limit
    with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
        codes = [ledger.code(query.id) for query in queries]
    assert all(code is not None and not code.any() for code in codes[:REFUSED]), said
    assert codes[-1] is not None
    assert codes[-1].any(), said
    print(f"peak {peak >> 20} MiB of {limit >> 20}; last volume read: {bool(codes[-2].any())}")  # type: ignore[union-attr]
