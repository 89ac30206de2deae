"""Builds MONAI's transforms that equal the augmentations ``smooth``, ``wide``, ``wider`` and ``wide-mirror``."""

from __future__ import annotations

from monai.transforms import (
    Compose,
    RandAdjustContrastd,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandScaleIntensityd,
    RandShiftIntensityd,
)

TURN = {"smooth": 0.25, "wide": 0.8, "wider": 1.2}
SCALE = {"smooth": 0.15, "wide": 0.3, "wider": 0.45}
GAMMA = {"smooth": (0.7, 1.5), "wide": (0.6, 1.7), "wider": (0.45, 2.2)}
BRIGHT = {"smooth": 0.2, "wide": 0.3, "wider": 0.6}
NOISE = {"smooth": 0.15, "wide": 0.2, "wider": 0.4}


def monais(grid: tuple[int, ...], *, kind: str = "smooth") -> Compose:
    """Return MONAI's transforms that are equal to an augmentation."""
    mirrored = (0, 1) if kind == "wide-mirror" else ()
    kind = kind.removesuffix("-mirror")
    return Compose(
        [
            RandAffined(
                keys=["image", "target"],
                prob=0.9,
                rotate_range=(0.25, 0.25, TURN[kind]),
                shear_range=(0.08,) * 6,
                translate_range=[n / 12 for n in grid],
                scale_range=(SCALE[kind],) * 3,
                mode="bilinear",
                padding_mode="border",
            ),
            RandAdjustContrastd(keys=["image"], prob=0.5, gamma=GAMMA[kind]),
            RandScaleIntensityd(keys=["image"], prob=1.0, factors=BRIGHT[kind]),
            RandShiftIntensityd(keys=["image"], prob=1.0, offsets=BRIGHT[kind]),
            RandGaussianNoised(keys=["image"], prob=0.5, std=NOISE[kind]),
            *(RandFlipd(keys=["image", "target"], prob=0.5, spatial_axis=axis) for axis in mirrored),
        ]
    )
