"""Sets up hospitals that take part in several studies over real daemons: one pool each, one consortium's ledger."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from client.policy import load_site
from client.site.books import read_books
from client.site.enrolment import SiteKit, join_site
from common.config import CodecConfig, CollectionConfig, TrainingConfig
from common.data.dataset import Case
from common.data.msd import write_dataset
from common.data.synthetic import study_data, write_phantoms
from common.sockets import free_port
from consilium.demo.federation import write_server
from server.ledger.server_ledger import Ledger
from server.operations import provision
from server.operations.supervisor import request_stop, supervise
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.studies import made_study
from tests.waiting import events_of
from tests.worlds import make_study

SITES = ("site-0", "site-1")
QUERIES, PATIENTS, POOL_EPSILON = 2, 2, 10.0
RECIPE = TrainingConfig(channels=(4, 8), steps=2)


@dataclass
class Consortium:
    """Holds hospitals' directories for their first study, and public cases that no study has used yet."""

    root: Path
    public: list[Case]
    sites: dict[str, Path]
    first: Workspace

    def study(self, name: str, *, epsilon: float, ledger: Path | None, behind: Workspace | None = None) -> Workspace:
        """Set up a study with volumes and a codec of its own, on the port of the study ``behind`` if one is given."""
        study = make_study(
            name=name,
            data=study_data(2),
            epsilon=epsilon,
            planned_queries=QUERIES,
            codec=CodecConfig(augmentations=10, max_dimension=4),
            teacher=RECIPE,
            student=RECIPE,
            collection=CollectionConfig(offer_deadline_s=20.0, patience_s=60.0),
        )
        workspace = made_study(self.root / name, study, ledger=ledger)
        asked, fitted = [self.public.pop() for _ in range(QUERIES)], self.public[:6]
        setup.publish_volumes(workspace, [case.image for case in asked])
        setup.fit_study_codec(workspace, [case.label for case in fitted], sites=len(SITES))
        if behind is None:
            write_server(workspace)
        else:
            provision.set_up_behind(workspace, behind, internal_port=free_port())
        return workspace

    def join(self, workspace: Workspace) -> dict[str, Path]:
        """Let every hospital join the study with its existing ledger and its present teachers."""
        joined = {}
        for name, existing in self.sites.items():
            kit = self.root / "kits" / f"{workspace.root.name}-{name}"
            provision.make_kit(workspace, name, kit)
            joined[name], _ = join_site(None, kit=SiteKit.load(kit), existing=existing)
            shutil.copytree(
                existing / "teachers", joined[name] / "teachers", ignore=shutil.ignore_patterns("slots.json")
            )
        return joined

    def set_caps(self, epsilon: float) -> None:
        """Set the hospitals' caps, which each hospital states in one file only."""
        for directory in self.sites.values():
            text = (directory / "site.toml").read_text()
            (directory / "site.toml").write_text(re.sub(r"(?m)^epsilon = .*$", f"epsilon = {epsilon}", text))

    def spent(self) -> dict[str, tuple[Fraction, Fraction]]:
        """Return Σμ² of every pool, by the consortium's ledger and by the hospital's own."""
        found = {}
        with Ledger.open(self.first.ledger_file) as ledger:
            for name, directory in self.sites.items():
                with read_books(load_site(directory)) as own:
                    found[name] = ledger.spent(f"{name}/patients").mu_squared, own.spent().mu_squared
        return found


def costs(workspace: Workspace) -> Fraction:
    """Return Σμ² of a study's answers, added up from the release rows alone."""
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
    assert len(answers) == QUERIES
    moved = [Fraction(2 * answer.query.mechanism.radius_int) for answer in answers]
    return sum((m**2 / a.query.mechanism.noise_std**2 for m, a in zip(moved, answers, strict=True)), Fraction(0))


def collect(workspace: Workspace) -> None:
    """Run a study until its answers are released, and train no student."""

    def stop(event: dict) -> None:
        if event["event"] == "released":
            request_stop(workspace)

    supervise(workspace, on_event=stop)


def events(workspace: Workspace, kind: str) -> list[dict]:
    return events_of(workspace.events_file, kind)


def consortium_of(root: Path) -> Consortium:
    """Make hospitals with data, and public cases, without a study yet."""
    phantoms = write_phantoms(root / "all", cases=len(SITES) * PATIENTS + 2 * QUERIES + 6, seed=1)
    cases = list(phantoms.cases)
    for k, name in enumerate(SITES):
        part = cases[k * PATIENTS : (k + 1) * PATIENTS]
        write_dataset(root / "data" / name, name=name, labels=phantoms.labels, channels=phantoms.channels, cases=part)
    return Consortium(root, cases[len(SITES) * PATIENTS :], {}, Workspace(root / "first"))
