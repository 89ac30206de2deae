"""What a demo is asked for, and where its parts lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from client.training.private.settings import PrivateSettings, defaults
from common.config import OPEN
from common.errors import InvalidInput
from common.privacy.training import Neighbours
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What one demo is; a directory belongs to one set of options. ``data`` is an MSD dataset, None for phantoms.

    ``strategy`` trains the teachers; a private one may cost each patient ``training_epsilon`` at the study's δ.
    """

    hospitals: int = 4
    epsilon: float = 8.0
    delta: float = 1e-3
    queries: int = 16
    accountant: str = "exact"
    unit: str = "hospital"
    relation: str = "replace-one"
    voters: int = 1
    aggregation: str = OPEN
    colluders: int = 1
    spare_draws: int = 0
    codec: str = "pca"
    joint: bool = False
    seed: int = 0
    data: str | None = None
    strategy: str = "standard"
    training_epsilon: float = 8.0

    def __post_init__(self) -> None:
        if not 1 <= self.hospitals <= 64:
            raise InvalidInput("--hospitals", value=self.hospitals, limit="1 to 64")
        self.private()

    def private(self) -> PrivateSettings | None:
        """What each patient pays for its teacher, None for teachers without a guarantee of their own."""
        if self.strategy == "standard":
            return None
        same = Neighbours.REPLACE_ONE if self.relation == Neighbours.REPLACE_ONE else Neighbours.ADD_REMOVE
        recipe = defaults(self.strategy, epsilon=self.training_epsilon, delta=self.delta, begun=self.joint)
        return replace(recipe, neighbours=same)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a demo's parts lie below its output directory."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "data" / "all"

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
