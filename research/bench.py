"""Computes once what the networks compared at one setting and seed share: codec, public start, frame, teachers, codes.

The utility, ablation, poison and PATE benchmarks use it. An *arm* is one of the compared networks, such as the student
or a control. All arms of a seed have the same roles, teachers, public start and steps. One seed determines which fold
of the cases is held out, the public start and the student. (In a study the student's seed is fixed.) It refuses a
setting that its protocol cannot run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8

from client.records.journal import TrainingJournal, TrainingPlan
from client.training.contract import VoterData
from client.training.private.settings import PrivateSettings, defaults
from client.training.private.teachers import train_privately
from common.canonical import digest, sha256_bytes
from common.codecs import Codec, fit_codec, load_codec
from common.codecs.pca import PcaCodec
from common.config import DataConfig, TrainingConfig
from common.metrics import score
from common.models.fit import NEAR, average_with_start, fit, one_hot, predict
from common.models.unet import load_weights, network_of, save_weights
from common.objects import ObjectStore, write_atomically
from common.privacy.training import Neighbours
from common.protocols.appearance import AppearanceEncoder, window_of
from common.protocols.frame import Frame
from common.study_mechanism import study_mechanism
from research.roles import CaseRoles, Cases
from research.scores import at_site, own_cases, scored
from research.setting import PER_VOLUME, RECIPE, Setting, study_of
from research.stored_results import ResultFolder, array_hash, weights_hash
from server.protocols.appearance.labels import LABELS, placed
from server.protocols.appearance.look import first_frame
from server.protocols.joint.kernel import MAX_ROWS, MAX_WEIGHTS, tangent_kernel
from server.protocols.public_start import (
    SPREAD,
    STUDENT_PASSES,
    TEMPERATURE,
    PairTraining,
    Start,
    codes_of,
    joint_frame,
    public_start,
    refine,
    refine_paired,
)
from server.protocols.rounds import FRAMES, keep_frame
from server.public.material import START_FILE, CodecRecord, PublicMaterial
from server.public.paired import Paired
from server.public.public_files import FilesInFolder


class Bench:
    """One setting at one seed.

    Args:
        setting: The row of the table.
        roles: The cases by role.
        data: The study's grid and labels.
        seed: The seed.
        cache: Folder in which expensive results are stored by the hash of everything they depend on.
    """

    def __init__(self, setting: Setting, roles: CaseRoles, data: DataConfig, *, seed: int, cache: Path) -> None:
        self.setting, self.roles, self.seed = setting, roles, seed
        self.study = study_of(setting, data)
        self.joint = setting.recipe == "joint"
        self.images = roles.public.images[: setting.queries if setting.recipe in PER_VOLUME else None]
        self.paired = None
        if setting.paired and roles.paired is not None:
            self.paired = Paired(roles.paired.images, roles.paired.labels, self.classes)
        self.kept = ResultFolder(
            cache, digest("bench-roles", [array_hash(part.images, part.labels) for part in roles.parts])
        )

    def at(self, setting: Setting) -> Bench:
        """Return a bench with the same roles, seed and cache, and another setting."""
        return Bench(setting, self.roles, self.study.data, seed=self.seed, cache=self.kept.folder)

    @property
    def classes(self) -> int:
        """Number of classes, the background included."""
        return len(self.study.data.labels)

    @property
    def schooling(self) -> list[object]:
        """Protocol constants that influence the training of students; the names of stored results contain them."""
        if self.paired is not None:
            return [NEAR]
        if self.setting.recipe == "appearance":
            return [LABELS]
        return [STUDENT_PASSES] if self.joint else []

    @property
    def begun(self) -> bool:
        """True if teachers and student start from a public start."""
        return self.joint or (self.setting.recipe == "appearance" and placed(self.linear))

    @property
    def voters(self) -> int:
        """Number of voters of all hospitals."""
        return self.setting.hospitals * self.setting.voters

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of a release's mean code."""
        return study_mechanism(self.study, dimension=1).mean_noise_std(voters=self.voters)

    @cached_property
    def codec(self) -> Codec:
        """The study's codec, fitted on the public label maps; stored, because an autoencoder takes minutes."""
        maps = list(self.roles.maps.labels)
        if self.study.codec.name == PcaCodec.name:
            return fit_codec(self.study, maps, noise_std=self.noise_std, seed=0)
        parts = [repr(self.study.codec), repr(self.study.data), self.noise_std.hex(), array_hash(*maps)]
        path = self.kept.file("codec", parts, ".npz")
        if not path.exists():
            write_atomically(path, fit_codec(self.study, maps, noise_std=self.noise_std, seed=0).to_bytes())
        return load_codec(path.read_bytes())

    @property
    def linear(self) -> PcaCodec:
        """The codec of a joint query."""
        assert isinstance(self.codec, PcaCodec)
        return self.codec

    @cached_property
    def codec_hash(self) -> str:
        """Hash of the codec; of a PCA codec without its planned noise.

        Settings whose PCA codecs differ only in the planned noise therefore share stored results.
        """
        codec = self.codec
        if not isinstance(codec, PcaCodec):
            return sha256_bytes(codec.to_bytes())
        arrays = (codec.basis, codec.centre, codec.metric, codec.variances, codec.powers)
        return digest("bench-codec", [array_hash(array) for array in arrays])

    # --- public data before any query

    def start_file(self) -> Path:
        """Return the file in which :meth:`start` stores its weights."""
        return self.kept.file("start", [self.codec_hash, repr(self.setting.student), self.seed], ".pt")

    def start(self, *, spread: float = SPREAD) -> Start:
        """Return the public start of a joint query. It is trained once for each seed and ``spread``, and stored.

        Args:
            spread: Least ratio between the variance of the public start's codes and that of the public label maps'
                codes.
        """
        codec = self.linear
        path = self.start_file() if spread == SPREAD else self.start_file().with_suffix(f".{spread:g}.pt")
        if not path.exists():
            start = public_start(
                self.images,
                codec,
                codec.powers,
                self.setting.student,
                seed=self.seed,
                spread=spread,
                paired=self.paired,
            )
            save_weights(path, start.model)
        model = self.empty(self.setting.student)
        load_weights(path, model)
        return Start(model=model, codes=codes_of(model, self.images, codec, temperature=TEMPERATURE))

    def kernel(self, start: Start, *, temperature: float) -> Float[np.ndarray, "k k"]:
        """Return the tangent kernel of a start; settings and variants of an ablation share it.

        Args:
            start: The public start.
            temperature: Temperature that sharpens the predictions.
        """
        parts = [self.codec_hash, weights_hash(start.model), temperature, MAX_ROWS, MAX_WEIGHTS]
        make = partial(tangent_kernel, start.model, self.images, self.linear, temperature=temperature)
        return self.kept.array("kernel", parts, make)

    def frame(self, start: Start) -> Frame:
        """Return the frame of a joint query's first round, planned once per seed."""
        path = self.kept.file("frame", [self.codec_hash, weights_hash(start.model), self.noise_std.hex(), RECIPE], "")
        if not path.exists():
            kernel, radius = self.kernel(start, temperature=TEMPERATURE), self.study.codec.radius
            sha256, noise_std = sha256_bytes(self.codec.to_bytes()), self.noise_std
            frame = joint_frame(
                start, self.linear, codec_sha256=sha256, kernel=kernel, noise_std=noise_std, radius=radius
            )
            write_atomically(path, frame.to_bytes())
        return Frame.from_bytes(path.read_bytes())

    def public(self, folder: Path, *, start: Start | None, frame: Frame | None) -> PublicMaterial:
        """Return the study's public material, stored in a folder as in a study's directory.

        Volumes are named by the hash of their voxels and are not in the object store.

        Args:
            folder: The folder; it is created if missing.
            start: The public start, if any.
            frame: The first frame of a joint query.
        """
        folder.mkdir(parents=True, exist_ok=True)
        objects = ObjectStore(folder / "objects")
        codec = CodecRecord(objects.put(self.codec.to_bytes()), self.codec.dimension)
        looked_at = self.setting.recipe == "appearance"
        images = {array_hash(image): image for image in self.images}
        kept, paired = FilesInFolder(folder), self.paired or ()
        public = PublicMaterial(self.study, codec, tuple(images), objects, kept, paired, images=images)
        if looked_at and start is not None:
            save_weights(folder / START_FILE, start.model)
        if looked_at and not (folder / FRAMES).exists():
            keep_frame(public, first_frame(self.study, codec=codec.sha256, noise_std=self.noise_std), after=())
        if start is not None and frame is not None and not (folder / FRAMES).exists():
            save_weights(folder / START_FILE, start.model)
            keep_frame(public, frame, after=())
        return public

    @contextmanager
    def asking(self, start: Start, frame: Frame) -> Iterator[PublicMaterial]:
        """Yield the public material of a study whose joint query begins with this frame, in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="consilium-bench-") as folder:
            yield self.public(Path(folder), start=start, frame=frame)

    # --- at the sites

    def teachers(self, start: Start | None) -> list[torch.nn.Module]:
        """Return the teachers: one for every voter that has patients.

        If a hospital has fewer patients than voters, its other voters have no teacher; they send zero codes.

        Args:
            start: A public start to continue from; None for random weights.
        """
        weights = None if start is None else weights_hash(start.model)
        models = []
        for hospital, site in enumerate(self.roles.private):
            for voter in range(min(self.setting.voters, len(site))):
                part = site[np.arange(voter, len(site), self.setting.voters)]
                seed = 1000 * hospital + voter
                parts = [repr(self.setting.teacher), array_hash(part.images, part.labels), seed, weights or "random"]
                parts += [NEAR] if self.paired is not None and start is not None else []
                path = self.kept.file("teacher", parts, ".pt")
                make = partial(self._teacher, part, start, seed=seed)
                models.append(self.kept.network(path, self.empty(self.setting.teacher), make))
        return models

    def _teacher(self, part: Cases, start: Start | None, *, seed: int) -> torch.nn.Module:
        model = self.empty(self.setting.teacher, seed=seed)
        if start is not None:
            model.load_state_dict(start.model.state_dict())
        targets = np.stack([one_hot(label, self.classes) for label in part.labels])
        fit(model, part.images, targets, self.setting.teacher, seed=seed)
        if start is not None and self.paired is not None:
            average_with_start(start.model.state_dict(), model)
        return model

    def codes(self, teachers: list[torch.nn.Module], *, temperature: float | None = None) -> Float[np.ndarray, "k n l"]:
        """Return every teacher's codes of the public volumes, float [k, n, l]. # sensitive: use public data only

        Args:
            teachers: The teachers.
            temperature: Temperature that sharpens the predictions; None for the recipe's.
        """
        if self.setting.recipe == "appearance":
            return np.stack([self._looks(model) for model in teachers])
        if temperature is None:
            temperature = TEMPERATURE if self.joint else 1.0
        result = []
        for model in teachers:
            parts = [self.codec_hash, weights_hash(model), len(self.images), temperature]
            make = partial(codes_of, model, self.images, self.codec, temperature=temperature)
            result.append(self.kept.array("codes", parts, make))
        return np.stack(result)

    def _looks(self, model: torch.nn.Module) -> Float[np.ndarray, "n l"]:
        """Return a teacher's statistics of grey values in each public volume, which an appearance query sums.

        The result of :meth:`AppearanceEncoder.of_volume` for each of the n volumes, float [n, l]. It does not depend on
        the frame.
        """
        frame = first_frame(self.study, codec=self.codec_hash, noise_std=self.noise_std)
        window, channels = window_of(self.codec), self.images.shape[1]
        encoder = AppearanceEncoder(frame, window, labels=self.classes, channels=channels)

        def make() -> np.ndarray:
            return np.stack([encoder.of_volume(predict(model, one), partial(np.asarray, one)) for one in self.images])

        return self.kept.array("looks", [weights_hash(model), array_hash(window), len(self.images)], make)

    def dp_sgd(self, start: Start | None) -> PrivateSettings:
        """Return DP-SGD's default recipe at the setting's (ε, δ) for one patient, under replace-one.

        Args:
            start: The public start that the training begins from, if any.
        """
        setting = self.setting
        own = defaults("dp-sgd", epsilon=setting.epsilon, delta=setting.delta, begun=start is not None)
        return replace(own, neighbours=Neighbours.REPLACE_ONE)

    def central(
        self, settings: PrivateSettings, start: Start | None, plan: TrainingPlan | None = None
    ) -> torch.nn.Module:
        """Return a network trained privately on all private patients in one place.

        Args:
            settings: The private training.
            start: The public start, if any.
            plan: Noise and cost of the training; by default those of the settings.
        """
        pooled = self.roles.pooled
        return train_privately(
            VoterData(pooled.images, pooled.labels, self.classes),
            self.setting.teacher,
            settings,
            TrainingJournal(plan or settings.plan(patients=len(pooled))),
            seed=self.seed,
            start=None if start is None else self.start_file(),
        ).model

    # --- students

    def taught(self, start: Start, codes: Float[np.ndarray, "n l"], *, passes: int | None = None) -> float:
        """Return the Dice of a joint query's student that is trained on these codes.

        Args:
            start: The public start.
            codes: Codes of the public volumes, float [n, l].
            passes: Number of training passes of the student; None for the recipe's.
        """
        parts = [self.codec_hash, weights_hash(start.model), repr(self.setting.student), self.seed, array_hash(codes)]
        parts += self.schooling if passes is None else [passes]
        make = partial(self.refined, start, codes, passes=passes)
        return self.kept.number("taught", parts, lambda: self.dice(make(), self.roles.held_out))

    def refined(self, start: Start, codes: Float[np.ndarray, "n l"], *, passes: int | None = None) -> torch.nn.Module:
        """Return a joint query's student that is trained on these codes; see :meth:`taught`."""
        recipe, beside = self.setting.student, None
        if self.paired is not None:
            beside = PairTraining(self.paired, self.alone(start))
        return refine(
            start.model, self.images, self.linear, codes, recipe, seed=self.seed, beside=beside, passes=passes
        )

    def alone(self, start: Start) -> torch.nn.Module:
        """Return the network trained on the public cases with label maps alone. It is trained once and stored."""
        assert self.paired is not None
        recipe = self.setting.student
        path = self.kept.file("pairs", [weights_hash(start.model), repr(recipe), self.seed], ".pt")
        make = partial(refine_paired, start.model, self.paired, recipe, seed=self.seed)
        return self.kept.network(path, self.empty(recipe), make)

    def dice(self, model: torch.nn.Module, cases: Cases) -> float:
        """Return a network's mean Dice on these cases."""
        return score(segmented(model, cases), cases.labels, self.study.data.members).mean

    def scored(self, arm: str, model: torch.nn.Module) -> dict[str, float]:
        """Return every metric of a network on the held-out cases, and its Dice on each hospital's own held-out cases.

        Args:
            arm: Name under which the metrics are returned.
            model: The network.
        """
        held_out, labels = self.roles.held_out, segmented(model, self.roles.held_out)
        values = scored(arm, labels, held_out.labels, self.study.data)
        for site in self.roles.sites:
            rows = own_cases(site, self.roles.held_out_sites)
            if len(rows):
                own = score(labels[rows], held_out.labels[rows], self.study.data.members).mean
                values[at_site(f"{arm} on its own", site)] = own
        return values

    def empty(self, recipe: TrainingConfig, *, seed: int = 0) -> torch.nn.Module:
        """Return an untrained network of the recipe."""
        return network_of(recipe, channels=len(self.study.data.channels), classes=self.classes, seed=seed)


def segmented(model: torch.nn.Module, cases: Cases) -> UInt8[np.ndarray, "n x y z"]:
    """Return a network's label maps of the cases, uint8 [n, x, y, z]."""
    return hard(np.stack([predict(model, image) for image in cases.images]))


def hard(probabilities: Float[np.ndarray, "n k x y z"]) -> UInt8[np.ndarray, "n x y z"]:
    """Return the most probable classes, uint8 [n, x, y, z], of probabilities [n, k, x, y, z]."""
    result: np.ndarray = probabilities.argmax(axis=1).astype(np.uint8)
    return result
