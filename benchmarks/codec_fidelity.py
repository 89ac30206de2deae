"""What a codec keeps of label maps it was not fitted on: Dice after decoding, without noise and with the planned one.

No teacher, student or privacy is involved: 24 public label maps to fit on, 26 of other patients to score, seeded noise.

    python benchmarks/codec_fidelity.py --data Task04_Hippocampus --codec ball-ae --dimension 32 --noise 0.024
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from common.codecs import fit_codec, shapes
from common.config import CodecConfig, DataConfig, PrivacyConfig, Study
from common.data.msd import read_dataset
from common.metrics import mean_dice
from consilium.research.roles import load_cases

MAPS, PUBLIC, VALIDATION = 24, 16, 10
NOISY = 3  # draws of the noise a map


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an MSD dataset directory")
    parser.add_argument("--codec", default="pca", help="pca or ball-ae")
    parser.add_argument("--dimension", type=int, default=32, help="the most coordinates l")
    parser.add_argument("--noise", type=float, default=0.024, help="planned noise on the mean code, in units of C = 1")
    parser.add_argument("--seed", type=int, default=0, help="of the copies and of fitting")
    args = parser.parse_args()
    names = read_dataset(args.data).labels
    data = DataConfig(labels=names, spacing_mm=(1.0, 1.0, 1.0), grid=(32, 48, 32))
    study = Study(
        name="codec-fidelity",
        data=data,
        privacy=PrivacyConfig(epsilon=8.0, delta=1e-3, planned_queries=16, quorum=8),
        codec=CodecConfig(name=args.codec, max_dimension=args.dimension),
    )
    labels = load_cases(args.data, data).labels
    order = np.random.default_rng([0, 0]).permutation(len(labels))
    maps, public, validation = np.split(labels[order], np.cumsum([MAPS, PUBLIC, VALIDATION]))[:3]
    others = np.concatenate([validation, public])
    started = time.process_time()
    codec = fit_codec(study, list(maps), noise_std=args.noise, seed=args.seed)
    seconds = time.process_time() - started
    codes = np.stack([codec.encode(shapes.one_hot(label_map, labels=len(names))) for label_map in others])
    rng = np.random.default_rng(1)

    def dice(sent: np.ndarray, noise: float) -> float:
        decoded = [codec.decode(code, noise_std=noise).argmax(axis=0).astype(np.uint8) for code in sent]
        return float(np.mean([mean_dice(d, m, len(names)) for d, m in zip(decoded, others, strict=True)]))

    noisy = [dice(codes + args.noise * rng.normal(size=codes.shape), args.noise) for _ in range(NOISY)]
    variances = codes.var(axis=0) * codec.dimension / codec.radius**2
    report = {
        "codec": codec.name,
        "dimension": codec.dimension,
        "planned_noise": args.noise,
        "cpu_seconds": round(seconds, 1),
        "bytes": len(codec.to_bytes()),
        "dice": {"mean shape": dice(np.zeros_like(codes), 0.0), "no noise": dice(codes, 0.0), "noise": np.mean(noisy)},
        "variance of a coordinate, in C²/l": {"least": variances.min(), "median": float(np.median(variances))},
    }
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
