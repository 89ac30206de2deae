"""What a joint query can be expected to give the student, from public numbers alone.

A release at noise σ a coordinate of the mean code, relative to the clipping norm C, recovers the share
Σ v_i p_i / (p_i + σ²) of what the teachers know beyond the public start, with v the variance along the directions of
the public start's tangent kernel and p the radius spread over them by water-filling. The spectrum is so much alike over
data splits that its octaves are constants here; what full recovery is worth in Dice was measured once, on one task.
"""

from __future__ import annotations

from common.errors import InvalidInput
from common.privacy.planner import water_fill

OCTAVES = (0.138, 0.106, 0.149, 0.172, 0.131, 0.088, 0.061, 0.052, 0.049, 0.040)
"""Shares of the variance in directions 1, 2, 3–4, 5–8 … 257–512; the rest lies beyond and is never sent."""

DICE_OF_ALL = 0.07
"""Dice over the best control where all of it is recovered: hippocampus, 120 patients, 30 public images."""

WORTH_ASKING = 0.02
"""A predicted gain below this is within what seeds and tasks differ by."""


def recovered_share(noise: float) -> float:
    """The share of what teachers know beyond public data that one joint release can carry, in (0, 1).

    ``noise``: standard deviation on every coordinate of the mean code, in units of the clipping norm. Falls with noise.
    """
    if not 0 < noise < 1e6:
        raise InvalidInput("noise on the mean code", value=noise, limit="above 0, below a million clipping norms")
    spectrum = [OCTAVES[0]]
    for octave, share in enumerate(OCTAVES[1:]):
        spectrum += [share / 2**octave] * 2**octave
    powers = water_fill(spectrum, noise**2, 1.0)
    return sum(v * p / (p + noise**2) for v, p in zip(spectrum, powers, strict=True))


def predicted_gain(noise: float) -> float:
    """Dice the student of a joint query should have over its best control; see the module for what it stands on."""
    return DICE_OF_ALL * recovered_share(noise)
