"""A recorded study for the dashboard's tests: real workers, ledgers, core and pipeline in one process, on phantoms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from client.ledger.site_ledger import SiteLedger
from client.policy import Caps, Consent, ServerFacts, SiteConfig
from client.worker import Worker
from common.config import CodecConfig, CollectionConfig, PrivacyConfig, Study, TrainingConfig
from common.data.synthetic import study_data, write_phantoms
from common.data.volume import load_label
from common.events import EventLog
from server.aggregation.pipeline import collect, run_study
from server.study import create_study as setup
from server.study.workspace import Site, Workspace
from tests.federation import LoopTransport

QUERIES, SITES = 8, ("north", "east", "south", "west")


@dataclass
class NoisyTruth:
    """A teacher that knows the phantom's own label map and is wrong by a shift of its own."""

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
    """The study's directory and what it takes to run it (again)."""

    workspace: Workspace
    transport: LoopTransport
    teachers: dict[str, NoisyTruth]

    def run(self, run: str = "1") -> None:
        """Every stage, to the bundle."""
        run_study(self.workspace, self.transport, run=run)

    def collect(self, run: str = "1") -> EventLog:
        """The first stage alone: answers in the ledger, no student; the log stands in the middle of a run."""
        events = EventLog(self.workspace.events_file, study=self.workspace.study().id)
        events.emit("run-started", run=run, pid=1, resumed=False)
        collect(self.workspace, self.transport, events=events)
        return events


def make_study_directory(
    root: Path,
    *,
    batch_size: int = 4,
    steps: int = 60,
    epsilon: float = 8.0,
    rounds: int = 0,
    queries: int = QUERIES,
    protocol: str = "",
) -> Recorded:
    """A study ready to run: phantoms published, codec fitted, four sites registered; a joint one of so many rounds, or
    so many queries of another protocol."""
    phantoms = write_phantoms(root / "phantoms", cases=QUERIES + 10, seed=3)
    public, maps = phantoms.cases[:QUERIES], phantoms.cases[QUERIES:]
    study = Study(
        name="hippocampus-demo",
        data=study_data(2),
        privacy=PrivacyConfig(epsilon=epsilon, delta=1e-3, planned_queries=rounds or queries, quorum=3),
        codec=CodecConfig(augmentations=20, max_dimension=12, joint=rounds > 0, protocol=protocol),
        teacher=TrainingConfig(channels=(4, 8), steps=4),
        student=TrainingConfig(channels=(4, 8), steps=steps),
        collection=CollectionConfig(batch_size=batch_size, offer_deadline_s=2.0),
    )
    workspace = Workspace(root / "study")
    setup.create_study(workspace, study)
    setup.publish_volumes(workspace, [case.image for case in public])
    setup.fit_study_codec(workspace, [case.label for case in maps if case.label], sites=len(SITES))
    truths = {case.image.read_bytes(): load_label(case.label, study.data) for case in public if case.label}
    keys = setup.server_keys(workspace)
    workers, teachers = {}, {}
    for index, name in enumerate(SITES):
        site = Site(name=name, pool=f"{name}/patients", node_id=100 + index)
        teachers[name] = NoisyTruth(truths, len(study.data.labels), shift=index % 3)
        privacy = study.privacy
        config = SiteConfig(
            site=name,
            pool=site.pool,
            data="data",
            server=ServerFacts(
                sealing_key=keys.sealing_key,
                signing_key=keys.signing_key,
                objects_url="https://localhost",
                superlink="localhost:1",
                root_certificates="ca.crt",
            ),
            caps=Caps(epsilon=privacy.epsilon, delta=privacy.delta, unit=privacy.unit, relation=privacy.relation),
        )
        folder = root / "sites" / name
        folder.mkdir(parents=True)
        ledger = SiteLedger.open(folder / "site-ledger.sqlite", site.pool, caps=config.caps, site=name)
        ledger.consent(study)
        setup.add_site(workspace, replace(site, answer_key=ledger.head().public_key))
        workers[site.node_id] = Worker(
            config=config,
            consent=Consent.of(study),
            ledger=ledger,
            voters=teachers[name],
            fetch=workspace.objects.get,
        )
    return Recorded(workspace, LoopTransport(workers), teachers)


if __name__ == "__main__":
    import sys

    make_study_directory(Path(sys.argv[1])).run()
