"""Measures peak memory with BraTS-sized volumes (240×240×155, four channels), from teacher to student.

Every stage is a process of its own, as at a site and at the server, and runs the production functions: reading four
channel files for each case, patch training of a four-level U-Net for each voter, the same with DP-SGD, every voter's
codes, the codec, and the student with a label map on the file's own voxels. A GPU is used if there is one. Data are
synthetic and steps are few: this measures memory and time, not quality.

    python -m benchmarks.large_volumes --out DIR [--cases 4] [--steps 3] [--voters 2] [--patch 64]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import nibabel as nib
import numpy as np
from nibabel.openers import Opener

from common.config import CodecConfig, DataConfig, Study, TrainingConfig
from common.privacy.mechanism import Unit
from tests.worlds import make_study

if TYPE_CHECKING:
    from client.training.private.settings import PrivateSettings

CHANNELS = ("T1", "T1c", "T2", "FLAIR")
SHAPE = (240, 240, 155)
SITE_LIMIT_GB, SERVER_LIMIT_GB = 8.0, 4.0


@dataclass(frozen=True, slots=True)
class Size:
    """The options of the command line."""

    steps: int
    voters: int
    patch: int


def study(size: Size) -> Study:
    """Return the study of this size."""
    recipe = TrainingConfig(
        channels=(16, 32, 64, 128), steps=size.steps, batch_size=1, patch=(size.patch,) * 3, amp=True
    )
    return make_study(
        name="large",
        data=DataConfig(
            labels=("background", "edema", "core", "enhancing"),
            spacing_mm=(1.0, 1.0, 1.0),
            grid=(240, 240, 160),
            channels=CHANNELS,
        ),
        planned_queries=2,
        quorum=1,
        unit=Unit.PATIENT,
        voters_per_site=size.voters,
        codec=CodecConfig(augmentations=24),
        teacher=recipe,
        student=recipe,
    )


def make_data(root: Path, cases: int) -> None:
    """Write the site's cases in nnU-Net layout, and the public four-channel files and label maps."""
    axes = np.stack(np.meshgrid(*[np.arange(n, dtype=np.float32) for n in SHAPE], indexing="ij"))
    for number in range(cases + 6):
        rng = np.random.default_rng(number)
        centre = np.array([120, 130, 80]) + rng.uniform(-25, 25, 3)
        distance = np.sqrt(sum((axes[i] - np.float32(centre[i])) ** 2 for i in range(3)))
        distance += 4 * np.sin(axes[0] / rng.uniform(5, 9)).astype(np.float32)
        labels = np.digitize(-distance, [-34, -22, -12]).astype(np.uint8)
        affine = np.diag([-1.0, -1.0, 1.0, 1.0])
        images = [
            (300.0 + 90.0 * ((labels + c) % 4) + rng.normal(0, 40, SHAPE)).clip(0).astype(np.int16) for c in range(4)
        ]
        if number < cases:
            save(root / f"site/labelsTr/c{number}.nii.gz", labels, affine)
            for c, image in enumerate(images):
                save(root / f"site/imagesTr/c{number}_{c:04d}.nii.gz", image, affine)
        elif number < cases + 2:
            save(root / f"public/volume{number}.nii.gz", np.stack(images, axis=-1), affine)
        else:
            save(root / f"maps/m{number}.nii.gz", labels, affine)
    index = {
        "channel_names": {str(i): name for i, name in enumerate(CHANNELS)},
        "labels": {"background": 0, "edema": 1, "core": 2, "enhancing": 3},
        "file_ending": ".nii.gz",
    }
    (root / "site/dataset.json").write_text(json.dumps(index))


def save(path: Path, array: np.ndarray, affine: np.ndarray) -> None:
    """Write a NIfTI file; its folder is created.

    Args:
        path: The file.
        array: The voxels.
        affine: Affine matrix, in mm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Opener.default_compresslevel = 1
    nib.save(nib.Nifti1Image(array, affine), path)


def site_train(root: Path, plan: Study, private: PrivateSettings | None = None) -> dict[str, object]:
    """Train the site's teachers and return their facts."""
    from client.data.layouts import DatasetSettings, open_for_training
    from client.training.site import plan_site, site_report
    from client.training.voter import train_voter

    folder = root / ("teachers" if private is None else "private")
    shutil.rmtree(folder, ignore_errors=True)
    planned = plan_site(
        open_for_training(root / "site", plan.data, DatasetSettings()),
        teachers=folder,
        data=plan.data,
        recipe=plan.teacher,
        voters=plan.privacy.voters_per_site,
        trainer="standard" if private is None else private.strategy,
        private=private,
    )
    report = site_report([train_voter(task, on_step=lambda step, loss: None) for task in planned])
    return {
        "voters": len(report.voters),
        "patients": [voter.trained_on for voter in report.voters],
        "seconds_a_step": [round(voter.seconds / voter.steps, 2) for voter in report.voters],
    }


def site_train_privately(root: Path, plan: Study) -> dict[str, object]:
    """Train with DP-SGD on every patient in every step, so that chunks are as full as possible."""
    from client.training.private.settings import PrivateSettings

    private = PrivateSettings("dp-sgd", 8.0, 1e-3, rate=Fraction(1), steps=plan.teacher.steps)
    return site_train(root, plan, private)


def site_encode(root: Path, plan: Study) -> dict[str, object]:
    """Run the worker's part: read a public volume, predict, encode, quantise; and time MONAI's inference alone."""
    import torch
    from monai.inferers import sliding_window_inference

    from client.teachers.teacher import Teachers
    from common.codecs.codec import load_codec
    from common.data.volume import volume_from_bytes
    from common.models.fit import WINDOW_OVERLAP, best_device, mixed_precision
    from common.privacy.quantise import quantise
    from common.study_mechanism import study_mechanism

    codec = load_codec((root / "codec.bin").read_bytes())
    teachers = Teachers.load(root / "teachers", data=plan.data)
    mechanism = study_mechanism(plan, dimension=codec.dimension)
    device, patch = best_device(), plan.teacher.patch
    times, alone = [], []
    for path in sorted((root / "public").iterdir()):
        image = volume_from_bytes(path.read_bytes(), plan.data).image
        total = np.zeros(codec.dimension, dtype=np.int64)
        maps = teachers.predict(image)
        for _ in teachers.models:
            started = time.process_time()
            probabilities = next(maps)
            times.append(round(time.process_time() - started, 2))
            assert probabilities is not None
            total += quantise(codec.encode(probabilities), radius_int=mechanism.radius_int)
            del probabilities
        np.save(root / f"{path.name}.code.npy", total)
        for model in teachers.models:
            assert model is not None
            with torch.inference_mode(), mixed_precision(device, enabled=True):
                started = time.process_time()
                sliding_window_inference(
                    torch.tensor(image)[None].to(device), patch, 1, model, overlap=WINDOW_OVERLAP, mode="gaussian"
                ).cpu()
                alone.append(round(time.process_time() - started, 2))
    return {
        "device": device.type,
        "cpu_seconds_a_map": times,
        "cpu_seconds_of_sliding_window_inference_alone": alone,
        "ratio": round(sum(times) / sum(alone), 3),
        "dimension": codec.dimension,
    }


def server_codec(root: Path, plan: Study) -> dict[str, object]:
    """Fit the codec and return its facts."""
    from common.codecs.codec import fit_codec
    from common.data.volume import load_label

    maps = [load_label(path, plan.data) for path in sorted((root / "maps").iterdir())]
    started = time.monotonic()
    codec = fit_codec(plan, maps, noise_std=0.05)
    (root / "codec.bin").write_bytes(codec.to_bytes())
    return {"dimension": codec.dimension, "seconds": time.monotonic() - started, "bytes": len(codec.to_bytes())}


def server_student(root: Path, plan: Study) -> dict[str, object]:
    """Add noise, decode, train the student, and write one label map on a file's own voxels."""
    from common.codecs.codec import load_codec
    from common.data.volume import load_volume, save_label, to_native
    from common.data.volume_cache import VolumeCache, together
    from common.models.fit import predict
    from common.privacy.gaussian import rounded_gaussian
    from common.study_mechanism import study_mechanism
    from server.protocols.decode import decode_answer
    from server.protocols.stored_labels import as_stored
    from server.protocols.student_fit import CACHE_BYTES, train_student

    codec = load_codec((root / "codec.bin").read_bytes())
    mechanism = study_mechanism(plan, dimension=codec.dimension)
    volumes, voters = sorted((root / "public").iterdir()), plan.privacy.voters_per_site
    with VolumeCache(root / "cache", budget_bytes=CACHE_BYTES) as cache:
        images, labels = [], []
        for path in volumes:
            noisy = np.load(root / f"{path.name}.code.npy") + rounded_gaussian(codec.dimension, mechanism.noise_std)
            labels.append(cache.keep(as_stored(decode_answer(codec, noisy, voters=voters, mechanism=mechanism))))
            images.append(cache.keep(load_volume(path, plan.data).image))
        model, result = train_student(together(images), together(labels), plan.student, seed=0)
    volume = load_volume(volumes[0], plan.data)
    found = predict(model, volume.image, patch=plan.student.patch, amp=plan.student.amp)
    save_label(root / "native.nii.gz", to_native(found.argmax(axis=0).astype(np.uint8), volume), volume)
    saved, original = nib.load(root / "native.nii.gz"), nib.load(volumes[0])
    assert saved.shape == original.shape[:3] == SHAPE
    np.testing.assert_allclose(saved.affine, original.affine)
    return {"steps": result.steps, "seconds": result.seconds, "native_shape": list(saved.shape)}


STAGES: dict[str, tuple[Callable[[Path, Study], dict[str, object]], float]] = {
    "server codec": (server_codec, SERVER_LIMIT_GB),
    "site train": (site_train, SITE_LIMIT_GB),
    "site train privately": (site_train_privately, SITE_LIMIT_GB),
    "site encode": (site_encode, SITE_LIMIT_GB),
    "server student": (server_student, SERVER_LIMIT_GB),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--voters", type=int, default=2)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--stage", choices=sorted(STAGES))
    arguments = parser.parse_args()
    if arguments.stage:
        size = Size(arguments.steps, arguments.voters, arguments.patch)
        facts = STAGES[arguments.stage][0](arguments.out, study(size))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"stage": arguments.stage, "peak_gb": round(peak, 2), **facts}))
        return
    if not (arguments.out / "site" / "dataset.json").exists():
        make_data(arguments.out, arguments.cases)
    too_much = []
    for stage, (_, limit) in STAGES.items():
        command = [sys.executable, "-m", "benchmarks.large_volumes", "--out", str(arguments.out), "--stage", stage]
        for name in ("steps", "voters", "patch"):
            command += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout.strip(), flush=True)
        if json.loads(done.stdout)["peak_gb"] >= limit:
            too_much.append(f"{stage}: more than {limit} GB")
    if too_much:
        raise SystemExit("; ".join(too_much))


if __name__ == "__main__":
    main()
