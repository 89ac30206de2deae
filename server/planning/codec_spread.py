"""Reads from a codec how much each coordinate varies over public shapes; the planner compares it with the noise."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from common.canonical import parse_float
from common.codecs.codec import unpack
from server.study.workspace import Workspace


def codec_stds(workspace: Workspace) -> tuple[float, ...]:
    """Return the standard deviations of the code's coordinates over public shapes.

    Args:
        workspace: The study's directory.

    Returns:
        One value for each coordinate in code units, largest first; empty before a codec is fitted, and for a codec
        that stores no deviations.
    """
    fitted = workspace.codec_file.exists()
    return _stds_of(workspace, workspace.codec().sha256) if fitted else ()


@lru_cache(maxsize=1)
def _stds_of(workspace: Workspace, codec: str) -> tuple[float, ...]:
    header, arrays = unpack(workspace.objects.get(codec))
    powers = arrays.get("powers", np.zeros(0))
    unit = parse_float(header["radius"]) if header["name"] == "ball-ae" else 1.0  # powers in units of C²
    return tuple(float(std) for std in unit * np.sort(np.sqrt(powers))[::-1])
