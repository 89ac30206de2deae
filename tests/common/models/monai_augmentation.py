"""MONAI's transforms that are equal to the augmentations ``smooth``, ``wide`` and ``wide-mirror``."""

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


def monais(grid: tuple[int, ...], *, kind: str = "smooth") -> Compose:
    """Return MONAI's transforms that are equal to an augmentation."""
    wide = kind != "smooth"
    mirrored = (0, 1) if kind == "wide-mirror" else ()
    return Compose(
        [
            RandAffined(
                keys=["image", "target"],
                prob=0.9,
                rotate_range=(0.25, 0.25, 0.8 if wide else 0.25),
                shear_range=(0.08,) * 6,
                translate_range=[n / 12 for n in grid],
                scale_range=(0.3 if wide else 0.15,) * 3,
                mode="bilinear",
                padding_mode="border",
            ),
            RandAdjustContrastd(keys=["image"], prob=0.5, gamma=(0.6, 1.7) if wide else (0.7, 1.5)),
            RandScaleIntensityd(keys=["image"], prob=1.0, factors=0.3 if wide else 0.2),
            RandShiftIntensityd(keys=["image"], prob=1.0, offsets=0.3 if wide else 0.2),
            RandGaussianNoised(keys=["image"], prob=0.5, std=0.2 if wide else 0.15),
            *(RandFlipd(keys=["image", "target"], prob=0.5, spatial_axis=axis) for axis in mirrored),
        ]
    )
