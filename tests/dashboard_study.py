"""Makes a recorded study for the dashboard's tests: real workers, ledgers, core and pipeline in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import sha256_bytes
from common.config import CodecConfig, CollectionConfig, StartConfig, TrainingConfig, render_study
from common.data.dataset import Case
from common.data.grid import WHOLE_VOXELS, asked_at
from common.data.msd import read_dataset
from common.data.synthetic import study_data, write_phantoms
from common.data.volume import load_label
from common.events import EventLog
from common.ledger.charges import RosterEntry
from common.privacy.mechanism import QuerySpec
from common.study_mechanism import study_mechanism
from consilium.in_process import Sites, Wire, site_config
from server.aggregation.pipeline import collect, countersign, run_study
from server.ledger.server_ledger import Ledger
from server.study import create_study as setup
from server.study.start import GivenStart
from server.study.workspace import Site, Workspace
from tests.studies import made_study
from tests.worlds import make_study, pool_of

QUERIES, SITES = 8, ("north", "east", "south", "west")


@dataclass
class NoisyTruth:
    """Stands for a teacher that knows the phantom's label map and shifts it by a fixed number of voxels."""

    truths: dict[bytes, np.ndarray]
    classes: int
    shift: int
    voters: int = 1
    before: Callable[[], None] = lambda: None

    def predict(self, volume: bytes) -> list[Callable[[], np.ndarray]]:
        self.before()
        return [partial(self.answer, volume)]

    def answer(self, volume: bytes) -> np.ndarray:
        label = np.roll(self.truths[volume], self.shift, axis=self.shift % 3)
        hot = np.stack([(label == c).astype(np.float32) for c in range(self.classes)])
        return (0.9 * hot + 0.1 / self.classes).astype(np.float32)


@dataclass
class Recorded:
    """Holds the study's directory and everything needed to run it again."""

    workspace: Workspace
    transport: Wire
    teachers: dict[str, NoisyTruth]
    opened: Sites

    def log(self) -> EventLog:
        return EventLog(self.workspace.events_file, study=self.workspace.study().id)

    def run(self, run: str = "1") -> None:
        """Run every stage, up to the bundle."""
        run_study(self.workspace, self.transport, run=run)

    def collect(self, run: str = "1") -> EventLog:
        """Run the first stage alone: answers are in the ledger, there is no student, and the log ends during a run."""
        events = self.log()
        events.emit("run-started", run=run, pid=1, resumed=False)
        collect(self.workspace, self.transport, events=events)
        countersign(self.workspace, self.transport, events=events)
        return events


@cache
def _phantom_files(cases: int, seed: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_phantoms(Path(folder) / "drawn", cases=cases, seed=seed)
        return {
            path.relative_to(folder).as_posix().removeprefix("drawn/"): path.read_bytes()
            for path in Path(folder).rglob("*")
            if path.is_file()
        }


def phantoms(folder: Path, cases: int, *, seed: int = 3) -> tuple[Case, ...]:
    """Write the phantoms of a seed into a new folder. They are drawn once for each process."""
    for name, content in _phantom_files(cases, seed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return read_dataset(folder).cases


def make_study_directory(
    root: Path,
    *,
    batch_size: int = 4,
    steps: int = 60,
    epsilon: float = 8.0,
    rounds: int = 0,
    volumes: int = QUERIES,
    queries: int = 0,
    protocol: str = "",
    most: int = WHOLE_VOXELS,
    start: GivenStart | None = None,
    later: int = 0,
) -> Recorded:
    """Make a study that is ready to run: phantoms published, codec fitted, four sites registered.

    With ``rounds`` the study is joint, with ``queries`` it uses another protocol. ``most`` is the number of voxels of
    the queried grid, and ``start`` the network that the study starts from. The last ``later`` volumes and the last site
    are left out; they are ready in ``phantoms`` to be added.
    """
    cases = phantoms(root / "phantoms", volumes + 10)
    public, maps = cases[:volumes], cases[volumes:]
    study = make_study(
        name="hippocampus-demo",
        data=asked_at(study_data(2), most=most),
        epsilon=epsilon,
        planned_queries=rounds or queries or volumes,
        quorum=3,
        codec=CodecConfig(augmentations=20, max_dimension=12, joint=rounds > 0, protocol=protocol),
        teacher=TrainingConfig(channels=(4, 8), steps=4),
        student=TrainingConfig(channels=(4, 8), steps=steps),
        collection=CollectionConfig(batch_size=batch_size, offer_deadline_s=2.0),
        start=StartConfig() if start is None else start.config,
    )
    workspace = made_study(root / "study", study, start=None if start is None else start.weights)
    if later:
        setup.add_volumes(workspace, [case.image for case in public[:-later]])
    else:
        setup.publish_volumes(workspace, [case.image for case in public])
    setup.fit_study_codec(workspace, [case.label for case in maps if case.label], sites=len(SITES))
    truths = {case.image.read_bytes(): load_label(case.label, study.data) for case in public if case.label}
    keys, classes = setup.server_keys(workspace), len(study.data.labels)
    teachers = {name: NoisyTruth(truths, classes, shift=index % 3) for index, name in enumerate(SITES)}
    opened = Sites(
        root / "sites",
        [Site(name, pool=f"{name}/patients", node_id=100 + index) for index, name in enumerate(SITES)],
        study,
        config=lambda site: site_config(site, study, keys),
        voters=lambda site: teachers[site.name],
        fetch=workspace.objects.get,
    )
    for site in opened.sites[: -1 if later else None]:
        setup.add_site(workspace, site)
    return Recorded(workspace, Wire(opened.workers), teachers, opened)


def make_large_study(root: Path, *, rows: int, sites: int = 4, roster: int = 4) -> Workspace:
    """Make a study with ``rows`` ledger rows and a run in progress; each release names ``roster`` of its sites."""
    workspace = Workspace(root)
    study = make_study(name="large", delta=1e-5, planned_queries=rows)
    workspace.study_file.write_text(render_study(study), encoding="utf-8")
    registered = tuple(Site(name=f"site-{i}", pool=f"pool-{i}", node_id=i) for i in range(sites))
    workspace.save_sites(registered)
    mechanism = study_mechanism(study, dimension=2)
    codec, noisy = sha256_bytes(b"codec"), np.zeros(2, dtype=np.int64)
    events = EventLog(workspace.events_file, study=study.id)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("stage-started", stage="collect", total=rows)
    with Ledger.create(workspace.ledger_file, signing_key=Ed25519PrivateKey.generate()) as ledger:
        ledger.register_study(study)
        for site in registered:
            ledger.declare_pool(pool_of(site, study))
        answers = rows - 2 - sites
        for start in range(0, answers, 500):
            first = start // 500 * roster
            entries = {registered[(first + i) % sites] for i in range(roster)}
            queries = [
                QuerySpec(
                    edition=1,
                    codec=codec,
                    volumes=(sha256_bytes(str(number).encode()),),
                    round=1,
                    centre="zero",
                    weights="codec",
                    mechanism=mechanism,
                )
                for number in range(start, min(start + 500, answers))
            ]
            ledger.release_batch(
                study_id=study.id,
                batch_id=f"batch-{start}",
                roster=tuple(RosterEntry(site=site.name, pool=site.pool) for site in registered if site in entries),
                queries=queries,
                draw=lambda _: noisy.copy(),
            )
    return workspace


if __name__ == "__main__":
    import sys

    make_study_directory(Path(sys.argv[1])).run()
