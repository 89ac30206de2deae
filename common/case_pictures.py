"""Draws a volume in three planes through the centre of a label, in radiological view, with outlines of label maps.

Used by a study's report and by a site's own evaluations.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Stroke, withStroke
from PIL import Image

from common.planes import PLANES

Outlines = Mapping[str, UInt8[np.ndarray, "x y z"]]
TRUTH, STUDENT = "truth", "student"


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The line style of one kind of outline.

    Any two kinds differ in colour and in dashes, so each of the two alone is enough to tell them apart.

    Attributes:
        words: Description of the line, such as "solid orange".
        colour: A colour of the palette of Okabe & Ito (2008) or a brighter variant of one, or white.
        dashes: Dash pattern in units of the line's width; empty for a solid line.
        gaps: Colour between the dashes; empty if the picture shows through the gaps.
    """

    words: str
    colour: str
    dashes: tuple[float, ...]
    gaps: str = ""


OUTLINES: Mapping[str, LineStyle] = MappingProxyType(
    {
        TRUTH: LineStyle("white and black dashes", "#ffffff", (2.2, 1.8), gaps="#000000"),
        "nobody asked": LineStyle("long pink dashes", "#cc79a7", (6.0, 1.2)),
        "teachers": LineStyle("green dashes and dots", "#00c08b", (3.0, 1.0, 1.0, 1.0)),
        "pseudo-label": LineStyle("blue dashes", "#56b4e9", (4.0, 1.6)),
        STUDENT: LineStyle("solid orange", "#ff7a2f", ()),
    }
)
"""The kinds of outlines. The truth is drawn last, so that no other line hides its black gaps. Where lines coincide,
the truth hides the others."""


def legend(names: Mapping[str, str]) -> str:
    """Return a legend of the outlines as text.

    Args:
        names: What each outline shows, by a name of :data:`OUTLINES`.

    Returns:
        A text such as ``truth: white and black dashes; student: solid orange``.
    """
    return "; ".join(f"{said}: {OUTLINES[name].words}" for name, said in names.items())


_BACKGROUND, _TEXT = "#0b0e11", "#e6e9ec"
_DRAWING = threading.Lock()  # matplotlib's font cache is shared


def centre_of(image: Float32[np.ndarray, "x y z"], outlines: Outlines) -> tuple[int, int, int]:
    """Return the voxel through which the three planes go.

    It is the centre of the first non-empty outline, moved along each axis to the nearest slice that shows it; without
    any outline, the middle of the grid.

    Args:
        image: The volume.
        outlines: Label maps by a name of :data:`OUTLINES`.

    Returns:
        Indices x, y and z.
    """
    for mask in outlines.values():
        found = np.nonzero(mask)
        if len(found[0]):
            centre = []
            for axis in found:
                slices = np.unique(axis)
                centre.append(int(slices[np.argmin(np.abs(slices - axis.mean()))]))
            return centre[0], centre[1], centre[2]
    x, y, z = image.shape
    return x // 2, y // 2, z // 2


def draw_planes(
    image: Float32[np.ndarray, "x y z"],
    outlines: Outlines,
    spacing_mm: Sequence[float],
    *,
    title: str = "",
    dpi: float = 110,
    by_label: bool = False,
) -> bytes:
    """Draw the three planes of a volume side by side at one scale on a dark background.

    Args:
        image: The volume on the study's grid (RAS+).
        outlines: Label maps by a name of :data:`OUTLINES`. The planes go through the first one that is not empty.
        spacing_mm: Voxel spacing in mm.
        title: Lines above the planes; empty if there are none.
        dpi: Pixels per inch; the picture is nine inches wide.
        by_label: True to draw each label of a map in the next style of :data:`OUTLINES`, instead of all in the style of
            the map's name.

    Returns:
        PNG. Letters mark the patient's right, left, anterior, posterior, superior and inferior.
    """
    size = [n * s for n, s in zip(image.shape, spacing_mm, strict=True)]
    widths = [size[view.across] for view in PLANES.values()]
    height = max(size[view.up] for view in PLANES.values())
    gap = frame = 0.025 * sum(widths)
    footer = 0.06 * sum(widths)  # names of the planes and the scale bar
    total_width = sum(widths) + 2 * gap + 2 * frame
    header = 0.05 * sum(widths) * len(title.splitlines())
    total_height = height + frame + footer + header
    inches = 9.0
    figure = Figure(figsize=(inches, inches * total_height / total_width), dpi=dpi, facecolor=_BACKGROUND)
    canvas = FigureCanvasAgg(figure)
    low, high = (float(v) for v in np.percentile(image, (1.0, 99.5)))
    centre = centre_of(image, outlines)
    left = frame
    for (plane, view), width in zip(PLANES.items(), widths, strict=True):
        tall = size[view.up]
        bottom = footer + (height - tall) / 2
        axes = figure.add_axes(
            (left / total_width, bottom / total_height, width / total_width, tall / total_height), facecolor=_BACKGROUND
        )
        axes.set_axis_off()
        axes.imshow(
            view.cut(image, centre[view.fixed]),
            cmap="gray",
            vmin=low,
            vmax=max(high, low + 1e-6),
            origin="lower",
            extent=(0, width, 0, tall),
            interpolation="bilinear",
        )
        for name in sorted(outlines, key=lambda one: one == TRUTH):
            cut = view.cut(outlines[name], centre[view.fixed])
            styles = list(OUTLINES.values()) if by_label else [OUTLINES[name]]
            _outline(axes, cut, styles, width=width, height=tall)
        axes.set(xlim=(0, width), ylim=(0, tall))
        _letters(axes, view.letters)
        middle = footer / total_height / 2
        figure.text(left / total_width, middle, plane, color=_TEXT, fontsize=9, va="center")
        left += width + gap
    _scale_bar(figure, total_width, right=1 - frame / total_width, middle=footer / total_height / 2)
    if title:
        above = 1 - (frame / 2 + header / 2) / total_height
        figure.text(frame / total_width, above, title, color=_TEXT, fontsize=10, va="center")
    stream = io.BytesIO()
    with _DRAWING:
        canvas.print_png(stream)
    # A palette of 200 colours is a third of the bytes and looks the same on a grey picture with a few line colours.
    with Image.open(stream) as drawn:
        small = io.BytesIO()
        drawn.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _outline(
    axes: Any, mask: UInt8[np.ndarray, "v u"], styles: Sequence[LineStyle], *, width: float, height: float
) -> None:
    rows, columns = mask.shape
    u = (np.arange(-1, columns + 1) + 0.5) * width / columns
    v = (np.arange(-1, rows + 1) + 0.5) * height / rows
    for label in np.unique(mask[mask > 0]):
        style = styles[(label - 1) % len(styles)]
        inside = np.pad((mask == label).astype(np.float32), 1)  # padded, so that an outline closes at the edge
        if style.gaps:
            axes.contour(u, v, inside, levels=[0.5], colors=[style.gaps], linewidths=2.6)
        lines = axes.contour(u, v, inside, levels=[0.5], colors=[style.colour], linewidths=1.7)
        lines.set_linestyle((0, style.dashes) if style.dashes else "solid")
        if not style.gaps:
            lines.set_path_effects([withStroke(linewidth=2.8, foreground="#000000", alpha=0.55)])


def _letters(axes: Any, letters: tuple[str, str, str, str]) -> None:
    left, right, top, bottom = letters
    places = ((0.025, 0.5, left, "left", "center"), (0.975, 0.5, right, "right", "center"))
    places += ((0.5, 0.975, top, "center", "top"), (0.5, 0.025, bottom, "center", "bottom"))  # type: ignore[assignment]
    for x, y, letter, across, up in places:
        axes.text(
            x,
            y,
            letter,
            transform=axes.transAxes,
            ha=across,
            va=up,
            color=_TEXT,
            fontsize=10,
            fontweight="bold",
            path_effects=[Stroke(linewidth=2.5, foreground="#000000"), withStroke(linewidth=0, foreground="#000000")],
        )


def _scale_bar(figure: Any, total_width_mm: float, *, right: float, middle: float) -> None:
    length = next((mm for mm in (50, 20, 10, 5, 2, 1) if mm <= total_width_mm / 12), 1)
    left = right - length / total_width_mm
    axes = figure.add_axes((left, middle - 0.006, right - left, 0.012), facecolor=_TEXT)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(left - 0.006, middle, f"{length} mm", color=_TEXT, fontsize=9, ha="right", va="center")
