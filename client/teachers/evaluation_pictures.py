"""Draws the pictures of a site's own evaluation: a case in three planes, and a reliability diagram."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.calibration import Reliability
from common.case_pictures import STUDENT, TRUTH, draw_planes, legend
from common.data.dataset import Case
from common.data.volume import load_example
from common.models.bundle import Bundle
from common.models.fit import predict


def case_picture(case: Case, bundle: Bundle, *, title: str, who: str = "student") -> bytes:
    """Draw the outlines of a case's true and predicted structures in three planes through the middle of the true ones.

    Args:
        case: The case.
        bundle: The model.
        title: Title of the picture.
        who: Name of the model in the legend.

    Returns:
        PNG image of the case on the study's grid.
    """
    data = bundle.data
    example = load_example(case, data)
    found = predict(bundle.network, example.volume.image, patch=bundle.patch).argmax(axis=0).astype(np.uint8)
    words = legend({TRUTH: "truth", STUDENT: who})
    return draw_planes(
        example.volume.image[0],
        {TRUTH: example.label, STUDENT: found},
        data.spacing_mm,
        title=f"{title} ({words})",
    )


def reliability_picture(found: Mapping[str, Reliability]) -> bytes:
    """Draw a reliability diagram: the share of correct voxels over the confidence.

    Args:
        found: Calibration by model.

    Returns:
        PNG image.
    """
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="#8a94a0", linestyle=":", linewidth=1)
    for name, one in found.items():
        if one.points:
            axes.plot(*zip(*one.points, strict=True), marker="o", markersize=3, label=f"{name}: ECE {one.error:.3f}")
    axes.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    stream = io.BytesIO()
    canvas.print_png(stream)
    return stream.getvalue()
