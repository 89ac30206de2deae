"""Defines a demo's options and where its parts lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from client.data.layouts import named_dataset
from client.training.private.settings import PrivateSettings, defaults
from common.data.dataset import Dataset
from common.errors import InvalidInput
from common.privacy.training import Neighbours
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What one demo is; a directory belongs to one set of options. ``data`` is a dataset in ``layout``, None for
    phantoms, ``labels`` and ``channels`` its names where it has none. ``simulated``: without daemons, and called so.
    ``absent``: SITE=CHANNEL, comma-separated.

    None stands for what the data says (``hospitals``, ``queries``: public volumes) or the planner recommends
    (``voters`` a site; ``rounds``: how to ask, by the public label maps). ``paired``: public cases that keep their
    label maps. ``strategy`` trains the teachers; a private one may cost each patient
    ``training_epsilon`` at the study's δ.
    """

    hospitals: int | None = None
    epsilon: float = 8.0
    delta: float = 1e-5
    queries: int | None = None
    accountant: str = "exact"
    unit: str = "patient"
    relation: str = "replace-one"
    voters: int | None = None
    aggregation: str | None = None
    colluders: int = 1
    spare_draws: int = 0
    codec: str = "pca"
    rounds: bool | None = None
    paired: int = 0
    seed: int = 0
    data: str | None = None
    strategy: str = "standard"
    training_epsilon: float = 8.0
    simulated: bool = False
    layout: str = "auto"
    labels: str = ""
    channels: str = ""
    label_maps: int | None = None
    teacher_steps: int | None = None
    student_steps: int | None = None
    absent: str = ""

    def __post_init__(self) -> None:
        if self.hospitals is not None and not 1 <= self.hospitals <= 64:
            raise InvalidInput("--hospitals", value=self.hospitals, limit="1 to 64")
        self.private(begun=False)
        if self.absent and (not self.data or not all(self.lacking.values())):
            raise InvalidInput(
                "--absent", value=self.absent, limit="SITE=CHANNEL, with --data", remedy="hospital-01=T1ce"
            )

    @property
    def lacking(self) -> dict[str, str]:
        """The channel that a hospital has of none of its patients, by hospital."""
        return dict(pair.partition("=")[::2] for pair in self.absent.split(",") if pair)

    def private(self, *, begun: bool) -> PrivateSettings | None:
        """What each patient pays for its teacher, which may have ``begun`` from a public start; None for teachers
        without a guarantee of their own."""
        if self.strategy == "standard":
            return None
        same = Neighbours.REPLACE_ONE if self.relation == Neighbours.REPLACE_ONE else Neighbours.ADD_REMOVE
        recipe = defaults(self.strategy, epsilon=self.training_epsilon, delta=self.delta, begun=begun)
        return replace(recipe, neighbours=same)


def dataset_of(source: Path, options: DemoOptions) -> Dataset:
    """The index of the data that a demo is about, in terms of its own or those given."""
    names = [tuple(text.split(",")) if text else () for text in (options.labels, options.channels)]
    return named_dataset(source, layout=options.layout, labels=names[0], channels=names[1])


@dataclass(frozen=True, slots=True)
class Places:
    """Where a demo's parts lie below its output directory."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "data" / "all"

    @property
    def atlas(self) -> Path:
        return self.root / "data" / "atlas"

    @property
    def split(self) -> Path:
        return self.root / "data" / "split"

    @property
    def sites(self) -> Path:
        return self.root / "sites"

    @property
    def dashboard(self) -> Path:
        return self.root / "dashboard"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / "server")
