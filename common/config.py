"""The study: one TOML file, frozen and validated, that says what is asked of whom under which guarantee.

Refuses unknown keys, wrong types and unsound combinations (unit ``patient`` with relation ``zero-out``). The study's
hash stands in every ledger entry, so an edited study is another study to the ledger and buys no budget: budgets belong
to the sites' patient pools.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.canonical import check_schema, digest
from common.errors import InvalidInput
from common.names import check_regions, check_text, region_members, region_names
from common.privacy.mechanism import (
    HONEST_SITES,
    MAX_VOTERS_PER_SITE,
    AccountantName,
    Budget,
    Protection,
    Relation,
    Unit,
)
from common.sections import as_said, no_unknown, read_section

STUDY_SCHEMA = 1
MAX_GRID_VOXELS = 1 << 24
JOINT_ROUNDS = 4
"""Rounds of a joint query by default; twice as many bring little more (docs/utility.md)."""
MAX_JOINT_ROUNDS = 16
OPEN, SEALED_SUM = "open", "sealed-sum"
NORMALISATIONS = ("volume", "nonzero")


@dataclass(frozen=True, slots=True, repr=False)
class DataConfig:
    """What every volume is brought to: RAS+, ``spacing_mm``, centre-cropped or padded to ``grid`` voxels.

    ``labels[i]`` names label value i; label 0 is background. ``channels`` names the image channels. ``regions``: what
    label maps are scored by where structures overlap, as BraTS' do: each ``"name = label + label"``. The labels stay
    exclusive, for a code is of probabilities that sum to 1. ``normalisation``: z-scores over the whole ``"volume"``, or
    over its ``"nonzero"`` voxels (a brain cut out of its skull), the others staying 0. ``finer``: the student is
    trained and scored at so many times the resolution at which hospitals are asked (:attr:`student`).
    """

    labels: tuple[str, ...]
    spacing_mm: tuple[float, float, float]
    grid: tuple[int, int, int]
    channels: tuple[str, ...] = ("MRI",)
    regions: tuple[str, ...] = ()
    normalisation: str = "volume"
    finer: int = 1

    def __post_init__(self) -> None:
        for name in ("labels", "grid", "channels", "regions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "spacing_mm", tuple(float(spacing) for spacing in self.spacing_mm))
        if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels) or not all(self.labels):
            raise InvalidInput(
                "data.labels", value=self.labels, limit="background and at least one structure, no name twice"
            )
        if not self.channels or len(set(self.channels)) != len(self.channels):
            raise InvalidInput("data.channels", value=self.channels, limit="at least one channel, no name twice")
        if len(self.spacing_mm) != 3 or not all(0.05 <= s <= 20 for s in self.spacing_mm):
            raise InvalidInput("data.spacing_mm", value=self.spacing_mm, limit="three numbers from 0.05 to 20 mm")
        if len(self.grid) != 3 or not all(8 <= n <= 512 and n % 8 == 0 for n in self.grid):
            raise InvalidInput("data.grid", value=self.grid, limit="three multiples of 8 from 8 to 512 voxels")
        for name in ("labels", "channels"):
            for text in getattr(self, name):
                check_text(text, what=f"name in data.{name}")
        if self.grid[0] * self.grid[1] * self.grid[2] > MAX_GRID_VOXELS:
            raise InvalidInput("data.grid", value=self.grid, limit=f"at most {MAX_GRID_VOXELS} voxels in all")
        if self.normalisation not in NORMALISATIONS:
            raise InvalidInput("data.normalisation", value=self.normalisation, limit=", ".join(NORMALISATIONS))
        check_regions(self.regions, self.labels)
        if type(self.finer) is not int or self.finer not in (1, 2, 4):
            raise InvalidInput("data.finer", value=self.finer, limit="1, 2, 4")
        _ = self.student  # refuses a grid that is too large there

    @property
    def student(self) -> DataConfig:
        """What the student sees: the same field of view in ``finer`` times as many voxels on each axis."""
        (x, y, z), (u, v, w), n = self.grid, self.spacing_mm, self.finer
        finer = {"grid": (n * x, n * y, n * z), "spacing_mm": (u / n, v / n, w / n), "finer": 1}
        return self if n == 1 else dataclasses.replace(self, **finer)  # type: ignore[arg-type]

    @property
    def structures(self) -> tuple[str, ...]:
        """What label maps are scored by, by name: the regions, or every label but the background."""
        return region_names(self.regions) or self.labels[1:]

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The label values of every one of :attr:`structures`."""
        alone = tuple((value,) for value in range(1, len(self.labels)))
        return region_members(self.regions, self.labels) or alone

    def to_table(self) -> dict[str, Any]:
        """The section's keys and values; later ones only where they say something, so that ids of studies stay."""
        return as_said(self, ("regions", "normalisation", "finer"))

    def __repr__(self) -> str:
        return f"DataConfig({', '.join(f'{name}={value!r}' for name, value in self.to_table().items())})"


class StatedBudget:
    """Fields that every table stating a budget has in common: a study's ``[privacy]`` and a site's ``[caps]``."""

    __slots__ = ()

    epsilon: float
    delta: float
    accountant: AccountantName
    unit: Unit
    relation: Relation

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta)

    @property
    def protection(self) -> Protection:
        return Protection(unit=self.unit, relation=self.relation)

    def _check_budget(self, where: str) -> None:
        """Turn names into their enumerations; InvalidInput for an unknown one and for an unsound combination."""
        for name, kind in (("accountant", AccountantName), ("relation", Relation), ("unit", Unit)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError as error:
                raise InvalidInput(f"{where}.{name}", value=value, limit=", ".join(kind)) from error
        _ = self.budget, self.protection


@dataclass(frozen=True, slots=True)
class PrivacyConfig(StatedBudget):
    """Every setting that changes the guarantee; hashed into the ledger.

    ``epsilon``, ``delta`` bound what one unit can lose over the whole study; ``accountant`` gates (the others are shown
    beside it); ``voters_per_site`` is m; ``planned_queries`` is N; ``quorum`` the least number of sites in a release;
    ``edition`` counts retrainings of the teachers asked.

    ``aggregation``: ``"open"``, where the server adds the noise to codes it can read, or ``"sealed-sum"``, where sites
    mask their codes and draw the noise, and ε holds against the server together with ``colluders`` of them. A sum that
    one of its sites never completed is charged and lost; ``spare_draws`` are charges beyond N that the noise is
    calibrated for, so that as many sums may be lost. All three say nothing in an open study.
    """

    epsilon: float
    delta: float
    planned_queries: int
    quorum: int
    accountant: AccountantName = AccountantName.EXACT
    relation: Relation = Relation.REPLACE_ONE
    unit: Unit = Unit.HOSPITAL
    voters_per_site: int = 1
    edition: int = 1
    aggregation: str = OPEN
    colluders: int = 1
    spare_draws: int = 0

    def __post_init__(self) -> None:
        self._check_budget("privacy")
        for name, most in (
            ("planned_queries", 1_000_000),
            ("quorum", 10_000),
            ("voters_per_site", MAX_VOTERS_PER_SITE),
            ("edition", 1_000_000),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidInput(f"privacy.{name}", value=value, limit=f"an integer from 1 to {most}")
        self._check_aggregation()

    def _check_aggregation(self) -> None:
        if self.aggregation not in (OPEN, SEALED_SUM):
            raise InvalidInput("privacy.aggregation", value=self.aggregation, limit=f"{OPEN}, {SEALED_SUM}")
        for name, most, remedy in (
            ("colluders", self.quorum - HONEST_SITES, f"a sum needs {HONEST_SITES} honest sites: a larger quorum"),
            ("spare_draws", 1_000, ""),
        ):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            limit = f"0 to {most}" if self.sealed else f"stated where aggregation is {SEALED_SUM}"
            if value != default if not self.sealed else type(value) is not int or not 0 <= value <= most:
                raise InvalidInput(f"privacy.{name}", value=value, limit=limit, remedy=remedy)

    @property
    def sealed(self) -> bool:
        """Whether the server sees no site's code, but noisy sums alone."""
        return self.aggregation == SEALED_SUM

    @property
    def sealed_colluders(self) -> int | None:
        """t of a sealed sum; None in an open study."""
        return self.colluders if self.sealed else None

    @property
    def charges(self) -> int:
        """Releases the noise is calibrated for: those planned, and the draws that may be lost."""
        return self.planned_queries + self.spare_draws

    def to_table(self) -> dict[str, Any]:
        """The section's keys and values; those of the sealed sum only in such a study, so that ids of studies stay."""
        said = self.sealed
        return {k: v for k, v in dataclasses.asdict(self).items() if said or k not in _SEALED_ALONE}


_SEALED_ALONE = ("aggregation", "colluders", "spare_draws")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Which codec, and how it is fitted on public label maps; ``max_dimension`` bounds l, ``radius`` is C.

    ``joint``: every query asks about all public volumes at once, and l is a volume's share; then
    ``privacy.planned_queries`` are rounds. ``protocol`` names another way to ask (``common.protocols.base``), in place
    of the two that ``joint`` decides between. ``paired``: so many public volumes are published with their label maps.
    """

    name: str = "pca"
    radius: float = 1.0
    max_dimension: int = 128
    augmentations: int = 240
    joint: bool = False
    protocol: str = ""
    paired: int = 0

    def __post_init__(self) -> None:
        if not 2**-8 <= self.radius <= 2**10:
            raise InvalidInput("codec.radius", value=self.radius, limit="2^-8 to 2^10")
        if not 1 <= self.max_dimension <= 4096:
            raise InvalidInput("codec.max_dimension", value=self.max_dimension, limit="1 to 4096")
        if not 0 <= self.augmentations <= 10_000:
            raise InvalidInput("codec.augmentations", value=self.augmentations, limit="0 to 10000")
        if self.joint and self.name != "pca":
            raise InvalidInput("codec.joint", value=self.name, limit="codec pca")
        if self.joint and self.protocol:
            raise InvalidInput("codec.protocol", value=self.protocol, limit="none where codec.joint is true")
        if not 0 <= self.paired <= (1000 if self.joint else 0):
            raise InvalidInput("codec.paired", value=self.paired, limit="0 to 1000, and 0 unless codec.joint is true")

    @property
    def in_proportion(self) -> bool:
        """Whether a code's coordinates vary as the shapes do: a frame spreads the radius, over all volumes at once."""
        return self.joint or self.protocol == "appearance"

    def to_table(self) -> dict[str, Any]:
        """The section's keys and values; later ones only where they say something, so that ids of studies stay."""
        table, later = dataclasses.asdict(self), ("protocol", "paired")
        return {key: value for key, value in table.items() if value or key not in later}


AUGMENTATIONS = ("smooth", "rotate-mirror")
NETWORKS = ("unet", "residual", "paper-unet", "dynunet")


@dataclass(frozen=True, slots=True, repr=False)
class TrainingConfig:
    """Recipe of teachers or the student: a U-Net's channels and the optimiser's schedule. Changes no guarantee.

    ``network``: which U-Net (:func:`common.models.unet.definition`). ``modality_dropout``: the chance that a channel is
    set to 0 in a step of training, never all of them, so that a network learns to do without one.

    ``patch`` in voxels: train on random patches of the grid; empty for whole volumes. ``augmentation``: ``"smooth"`` or
    ``"rotate-mirror"`` (:mod:`common.models.augmentation`). ``amp``: mixed precision, bfloat16 where the device
    has it. With a patch, volumes are predicted by a sliding window of its size.
    """

    channels: tuple[int, ...] = (16, 32, 64)
    steps: int = 300
    batch_size: int = 2
    learning_rate: float = 1e-2
    patch: tuple[int, ...] = ()
    augmentation: str = "smooth"
    amp: bool = False
    network: str = "unet"
    modality_dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))
        object.__setattr__(self, "patch", tuple(self.patch))
        if not 2 <= len(self.channels) <= 6 or not all(isinstance(c, int) and 2 <= c <= 512 for c in self.channels):
            raise InvalidInput("training channels", value=self.channels, limit="2 to 6 integers from 2 to 512")
        if not 1 <= self.steps <= 1_000_000:
            raise InvalidInput("training steps", value=self.steps, limit="1 to 1000000")
        if not 1 <= self.batch_size <= 64:
            raise InvalidInput("training batch size", value=self.batch_size, limit="1 to 64")
        if not 0 < self.learning_rate < 1:
            raise InvalidInput("learning rate", value=self.learning_rate, limit="above 0, below 1")
        halved = 2 ** (len(self.channels) - 1)
        if self.patch and (
            len(self.patch) != 3
            or not all(isinstance(n, int) and 8 <= n <= 512 and n % halved == 0 for n in self.patch)
        ):
            raise InvalidInput("training patch", value=self.patch, limit=f"three multiples of {halved} from 8 to 512")
        if self.augmentation not in AUGMENTATIONS:
            raise InvalidInput("training augmentation", value=self.augmentation, limit=", ".join(AUGMENTATIONS))
        if self.network not in NETWORKS:
            raise InvalidInput("training network", value=self.network, limit=", ".join(NETWORKS))
        if self.network == "paper-unet" and len(self.channels) != 5:
            raise InvalidInput("channels of paper-unet", value=self.channels, limit="5, four poolings between them")
        if not 0 <= self.modality_dropout < 1:
            raise InvalidInput("modality dropout", value=self.modality_dropout, limit="0 to below 1")

    def to_table(self) -> dict[str, Any]:
        """The section's keys and values; later ones only where they say something, so that trainings keep theirs."""
        return as_said(self, ("network", "modality_dropout"))

    def __repr__(self) -> str:
        return f"TrainingConfig({', '.join(f'{name}={value!r}' for name, value in self.to_table().items())})"


STUDENT_RECIPE = TrainingConfig(steps=600, learning_rate=2e-3)
"""The student's default: its labels are noisy, so it learns longer and in smaller steps than a teacher."""


@dataclass(frozen=True, slots=True)
class CollectionConfig:
    """How answers are gathered. Changes no guarantee.

    ``batch_size`` is queries in one message; ``offer_deadline_s`` how long sites have to come online and decide;
    ``deadline_s`` bounds one attempt at a batch; ``patience_s`` bounds all attempts together, after which a site that
    accepted and stayed silent counts as the zero code or, in a sealed sum, loses the draw.
    """

    batch_size: int = 50
    offer_deadline_s: float = 180.0
    deadline_s: float = 600.0
    patience_s: float = 1200.0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= 500:
            raise InvalidInput("collection.batch_size", value=self.batch_size, limit="1 to 500")
        for name in ("offer_deadline_s", "deadline_s", "patience_s"):
            if not 1 <= getattr(self, name) <= 604_800:
                raise InvalidInput(f"collection.{name}", value=getattr(self, name), limit="1 to 604800 seconds")


@dataclass(frozen=True, slots=True)
class Study:
    """A whole study. ``id`` is the hash of everything a site consents to: name, data, privacy, codec."""

    name: str
    data: DataConfig
    privacy: PrivacyConfig
    codec: CodecConfig = field(default_factory=CodecConfig)
    teacher: TrainingConfig = field(default_factory=TrainingConfig)
    student: TrainingConfig = field(default_factory=lambda: STUDENT_RECIPE)
    collection: CollectionConfig = field(default_factory=CollectionConfig)
    _id: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 64 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.name):
            raise InvalidInput("study name", value=self.name, limit="1 to 64 letters, digits, '-', '_', '.'")
        if self.codec.joint and self.privacy.planned_queries > MAX_JOINT_ROUNDS:
            raise InvalidInput(
                "privacy.planned_queries",
                value=self.privacy.planned_queries,
                limit=f"at most {MAX_JOINT_ROUNDS} where codec.joint is true: each is a round about all public volumes",
                remedy=f"{JOINT_ROUNDS} rounds are what the recipe takes",
            )
        if self.data.finer > 1 and (not self.codec.joint or self.codec.paired):
            raise InvalidInput("data.finer", value=self.data.finer, limit="1 unless codec.joint is true, without pairs")

    @property
    def id(self) -> str:
        if not self._id:
            object.__setattr__(self, "_id", digest("study", self.to_json()))
        return self._id

    def to_json(self) -> dict[str, object]:
        """What a site consents to, in canonical form; recipes and deadlines change no guarantee and stay out."""
        data = _plain(self.data.to_table())
        codec = _plain(self.codec.to_table())
        return {
            "codec": codec,
            "data": data,
            "name": self.name,
            "privacy": _plain(self.privacy.to_table()),
            "schema": STUDY_SCHEMA,
        }


def load_study(path: Path) -> Study:
    """Read ``study.toml``; every mistake names the key, its value and the limit."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why, remedy = getattr(error, "strerror", None) or "not UTF-8", "check the path; `consilium study init`"
        raise InvalidInput(f"study file cannot be read ({why})", value=str(path), remedy=remedy) from error
    return parse_study(text)


def parse_study(text: str) -> Study:
    """The study in the text of a study file (TOML); every mistake names the key, its value and the limit."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(
            f"study file is not TOML ({error})", remedy="see `consilium study init` for a valid one"
        ) from error
    check_schema("study", document.pop("schema", None), known=STUDY_SCHEMA)
    sections = {
        "data": DataConfig,
        "privacy": PrivacyConfig,
        "codec": CodecConfig,
        "teacher": TrainingConfig,
        "student": TrainingConfig,
        "collection": CollectionConfig,
    }
    no_unknown(document, {"name", *sections}, where="study")
    parts: dict[str, Any] = {
        key: read_section(kind, document[key], where=key) for key, kind in sections.items() if key in document
    }
    if not isinstance(document.get("name"), str):
        raise InvalidInput("study name", value=document.get("name"), limit="a string")
    for key in ("data", "privacy"):
        if key not in parts:
            raise InvalidInput(f"section [{key}] is missing", remedy="see `consilium study init` for a valid study")
    return Study(name=document["name"], **parts)


def render_study(study: Study) -> str:
    """The study as the text of a study file; parsing it gives an equal study back."""
    lines = [f"schema = {STUDY_SCHEMA}", f"name = {json.dumps(study.name)}"]
    for section in ("data", "privacy", "codec", "teacher", "student", "collection"):
        lines += ["", f"[{section}]"]
        part = getattr(study, section)
        table = dataclasses.asdict(part) if isinstance(part, CollectionConfig) else part.to_table()
        for key, value in table.items():
            plain = list(value) if isinstance(value, tuple) else value
            lines.append(f"{key} = {json.dumps(plain, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    return value
