"""Measures how well a codec reproduces label maps it was not fitted on: Dice after decoding, without and with noise.

No teacher, student or private data is involved: 24 public label maps to fit on, 26 of other patients to score, seeded
noise of the planned size.

    python -m benchmarks.codec_fidelity --data Task04_Hippocampus [--out benchmarks/results/codecs/fidelity.json]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from common.codecs import fit_codec
from common.config import CodecConfig, DataConfig
from common.data.label_maps import one_hot
from common.data.msd import read_dataset
from common.metrics import mean_dice
from research.commit import commit
from research.roles import load_cases
from tests.worlds import make_study

MAPS, PUBLIC, VALIDATION = 24, 16, 10
NOISY = 3  # number of noise draws for each map
ROWS = ((32, 0.024), (8, 0.024), (32, 0.48))
"""Largest number of coordinates l, and the noise planned for the mean code in clipping norms; both codecs for each."""


def fidelity(
    codec: str, dimension: int, noise: float, *, labels: np.ndarray, data: DataConfig, seed: int
) -> dict[str, object]:
    """Return one codec's row of the table.

    Args:
        codec: Name of the codec.
        dimension: Largest number of coordinates.
        noise: Planned noise on the mean code, in clipping norms.
        labels: All label maps of the dataset, uint8 [n, x, y, z].
        data: The study's grid and labels.
        seed: Seed of fitting.
    """
    study = make_study(data=data, codec=CodecConfig(name=codec, max_dimension=dimension))
    order = np.random.default_rng([0, 0]).permutation(len(labels))
    maps, public, validation = np.split(labels[order], np.cumsum([MAPS, PUBLIC, VALIDATION]))[:3]
    others = np.concatenate([validation, public])
    fitted = fit_codec(study, list(maps), noise_std=noise, seed=seed)
    names = len(data.labels)
    codes = np.stack([fitted.encode(one_hot(label_map, names)) for label_map in others])
    rng = np.random.default_rng(1)

    def dice(sent: np.ndarray, noise: float) -> float:
        decoded = [fitted.decode(code, noise_std=noise).argmax(axis=0).astype(np.uint8) for code in sent]
        return float(np.mean([mean_dice(d, m, names) for d, m in zip(decoded, others, strict=True)]))

    noisy = [dice(codes + noise * rng.normal(size=codes.shape), noise) for _ in range(NOISY)]
    variances = codes.var(axis=0) * fitted.dimension / fitted.radius**2
    return {
        "codec": fitted.name,
        "dimension": fitted.dimension,
        "planned_noise": noise,
        "mean_shape": dice(np.zeros_like(codes), 0.0),
        "no_noise": dice(codes, 0.0),
        "noise": float(np.mean(noisy)),
        "least_variance": float(variances.min()),
        "median_variance": float(np.median(variances)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an MSD dataset directory")
    parser.add_argument("--seed", type=int, default=0, help="of the copies and of fitting")
    parser.add_argument("--out", type=Path, help="where the rows are recorded")
    args = parser.parse_args()
    data = DataConfig(labels=read_dataset(args.data).labels, spacing_mm=(1.0, 1.0, 1.0), grid=(32, 48, 32))
    labels = load_cases(args.data, data).labels
    rows = []
    for dimension, noise in ROWS:
        for codec in ("pca", "ball-ae"):
            rows.append(fidelity(codec, dimension, noise, labels=labels, data=data, seed=args.seed))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        command = f"python -m benchmarks.codec_fidelity --data {args.data.name} --seed {args.seed}"
        found = {"command": command, "commit": commit(), "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
