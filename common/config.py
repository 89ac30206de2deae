"""Defines a study: one TOML file, read into frozen and validated values, that states all terms of the study.

Called by every party. The study's hash is in every ledger entry, so an edited study counts as another study. Editing
gains no budget, because budgets belong to the sites' patient pools. Refuses unknown keys, wrong types and unsound
combinations (unit ``patient`` with relation ``zero-out``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common.canonical import check_hash, check_schema, digest
from common.data_config import DataConfig as DataConfig
from common.errors import InvalidInput
from common.privacy.figures import epsilon_text
from common.privacy.mechanism import HONEST_SITES, MAX_VOTERS_PER_SITE, AccountantName, Budget, Relation, Unit
from common.protocol_terms import CODECS, ProtocolTerms, choosing_line, choosing_lines, protocol_name, terms_of
from common.reading import MAX_TOML_BYTES, as_path, parse_toml, parsing, read_text
from common.sections import TomlSection, check_ranges, check_types, no_unknown, read_section
from common.stated_budget import StatedBudget

STUDY_SCHEMA = 1
JOINT_ROUNDS = 4
"""Default number of rounds of a joint query (about all public volumes). Twice as many rounds improve the student little
(docs/lab/utility-measured.md)."""
MAX_PAIRS = 1000
"""Most public volumes that a study publishes with their label maps."""
OPEN, SEALED_SUM = "open", "sealed-sum"


def usual_aggregation(quorum: int) -> str:
    """Return the aggregation of a new study that does not state one.

    It is ``sealed-sum`` for a quorum of 3 or more (one colluding and two honest sites), otherwise ``open``.

    Args:
        quorum: Least number of sites of a release.

    Returns:
        ``sealed-sum`` or ``open``.

    >>> usual_aggregation(2), usual_aggregation(3)
    ('open', 'sealed-sum')
    """
    return SEALED_SUM if quorum >= 1 + HONEST_SITES else OPEN


@dataclass(frozen=True, slots=True)
class PrivacyConfig(StatedBudget):
    """Every setting that changes the guarantee. It is hashed into the ledger.

    Attributes:
        epsilon: ε that one unit may lose over the whole study.
        delta: δ of that ε.
        planned_queries: Number N of releases.
        quorum: Smallest number of sites in a release.
        accountant: Accountant that decides whether a release fits the budget. ε by the other accountants is only
            displayed.
        relation: Which two worlds the guarantee compares, ``replace-one`` or ``zero-out``.
        unit: Whom the guarantee protects, ``patient`` or ``hospital``.
        voters_per_site: Number m of voters of each site.
        edition: Number of the set of teachers. It is raised by 1 each time the teachers are trained anew.
        aggregation: ``open``, where the server reads the codes and adds the noise, or ``sealed-sum``, where the sites
            mask their codes and draw the noise. New studies with a quorum of 3 or more use ``sealed-sum``.
        colluders: In a sealed sum, number of sites that may collude with the server without breaking the guarantee.
        spare_draws: In a sealed sum, number of charges beyond the planned ones for repeating sums that a site did not
            complete. An incomplete sum is charged and lost.
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
        check_types(self, where="privacy")
        self._check_budget("privacy")
        ranges = {"planned_queries": (1, 1_000_000), "quorum": (1, 10_000), "edition": (1, 1_000_000)}
        check_ranges(self, ranges | {"voters_per_site": (1, MAX_VOTERS_PER_SITE)}, where="privacy")
        self._check_aggregation()

    def _check_aggregation(self) -> None:
        if self.aggregation not in (OPEN, SEALED_SUM):
            raise InvalidInput("privacy.aggregation", value=self.aggregation, limit=f"{OPEN}, {SEALED_SUM}")
        for name, most, remedy in (
            (
                "colluders",
                self.quorum - HONEST_SITES,
                f"choose a larger quorum, because a sealed sum needs {HONEST_SITES} honest sites",
            ),
            ("spare_draws", 1_000, ""),
        ):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            limit = f"0 to {most}" if self.sealed else f"{default}, unless privacy.aggregation is {SEALED_SUM}"
            remedy = remedy if self.sealed else f"leave {name} out, or choose aggregation {SEALED_SUM}"
            if value != default if not self.sealed else not 0 <= value <= most:
                raise InvalidInput(f"privacy.{name}", value=value, limit=limit, remedy=remedy)

    @property
    def sealed(self) -> bool:
        """True if the study uses a sealed sum, in which the server sees noisy sums and no site's code."""
        return self.aggregation == SEALED_SUM

    @property
    def sealed_colluders(self) -> int | None:
        """Number t of colluders of a sealed sum; None in an open study."""
        return self.colluders if self.sealed else None

    @property
    def charges(self) -> int:
        """Number of charges for which the noise is calibrated: planned queries, and spare attempts at sealed sums."""
        return self.planned_queries + self.spare_draws

    def to_table(self) -> dict[str, Any]:
        """Return the section as a table. In an open study it lacks the settings of a sealed sum.

        A study's id is a hash of its tables, so the ids of open studies made before sealed sums existed do not change.
        """
        said = self.sealed
        return {k: v for k, v in dataclasses.asdict(self).items() if said or k not in _SEALED_ALONE}


_SEALED_ALONE = ("aggregation", "colluders", "spare_draws")


@dataclass(frozen=True, slots=True)
class CodecConfig(TomlSection):
    """A study's codec, the settings for fitting it on public label maps, and the query protocol.

    Attributes:
        name: Name of the codec: ``pca``, ``ball-ae`` or ``paper-pca``.
        radius: Clipping norm C of one voter's code.
        max_dimension: Largest length l of a code.
        augmentations: Number of deformed copies of each public label map.
        joint: If true, every query asks about all public volumes at once, l is the length for each volume, and
            ``privacy.planned_queries`` counts rounds.
        protocol: Name of the query protocol (:mod:`common.protocol_terms`): ``per-volume``, ``joint`` or
            ``appearance``. If it is empty, ``joint`` chooses between the first two.
        paired: Number of public volumes that are published with their label maps.
        dimension: Length l of a code; if it is 0, the codec chooses a length that suits the planned noise.

    >>> c.CodecConfig(protocol="appearance").protocol_name
    'appearance'
    """

    LATER: ClassVar = ("protocol", "paired", "dimension")

    name: str = "pca"
    radius: float = 1.0
    max_dimension: int = 128
    augmentations: int = 240
    joint: bool = False
    protocol: str = ""
    paired: int = 0
    dimension: int = 0

    def __post_init__(self) -> None:
        check_types(self, where="codec")
        terms = self.terms
        longest = 0 if terms.framed else self.max_dimension  # 0: the codec chooses
        ranges = {"radius": (2**-8, 2**10), "max_dimension": (1, 4096), "augmentations": (0, 10_000)}
        check_ranges(self, ranges | {"dimension": (0, longest)}, where="codec")
        if terms.codecs and self.name not in terms.codecs:
            limit = f"{', '.join(terms.codecs)}, because the study has {choosing_line(self.protocol_name)}"
            raise InvalidInput("codec.name", value=self.name, limit=limit)
        if self.name not in CODECS:
            raise InvalidInput("codec.name", value=self.name, limit=", ".join(sorted(CODECS)))
        if not 0 <= self.paired <= (MAX_PAIRS if terms.pairs else 0):
            limit = f"0 to {MAX_PAIRS} with {choosing_lines('pairs')}, otherwise 0"
            raise InvalidInput("codec.paired", value=self.paired, limit=limit)

    @property
    def protocol_name(self) -> str:
        """Name of the protocol in :data:`~common.protocol_terms.PROTOCOLS`."""
        return protocol_name(self)

    @property
    def terms(self) -> ProtocolTerms:
        """Requirements of the protocol; raises InvalidInput if the protocol is not registered."""
        return terms_of(self.protocol_name)


AUGMENTATIONS = ("smooth", "wide", "wider", "wide-mirror", "rotate-mirror")
NETWORKS = ("unet", "residual", "paper-unet", "dynunet")


@dataclass(frozen=True, slots=True, repr=False)
class TrainingConfig(TomlSection):
    """The recipe of the teachers or of the student: network and optimiser. It changes no guarantee.

    Attributes:
        channels: Feature maps at each level of the U-Net.
        steps: Number of optimiser steps.
        batch_size: Volumes or patches in a step.
        learning_rate: First learning rate.
        patch: Size in voxels of random training patches; volumes are then predicted by a sliding window of this size.
            Empty for whole volumes.
        augmentation: ``smooth``, ``wide``, ``wider``, ``wide-mirror`` or ``rotate-mirror``
            (:mod:`common.models.augmentation`).
        amp: Mixed precision, in bfloat16 if the device has it.
        network: Name of the U-Net (:func:`common.models.unet.definition`).
        modality_dropout: Probability that a channel is set to 0 in a training step, so that the network learns to do
            without it. At least one channel is always kept.

    >>> c.TrainingConfig(channels=(8, 16), steps=100).learning_rate
    0.01
    """

    LATER: ClassVar = ("network", "modality_dropout")

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
        check_types(self, where="training")
        if not 2 <= len(self.channels) <= 6 or not all(2 <= c <= 512 for c in self.channels):
            raise InvalidInput("training channels", value=self.channels, limit="2 to 6 integers from 2 to 512")
        check_ranges(self, {"steps": (1, 1_000_000), "batch_size": (1, 64)}, where="training")
        if not 0 < self.learning_rate < 1:
            raise InvalidInput("learning rate", value=self.learning_rate, limit="above 0 and below 1")
        halved = 2 ** (len(self.channels) - 1)
        if self.patch and (len(self.patch) != 3 or not all(8 <= n <= 512 and n % halved == 0 for n in self.patch)):
            raise InvalidInput("training patch", value=self.patch, limit=f"three multiples of {halved} from 8 to 512")
        if self.augmentation not in AUGMENTATIONS:
            raise InvalidInput("training augmentation", value=self.augmentation, limit=", ".join(AUGMENTATIONS))
        if self.network not in NETWORKS:
            raise InvalidInput("training network", value=self.network, limit=", ".join(NETWORKS))
        if self.network == "paper-unet" and len(self.channels) != 5:
            raise InvalidInput(
                "channels of paper-unet",
                value=self.channels,
                limit="exactly 5 numbers, because this network has 5 levels",
            )
        if not 0 <= self.modality_dropout < 1:
            raise InvalidInput("modality dropout", value=self.modality_dropout, limit="0 to below 1")

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Check that volumes of a given size can be used to train the network.

        The network has one level for each number in :attr:`channels`. From each level to the next it halves its input,
        so over all levels it divides each axis by d = 2^(levels − 1). ``paper-unet`` pads its input, so it also takes
        axes that are no multiples of d.

        Args:
            grid: Number of voxels of a volume on each axis. If :attr:`patch` is set, the patch is checked instead.

        Raises:
            InvalidInput: If an axis has fewer than d voxels, or, except for ``paper-unet``, no multiple of d voxels. If
                no axis has 2d voxels or more, because a single voxel would then be left at the last level. If the
                network is ``dynunet`` with fewer than 3 levels.
        """
        levels, size = len(self.channels), tuple(self.patch or grid)
        if self.network == "dynunet" and levels < 3:
            raise InvalidInput("channels of dynunet", value=self.channels, limit="at least 3 numbers")
        halved = 2 ** (levels - 1)
        uneven = self.network != "paper-unet" and any(n % halved for n in size)
        if uneven or min(size) < halved or max(size) < 2 * halved:
            sides = f"{halved} or more" if self.network == "paper-unet" else f"multiples of {halved}"
            raise InvalidInput(
                "voxels of a training volume or patch",
                value=size,
                limit=f"{sides}, one at least {2 * halved}, because the network has {levels} levels",
                remedy="choose a larger size, or fewer training channels",
            )


STUDENT_RECIPE = TrainingConfig(steps=600, learning_rate=2e-3)
"""Default recipe of the student. Its labels are noisy, so it takes more and smaller steps than a teacher."""


@dataclass(frozen=True, slots=True)
class CollectionConfig(TomlSection):
    """Settings by which the server collects answers from the sites. They change no guarantee.

    Attributes:
        batch_size: Number of queries in one message.
        offer_deadline_s: Seconds that sites have to come online and to accept or decline an offer of queries.
        deadline_s: Seconds that one attempt to get the answers to a batch may take.
        patience_s: Seconds that all attempts together may take. After that, a site that accepted but did not answer
            counts as the zero code; in a sealed sum, the draw is lost, or stays open if the study needs the site.
    """

    batch_size: int = 50
    offer_deadline_s: float = 180.0
    deadline_s: float = 600.0
    patience_s: float = 1200.0

    def __post_init__(self) -> None:
        check_types(self, where="collection")
        week = (1, 604_800)
        ranges = {"batch_size": (1, 500), "offer_deadline_s": week, "deadline_s": week, "patience_s": week}
        check_ranges(self, ranges, where="collection")


@dataclass(frozen=True, slots=True)
class GateConfig(TomlSection):
    """The condition under which a student is released.

    A verdict is one word of a hospital about the student's results on its own cases. No ε bounds what a verdict
    reveals, so sites must consent to the gate.

    Attributes:
        verdicts: Number of hospitals that must find the student better than public data alone. At 0 the student is
            released when it is exported.
    """

    LATER: ClassVar = ("verdicts",)

    verdicts: int = 0

    def __post_init__(self) -> None:
        check_types(self, where="gate")
        check_ranges(self, {"verdicts": (0, 10_000)}, where="gate")


@dataclass(frozen=True, slots=True)
class PoolConfig(TomlSection):
    """The budget, for all studies together, of every patient pool that this study is the first to admit.

    Attributes:
        epsilon: ε that all studies together may spend, at the study's δ and by its accountant; at least the study's own
            ε. 0 stands for the study's own ε; this study may then spend the whole budget.
    """

    LATER: ClassVar = ("epsilon",)

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_types(self, where="pool")
        if self.epsilon < 0:
            raise InvalidInput(
                "pool.epsilon", value=self.epsilon, limit="at least the study's own ε, or 0 to use the study's own ε"
            )


MAX_START_NAME = 80


@dataclass(frozen=True, slots=True)
class StartConfig(TomlSection):
    """The network that the study's teachers, student and controls begin from, if the consortium supplies one.

    It is identified by the hash of its weights. Hospitals see all fields on the consent sheet.

    Attributes:
        weights: SHA-256 of the weights' file in hex; empty without such a network.
        name: The consortium's name for the network.
        study: Id of the study whose student the network is; empty for any other network.
    """

    LATER: ClassVar = ("weights", "name", "study")

    weights: str = ""
    name: str = ""
    study: str = ""

    def __post_init__(self) -> None:
        check_types(self, where="start")
        for value in filter(None, (self.weights, self.study)):
            check_hash(value)
        if not self.weights and (self.name or self.study):
            raise InvalidInput("start.weights is missing", remedy="give the SHA-256 of the network's weights")
        if len(self.name) > MAX_START_NAME or not self.name.isprintable():
            raise InvalidInput(
                "start.name", value=self.name[:MAX_START_NAME], limit=f"at most {MAX_START_NAME} printable characters"
            )


SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "privacy": PrivacyConfig,
    "codec": CodecConfig,
    "teacher": TrainingConfig,
    "student": TrainingConfig,
    "collection": CollectionConfig,
    "gate": GateConfig,
    "pool": PoolConfig,
    "start": StartConfig,
}
"""Every section of a study's file by its name."""

CONSENTED = ("data", "privacy", "codec", "gate", "pool", "start")
"""The sections that a hospital consents to. The others change no guarantee."""


@dataclass(frozen=True, slots=True)
class Study:
    """The terms of a whole study, checked when the object is made.

    Attributes:
        name: Letters, digits, ``-``, ``_`` and ``.``.
        data: Labels, grid, spacing and channels.
        privacy: Budget, unit, relation, number of queries, quorum and who adds the noise.
        codec: The codec and the query protocol.
        teacher: Recipe of the teachers.
        student: Recipe of the student and its controls.
        collection: How answers are collected.
        gate: The condition under which the student is released.
        pool: ε that a newly admitted patient pool may spend in all studies together.
        start: The network that teachers, student and controls begin from, if one is given.

    Raises:
        InvalidInput: If a value is outside its range, or two sections contradict each other.

    >>> study = c.Study.new(
    ...     labels=["background", "blob"],
    ...     grid=(16, 16, 16),
    ...     epsilon=8,
    ...     delta=1e-5,
    ...     unit="patient",
    ...     quorum=3,
    ...     queries=4,
    ... )
    >>> study.privacy.aggregation, len(study.id)
    ('sealed-sum', 64)
    """

    name: str
    data: DataConfig
    privacy: PrivacyConfig
    codec: CodecConfig = field(default_factory=CodecConfig)
    teacher: TrainingConfig = field(default_factory=TrainingConfig)
    student: TrainingConfig = field(default_factory=lambda: STUDENT_RECIPE)
    collection: CollectionConfig = field(default_factory=CollectionConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    start: StartConfig = field(default_factory=StartConfig)
    _id: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for section, kind in SECTIONS.items():
            if not isinstance(found := getattr(self, section), kind):
                raise InvalidInput(f"study's {section}", value=type(found).__name__, limit=f"a {kind.__name__}")
        if (
            not isinstance(self.name, str)
            or not 1 <= len(self.name) <= 64
            or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.name)
        ):
            raise InvalidInput("study name", value=self.name, limit="1 to 64 letters, digits, '-', '_', '.'")
        asked, terms = choosing_line(self.codec.protocol_name), self.codec.terms
        if terms.most_rounds is not None and self.privacy.planned_queries > terms.most_rounds:
            raise InvalidInput(
                "privacy.planned_queries",
                value=self.privacy.planned_queries,
                limit=f"at most {terms.most_rounds} with {asked}, because each query is then a round about all volumes",
                remedy=f"set {JOINT_ROUNDS}, the default number of rounds",
            )
        if self.gate.verdicts > self.privacy.quorum:
            raise InvalidInput(
                "gate.verdicts", value=self.gate.verdicts, limit=f"at most the quorum, {self.privacy.quorum}"
            )
        if 0 < self.pool.epsilon < self.privacy.epsilon:
            limit = f"at least the study's own ε, {epsilon_text(self.privacy.epsilon)}"
            raise InvalidInput(
                "pool.epsilon",
                value=self.pool.epsilon,
                limit=limit,
                remedy="set a larger ε, or 0 to use the study's own",
            )
        if self.pool.epsilon == self.privacy.epsilon:  # both mean the same, so both have one id
            object.__setattr__(self, "pool", PoolConfig())
        if self.data.finer > 1 and (not terms.finer or self.codec.paired):
            limit = f"1, unless the study has {choosing_lines('finer')} and codec.paired = 0"
            raise InvalidInput("data.finer", value=self.data.finer, limit=limit)

    @classmethod
    def new(
        cls,
        *,
        labels: Sequence[str],
        grid: Sequence[int],
        epsilon: float,
        delta: float,
        unit: Unit | str,
        quorum: int,
        queries: int,
        voters: int = 1,
        name: str = "study",
        spacing_mm: Sequence[float] = (1.0, 1.0, 1.0),
        channels: Sequence[str] = ("MRI",),
        relation: Relation | str = Relation.REPLACE_ONE,
        aggregation: str | None = None,
        codec: CodecConfig | None = None,
        student: TrainingConfig = STUDENT_RECIPE,
    ) -> Study:
        """Make a study from its terms, without a file.

        Args:
            labels: Names of the label values; the first is the background.
            grid: Voxels of every volume, three multiples of 8.
            epsilon: ε that one unit may lose over the whole study, at ``delta``.
            delta: δ of the guarantee.
            unit: Unit of privacy, ``"patient"`` or ``"hospital"``.
            quorum: Least number of sites in a release.
            queries: Number of releases in all; ``privacy.planned_queries`` of a study file.
            voters: Teachers of each site, trained on disjoint patients.
            name: Letters, digits, ``-``, ``_`` and ``.``.
            spacing_mm: Size of a voxel.
            channels: Names of an image's channels.
            relation: Neighbouring relation, ``"replace-one"`` or ``"zero-out"``.
            aggregation: ``"open"`` or ``"sealed-sum"``; if None, ``"sealed-sum"`` for a quorum of 3 or more.
            codec: The codec and the query protocol; if None, a PCA codec and one query per volume.
            student: Recipe of the student and its controls.

        Returns:
            The study.

        Raises:
            InvalidInput: If a term is outside its range, or two terms contradict each other.
        """
        data = {"labels": labels, "grid": grid, "spacing_mm": spacing_mm, "channels": channels}
        terms = {"epsilon": epsilon, "delta": delta, "unit": unit, "relation": relation, "voters_per_site": voters}
        terms |= {"quorum": quorum, "planned_queries": queries}
        privacy = read_section(PrivacyConfig, terms, where="privacy")
        usual = usual_aggregation(quorum) if aggregation is None else aggregation
        return cls(
            name=name,
            data=read_section(DataConfig, data, where="data"),
            privacy=dataclasses.replace(privacy, aggregation=usual),
            codec=CodecConfig() if codec is None else codec,
            student=student,
        )

    @property
    def pool_budget(self) -> Budget:
        """ε and δ that a patient pool may spend in all studies together, if this study is the first to admit the pool.

        ε is ``pool.epsilon``, or the study's own ε if ``pool.epsilon`` is 0. The study's accountant measures it.
        """
        return Budget(epsilon=self.pool.epsilon or self.privacy.epsilon, delta=self.privacy.delta)

    @property
    def one_network(self) -> bool:
        """Whether teachers and student have the same network, so that both can begin from the same weights."""
        return (self.teacher.channels, self.teacher.network) == (self.student.channels, self.student.network)

    @property
    def id(self) -> str:
        """SHA-256 of everything that a site consents to: name, data, privacy, codec, gate, pool and start."""
        if not self._id:
            object.__setattr__(self, "_id", digest("study", self.to_json()))
        return self._id

    def to_json(self) -> dict[str, object]:
        """Return what a site consents to, in canonical form. Recipes and deadlines change no guarantee and are left
        out."""
        tables = {section: _plain(getattr(self, section).to_table()) for section in CONSENTED}
        return {"name": self.name, "schema": STUDY_SCHEMA} | {key: table for key, table in tables.items() if table}


def load_study(path: Path | str) -> Study:
    """Read a study file.

    Args:
        path: Path of the ``study.toml``, or of the directory that contains it.

    Returns:
        The study.

    Raises:
        InvalidInput: If the file cannot be read, or a key is unknown, missing or outside its range. The message names
            the key, its value and the limit.

    >>> from tempfile import TemporaryDirectory
    >>> from server.study.templates import template
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "study.toml"
    ...     _ = file.write_text(template("paper-pca"), encoding="utf-8")
    ...     c.load_study(file).codec.name
    'paper-pca'
    """
    file, absent = as_path(path, what="study file"), "check the path, or make a study with `consilium study init`"
    file = file / "study.toml" if file.is_dir() else file
    remedy = "give a study file, TOML in UTF-8"
    return parse_study(read_text(file, what="study file", most_bytes=MAX_TOML_BYTES, remedy=remedy, absent=absent))


def parse_study(text: str) -> Study:
    """Read a study from the text of a study file.

    Args:
        text: TOML.

    Returns:
        The study.

    Raises:
        InvalidInput: If a key is unknown, missing or outside its range. The message names the key, its value and the
            limit.

    >>> c.parse_study('name = "trial"')
    Traceback (most recent call last):
    ...
    common.errors.InvalidInput: study schema; allowed: 1; to fix: ...
    """
    if not isinstance(text, str):
        raise InvalidInput("text of a study file", value=type(text).__name__, limit="a string")
    document = parse_toml(text, what="study file", remedy="see `consilium study init` for a valid one")
    check_schema("study", document.pop("schema", None), known=STUDY_SCHEMA)
    no_unknown(document, {"name", *SECTIONS}, where="study")
    parts: dict[str, Any] = {
        key: read_section(kind, document[key], where=key) for key, kind in SECTIONS.items() if key in document
    }
    name = document.get("name")
    if not isinstance(name, str) or not name.isprintable():
        raise InvalidInput("study name", value=name, limit="a line of printable characters")
    for key in ("data", "privacy"):
        if key not in parts:
            raise InvalidInput(f"section [{key}] is missing", remedy="see `consilium study init` for a valid study")
    with parsing(
        "study file", limit="a study whose noise can be computed from its budget", remedy="see `consilium study init`"
    ):
        return Study(name=document["name"], **parts)


def render_study(study: Study) -> str:
    """Return the text of a study file. Parsing it gives an equal study.

    Args:
        study: The study.

    Returns:
        TOML text.
    """
    lines = [f"schema = {STUDY_SCHEMA}", f"name = {json.dumps(study.name)}"]
    for section in SECTIONS:
        table = getattr(study, section).to_table()
        if section == "privacy":  # written even for open studies, since new studies are usually sealed
            table["aggregation"] = study.privacy.aggregation
        elif section == "gate" and study.privacy.sealed:
            table = {"verdicts": 0} | table
        elif section == "pool":
            table["epsilon"] = study.pool_budget.epsilon
        if table:
            lines += ["", f"[{section}]"]
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    return value
