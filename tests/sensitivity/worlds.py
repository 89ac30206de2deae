"""Runs worlds that differ in one patient through everything between a patient's file and the site's sum.

A :class:`Site` is a hospital's data in memory; :func:`write` puts it on disk in a layout; :func:`run` reads, deals,
trains, serves and answers with the production objects and returns what a server could see and what it must not.
Secret draws are the same in both worlds (a coupling: they read no data), so whatever differs, differs by the patient.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from unittest import mock

import nibabel as nib
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import client.training.private.engine as engine
from client.data.layouts import DatasetSettings, open_for_training
from client.declined import DECLINED
from client.ledger.site_ledger import SiteLedger
from client.operations.serve import TeacherVoters
from client.policy import Consent, SiteConfig
from client.records.patient_deal import Slots, deal, save_slots
from client.site.disclose import sealed_disclosure
from client.teachers.teacher import Teachers
from client.training.private.clipped_sums import ClippingPlan, silent
from client.training.private.sampling import Entropy, Sampler
from client.training.private.settings import PrivateSettings
from client.training.task import Crash, VoterOutcome, VoterTask
from client.training.voter import train_voter
from client.witnessing import Witnessing
from client.worker import Ask, Voters, Worker
from common.codecs.codec import Codec, fit_codec
from common.config import SEALED_SUM, CodecConfig, DataConfig, Study, TrainingConfig
from common.envelope import body_of, sign_request
from common.ledger.keys import public_hex
from common.masking import DrawId, MaskedRoster, Member, mask_private_key, pair_mask, signed_mask_key
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, decode, encode
from common.models.unet import build_unet, save_weights
from common.objects import ObjectStore
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.privacy.training import TrainingEvent
from common.protocols.frame import Frame
from common.sealing import SealContext, unseal
from common.witness.memory import FOLDER as WITNESSES
from common.witness.messages import ConsistencyProof, WitnessReply, WitnessRequest
from common.witness.notes import CheckpointNote, note_in, origin_of
from consilium.in_process import site_config
from server.protocols.appearance.look import first_frame
from server.protocols.per_volume import plan_queries
from server.protocols.rounds import round_query
from server.public.material import CodecRecord
from server.study.create_study import ServerKeys
from server.study.workspace import Site as RegisteredSite
from tests.sensitivity.axes import Choice
from tests.trained_sites import train_site
from tests.worlds import make_study

GRID = (16, 8, 8)
STRUCTURES = ("front", "back")
PATIENTS, PUBLIC = 7, 2
RADIUS = 2.0**-6
"""C: far below the norm of any teacher's code, so that every vote is clipped."""

NOW = 1_800_000_000_000
"""The time of an offer, and the site's clock, in milliseconds since 1970."""


# ---- a hospital's data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """Holds ``image`` [c, x, y, z] and ``label`` [x, y, z] of name ``stem``; ``damage`` describes a damaged file."""

    stem: str
    image: np.ndarray
    label: np.ndarray
    damage: str = ""


Site = Mapping[str, tuple[Scan, ...]]
"""Patient → scans, in the order in which the data list them."""


def make_scan(stem: str, *, seed: int, channels: int, labels: int) -> Scan:
    """Return one or two blocks in noise, with a shape and a position of their own."""
    rng = np.random.default_rng([77, seed])
    shape = (int(rng.integers(12, 19)), int(rng.integers(7, 10)), 8)
    label = np.zeros(shape, dtype=np.uint8)
    at, y = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    label[at : at + 4, y : y + 4, 2:6] = 1
    if labels > 2:
        label[at + 4 : at + 7, y : y + 4, 2:6] = 2
    image = rng.normal(0, 0.4, (channels, *shape)) + label * rng.uniform(1, 3) + rng.uniform(-2, 2)
    return Scan(stem, image.astype(np.float32), label)


def make_site(choice: Choice) -> dict[str, tuple[Scan, ...]]:
    channels, labels, scans = (
        int(str(choice[name])) for name in ("DataConfig.channels", "DataConfig.labels", "scans of a patient")
    )
    make = partial(make_scan, channels=channels, labels=labels)
    return {
        f"p{number}": tuple(make(f"p{number}x{scan}", seed=10 * number + scan) for scan in range(scans))
        for number in range(PATIENTS)
    }


# ---- exchanges -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Holds a site's data and its changes; ``renamed`` maps a new name to the slot's old one.

    The voter of patient ``crash`` cannot be trained; that of ``breaks`` fails at every question.
    """

    site: Site
    renamed: Mapping[str, str] = field(default_factory=dict)
    crash: str | None = None
    breaks: str | None = None


def _each(site: Site, victim: str, change: Callable[[Scan], Scan]) -> World:
    return World({**site, victim: tuple(change(scan) for scan in site[victim])})


def _other(scan: Scan, *, seed: int = 999) -> Scan:
    labels = 3 if scan.label.max() > 1 else 2
    other = make_scan(scan.stem, seed=seed, channels=len(scan.image), labels=labels)
    return replace(other, image=other.image * 1e4)


def _more(site: Site, victim: str) -> World:
    first = site[victim][0]
    return World({**site, victim: (*site[victim], replace(_other(first, seed=31), stem=f"{victim}x7"))})


def _moved_names(site: Site, victim: str) -> World:
    """Return the same scans under other file names, in another order."""
    scans = tuple(replace(scan, stem=f"{victim}x{8 - number}") for number, scan in enumerate(site[victim]))
    return World({**site, victim: scans})


def _renamed(site: Site, victim: str) -> World:
    new = "zz-new"
    scans = tuple(replace(_other(scan), stem=f"{new}x{number}") for number, scan in enumerate(site[victim]))
    return World(
        {name if name != victim else new: own if name != victim else scans for name, own in site.items()},
        renamed={new: victim},
    )


def _copied(site: Site, victim: str) -> World:
    """Replace the victim's files by another patient's, byte for byte."""
    source = site[next(name for name in reversed(site) if name != victim)]
    scans = tuple(replace(source[n % len(source)], stem=scan.stem) for n, scan in enumerate(site[victim]))
    return World({**site, victim: scans})


EXCHANGES: dict[str, Callable[[Site, str], World]] = {
    "exchanged": lambda site, victim: _each(site, victim, _other),
    "cannot be read": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="truncated")),
    "not finite": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="nan")),
    "labels of another study": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="labels")),
    "label elsewhere": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="geometry")),
    "names its labels otherwise": lambda site, victim: _each(
        site, victim, lambda scan: replace(scan, damage="own table")
    ),
    "a channel more": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="more channels")),
    "label gone": lambda site, victim: _each(site, victim, lambda scan: replace(scan, damage="no label")),
    "a scan more": _more,
    "a scan fewer": lambda site, victim: World({**site, victim: site[victim][1:]}),
    "not listed": lambda site, victim: World({name: own for name, own in site.items() if name != victim}),
    "filed under other names": _moved_names,
    "another patient": _renamed,
    "a copy of another patient": _copied,
    "a newcomer": lambda site, victim: World(
        {**site, "q1": (replace(_other(site[victim][0]), stem="q1x0"),)}, renamed={}
    ),
    "ends its training": lambda site, victim: World(site, crash=victim),
    "ends its answer": lambda site, victim: World(site, breaks=victim),
}
"""Changes of one patient's data. None may move another voter, or anything that is public."""


def everything(site: Site) -> World:
    """Exchange the whole hospital, and make some of it unreadable."""
    worlds = {name: tuple(_other(scan, seed=500 + n) for scan in own) for n, (name, own) in enumerate(site.items())}
    first = next(iter(worlds))
    return World({**worlds, first: tuple(replace(scan, damage="truncated") for scan in worlds[first])})


def nothing(site: Site) -> World:
    """Make every file of the hospital unreadable."""
    return World({name: tuple(replace(scan, damage="truncated") for scan in own) for name, own in site.items()})


def alone(site: Site, victim: str) -> World:
    """Make all files unreadable except the victim's."""
    gone = {name: tuple(replace(scan, damage="truncated") for scan in own) for name, own in site.items()}
    return World({**gone, victim: site[victim]})


# ---- on disk ---------------------------------------------------------------------------------------------------------


def write(site: Site, directory: Path, choice: Choice) -> None:
    """Write the site's data in the layout that ``choice`` names, with a table of patients if the layout has none."""
    directory.mkdir(parents=True)
    labels = ["background", *STRUCTURES[: int(str(choice["DataConfig.labels"])) - 1]]
    if choice["DatasetSettings.labels"] == "mapped":
        labels = ["background", *(f"our-{name}" for name in labels[1:])]
    channels = [f"C{i}" for i in range(int(str(choice["DataConfig.channels"])))]
    _WRITERS[str(choice["DatasetSettings.layout"])](site, directory, labels, channels)


def _write_msd(site: Site, directory: Path, labels: list[str], channels: list[str]) -> None:
    training = []
    for scan in (scan for scans in site.values() for scan in scans):
        image, label = f"imagesTr/{scan.stem}.nii.gz", f"labelsTr/{scan.stem}.nii.gz"
        _save_image(directory / image, scan, list(range(len(channels))))
        _save_label(directory / label, scan)
        training.append({"image": f"./{image}", "label": f"./{label}"})
    index = {
        "name": "site",
        "labels": {str(i): name for i, name in enumerate(labels)},
        "modality": {str(i): name for i, name in enumerate(channels)},
        "training": training,
        "test": [],
    }
    (directory / "dataset.json").write_text(json.dumps(index))
    _write_patients(site, directory)


def _write_nnunet(site: Site, directory: Path, labels: list[str], channels: list[str]) -> None:
    for scan in (scan for scans in site.values() for scan in scans):
        for number in range(len(channels)):
            _save_image(directory / "imagesTr" / f"{scan.stem}_{number:04d}.nii.gz", scan, [number])
        if scan.damage == "more channels":
            _save_image(directory / "imagesTr" / f"{scan.stem}_0009.nii.gz", scan, [0])
        _save_label(directory / "labelsTr" / f"{scan.stem}.nii.gz", scan)
    index = {
        "channel_names": {str(i): name for i, name in enumerate(channels)},
        "labels": {name: i for i, name in enumerate(labels)},
        "file_ending": ".nii.gz",
    }
    (directory / "dataset.json").write_text(json.dumps(index))
    _write_patients(site, directory)


def _write_bids(site: Site, directory: Path, labels: list[str], channels: list[str]) -> None:
    rows = "".join(f"{i}\t{name}\n" for i, name in enumerate(labels))
    for patient, scans in site.items():
        subject = f"sub-{patient.replace('-', '')}"
        for scan in scans:
            session = f"ses-{scan.stem.split('x')[-1]}"
            for number, name in enumerate(channels):
                file = directory / subject / session / "anat" / f"{subject}_{session}_{name}.nii.gz"
                _save_image(file, scan, [number])
            if scan.damage == "more channels":
                _save_image(directory / subject / session / "anat" / f"{subject}_{session}_C9.nii.gz", scan, [0])
            drawn = directory / "derivatives" / "hand" / subject / session / "anat"
            _save_label(drawn / f"{subject}_{session}_dseg.nii.gz", scan)
            if scan.damage == "own table":
                (drawn / f"{subject}_{session}_dseg.tsv").write_text("index\tname\n1\tsomething else\n")
    (directory / "dseg.tsv").write_text(f"index\tname\n{rows}")


def _write_table(site: Site, directory: Path, labels: list[str], channels: list[str]) -> None:
    lines = [",".join(["case_id", "patient_id", "label", *(f"image_{name}" for name in channels)])]
    for patient, scans in site.items():
        for scan in scans:
            files = [f"scans/{scan.stem}-{name}.nii.gz" for name in channels]
            for number, file in enumerate(files):
                _save_image(directory / file, scan, [number])
            _save_label(directory / "drawn" / f"{scan.stem}.nii.gz", scan)
            lines.append(",".join([scan.stem, patient, f"drawn/{scan.stem}.nii.gz", *files]))
    (directory / "cases.csv").write_text("\n".join(lines) + "\n")
    (directory / "labels.tsv").write_text("index\tname\n" + "".join(f"{i}\t{n}\n" for i, n in enumerate(labels)))


_WRITERS = {"msd": _write_msd, "nnunet": _write_nnunet, "bids": _write_bids, "table": _write_table}


def _write_patients(site: Site, directory: Path) -> None:
    if any(len(scans) > 1 for scans in site.values()):
        rows = [f"{scan.stem}\t{patient}" for patient, scans in site.items() for scan in scans]
        (directory / "patients.tsv").write_text("\n".join(["case_id\tpatient_id", *rows]) + "\n")


def _save_image(path: Path, scan: Scan, channels: list[int]) -> None:
    image = np.moveaxis(scan.image[channels], 0, -1)
    if scan.damage == "nan":
        image = image.copy()
        image[0, 0, 0] = np.nan
    _save(path, image[..., 0] if len(channels) == 1 else image, damage=scan.damage)


def _save_label(path: Path, scan: Scan) -> None:
    if scan.damage == "no label":
        return
    label = scan.label * 9 if scan.damage == "labels" else scan.label
    _save(path, label, shift=50.0 * (scan.damage == "geometry"))


def _save(path: Path, array: np.ndarray, *, shift: float = 0.0, damage: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.eye(4)
    affine[0, 3] = shift
    nib.save(nib.Nifti1Image(array, affine), path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:200])


# ---- a configuration -------------------------------------------------------------------------------------------------


def study_of(choice: Choice) -> Study:
    labels = ("background", *STRUCTURES[: int(str(choice["DataConfig.labels"])) - 1])
    unit, relation = str(choice["PrivacyConfig.unit+relation"]).split("/")
    codec, _, protocol = str(choice["CodecConfig.name+joint+protocol"]).partition("/")
    return make_study(
        data=DataConfig(
            labels=labels,
            spacing_mm=choice["DataConfig.spacing_mm"],  # type: ignore[arg-type]
            grid=GRID,
            channels=tuple(f"C{i}" for i in range(int(str(choice["DataConfig.channels"])))),
        ),
        planned_queries=PUBLIC,
        quorum=3 if choice["PrivacyConfig.aggregation"] == SEALED_SUM else 1,
        unit=unit,
        relation=relation,
        voters_per_site=int(str(choice["PrivacyConfig.voters_per_site"])),
        aggregation=str(choice["PrivacyConfig.aggregation"]),
        codec=CodecConfig(
            name=codec,
            radius=RADIUS,
            max_dimension=6,
            augmentations=0,
            joint=protocol == "joint",
            protocol="" if protocol == "joint" else protocol,
        ),
        teacher=TrainingConfig(
            channels=(4, 8),
            steps=3,
            batch_size=int(str(choice["TrainingConfig.batch_size"])),
            learning_rate=0.3,
            patch=choice["TrainingConfig.patch"],  # type: ignore[arg-type]
            augmentation=str(choice["TrainingConfig.augmentation"]),
            amp=bool(choice["TrainingConfig.amp"]),
        ),
    )


def private_of(choice: Choice) -> PrivateSettings | None:
    if "PrivateSettings.strategy" not in choice:
        return None
    return PrivateSettings(
        str(choice["PrivateSettings.strategy"]),
        0.25,  # irrelevant here, because the noise is off; fast to account
        1e-3,
        rate=Fraction(1, 2),
        steps=4,
        clip=1e-3,
        mu=1.0,
        **{  # type: ignore[arg-type]
            name: choice[f"PrivateSettings.{name}"]
            for name in ("per_layer", "neighbours", "sampling", "scans", "chunk")
        },
    )


@lru_cache(maxsize=32)
def codec_of(name: str, labels: int) -> Codec:
    """Return the codec. It is fitted once for all worlds, because it is public."""
    study = study_of(
        {
            **dict.fromkeys(_NEEDED, 1),
            "DataConfig.labels": labels,
            "CodecConfig.name+joint+protocol": name,
            "DataConfig.spacing_mm": (1.0, 1.0, 1.0),
            "PrivacyConfig.unit+relation": "patient/replace-one",
            "PrivacyConfig.aggregation": "open",
            "TrainingConfig.patch": (),
            "TrainingConfig.augmentation": "smooth",
        }
    )
    maps = []
    for number in range(8):
        label = np.zeros(GRID, dtype=np.uint8)
        at = 2 + number
        label[at : at + 3, 2 + number % 3 : 5 + number % 3, 2:6] = 1
        if labels > 2:
            label[at + 3 : at + 5, 2:6, 2:6] = 2
        maps.append(label)
    return fit_codec(study, maps, noise_std=0.01)


_NEEDED = ("DataConfig.channels", "PrivacyConfig.voters_per_site", "TrainingConfig.batch_size", "TrainingConfig.amp")


def joint_frame(study: Study, codec: Codec, codec_hash: str) -> Frame:
    """Return a public frame over the public volumes, with random directions."""
    rng, size = np.random.default_rng(5), PUBLIC * codec.dimension
    rows = np.linalg.qr(rng.normal(size=(size, size)))[0][:5]
    return Frame(
        basis=rows.reshape(5, PUBLIC, codec.dimension),
        variances=np.ones(5),
        weights=np.ones(5),
        centre=np.zeros((PUBLIC, codec.dimension)),
        temperature=0.9,
        codec=codec_hash,
    )


def look_frame(study: Study, codec: Codec, codec_hash: str) -> Frame:
    """Return a public frame over how structures look."""
    return first_frame(study, codec=codec_hash, noise_std=0.01)


FRAMES = {"joint": joint_frame, "appearance": look_frame}
"""Frames by protocol; a protocol that asks about each volume separately has none."""


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observation:
    """Holds a world's results. Secret are ``votes[voter][query]`` and ``sums[query]`` on the grid, and
    ``steps[voter][step]``, the flat integer sums of a private training; ``public`` is public.
    """

    votes: tuple[tuple[np.ndarray, ...], ...]
    sums: tuple[np.ndarray, ...]
    steps: tuple[tuple[np.ndarray, ...], ...]
    public: Mapping[str, object]


def voter_of(victim: str, site: Site, choice: Choice) -> int:
    return slots_of(site).index(victim) % int(str(choice["PrivacyConfig.voters_per_site"]))


def slots_of(site: Site) -> tuple[str, ...]:
    """Return the slots of the first world: a permutation that depends only on the number of patients."""
    names = sorted(site)
    return tuple(names[i] for i in np.random.default_rng(11).permutation(len(names)))


def run(
    world: World, base: Site, root: Path, choice: Choice, *, interrupt: int | None = None, frozen: bool = False
) -> Observation:
    """Run one world from its files to its sum. ``base`` is the world in which the patients were dealt.

    With ``interrupt`` every voter's training stops after that many steps and begins again. With ``frozen`` a private
    step's mean is replaced by numbers that read no data, so that two worlds have the same weights at every step;
    nothing is served then.
    """
    root.mkdir(parents=True)
    write(world.site, root / "data", choice)
    study, private = study_of(choice), private_of(choice)
    voters = study.privacy.voters_per_site
    back = {old: new for new, old in world.renamed.items()}
    save_slots(
        root / "teachers" / "slots.json",
        dealt([_said(back.get(name, name), choice) for name in slots_of(base)], voters=voters),
    )
    crash = None if world.crash is None else voter_of(world.crash, base, choice)
    breaks = None if world.breaks is None else voter_of(world.breaks, base, choice)
    mapped = choice["DatasetSettings.labels"] == "mapped"
    names = {f"our-{name}": name for name in study.data.labels[1:]} if mapped else {}
    with Coupling(frozen=frozen, crash=crash) as coupling:
        dataset = open_for_training(root / "data", study.data, DatasetSettings(labels=names))
        train = partial(
            train_site,
            dataset,
            teachers=root / "teachers",
            data=study.data,
            recipe=study.teacher,
            voters=voters,
            trainer="standard" if private is None else private.strategy,
            private=private,
            start=_start(root, study) if choice["public start"] else None,
        )
        if interrupt is not None:
            train(run=partial(coupling.train, interrupt=interrupt))
        train(run=coupling.train)
    votes, sums, public = ((), (), {}) if frozen else _serve(root, study, breaks=breaks)
    steps = tuple(tuple(coupling.steps.get(voter, ())) for voter in range(voters))
    return Observation(votes, sums, steps, public)


def dealt(order: Sequence[str], *, voters: int) -> Slots:
    """Assign patients by the production code with a shuffle that both worlds share: an exchanged patient takes the
    other's slot.
    """
    return deal(order, voters=voters, seed=3, shuffle=lambda names: order)


def _said(name: str, choice: Choice) -> str:
    """Return a patient's name in the dataset: a subject, a row of a table, or its one scan."""
    if choice["DatasetSettings.layout"] == "bids":
        return f"sub-{name.replace('-', '')}"
    tabled = choice["DatasetSettings.layout"] == "table" or choice["scans of a patient"] != 1
    return name if tabled else f"{name}x0"


def _start(root: Path, study: Study) -> Path:
    recipe, data = study.teacher, study.data
    model = build_unet(recipe.channels, in_channels=len(data.channels), out_channels=len(data.labels), seed=8)
    save_weights(root / "start.pt", model)
    return root / "start.pt"


class _Stop(Exception):
    """Stops a training as a power cut would."""


@dataclass
class Coupling:
    """Holds the draws that all worlds share, and records the integer sums of private trainings by voter.

    A draw depends only on voter and step, never on data, so that worlds can be compared. ``frozen`` is as in
    :func:`run`.
    """

    frozen: bool
    crash: int | None
    voter: int = 0
    steps: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def train(
        self,
        tasks: Sequence[VoterTask],
        on_progress: Callable[[int, int, float], None],
        *,
        interrupt: int | None = None,
    ) -> list[VoterOutcome | Crash]:
        """Train the voters one after the other; ``interrupt`` is the number of steps after which each is stopped."""
        return [self._train(task, interrupt) for task in tasks]

    def _train(self, task: VoterTask, interrupt: int | None) -> VoterOutcome | Crash:
        self.voter = task.voter
        if task.voter == self.crash:
            return Crash(task.voter, "killed")
        done = 0

        def on_step(step: int, loss: float) -> None:
            nonlocal done
            done += 1
            if interrupt is not None and done > interrupt:
                raise _Stop

        try:
            return train_voter(task, on_step=on_step)
        except _Stop:
            return Crash(task.voter, "interrupted")

    def __enter__(self) -> Coupling:
        self._real = engine.sampler_for, engine.noised
        self._stack = ExitStack()
        self._stack.enter_context(mock.patch.object(secrets, "token_bytes", self._bytes))
        self._stack.enter_context(mock.patch.object(engine, "sampler_for", self._sampler))
        self._stack.enter_context(mock.patch.object(engine, "noised", self._noised))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bytes(self, size: int = 32) -> bytes:
        return hashlib.shake_256(f"key of voter {self.voter}".encode()).digest(size)

    def _sampler(self, event: TrainingEvent, *, patients: int, key: bytes) -> _Batches:
        real = self._real[0]
        return _Batches(lambda entropy: real(event, patients=patients, key=key, entropy=entropy), self.voter)

    def _noised(
        self, total: Mapping[str, torch.Tensor], parts: ClippingPlan, **settings: object
    ) -> Mapping[str, torch.Tensor]:
        known = self.steps.setdefault(self.voter, [])
        known.append(np.concatenate([total[name].numpy().ravel() for name in sorted(total)]))
        mean: Mapping[str, torch.Tensor] = self._real[1](total, parts, **{**settings, "noise": silent})
        if not self.frozen:
            return mean
        draws = np.random.default_rng([len(known), self.voter])
        return {name: torch.from_numpy(draws.normal(0, 0.01, tuple(entry.shape))) for name, entry in mean.items()}


class _Batches:
    """Stands for the production sampler, with coins that depend only on voter and step."""

    def __init__(self, make: Callable[[Entropy], Sampler], voter: int) -> None:
        self._make, self._voter = make, voter
        self.expected = make(self._coins(0)).expected

    def batch(self, step: int) -> np.ndarray:
        return self._make(self._coins(step)).batch(step)

    def _coins(self, step: int) -> Entropy:
        return lambda size: hashlib.shake_256(f"coins {self._voter} {step}".encode()).digest(size)


# ---- serving ---------------------------------------------------------------------------------------------------------


class _Faulty:
    """Voters of whom one fails at every question; if ``only`` is given, no other voter has a teacher."""

    def __init__(self, inner: Voters, *, breaks: int | None, only: int | None) -> None:
        self._inner, self._breaks, self._only = inner, breaks, only

    def predict(self, volume: bytes) -> list[Ask]:
        return [self._ask(number, ask) for number, ask in enumerate(self._inner.predict(volume))]

    def _ask(self, number: int, ask: Ask) -> Ask:
        if self._only not in (None, number):
            return lambda: None
        return _fail if number == self._breaks else ask


def _fail() -> None:
    raise MemoryError("no room")


def _serve(
    root: Path, study: Study, *, breaks: int | None
) -> tuple[tuple[tuple[np.ndarray, ...], ...], tuple[np.ndarray, ...], dict[str, object]]:
    """Return every voter's vote alone, the site's sums, and what a server sees of it."""
    objects = ObjectStore(root / "objects")
    codec = codec_of(study.codec.name, len(study.data.labels))
    record = CodecRecord(objects.put(codec.to_bytes()), codec.dimension)
    volumes = tuple(objects.put(_public_volume(number, study)) for number in range(PUBLIC))
    queries = plan_queries(study, codec=record, volumes=volumes)
    if study.codec.terms.framed:
        made = FRAMES[study.codec.protocol_name](study, codec, record.sha256)
        frame = CodecRecord(objects.put(made.to_bytes()), made.dimension)
        queries = (round_query(study, codec=record, volumes=volumes, frame=frame),)
    teachers = load_teachers(root / "teachers", study)

    def answer(only: int | None, name: str) -> tuple[tuple[np.ndarray, ...], dict[str, object]]:
        voters = _Faulty(site_voters(teachers, study), breaks=breaks, only=only)
        return _answers(root / name, study, queries, voters, objects)

    alone = tuple(answer(voter, f"voter-{voter}")[0] for voter in range(study.privacy.voters_per_site))
    sums, public = answer(None, "site")
    return alone, sums, public


def _answers(
    root: Path, study: Study, queries: tuple[QuerySpec, ...], voters: Voters, objects: ObjectStore
) -> tuple[tuple[np.ndarray, ...], dict[str, object]]:
    """Ask a real worker over its real ledger; return the codes that the ledger stores, and what a server sees."""
    sealing, signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    privacy, keys = study.privacy, ServerKeys(public_hex(sealing), public_hex(signing))
    config = replace(site_config(RegisteredSite("north", "north", node_id=1), study, keys), root=root)
    root.mkdir()
    with SiteLedger.open(root / "site-ledger.sqlite", "north", caps=config.caps, site="north") as ledger:
        ledger.consent(study)
        share = Share()
        worker = make_worker(config, study, ledger, voters, objects, share)
        draw = DrawId(study.id, "c" * 64, "b" * 64, 1)
        to = {"study": draw.study, "ledger": draw.ledger, "batch": draw.batch}
        others = Others(draw) if privacy.sealed else None
        for peer in others.peers if others is not None else ():
            ledger.confirm_peer(study.id, peer)
        offer = Offer(**to, queries=queries)
        if others is not None:
            named = (Peer(config.site, ledger.public_key), *others.peers)
            offer = replace(offer, draw=1, peers=tuple(sorted(named, key=lambda peer: peer.site)))

        def said(issued: int) -> tuple[int, OfferReply]:
            message = encode(replace(offer, issued=issued))
            offered = worker.answer(sign_request(message, sign=signing.sign, site=config.site))
            decided = decode(body_of(offered))
            assert isinstance(decided, OfferReply)
            return len(offered), decided

        ledger.decide(study.id, "pause")
        declined = [said(NOW)]
        ledger.decide(study.id, "resume")
        # The same offer again, an older one and a very old one.
        declined += [said(NOW), said(NOW - 1), said(NOW - 10**10)]
        assert [decided.reason for _, decided in declined] == ["paused", "paused", "stale", "stale"]
        kept = (root / DECLINED).read_bytes()
        offered, decided = said(NOW + 1)
        request = CodesRequest(**to, attempt=1, deadline_s=600, queries=tuple(query.id for query in queries))
        if others is not None:
            assert decided.mask is not None
            request = replace(request, draw=1, members=others.roster_with(Member(config.site, decided.mask)).members)
        reply = worker.answer(sign_request(encode(request), sign=signing.sign, site=config.site))
        codes = decode(body_of(reply))
        assert isinstance(codes, CodesReply)
        found = []
        for query, (_, sealed) in zip(queries, codes.codes, strict=True):
            context = SealContext(study.id, query.id, config.site, request.attempt)
            sent = unseal(sealed, private_key=sealing, context=context, dimension=query.mechanism.dimension)
            found.append(sent if others is None else others.unmasked(sent, query, request) - share.next())
        public = {
            "witness": witnessed(worker, config.site, to, signing),
            "decision": decided.reason,
            "offer reply": offered,
            "declined": declined,
            "declined offer kept": kept,
            "mask key": None if decided.mask is None else (len(decided.mask.key), len(decided.mask.signature)),
            "unconfirmed": decided.unconfirmed,
            "last draw": decided.last_draw,
            "codes reply": len(reply),
            "codes": [(query, len(sealed)) for query, sealed in codes.codes],
            "word signatures": None if codes.signatures is None else [len(one) for one in codes.signatures],
            "shares": share.drawn,
            "spent": ledger.spent(),
        }
        if request.roster is not None:
            auditor = public_hex(X25519PrivateKey.generate())
            of = {"auditor": auditor, "now": datetime(2026, 11, 24, tzinfo=UTC)}
            shown, disclosed = sealed_disclosure(config, ledger, request.roster.id, **of)  # type: ignore[arg-type]
            public["disclosure"] = len(disclosed.render()), shown.queries, shown.mu_squared, shown.if_told
    return tuple(found), public


class Share:
    """Draws a site's share of the noise, equal in every world; records each draw's size and standard deviation."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, Fraction]] = []
        self._noise: list[np.ndarray] = []

    def __call__(self, size: int, std: Fraction) -> np.ndarray:
        self.drawn.append((size, std))
        draws = np.random.default_rng([len(self.drawn), 6])
        self._noise.append(np.rint(draws.normal(0, float(std), size)).astype(np.int64))
        return self._noise[-1]

    def next(self) -> np.ndarray:
        """Return the draws of the first query, and at the next call those of the next query."""
        return self._noise.pop(0)


class Others:
    """Holds two more sites of a sealed study, one before and one after ours by name, with their keys."""

    NAMES = ("east", "south")

    def __init__(self, draw: DrawId) -> None:
        self._draw = draw
        self._identities = {name: Ed25519PrivateKey.generate() for name in self.NAMES}
        self._private = {
            name: mask_private_key(key.private_bytes_raw(), draw, nonce="0" * 64)
            for name, key in self._identities.items()
        }
        self.peers = tuple(Peer(name, public_hex(key)) for name, key in self._identities.items())

    def roster_with(self, member: Member) -> MaskedRoster:
        """Return the roster of all three sites, each with the mask key that it signed."""
        own = [
            Member(name, signed_mask_key(private, self._draw, sign=self._identities[name].sign, site=name))
            for name, private in self._private.items()
        ]
        members = tuple(sorted((member, *own), key=lambda one: one.site))
        return MaskedRoster(self._draw.study, self._draw.ledger, self._draw.batch, self._draw.number, members)

    def unmasked(self, sent: np.ndarray, query: QuerySpec, request: CodesRequest) -> np.ndarray:
        """Return a site's masked code after both other sites have removed the masks that they share with it."""
        roster = request.roster
        assert roster is not None
        (ours,) = (member for member in roster.members if member.site not in self._private)
        words = sent.view(np.uint64)
        for name, private in self._private.items():
            words = words + pair_mask(
                roster, me=name, peer=ours, private=private, query=query.id, dimension=query.mechanism.dimension
            )
        return words.view(np.int64)


def _public_volume(number: int, study: Study) -> bytes:
    scan = make_scan("public", seed=900 + number, channels=len(study.data.channels), labels=2)
    image = np.moveaxis(scan.image, 0, -1)
    return bytes(nib.Nifti1Image(image[..., 0] if image.shape[-1] == 1 else image, np.eye(4)).to_bytes())


# ---- the production objects that serve -------------------------------------------------------------------------------


def load_teachers(folder: Path, study: Study) -> Teachers:
    return Teachers.load(folder, data=study.data, voters=study.privacy.voters_per_site, recipe=study.teacher)


def site_voters(teachers: Teachers, study: Study) -> Voters:
    return TeacherVoters(teachers, study.data)


def witnessed(worker: Worker, site: str, to: Mapping[str, str], signing: Ed25519PrivateKey) -> dict[str, object]:
    """Return the site's reply to the server's first head, with only the lengths of signatures and blinded roots."""
    note = CheckpointNote(origin_of("server", to["ledger"]), 1, bytes(32))
    note = note.signed(signing.sign, key=public_hex(signing))
    request = WitnessRequest(
        study=to["study"],
        ledger=to["ledger"],
        note=note.render().encode(),
        growth=ConsistencyProof(0, ()),
        held_row=0,
        held=(),
        heads=(),
        own=b"",
        own_since=(1, 2),
    )
    reply = worker.answer(sign_request(encode(request), sign=signing.sign, site=site))
    said = decode(body_of(reply))
    assert isinstance(said, WitnessReply)
    own = note_in(said.own)
    assert own is not None
    return {
        "reply": len(reply),
        "word": (len(said.line), said.problem, said.size, said.held_row, said.heads),
        "own head": (own.size, len(said.own)),
        "proofs": [(growth.since, len(growth.proof)) for growth in said.own_growths],
    }


def make_worker(
    config: SiteConfig, study: Study, ledger: SiteLedger, voters: Voters, objects: ObjectStore, sampler: Share
) -> Worker:
    return Worker(
        config=config,
        consent=Consent.of(study),
        ledger=ledger,
        voters=voters,
        fetch=objects.get,
        sampler=sampler,
        declined=config.root / DECLINED,
        witness=Witnessing(
            config.root / WITNESSES,
            site=config.site,
            ledger=ledger,
            server_keys=config.server.signing_public_keys,
            now=lambda: NOW / 1000,
        ),
        now=lambda: NOW / 1000,
    )
