"""A study whose every byte is fixed: keys, ids, clock, codec, frames, teachers and noise. What it writes is golden.

``python -m tests.golden.golden`` writes the files beside it anew; they were written by release 0.1.0, and change only
with a change of schema that is said in the CHANGELOG.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import common.ledger.chain
from client.ledger.site_ledger import SiteLedger
from client.policy import load_site
from common.config import load_study
from common.events import EventLog
from common.objects import write_json
from consilium.in_process import Sites, Wire
from server.aggregation.aggregator import Aggregator
from server.aggregation.pipeline import collect, countersign
from server.ledger.server_ledger import Ledger
from server.protocols.rounds import FRAMES
from server.public.material import CodecRecord
from server.study.create_study import add_site, create_study, server_keys
from server.study.workspace import Site, Workspace
from tests.common.ledger.golden_world import as_until_0_2
from tests.federation import ball

HERE = Path(__file__).parent
KINDS = ("per-volume", "joint")
SITES, VOTERS, VOLUMES = 3, 2, 4
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)

STUDY = """\
schema = 1
name = "golden"

[data]
labels = ["background", "body"]
spacing_mm = [1.0, 1.0, 1.0]
grid = [8, 8, 8]

[privacy]
epsilon = 8.0
delta = 1e-3
planned_queries = {queries}
quorum = 2
voters_per_site = 2

[codec]
name = "pca"
max_dimension = 6
augmentations = 0
joint = {joint}

[collection]
batch_size = 2
"""

SITE = """\
schema = 1
site = "{name}"
pool = "{pool}"
data = "data"

[server]
sealing_key = "{sealing}"
signing_key = "{signing}"
objects_url = "https://localhost"
superlink = "localhost:1"
root_certificates = "ca.crt"

[caps]
epsilon = 8.0
delta = 1e-3
"""


class Voters:
    """Two balls, which differ by site, voter and volume."""

    def __init__(self, site: int) -> None:
        self._site = site

    def predict(self, volume: bytes) -> list[Callable[[], np.ndarray]]:
        place = int(volume.removeprefix(b"volume "))

        def ask(voter: int) -> np.ndarray:
            body = ball((3.0 + place / 2, 4, 4), 1.5 + self._site / 2 + voter / 4).astype(np.float32)
            return np.stack([1 - body, body])

        return [lambda voter=voter: ask(voter) for voter in range(VOTERS)]  # type: ignore[misc]


@contextlib.contextmanager
def fixed(*, seed: str) -> Iterator[None]:
    """Keys, ids, clock and noise of a test: each the next of its series, the same whenever ``seed`` is."""
    numbers, seconds = count(), count()

    def draw(size: int) -> bytes:
        return hashlib.shake_256(f"{seed} {next(numbers)}".encode()).digest(size)

    def now() -> datetime:
        return BEGUN + timedelta(seconds=next(seconds))

    def noise(size: int, noise_std: Fraction) -> np.ndarray:
        share = np.frombuffer(draw(4 * size), dtype="<i4").astype(np.int64)
        return share * int(noise_std) // 2**31

    with contextlib.ExitStack() as stack:
        stack.enter_context(as_until_0_2())
        for target, name, value in (
            (Ed25519PrivateKey, "generate", lambda: Ed25519PrivateKey.from_private_bytes(draw(32))),
            (X25519PrivateKey, "generate", lambda: X25519PrivateKey.from_private_bytes(draw(32))),
            (common.ledger.chain.secrets, "token_hex", lambda size: draw(size).hex()),  # type: ignore[attr-defined]
        ):
            stack.enter_context(patch.object(target, name, value))
        for function, argument, value in (
            (Ledger.create, "clock", now),
            (Ledger.open, "clock", now),
            (SiteLedger.open, "clock", now),
            (Aggregator.__init__, "sampler", noise),
        ):
            stack.enter_context(patch.dict(function.__kwdefaults__, {argument: value}))
        yield


def begin(root: Path, kind: str) -> None:
    """A study's and its sites' directories, before anything is asked."""
    joint = kind == "joint"
    (root / "study.toml").write_text(STUDY.format(queries=2 if joint else VOLUMES, joint=str(joint).lower()))
    study = load_study(root / "study.toml")
    workspace = Workspace(root / "study")
    create_study(workspace, study)
    workspace.save_volumes(tuple(workspace.objects.put(f"volume {number}".encode()) for number in range(VOLUMES)))
    dimensions = json.loads((HERE / "dimensions.json").read_text())
    codec, *frames = (
        CodecRecord(workspace.objects.put((HERE / name).read_bytes()), dimension)
        for name, dimension in dimensions.items()
    )
    workspace.save_codec(codec)
    if joint:
        write_json(workspace.root / FRAMES, [asdict(frame) for frame in frames])
    keys = server_keys(workspace)
    for number in range(SITES):
        name = f"site-{number}"
        folder = root / name
        folder.mkdir()
        (folder / "site.toml").write_text(
            SITE.format(name=name, pool=f"pool-{number}", sealing=keys.sealing_key, signing=keys.signing_key)
        )
        (folder / "study.toml").write_bytes((root / "study.toml").read_bytes())
        with _site_ledger(folder) as ledger:
            ledger.consent(study)
            answer_key = ledger.head().public_key
        add_site(workspace, Site(name=name, pool=f"pool-{number}", node_id=100 + number, answer_key=answer_key))


def ask(root: Path, *, until: int | None = None) -> None:
    """Run or resume the study's collection over its sites' real workers; stopped after ``until`` stored answers."""
    workspace = Workspace(root / "study")
    with contextlib.ExitStack() as stack:
        sites = Sites(
            root,
            workspace.sites(),
            workspace.study(),
            config=lambda site: load_site(root / site.name),
            voters=lambda site: Voters(site.node_id - 100),
            fetch=workspace.objects.get,
            consented=True,
        )
        stack.callback(sites.close)
        events = EventLog(workspace.events_file, study=workspace.study().id)
        emit = events.emit

        def stop_after(event: str, **fields: object) -> None:
            emit(event, **fields)
            if event == "released" and until is not None and len(stored(workspace)) >= until:
                workspace.stop_file.touch()

        stack.enter_context(patch.object(events, "emit", stop_after))
        transport = Wire(sites.workers)
        collect(workspace, transport, events=events)
        countersign(workspace, transport, events=events)
        workspace.stop_file.unlink(missing_ok=True)


def _site_ledger(folder: Path) -> SiteLedger:
    config = load_site(folder)
    return SiteLedger.open(config.ledger_file, config.pool, caps=config.caps, site=config.site)


def stored(workspace: Workspace) -> list[str]:
    """The ids of the queries that have an answer."""
    with Ledger.open(workspace.ledger_file) as ledger:
        return [answer.query.id for answer in ledger.answers(workspace.study().id)]


def written(root: Path) -> dict[str, object]:
    """Return all that must never change: the study's id, queries and answers, and the ledgers' rows with hashes."""
    workspace = Workspace(root / "study")
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(workspace.study().id)
        found: dict[str, object] = {
            "study": workspace.study().id,
            "answers": [
                {"query": answer.query.id, "roster": [e.site for e in answer.roster], "sum": answer.noisy_sum.tolist()}
                for answer in answers
            ],
            "server": [_row(row) for row in ledger.rows()],
        }
    for number in range(SITES):
        with SiteLedger.read(root / f"site-{number}" / "site-ledger.sqlite") as site:
            found[f"site-{number}"] = [_row(row) for row in site.rows()]
    return found


def _row(row: common.ledger.chain.Row) -> list[object]:
    return [row.seq, row.kind, row.time_utc, row.body, row.hash]


def make() -> None:
    """Write the golden files: the whole study's rows, and the directories of one stopped in the middle."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder, fixed(seed=kind):
            root = Path(folder)
            begin(root, kind)
            ask(root)
            _write(HERE / f"{kind}.json", written(root))
        with tempfile.TemporaryDirectory() as folder, fixed(seed=kind):
            root = Path(folder)
            begin(root, kind)
            ask(root, until=2 if kind == "per-volume" else 1)
            _write(HERE / f"{kind}-half.json", written(root))
            with tarfile.open(HERE / f"{kind}-0.1.0.tar.xz", "w:xz") as archive:
                archive.add(root, arcname=".")


def _write(path: Path, found: dict[str, object]) -> None:
    path.write_text(json.dumps(found, indent=0) + "\n")


def make_public() -> None:
    """Write the codec and the frames. This was done once, because their bytes depend on the processor's arithmetic."""
    from common.canonical import sha256_bytes
    from common.codecs.codec import fit_codec
    from common.protocols.frame import Frame, plan_frame

    (HERE / "study.tmp").write_text(STUDY.format(queries=VOLUMES, joint="false"))
    study = load_study(HERE / "study.tmp")
    (HERE / "study.tmp").unlink()
    maps = [ball((3 + i / 5, 3 + (i % 3) / 2, 4), 1.5 + (i % 4) / 3) for i in range(10)]
    codec = fit_codec(study, maps, noise_std=0.01)
    rng = np.random.default_rng(0)
    size = VOLUMES * min(4, codec.dimension)
    factors = rng.normal(size=(size, size))
    frames: list[Frame] = []
    for _ in range(2):
        frames.append(
            plan_frame(
                kernel=factors @ factors.T,
                centre=rng.normal(0, 0.1, size=(VOLUMES, codec.dimension)),
                variances=np.linspace(0.2, 0.1, codec.dimension),
                residual=0.5,
                temperature=0.5,
                noise_std=0.01,
                radius=study.codec.radius,
                codec=sha256_bytes(codec.to_bytes()),
            )
        )
    (HERE / "codec.npz").write_bytes(codec.to_bytes())
    dimensions = {"codec.npz": codec.dimension}
    for number, frame in enumerate(frames, start=1):
        (HERE / f"frame-{number}.npz").write_bytes(frame.to_bytes())
        dimensions[f"frame-{number}.npz"] = frame.dimension
    (HERE / "dimensions.json").write_text(json.dumps(dimensions, indent=1) + "\n")


if __name__ == "__main__":
    if "--public" in sys.argv:
        make_public()
    make()
