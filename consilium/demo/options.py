"""Defines a demo's options, and the folders below its output directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from client.data.layouts import named_dataset
from client.training.private.settings import PrivateSettings, defaults
from common.canonical import MAX_INTEGER
from common.codecs.codec import MIN_LABEL_MAPS
from common.data.dataset import Dataset
from common.errors import InvalidInput
from common.messages import MAX_VOLUMES
from common.objects import PathInside
from common.privacy.accounting import MAX_EPSILON
from common.privacy.mechanism import MAX_VOTERS_PER_SITE
from common.privacy.training import MAX_STEPS, Neighbours
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of one demo. An output directory belongs to one set of options.

    None stands for the value in the data, or for the planner's recommendation.

    Attributes:
        hospitals: Number of hospitals; None for the number in the data.
        epsilon: The study's ε.
        delta: The study's δ.
        queries: Number of public volumes; None for a share of the data.
        accountant: Accountant that decides whether a release fits the budget.
        unit: Unit of privacy.
        relation: Neighbouring relation.
        voters: Voters of each site; None for the planner's recommendation.
        aggregation: ``open`` or ``sealed-sum``; None for the default of new studies.
        colluders: Colluders in a sealed sum.
        spare_draws: In a sealed sum, number of charges for repeating sums that a site did not complete.
        codec: Name of the codec.
        rounds: True to ask joint queries about all volumes, in rounds; None for the planner's recommendation.
        paired: Number of public volumes that are published with their label maps.
        seed: Seed of data, split and training.
        data: Folder of a dataset; None for phantoms.
        strategy: Training strategy of the teachers, such as ``standard`` or ``dp-sgd``.
        training_epsilon: ε of each patient's private training, at the study's δ.
        simulated: True to run without daemons; the study's name then shows it.
        layout: Layout of the dataset.
        labels: Labels of the dataset, comma-separated, if it names none.
        channels: Channels of the dataset, comma-separated, if it names none.
        label_maps: Number of public label maps; None for the default.
        teacher_steps: Training steps of a teacher; None for the recipe's.
        student_steps: Training steps of the student; None for the recipe's.
        absent: ``SITE=CHANNEL`` pairs, comma-separated.

    Raises:
        InvalidInput: If an option is out of range.
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
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # a NaN is refused, too
                option = "--public-images" if self.simulated and name == "queries" else _spelled(name)
                raise InvalidInput(option, value=value, limit=f"{least} to {most}")
        self.private(begun=False)
        if not self.data and (unread := [_spelled(name) for name in _OF_DATA if getattr(self, name) != _default(name)]):
            raise InvalidInput(
                ", ".join(unread),
                limit="only together with --data",
                remedy="leave them out for phantoms, or give --data",
            )
        if self.absent and not all(self.lacking.values()):
            raise InvalidInput(
                "--absent",
                value=self.absent,
                limit="SITE=CHANNEL",
                remedy="write for instance hospital-01=T1ce",
            )

    @property
    def lacking(self) -> dict[str, str]:
        """For each hospital in ``absent``, the channel that none of its patients has."""
        return dict(pair.partition("=")[::2] for pair in self.absent.split(",") if pair)

    def private(self, *, begun: bool) -> PrivateSettings | None:
        """Return the settings of the teachers' private training.

        Args:
            begun: True if the teachers begin from a network that was trained on public data.

        Returns:
            The settings; None for teachers without a guarantee of their own.
        """
        if self.strategy == "standard":
            return None
        same = Neighbours.REPLACE_ONE if self.relation == Neighbours.REPLACE_ONE else Neighbours.ADD_REMOVE
        recipe = defaults(self.strategy, epsilon=self.training_epsilon, delta=self.delta, begun=begun)
        return replace(recipe, neighbours=same)


MOST_HOSPITALS = 64

_BOUNDS = {
    "hospitals": (1, MOST_HOSPITALS),
    "queries": (1, MAX_VOLUMES),
    "label_maps": (MIN_LABEL_MAPS, MAX_VOLUMES),
    "voters": (1, MAX_VOTERS_PER_SITE),
    "teacher_steps": (1, MAX_STEPS),
    "student_steps": (8, MAX_STEPS),
    "paired": (0, MAX_VOLUMES),
    "colluders": (0, MOST_HOSPITALS),
    "spare_draws": (0, 1_000),
    "seed": (0, MAX_INTEGER),
    "epsilon": (0, MAX_EPSILON),
    "training_epsilon": (0, MAX_EPSILON),
    "delta": (0, 1),
}
"""Smallest and largest value of each number; the study's own checks may be narrower."""

_OF_DATA = ("layout", "labels", "channels", "label_maps", "absent")
"""Options that phantoms ignore."""


def _default(name: str) -> object:
    return DemoOptions.__dataclass_fields__[name].default


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def dataset_of(source: Path, options: DemoOptions) -> Dataset:
    """Read the index of a demo's dataset. Labels and channels are those of the options, or else those of the dataset.

    Args:
        source: The dataset's folder.
        options: The demo's options.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If neither the options nor the dataset name labels and channels.
    """
    names = [tuple(text.split(",")) if text else () for text in (options.labels, options.channels)]
    return named_dataset(source, layout=options.layout, labels=names[0], channels=names[1])


@dataclass(frozen=True, slots=True)
class DemoFolders:
    """The folders below a demo's output directory."""

    root: Path

    source = PathInside("data/all")
    """Folder of the phantoms."""
    atlas = PathInside("data/atlas")
    """Folder of the phantoms whose label maps are public and whose images are not."""
    split = PathInside("data/split")
    """Folder of the data split into hospitals, public and test parts."""
    sites = PathInside("sites")
    """Folder of the hospitals' directories."""
    dashboard = PathInside("dashboard")
    """The dashboard's state directory."""

    @property
    def workspace(self) -> Workspace:
        """The study's directory."""
        return Workspace(self.root / "server")
