"""Replaces the drawing of figures in tests that read no picture, because drawing takes most of their time."""

from __future__ import annotations

from typing import BinaryIO

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Let every canvas write a PNG file of one pixel; the figure is still made in full."""

    def write(self: FigureCanvasAgg, stream: BinaryIO, **_options: object) -> None:
        Image.new("RGB", (1, 1)).save(stream, "PNG")

    patch.setattr(FigureCanvasAgg, "print_png", write)
