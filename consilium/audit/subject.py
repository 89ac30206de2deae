"""Defines the subject of an audit: a study with its sites, codec and frame, and the possible answers of a voter.

A frame is the public centre, axes and weights of a joint query's round. The audited study has the original study's
roster, dimension, rounds, unit, relation, voters and budgets. The claimed μ and noise come from
:mod:`common.privacy.claim` only. If the study's codec is not available or not linear, a stand-in of the same dimension
is used, because the released mechanism depends on no other property of a codec. Predictions are synthetic: a unit's
code is slightly outside the clipping ball, far outside, or zero, or the prediction fails. A dimension outside 2 to 4096
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, sqrt

import numpy as np
from jaxtyping import Float, Int64

from common.canonical import sha256_bytes
from common.codecs.codec import LinearCodec, Provenance, load_codec
from common.codecs.pca import PcaCodec
from common.codecs.shapes import to_probabilities
from common.config import CodecConfig, CollectionConfig, DataConfig, PrivacyConfig, Study
from common.errors import InvalidInput
from common.privacy.claim import claimed_mu, claimed_reach
from common.protocol_terms import PLAIN, keys_of, suited
from common.protocols.frame import Frame
from server.ledger.server_ledger import Ledger
from server.protocols.query_protocol import protocol_of
from server.study.workspace import Workspace

STEPS = 65536
"""Number of grid steps in a coordinate of value 1. Codes are rounded to multiples of 1/65536."""

NEAR, FAR = 1.2, 12.0
"""Target norms of the units' codes in units of the clipping norm. Some codecs cannot reach all of them."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The budget of a patient pool, as the server's ledger or the site's own ledger enforces it."""

    epsilon: float
    delta: float
    accountant: str

    @property
    def mu_squared(self) -> float:
        """Σμ² that the budget allows."""
        return float(claimed_mu(self.epsilon, self.delta, accountant=self.accountant) ** 2)


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A study under audit.

    Attributes:
        study: The study.
        limits: The budget of each site's pool.
        codec: The codec, or its stand-in.
        volumes: Names of public volumes. In a study without a frame there is one more than the plan asks about, for
            further queries.
        frame: Frame of the first round of a joint study; None otherwise.
        sayings: Synthetic predictions by name, such as ``near+``.

    Raises:
        InvalidInput: If there are fewer hospitals than the quorum, or no release fits their budgets.
    """

    study: Study
    limits: tuple[Limit, ...]
    codec: LinearCodec
    volumes: tuple[str, ...]
    frame: Frame | None = None
    sayings: Mapping[str, Float[np.ndarray, "k x y z"]] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.limits) < self.study.privacy.quorum:
            raise InvalidInput(
                "hospitals of an audit",
                value=len(self.limits),
                limit=f"at least the quorum, {self.study.privacy.quorum}",
            )
        if sum(limit.mu_squared >= self.cost for limit in self.limits) < self.study.privacy.quorum:
            raise InvalidInput(
                "budgets of the pools",
                value=[limit.epsilon for limit in self.limits],
                limit="room for one release in as many budgets as the quorum",
                remedy="use larger budgets; without a release there is nothing to audit",
            )
        object.__setattr__(self, "sayings", _sayings(self.codec, self.frame, self.study.codec.radius))

    # --- the claim

    @property
    def queries(self) -> int:
        """Number of planned queries."""
        return self.study.privacy.planned_queries

    @property
    def limit(self) -> Limit:
        """The budget that the study may spend on each pool."""
        privacy = self.study.privacy
        return Limit(float(privacy.epsilon), privacy.delta, str(privacy.accountant))

    @property
    def claimed_mu(self) -> float:
        """μ (parameter of Gaussian differential privacy) that the whole study claims."""
        return sqrt(self.limit.mu_squared)

    @property
    def reach(self) -> int:
        """Sensitivity in grid steps of 2⁻¹⁶."""
        privacy = self.study.privacy
        return self.radius * claimed_reach(
            str(privacy.unit), str(privacy.relation), voters_per_site=privacy.voters_per_site
        )

    @property
    def radius(self) -> int:
        """Clipping norm in grid steps of 2⁻¹⁶."""
        return floor(self.study.codec.radius * STEPS)

    @property
    def cost(self) -> float:
        """μ² of one release; in a sealed study, of one attempt at a sealed sum, which is charged even if it fails."""
        return self.limit.mu_squared / self.study.privacy.charges

    @property
    def claimed_noise_std(self) -> float:
        """Claimed standard deviation of the noise on the sum, in grid steps of 2⁻¹⁶."""
        return self.reach / sqrt(self.cost)

    @property
    def dimension(self) -> int:
        """Dimension l of the first release; later rounds of a joint query may have another one."""
        return self.codec.dimension if self.frame is None else self.frame.dimension

    # --- answers

    def clipped(self, said: str, frame: Frame | None) -> Int64[np.ndarray, "l"]:
        """Return a voter's contribution to its site's code: projected onto the ball, then truncated toward zero.

        Args:
            said: Name of the synthetic prediction.
            frame: Frame of the round; None if the study has no frame.

        Returns:
            int64 array [l]; zeros for a name without a prediction.
        """
        if said not in self.sayings:
            return np.zeros(self.codec.dimension if frame is None else frame.dimension, dtype=np.int64)
        code = _code(self.sayings[said], self.codec, frame) * STEPS
        return np.trunc(code * min(1.0, self.radius / max(float(np.linalg.norm(code)), 1e-300))).astype(np.int64)


def stand_in(
    privacy: PrivacyConfig,
    *,
    hospitals: int,
    dimension: int,
    radius: float,
    framed: bool,
    limits: tuple[Limit, ...] = (),
) -> Subject:
    """Make a study with given terms on a grid of 8³ voxels, with codes of a given dimension.

    Args:
        privacy: The study's privacy settings.
        hospitals: Number of sites.
        dimension: Dimension l of a release.
        radius: Clipping norm.
        framed: True if the study asks joint queries in rounds.
        limits: Budget of each site's pool; by default the study's.

    Returns:
        The subject.

    Raises:
        InvalidInput: If the number of hospitals or the dimension is out of range.
    """
    if isinstance(hospitals, bool) or not 1 <= hospitals <= 1000:
        raise InvalidInput("hospitals of an audit", value=hospitals, limit="1 to 1000")
    if isinstance(dimension, bool) or not 2 <= dimension <= 4096:
        raise InvalidInput("dimension of an audit", value=dimension, limit="2 to 4096")
    asked = 2 if framed and dimension % 2 == 0 else 1  # volumes in a query; each round measures every direction
    share = dimension // asked
    study = Study(
        name="audit",
        data=DataConfig(labels=("background", "one", "two"), spacing_mm=(1.0, 1.0, 1.0), grid=(8, 8, 8)),
        privacy=privacy,
        codec=CodecConfig(radius=radius, max_dimension=share, **keys_of(suited(placed=True) if framed else PLAIN)),
    )
    codec = _linear(study, share)
    count = asked if framed else privacy.planned_queries + 1
    return Subject(
        study=_impatient(study),
        limits=limits or (Limit(float(privacy.epsilon), privacy.delta, str(privacy.accountant)),) * hospitals,
        codec=codec,
        volumes=tuple(sha256_bytes(f"audit volume {i}".encode()) for i in range(count)),
        frame=_plain_frame(codec, asked, radius) if framed else None,
    )


def from_workspace(workspace: Workspace) -> Subject:
    """Make the subject of an audit from an existing study: its sites, their budgets in its ledger, codec and frame.

    Args:
        workspace: The study's directory.

    Returns:
        The subject.

    Raises:
        InvalidInput: If a site has no pool in the ledger.
    """
    study, record = workspace.study(), workspace.codec()
    with Ledger.open(workspace.ledger_file) as ledger:
        declared = {pool.pool: pool for pool in ledger.pools()}
    missing = [site.name for site in workspace.sites() if site.pool not in declared]
    if missing:
        raise InvalidInput(
            "sites without a pool in the ledger", value=missing, remedy="admit them with `consilium provision approve`"
        )
    pools = [declared[site.pool] for site in workspace.sites()]
    limits = tuple(Limit(float(p.budget.epsilon), p.budget.delta, str(p.accountant)) for p in pools)
    first = next(protocol_of(study).configure(workspace.public(), lambda _query: None))[0]
    frame = None if first.centre == "zero" else Frame.from_bytes(workspace.objects.get(first.centre))
    codec = load_codec(workspace.objects.get(record.sha256), expected_hash=record.sha256).linear
    if codec is None:
        dimension = frame.dimension if frame else record.dimension
        return stand_in(
            study.privacy,
            hospitals=len(limits),
            dimension=dimension,
            radius=study.codec.radius,
            framed=frame is not None,
            limits=limits,
        )
    volumes = workspace.volumes()
    if frame is None:
        more = sha256_bytes(b"a volume nobody planned to ask about")
        volumes = (*volumes[: study.privacy.planned_queries], more)
    return Subject(study=_impatient(study), limits=limits, codec=codec, volumes=volumes, frame=frame)


def shrunk(subject: Subject) -> Subject:
    """Return a subject with the same terms, sites and dimension and a small stand-in codec, to measure the noise.

    Args:
        subject: The subject.

    Returns:
        The smaller subject.
    """
    return stand_in(
        subject.study.privacy,
        hospitals=len(subject.limits),
        dimension=subject.dimension,
        radius=subject.study.codec.radius,
        framed=subject.frame is not None,
        limits=subject.limits,
    )


def _impatient(study: Study) -> Study:
    """Return the study with short deadlines, and with several batches of queries in each run."""
    batch = max(1, ceil(study.privacy.planned_queries / 3))
    collection = CollectionConfig(batch_size=min(batch, 500), offer_deadline_s=1.0, deadline_s=600.0, patience_s=1.0)
    return replace(study, collection=collection)


def _linear(study: Study, dimension: int) -> PcaCodec:
    """Make a codec of two structures whose coarse grid has a single voxel.

    Even coordinates encode the first structure, odd ones the second.
    """
    basis = np.zeros((dimension, 2, 1, 1, 1), dtype=np.float32)
    basis[0::2, 0], basis[1::2, 1] = 1, 1
    radius = study.codec.radius
    return PcaCodec(
        basis=basis,
        centre=np.zeros((2, 1, 1, 1), dtype=np.float32),
        metric=np.ones((1, 1, 1), dtype=np.float32),
        variances=np.full(dimension, 0.025),
        powers=np.full(dimension, 0.6 * radius**2 / dimension),
        radius=radius,
        grid=study.data.grid,
        provenance=Provenance(label_maps=("0" * 64, "1" * 64), augmentations=0, seed=0, noise_std=0.0),
    )


def _plain_frame(codec: LinearCodec, volumes: int, radius: float) -> Frame:
    """Make a frame for a joint query whose axes are the coordinates of all volumes, with equal weights."""
    size = volumes * codec.dimension
    return Frame(
        basis=np.eye(size, dtype=np.float32).reshape(size, volumes, codec.dimension),
        variances=np.full(size, 0.5 / size),
        weights=np.full(size, radius),
        centre=np.zeros((volumes, codec.dimension)),
        temperature=0.5,
        codec=sha256_bytes(codec.to_bytes()),
    )


def _code(predicted: Float[np.ndarray, "k x y z"], codec: LinearCodec, frame: Frame | None) -> Float[np.ndarray, "l"]:
    """Return the unclipped code of a voter that predicts the same for every volume, computed from codec and frame."""
    if frame is None:
        return codec.encode(predicted)
    codes = np.repeat(codec.encode(frame.sharpen(predicted))[None], frame.volumes, axis=0)
    basis = frame.basis.astype(np.float64)
    along = np.tensordot(basis, (codes - frame.centre)[:, : basis.shape[2]], axes=2)
    code: np.ndarray = (along * frame.weights)[frame.weights > 0]
    return code


def _sayings(codec: LinearCodec, frame: Frame | None, radius: float) -> dict[str, Float[np.ndarray, "k x y z"]]:
    """Make the synthetic predictions, by name.

    The codes of ``near+`` and ``far+`` lie outside the ball along one direction, those of ``near-`` and ``far-`` in the
    opposite direction. ``inside`` and ``aside`` are answers of the other voters.
    """
    sharpness = 1.0 if frame is None else frame.temperature
    factor = codec.grid[0] // codec.metric.shape[0]

    def said(component: int, size: float) -> Float[np.ndarray, "k x y z"]:
        shape = codec.basis[component % codec.dimension].astype(np.float64) / codec.metric
        ratios = codec.centre.astype(np.float64) + size * shape / max(float(np.abs(shape).max()), 1e-12)
        return to_probabilities(np.clip(ratios, -40, 40) * sharpness, factor=factor)

    def sized(component: int, sign: int, wanted: float) -> Float[np.ndarray, "k x y z"]:
        """Return predictions whose code has at least the wanted norm.

        The predicted structure is deformed along one component, in steps of growing size, until its code reaches the
        norm. If no step reaches it, the predictions of the largest step are returned.
        """
        for size in 2.0 ** np.arange(-8, 6.5, 0.5):
            predicted = said(component, sign * float(size))
            if np.linalg.norm(_code(predicted, codec, frame)) >= wanted * radius:
                break
        return predicted

    return {
        "near+": sized(0, 1, NEAR),
        "near-": sized(0, -1, NEAR),
        "far+": sized(0, 1, FAR),
        "far-": sized(0, -1, FAR),
        "inside": sized(1, 1, 0.5),
        "aside": sized(1, -1, NEAR),
    }
