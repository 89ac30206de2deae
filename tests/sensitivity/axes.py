"""Lists every option that study and site files admit, and the values that the sensitivity check tries.

``AXES`` names the options that can change the way from a patient's file to the site's sum. ``ELSEWHERE`` names the
others, each with the reason why none of its values can move a sum. A test compares both with the fields of the
configuration classes, so a new option that is in neither fails it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from client.data.layouts import DatasetSettings
from client.policy import AllowLists, Caps, SharingPolicy, SiteConfig
from client.training.private.settings import PrivateSettings
from common.config import SECTIONS, Study

Value = object
Choice = dict[str, Value]
"""Axis → value: one configuration."""

CLASSES = (
    *dict.fromkeys(SECTIONS.values()),  # teachers and student share one class of recipe
    Study,
    PrivateSettings,
    DatasetSettings,
    Caps,
    AllowLists,
    SharingPolicy,
    SiteConfig,
)

PLAIN_AXES: dict[str, tuple[Value, ...]] = {
    "DataConfig.labels": (2, 3),
    "DataConfig.spacing_mm": ((1.0, 1.0, 1.0), (1.25, 1.0, 1.0)),
    "DataConfig.channels": (1, 2),
    "PrivacyConfig.unit+relation": ("hospital/replace-one", "hospital/zero-out", "patient/replace-one"),
    "PrivacyConfig.voters_per_site": (3, 2, 1),
    "PrivacyConfig.aggregation": ("open", "sealed-sum"),
    "CodecConfig.name+joint+protocol": ("pca", "ball-ae", "pca/joint", "pca/appearance"),
    "TrainingConfig.batch_size": (2, 1),
    "TrainingConfig.patch": ((), (8, 8, 8)),
    "TrainingConfig.augmentation": ("smooth", "rotate-mirror"),
    "TrainingConfig.amp": (False, True),
    "DatasetSettings.layout": ("msd", "nnunet", "bids", "table"),
    "DatasetSettings.labels": ("as they are", "mapped"),
    "scans of a patient": (1, 3),
    "public start": (False, True),
}
"""Options of every training. The last two are no fields: the scans of a patient, and whether the kit held weights."""

PRIVATE_AXES: dict[str, tuple[Value, ...]] = PLAIN_AXES | {
    "PrivacyConfig.aggregation": ("sealed-sum", "open"),
    "PrivateSettings.strategy": ("dp-sgd", "dp-bbb", "dp-mac"),
    "PrivateSettings.per_layer": (False, True),
    "PrivateSettings.neighbours": ("add-remove", "replace-one"),
    "PrivateSettings.sampling": ("poisson", "fixed-partition"),
    "PrivateSettings.scans": (1, 2),
    "PrivateSettings.chunk": (4, 2),
}

ELSEWHERE: dict[str, str] = {
    "DataConfig.grid": "a public shape; one that is not a cube is tried throughout",
    "Study.pool": "what a pool may spend in its life: a limit in the books, and no part of a sum",
    "GateConfig.verdicts": "how many hospitals must speak for a student; its own release, after every code",
    "PoolConfig.epsilon": "what a pool may spend in its life: a limit in the books",
    "StartConfig.weights": "which public network teachers begin from; see the axis public start",
    "StartConfig.name": "a name",
    "StartConfig.study": "a name",
    "Study.start": "names the weights that teachers begin from: the axis public start has a site with and without them",
    "Study.gate": "read once a student is exported: a verdict is of the student, and of no code",
    "PrivacyConfig.epsilon": "sets the noise, which is no part of the sum",
    "PrivacyConfig.delta": "sets the noise",
    "PrivacyConfig.accountant": "sets the noise",
    "PrivacyConfig.planned_queries": "the number of queries; several are asked throughout",
    "PrivacyConfig.quorum": "read by the server, and by a sealed site as the least roster it masks for",
    "PrivacyConfig.edition": "a number in the query's id",
    "CodecConfig.radius": "small throughout, so that the clip always acts",
    "CodecConfig.dimension": "l as the study sets it; a public number",
    "CodecConfig.max_dimension": "bounds l; a public number",
    "CodecConfig.augmentations": "fitting on public label maps",
    "CodecConfig.paired": "public cases of which the public start is made",
    "PrivacyConfig.colluders": "how much noise a site draws",
    "PrivacyConfig.spare_draws": "how much noise a site draws",
    "TrainingConfig.channels": "the network's width",
    "TrainingConfig.network": "the network's kind; of each, no patient sees another (tests/common/models/test_unet.py)",
    "TrainingConfig.modality_dropout": "channels hidden by seed and step, or by slot and turn, whoever fills it",
    "DataConfig.regions": "how label maps are scored; labels stay as they are",
    "DataConfig.normalisation": "each volume by its own voxels",
    "DataConfig.finer": "the student's grid, which no voter sees",
    "DatasetSettings.absent": "said by the site of all its cases; no file is looked at",
    "TrainingConfig.steps": "the same for every voter",
    "TrainingConfig.learning_rate": "the same for every voter; large throughout",
    "CollectionConfig.batch_size": "how queries are grouped in messages; sites answer query by query",
    "CollectionConfig.offer_deadline_s": "read by the server alone",
    "CollectionConfig.deadline_s": "a public number in the request",
    "CollectionConfig.patience_s": "read by the server alone",
    "Study.name": "a name",
    "Study.data": "see DataConfig",
    "Study.privacy": "see PrivacyConfig",
    "Study.codec": "see CodecConfig",
    "Study.teacher": "see TrainingConfig",
    "Study.student": "trained at the server, on released answers",
    "Study.collection": "see CollectionConfig",
    "PrivateSettings.epsilon": "sets the noise of a training",
    "PrivateSettings.delta": "sets the noise of a training",
    "PrivateSettings.noise_multiplier": "sets the noise of a training",
    "PrivateSettings.rate": "one half throughout: batches with and without the patient",
    "PrivateSettings.steps": "the same for every voter",
    "PrivateSettings.learning_rate": "post-processing of the noisy mean",
    "PrivateSettings.clip": "small throughout, so that the clip always acts",
    "PrivateSettings.temperature": "dp-bbb's prior, which reads no data",
    "PrivateSettings.prior_std": "dp-bbb's prior, which reads no data",
    "PrivateSettings.initial_std": "dp-bbb's start, which reads no data",
    "PrivateSettings.mu": "how far dp-mac's coordinates move; small throughout, so that they move far",
    "PrivateSettings.mu_growth": "the same for every patient",
    "PrivateSettings.z_steps": "the same for every patient",
    "PrivateSettings.z_rate": "the same for every patient",
    "DatasetSettings.patients": "a table beside the data is read with the layouts msd and nnunet throughout",
    "DatasetSettings.channels": "names of channels in the index; no file",
    "DatasetSettings.choice": "which file of a BIDS session is meant; decided from names",
    "Caps.epsilon": "decides acceptance from the ledger alone",
    "Caps.delta": "decides acceptance from the ledger alone",
    "Caps.accountant": "decides acceptance from the ledger alone",
    "Caps.unit": "decides acceptance from the ledger alone",
    "Caps.relation": "decides acceptance from the ledger alone",
    "Caps.queries_per_day": "decides acceptance from the ledger alone",
    "AllowLists.studies": "decided from hashes of public things",
    "AllowLists.codecs": "decided from hashes of public things",
    "AllowLists.volumes": "decided from hashes of public things",
    "SharingPolicy.case_counts": "what a site tells beyond its answers, by its own choice",
    "SharingPolicy.status": "the account of the site's own books, by its own choice; a withdrawal does not change it",
    "SiteConfig.site": "a name",
    "SiteConfig.pool": "a name",
    "SiteConfig.data": "a path",
    "SiteConfig.server": "keys and addresses",
    "SiteConfig.caps": "see Caps",
    "SiteConfig.allow": "see AllowLists",
    "SiteConfig.study": "a path",
    "SiteConfig.dataset": "see DatasetSettings",
    "SiteConfig.share": "see Sharing",
    "SiteConfig.root": "a path",
    "SiteConfig.books": "where the pool's ledger and deals lie, in whichever directory",
    "SiteConfig.holder": "a name",
}


def fields() -> set[str]:
    """Return every option as ``Class.field``."""
    return {f"{kind.__name__}.{spec.name}" for kind in CLASSES for spec in dataclasses.fields(kind) if spec.init}


def placed() -> list[str]:
    """Return every option listed here; one axis may stand for two options of a class (``Class.one+other``)."""
    axes = [name for name in PRIVATE_AXES if "." in name]
    split = [f"{name.split('.')[0]}.{one}" for name in axes for one in name.split(".")[1].split("+")]
    return [*split, *ELSEWHERE]


def covering(axes: Mapping[str, Sequence[Value]], *, seed: int = 0) -> Iterator[Choice]:
    """Yield configurations in which every two values of every two axes meet; the first has every axis's first value."""
    names = list(axes)
    open_pairs = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    draws = random.Random(seed)
    row: Choice = {name: axes[name][0] for name in names}
    while True:
        yield row
        open_pairs -= set(itertools.combinations(row.items(), 2))
        if not open_pairs:
            return
        left = sorted(open_pairs, key=repr)
        row = max((_candidate(axes, left, draws) for _ in range(40)), key=lambda one: _gain(one, open_pairs))


def _gain(row: Choice, open_pairs: set[tuple[tuple[str, Value], tuple[str, Value]]]) -> int:
    return sum(pair in open_pairs for pair in itertools.combinations(row.items(), 2))


def _candidate(
    axes: Mapping[str, Sequence[Value]],
    open_pairs: Sequence[tuple[tuple[str, Value], tuple[str, Value]]],
    draws: random.Random,
) -> Choice:
    """Return a random row that meets one open pair for certain."""
    fixed = dict(draws.choice(open_pairs))
    return {name: fixed.get(name, draws.choice(list(axes[name]))) for name in axes}
