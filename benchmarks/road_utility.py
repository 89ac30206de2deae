"""How good a student the road yields, in one process: teachers → codec → quantise → noise → decode → student.

The production functions do the work; only the daemons, the sealing and the ledger are left out. Every private result
stands beside its controls (zero code, shuffled codes, public only) because the public prior alone already scores well.
Teachers' predictions and students are kept by the hash of all that shapes them, so codecs are compared on the same
teachers, and what two runs have in common is trained once.

    python benchmarks/road_utility.py --data Task04_Hippocampus --epsilon 1000 --seeds 3 --codec ball-ae
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from common.canonical import digest
from common.codecs import Codec, fit_codec
from common.config import CodecConfig, DataConfig, PrivacyConfig, Study, TrainingConfig
from common.data.msd import read_dataset
from common.data.volume import load_label, load_volume
from common.models.fit import fit, one_hot, predict
from common.models.unet import build_unet, load_weights, save_weights
from common.privacy.calibration import calibrate, noise_multiplier
from common.privacy.mechanism import Mechanism, radius_int
from common.privacy.quantise import quantise
from common.privacy.release import noisy_sum
from server.postprocess.controls import self_labels
from server.protocols.decode import decode_answer, mean_noise_std
from server.protocols.stored_labels import as_stored
from server.protocols.student import evaluate, score, train_student

HOSPITALS, MAPS, PUBLIC, VALIDATION, TEST = 8, 24, 16, 10, 34


@dataclass(frozen=True, slots=True)
class Cases:
    """Images [n, c, x, y, z] and label maps [n, x, y, z] of one role; a role's labels are used only where it may."""

    images: np.ndarray
    labels: np.ndarray


def load_cases(directory: Path, data: DataConfig) -> Cases:
    cases = read_dataset(directory).labelled
    images = np.stack([load_volume(case.image, data).image for case in cases])
    return Cases(images, np.stack([load_label(case.label, data) for case in cases if case.label is not None]))


def deal(cases: Cases, *, seed: int) -> tuple[dict[str, Cases], list[Cases]]:
    """Roles by a seeded permutation: public maps, public images, validation, test; the rest over the hospitals."""
    order = np.random.default_rng([seed, 0]).permutation(len(cases.images))
    parts = np.split(order, np.cumsum([MAPS, PUBLIC, VALIDATION, TEST]))
    roles = {
        name: Cases(cases.images[index], cases.labels[index])
        for name, index in zip(("maps", "public", "validation", "test"), parts, strict=False)
    }
    return roles, [Cases(cases.images[i], cases.labels[i]) for i in np.array_split(parts[4], HOSPITALS)]


def teacher_predictions(
    sites: list[Cases], asked: np.ndarray, recipe: TrainingConfig, *, classes: int, seed: int, cache: Path
) -> np.ndarray:
    """Probabilities [K, n, c, x, y, z] of one teacher a site on ``asked``; trained once, kept in ``cache``."""
    result = []
    for number, site in enumerate(sites):
        key = digest(
            "benchmark-teacher",
            [
                repr(recipe),
                seed,
                number,
                *(hashlib.sha256(a.tobytes()).hexdigest() for a in (site.images, site.labels, asked)),
            ],
        )
        path = cache / f"{key}.npy"
        if not path.exists():
            started = time.monotonic()
            model = build_unet(
                recipe.channels, in_channels=asked.shape[1], out_channels=classes, seed=1000 * seed + number
            )
            targets = np.stack([one_hot(label, classes) for label in site.labels])
            fit(model, site.images, targets, recipe, seed=1000 * seed + number)
            cache.mkdir(parents=True, exist_ok=True)
            np.save(path, np.stack([predict(model, image) for image in asked]))
            print(
                f"teacher={number} cases={len(site.images)} seconds={time.monotonic() - started:.1f}", file=sys.stderr
            )
        result.append(np.load(path))
    return np.stack(result)


def labels_of(probabilities: np.ndarray) -> np.ndarray:
    labels: np.ndarray = probabilities.argmax(axis=1).astype(np.uint8)
    return labels


def pseudo_labels(codec: Codec, answers: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Every query's answer, noised by the production sampler and decoded: float32 [n, c, x, y, z]."""
    decoded = []
    for volume in range(answers.shape[1]):
        codes = [quantise(codec.encode(answer), radius_int=mechanism.radius_int) for answer in answers[:, volume]]
        decoded.append(
            decode_answer(codec, noisy_sum(codes, mechanism), voters=len(codes), noise_std_int=mechanism.noise_std)
        )
    return np.stack(decoded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an MSD dataset directory")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "consilium-benchmark",
        help="teachers' predictions, students",
    )
    parser.add_argument("--codec", default="pca", help="pca or ball-ae")
    parser.add_argument("--dimension", type=int, default=CodecConfig().max_dimension, help="the most coordinates l")
    parser.add_argument("--split", type=int, default=0, help="seed of the split and of the teachers")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-3)
    parser.add_argument("--queries", type=int, default=PUBLIC, help=f"N, at most {PUBLIC}")
    parser.add_argument("--seeds", type=int, default=3, help="students a condition; noise is fresh for each")
    parser.add_argument("--steps", type=int, default=TrainingConfig(steps=600).steps, help="student's training steps")
    parser.add_argument(
        "--on", choices=("validation", "test"), default="validation", help="cases the student is scored on"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = read_dataset(args.data).labels
    study = Study(
        name="road-utility",
        data=DataConfig(labels=names, spacing_mm=(1.0, 1.0, 1.0), grid=(32, 48, 32)),
        privacy=PrivacyConfig(epsilon=args.epsilon, delta=args.delta, planned_queries=args.queries, quorum=HOSPITALS),
        codec=CodecConfig(name=args.codec, max_dimension=args.dimension),
        student=TrainingConfig(steps=args.steps),
    )
    roles, sites = deal(load_cases(args.data, study.data), seed=args.split)
    asked = np.concatenate([roles[name].images for name in ("public", "validation", "test")])
    answers = teacher_predictions(sites, asked, study.teacher, classes=len(names), seed=args.split, cache=args.cache)
    at = PUBLIC if args.on == "validation" else PUBLIC + VALIDATION
    held_out, truth = answers[:, at : at + len(roles[args.on].images)], roles[args.on].labels
    queried, images = answers[:, : args.queries], roles["public"].images[: args.queries]

    bound = radius_int(study.codec.radius)
    noise_std_int = calibrate(
        budget=study.privacy.budget,
        accountant=study.privacy.accountant,
        queries=args.queries,
        radius_int=bound,
        voters_per_site=1,
        protection=study.privacy.protection,
    )
    noise_std = mean_noise_std(noise_std_int, voters=HOSPITALS)
    started = time.monotonic()
    codec = fit_codec(study, list(roles["maps"].labels), noise_std=noise_std)
    fitting = time.monotonic() - started
    mechanism = Mechanism(dimension=codec.dimension, radius_int=bound, voters_per_site=1, noise_std=noise_std_int)

    def dice(probabilities: np.ndarray, label_maps: np.ndarray) -> float:
        return score(labels_of(probabilities), label_maps, len(names)).mean

    def student(targets: np.ndarray, seed: int) -> torch.nn.Module:
        key = digest(
            "benchmark-student",
            [repr(study.student), seed, *(hashlib.sha256(a.tobytes()).hexdigest() for a in (images, targets))],
        )
        path = args.cache / f"{key}.pt"
        if not path.exists():
            model, result = train_student(images, targets, study.student, seed=seed)
            seconds.append(result.seconds)
            save_weights(path, model)
        model = build_unet(study.student.channels, in_channels=images.shape[1], out_channels=len(names))
        load_weights(path, model)
        return model

    def scored(model: torch.nn.Module) -> float:
        return evaluate(model, roles[args.on].images, truth, classes=len(names)).mean

    mean_shape = as_stored(codec.decode(np.zeros(codec.dimension), noise_std=noise_std))
    seconds: list[float] = []
    students: dict[str, list[float]] = {"private": [], "shuffled codes": [], "zero code": [], "public only": []}
    quality = []
    for seed in range(args.seeds):
        decoded = np.stack([as_stored(label) for label in pseudo_labels(codec, queried, mechanism)])
        # Diagnostic: public volumes have labels in this data set, the road never sees them.
        quality.append(dice(decoded, roles["public"].labels[: args.queries]))
        mean_student = student(np.stack([mean_shape] * args.queries), seed)
        students["zero code"].append(scored(mean_student))
        students["public only"].append(scored(student(np.stack(self_labels(mean_student, images)), seed)))
        students["private"].append(scored(student(decoded, seed)))
        students["shuffled codes"].append(scored(student(np.roll(decoded, 1, axis=0), seed)))
        print(
            f"seed={seed} " + " ".join(f"{k.replace(' ', '_')}={v[-1]:.4f}" for k, v in students.items()),
            file=sys.stderr,
        )
    teachers = [dice(teacher, truth) for teacher in held_out]
    report = {
        "guarantee": {
            "epsilon": args.epsilon,
            "delta": args.delta,
            "unit": str(study.privacy.unit),
            "relation": str(study.privacy.relation),
            "accountant": str(study.privacy.accountant),
            "noise_multiplier": noise_multiplier(mechanism, study.privacy.protection),
            "queries": args.queries,
        },
        "codec": {"name": codec.name, "dimension": codec.dimension, "noise_std": noise_std, "seconds": fitting},
        "scored_on": args.on,
        "dice": {
            "teachers": teachers,
            "mean teacher": float(np.mean(teachers)),
            "ensemble": dice(held_out.mean(axis=0), truth),
            "mean shape": dice(np.stack([mean_shape] * len(truth)), truth),
            "pseudo-labels on public volumes": quality,
            "students": students,
        },
        "student_seconds": float(np.mean(seconds)) if seconds else None,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
