"""Draws the report's pictures: three planes through the centre of a label, in radiological view, with outlines.

Refuses pictures whose outlines do not fit their volume.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Stroke, withStroke
from PIL import Image

from common.errors import InvalidInput
from common.planes import PLANES

MAX_PICTURE_BYTES = 2_000_000
"""Largest size in bytes of all PNGs together. Larger pictures are drawn again with fewer pixels, so that the page stays
under 3 MB."""


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The line style of one kind of outline. Colour and dashes both differ between kinds, so either one is enough.

    Attributes:
        colour: A colour-blind-safe colour (Okabe & Ito 2008).
        dashes: Dash pattern in units of the line's width; empty for a solid line.
    """

    colour: str
    dashes: tuple[float, ...]


OUTLINES: Mapping[str, LineStyle] = MappingProxyType(
    {
        "truth": LineStyle("#f0e442", ()),
        "nobody asked": LineStyle("#cc79a7", (6.0, 1.2)),
        "teachers": LineStyle("#00c08b", (3.0, 1.0, 1.0, 1.0)),
        "pseudo-label": LineStyle("#56b4e9", (4.0, 1.6)),
        "student": LineStyle("#ff7a2f", (1.1, 1.3)),
    }
)
"""The kinds of outlines, in drawing order."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One volume on the study's grid (RAS+) with outlines. Arrays are copied and read-only.

    Attributes:
        title: Title.
        kind: ``public`` or ``test``.
        image: Float32 array [x, y, z].
        outlines: Label maps by a name of :data:`OUTLINES`.

    Raises:
        InvalidInput: If shapes or names do not match.
    """

    title: str
    kind: Literal["public", "test"]
    image: Float32[np.ndarray, "x y z"]
    outlines: Mapping[str, UInt8[np.ndarray, "x y z"]]

    def __post_init__(self) -> None:
        if self.kind not in ("public", "test"):
            raise InvalidInput("kind of picture", value=self.kind, limit="public or test")
        if self.image.ndim != 3 or not np.isfinite(self.image).all():
            raise InvalidInput("picture", value=self.image.shape, limit="finite voxels on three axes")
        unknown = sorted(self.outlines.keys() - OUTLINES.keys())
        if unknown:
            raise InvalidInput("outline", value=unknown[0], limit=", ".join(OUTLINES))
        for name, mask in self.outlines.items():
            if mask.shape != self.image.shape:
                raise InvalidInput(f"shape of outline {name}", value=mask.shape, limit=str(self.image.shape))
        object.__setattr__(self, "image", _frozen(self.image))
        frozen = {name: _frozen(self.outlines[name]) for name in OUTLINES if name in self.outlines}
        object.__setattr__(self, "outlines", MappingProxyType(frozen))


_BACKGROUND, _TEXT = "#0b0e11", "#e6e9ec"
_DRAWING = threading.Lock()  # matplotlib's font cache is shared


def centre_of(picture: Picture) -> tuple[int, int, int]:
    """Return the voxel through which the three planes go.

    It is the centre of the first non-empty outline, moved along each axis to the nearest slice that shows it; without
    any outline, the middle of the grid.

    Args:
        picture: The picture.

    Returns:
        Indices x, y and z.
    """
    for mask in picture.outlines.values():
        found = np.nonzero(mask)
        if len(found[0]):
            centre = []
            for axis in found:
                slices = np.unique(axis)
                centre.append(int(slices[np.argmin(np.abs(slices - axis.mean()))]))
            return centre[0], centre[1], centre[2]
    x, y, z = picture.image.shape
    return x // 2, y // 2, z // 2


def draw_picture(picture: Picture, spacing_mm: Sequence[float], *, dpi: float = 110) -> bytes:
    """Return a PNG of the three planes of a picture, side by side at one scale on a dark background."""
    size = [n * s for n, s in zip(picture.image.shape, spacing_mm, strict=True)]
    widths = [size[view.across] for view in PLANES.values()]
    height = max(size[view.up] for view in PLANES.values())
    gap = frame = 0.025 * sum(widths)
    footer = 0.06 * sum(widths)  # names of the planes and the scale bar
    total_width = sum(widths) + 2 * gap + 2 * frame
    total_height = height + frame + footer
    inches = 9.0
    figure = Figure(figsize=(inches, inches * total_height / total_width), dpi=dpi, facecolor=_BACKGROUND)
    canvas = FigureCanvasAgg(figure)
    low, high = (float(v) for v in np.percentile(picture.image, (1.0, 99.5)))
    centre = centre_of(picture)
    left = frame
    for (plane, view), width in zip(PLANES.items(), widths, strict=True):
        tall = size[view.up]
        bottom = footer + (height - tall) / 2
        axes = figure.add_axes(
            (left / total_width, bottom / total_height, width / total_width, tall / total_height), facecolor=_BACKGROUND
        )
        axes.set_axis_off()
        axes.imshow(
            view.cut(picture.image, centre[view.fixed]),
            cmap="gray",
            vmin=low,
            vmax=max(high, low + 1e-6),
            origin="lower",
            extent=(0, width, 0, tall),
            interpolation="bilinear",
        )
        for name, mask in picture.outlines.items():
            _outline(axes, view.cut(mask, centre[view.fixed]), OUTLINES[name], width=width, height=tall)
        axes.set(xlim=(0, width), ylim=(0, tall))
        _letters(axes, view.letters)
        middle = footer / total_height / 2
        figure.text(left / total_width, middle, plane, color=_TEXT, fontsize=9, va="center")
        left += width + gap
    _scale_bar(figure, total_width, right=1 - frame / total_width, middle=footer / total_height / 2)
    stream = io.BytesIO()
    with _DRAWING:
        canvas.print_png(stream)
    # A palette of 200 colours is a third of the bytes and looks the same on a grey picture with three line colours.
    with Image.open(stream) as drawn:
        small = io.BytesIO()
        drawn.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _outline(axes: Any, mask: UInt8[np.ndarray, "v u"], style: LineStyle, *, width: float, height: float) -> None:
    rows, columns = mask.shape
    u = (np.arange(-1, columns + 1) + 0.5) * width / columns
    v = (np.arange(-1, rows + 1) + 0.5) * height / rows
    for label in np.unique(mask[mask > 0]):
        inside = np.pad((mask == label).astype(np.float32), 1)  # padded, so that an outline closes at the edge
        lines = axes.contour(u, v, inside, levels=[0.5], colors=[style.colour], linewidths=1.7)
        lines.set_linestyle((0, style.dashes) if style.dashes else "solid")
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


def draw_pictures(pictures: Sequence[Picture], spacing_mm: Sequence[float]) -> list[bytes]:
    """Draw every picture, smaller if all together exceed :data:`MAX_PICTURE_BYTES`.

    Args:
        pictures: The pictures.
        spacing_mm: Voxel spacing in mm.

    Returns:
        PNGs.
    """
    images: list[bytes] = []
    for dpi in (110, 75, 50):
        images = [draw_picture(picture, spacing_mm, dpi=dpi) for picture in pictures]
        if sum(map(len, images)) <= MAX_PICTURE_BYTES:
            break
    return images


def _frozen(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    copy: np.ndarray[Any, Any] = array.copy()
    copy.setflags(write=False)
    return copy
