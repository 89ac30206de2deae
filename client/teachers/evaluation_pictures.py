"""Draws the pictures of a site's own evaluation: a case in three planes, and a reliability diagram."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.calibration import Reliability
from common.data.dataset import Case
from common.data.volume import Volume, load_example
from common.models.bundle import Bundle
from common.models.fit import predict
from common.planes import PLANES


def case_picture(case: Case, bundle: Bundle, *, title: str, who: str = "student") -> bytes:
    """Draw a case on the study's grid in three planes through the middle of the true structures.

    Args:
        case: The case.
        bundle: The model.
        title: Title of the picture.
        who: Name of the model in the legend.

    Returns:
        PNG image. The outlines of the true label map are solid, those of the prediction dashed. Letters mark the
        patient's right, left, anterior, posterior, superior and inferior.
    """
    data = bundle.data
    example = load_example(case, data)
    volume, truth = example.volume, example.label
    found = _label_map(bundle, volume)
    marked = np.argwhere(truth > 0)
    centre = marked.mean(axis=0).round().astype(int) if len(marked) else np.array(truth.shape) // 2
    figure = Figure(figsize=(9, 3.4), facecolor="#0b0e11", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for place, (name, plane) in enumerate(PLANES.items(), start=1):
        axes = figure.add_subplot(1, 3, place)
        shown, *maps = (plane.cut(array, centre[plane.fixed]) for array in (volume.image[0], truth, found))
        stretch = data.spacing_mm[plane.up] / data.spacing_mm[plane.across]
        axes.imshow(shown, cmap="gray", origin="lower", aspect=stretch)
        for label_map, colour, style in zip(maps, ("#f0e442", "#ff7a2f"), ("solid", "dashed"), strict=True):
            for value in np.unique(label_map[label_map > 0]):
                axes.contour(label_map == value, levels=[0.5], colors=[colour], linestyles=[style], linewidths=1.4)
        axes.set_title(name, color="#e6e9ec", fontsize=9)
        axes.set_axis_off()
        left, right, top, bottom = plane.letters
        for x, y, letter in ((0.04, 0.5, left), (0.96, 0.5, right), (0.5, 0.96, top), (0.5, 0.04, bottom)):
            axes.text(x, y, letter, transform=axes.transAxes, ha="center", va="center", color="#e6e9ec", fontsize=9)
    figure.suptitle(f"{title} (truth solid yellow, {who} dashed orange)", color="#e6e9ec", fontsize=10)
    stream = io.BytesIO()
    canvas.print_png(stream)
    return stream.getvalue()


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


def _label_map(bundle: Bundle, volume: Volume) -> np.ndarray:
    result: np.ndarray = predict(bundle.network, volume.image, patch=bundle.patch).argmax(axis=0).astype(np.uint8)
    return result
