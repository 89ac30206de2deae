"""A study built on disk, with its sites trained, for tests over real Flower daemons."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.ledger.site_ledger import SiteLedger
from client.training.private.settings import PrivateSettings
from common.config import CodecConfig, CollectionConfig, PrivacyConfig, Study, TrainingConfig
from common.data.msd import write_dataset
from common.data.synthetic import study_data, write_phantoms
from common.events import read_events
from common.privacy.training import Neighbours
from consilium.demo.federation import Federation, write_server, write_sites
from consilium.demo.training import train_all
from server.ledger.server_ledger import Ledger
from server.study import create_study as setup
from server.study.workspace import Workspace

SITES, QUERIES, PATIENTS = 3, 6, 2
RECIPE = TrainingConfig(channels=(4, 8), steps=4)
PRIVACY = PrivacyConfig(epsilon=8.0, delta=1e-3, planned_queries=QUERIES, quorum=2)
TRAINING = PrivateSettings("dp-sgd", 4.0, 1e-3, neighbours=Neighbours.REPLACE_ONE, rate=Fraction(1, 2), steps=3)
EACH_ITS_OWN = (TRAINING, replace(TRAINING, strategy="dp-bbb"), replace(TRAINING, per_layer=True))
"""A private training for each of three sites."""


@dataclass
class Road:
    root: Path
    workspace: Workspace
    sites: dict[str, Path]
    federation: Federation

    def ledger(self) -> Ledger:
        return Ledger.open(self.workspace.ledger_file)

    def answers(self) -> dict[str, bytes]:
        with self.ledger() as ledger:
            return {a.query.id: a.noisy_sum.tobytes() for a in ledger.answers(self.workspace.study().id)}

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.workspace.events_file) if event["event"] == kind]

    def wait(self, kind: str, *, timeout_s: float = 120.0) -> dict:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := self.events(kind):
                return found[-1]
            self.federation.group.check()
            time.sleep(0.05)
        raise AssertionError(f"no {kind} event within {timeout_s} s")

    def consilium(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", "from consilium.cli.main import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)


def known_codes(sites: Iterable[Path], queries: Iterable[str]) -> list[NDArray[np.int64]]:
    """The codes of these sites' ledgers that are not zero."""
    codes, wanted = [], list(queries)
    for directory in sites:
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            codes += [code for query in wanted if (code := ledger.code(query)) is not None and code.any()]
    return codes


def spellings(code: NDArray[np.int64]) -> tuple[bytes, ...]:
    """A code as it could be told apart among other bytes."""
    texts = (separator.join(map(str, code.tolist())).encode() for separator in (",", ", "))
    return (*(code.astype(kind).tobytes() for kind in ("<i8", ">i8", "<i4", "<f8")), *texts)


def build(
    root: Path,
    names: Sequence[str],
    *,
    collection: CollectionConfig,
    privacy: PrivacyConfig = PRIVACY,
    private: Sequence[PrivateSettings | None] = (),
) -> tuple[Workspace, dict[str, Path]]:
    """A study with its codec and volumes, and sites with trained teachers; nothing runs yet."""
    phantoms = write_phantoms(root / "all", cases=len(names) * PATIENTS + QUERIES + 8, seed=1)
    cases = list(phantoms.cases)
    for k, name in enumerate(names):
        part = cases[k * PATIENTS : (k + 1) * PATIENTS]
        write_dataset(
            root / "data" / name,
            name=name,
            labels=phantoms.labels,
            channels=phantoms.channels,
            cases=part,
            synthetic=True,
        )
    rest = cases[len(names) * PATIENTS :]
    study = Study(
        name="road",
        data=study_data(2),
        privacy=privacy,
        codec=CodecConfig(augmentations=20, max_dimension=8),
        teacher=RECIPE,
        student=RECIPE,
        collection=collection,
    )
    workspace = Workspace(root / "server")
    setup.create_study(workspace, study)
    setup.publish_volumes(workspace, [case.image for case in rest[:QUERIES]])
    setup.fit_study_codec(workspace, [case.label for case in rest[QUERIES:]], sites=len(names))
    write_server(workspace)
    sites = write_sites(workspace, root / "sites", names=names, data=root / "data")
    for number, (name, directory) in enumerate(sites.items()):
        own = private[number] if private else None
        train_all({name: directory}, seed=number, processes=1, private=own, on_steps=lambda done, total: None)
    return workspace, sites
