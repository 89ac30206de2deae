"""The pictures of the concept and measurement pages: ``python docs/figures.py`` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from common.privacy.accounting import max_mu_squared
from common.privacy.consent import guess_right_at_most
from common.privacy.mechanism import AccountantName, Budget

FOLDER = Path(__file__).parent / "figures"
INK, SIDE, PUBLIC, WARM = "#24424a", "#e8f1f0", "#fdf6e3", "#c8553d"


def odds() -> None:
    """How often the best guess is right, over ε, at two δ; exact accountant."""
    _, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    grid = [0.05 * 1.09**i for i in range(65)]
    for delta, style in ((1e-3, "-"), (1e-5, "--")):
        right = [100 * guess_right_at_most(_spent(epsilon, delta)) for epsilon in grid]
        axes.plot(grid, right, style, color=INK, label=f"δ = {delta:g}")
    for epsilon in (1, 2, 4, 8):
        right = 100 * guess_right_at_most(_spent(epsilon, 1e-5))
        axes.plot([epsilon], [right], "o", color=WARM)
        axes.annotate(f"{right:.0f} %", (epsilon, right), (4, -13), textcoords="offset points", color=WARM)
    axes.axhline(50, color="grey", linewidth=0.8)
    axes.annotate("a coin", (6.2, 50.8), color="grey")
    axes.set(xlabel="ε", ylabel="best guess is right, %", xlim=(0, 12), ylim=(48, 92))
    axes.legend(frameon=False, loc="lower right")
    _save("odds")


def noise() -> None:
    """The noise on the mean of a study's only release in units of the longest code, over all voters together."""
    _, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    voters = [2 * 2 ** (i / 4) for i in range(30)]
    for epsilon, delta, style in ((8, 1e-3, "-"), (8, 1e-5, "--"), (2, 1e-5, ":")):
        spread = 2 / float(_spent(epsilon, delta)) ** 0.5
        axes.plot(voters, [spread / n for n in voters], style, color=INK, label=f"ε = {epsilon}, δ = {delta:g}")
    axes.axhline(1, color=WARM, linewidth=0.8)
    axes.annotate("as long as the longest code, in every coordinate", (8, 1.15), color=WARM, fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="voters in all", ylabel="noise on the mean, in C", xlim=(2, 300))
    axes.set_xticks([2, 8, 40, 100, 300], ["2", "8", "40", "100", "300"])
    axes.legend(frameon=False, title="one release, replace-one", fontsize=8)
    _save("noise")


def student() -> None:
    """From a hospital's scans to the student."""
    axes = _page(10.4, 3.5)
    _room(axes, 0.0, 3.9, "at each hospital", SIDE)
    _room(axes, 4.1, 6.3, "sum and noise", "#f3e3df")
    _room(axes, 6.5, 10.4, "released: covered by (ε, δ) for good", PUBLIC)
    _box(axes, 0.2, 1.9, 1.5, "scans,\nlabels")
    _box(axes, 2.2, 1.9, 1.5, "teachers\n(U-Nets)")
    _box(axes, 2.2, 0.45, 1.5, "code, clipped\nto length C")
    _box(axes, 0.2, 0.45, 1.5, "public\nvolumes")
    _box(axes, 4.3, 0.45, 1.8, "Σ codes\n+ Gaussian noise")
    _box(axes, 4.3, 1.9, 1.8, "ledger:\ncharge, or refuse")
    _box(axes, 6.7, 0.45, 1.5, "noisy\nanswers")
    _box(axes, 8.7, 0.45, 1.5, "labels of public\nvolumes")
    _box(axes, 8.7, 1.9, 1.5, "student")
    _box(axes, 6.7, 1.9, 1.5, "certificate,\nreport")
    for start, end in (
        ((1.7, 2.3), (2.2, 2.3)),
        ((2.95, 1.9), (2.95, 1.25)),
        ((1.7, 0.85), (2.2, 0.85)),
        ((3.7, 0.85), (4.3, 0.85)),
        ((5.2, 1.9), (5.2, 1.25)),
        ((6.1, 0.85), (6.7, 0.85)),
        ((8.2, 0.85), (8.7, 0.85)),
        ((9.45, 1.25), (9.45, 1.9)),
        ((7.45, 1.25), (7.45, 1.9)),
    ):
        _arrow(axes, start, end)
    _save("student")


def sealed() -> None:
    """Masks that cancel, noise in shares."""
    axes = _page(9.6, 3.9)
    for row, (name, mask, words) in enumerate(
        (
            ("hospital A", "+ m(AB) + m(AC)", "code + share of noise"),
            ("hospital B", "− m(AB) + m(BC)", "code + share of noise"),
            ("hospital C", "− m(AC) − m(BC)", "code + share of noise"),
        )
    ):
        y = 2.5 - 1.15 * row
        _box(axes, 0.1, y, 3.5, f"{name}\n{words}\n{mask}", height=1.0, fill=SIDE)
        _arrow(axes, (3.6, y + 0.5), (5.4, 1.85), text="uniform words" if row == 0 else "")
    _box(axes, 5.4, 1.35, 1.5, "server\nadds mod 2⁶⁴", fill="#f3e3df")
    _arrow(axes, (6.9, 1.85), (7.6, 1.85))
    _box(axes, 7.6, 1.1, 1.9, "Σ codes\n+ the whole noise\n(masks are gone)", height=1.5, fill=PUBLIC)
    axes.text(4.6, 0.25, "Two of the three alone add up to uniform words, too.", color=INK, fontsize=8)
    _save("sealed")


def joint() -> None:
    """One vector about all volumes, in rounds."""
    axes = _page(10.0, 3.3)
    _box(axes, 0.1, 1.9, 1.9, "public images\nand label maps", fill=PUBLIC)
    _box(axes, 2.6, 1.9, 2.0, "public start:\ncentre and axes\n(tangent kernel)", height=1.1, fill=PUBLIC)
    _box(
        axes,
        5.4,
        1.9,
        2.1,
        "each voter: one clipped\nvector, teacher − centre,\nall volumes together",
        height=1.1,
        fill=SIDE,
    )
    _box(axes, 5.4, 0.2, 2.1, "noisy mean", fill="#f3e3df")
    _box(axes, 2.6, 0.2, 2.0, "posterior:\nthe next centre", fill=PUBLIC)
    _box(axes, 8.2, 0.2, 1.7, "labels, student", fill=PUBLIC)
    _arrow(axes, (2.0, 2.4), (2.6, 2.4))
    _arrow(axes, (4.6, 2.4), (5.4, 2.4))
    _arrow(axes, (6.45, 1.9), (6.45, 1.0))
    _arrow(axes, (5.4, 0.6), (4.6, 0.6))
    _arrow(axes, (3.6, 1.0), (5.4, 2.0), text="four rounds")
    _arrow(axes, (7.5, 0.6), (8.2, 0.6))
    axes.text(7.85, 1.1, "after the last", ha="center", color=INK, fontsize=7)
    _save("joint")


def core() -> None:
    """The server's processor for one code before and after, as docs/lab/performance.md tells it."""
    _, axes = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    sites = (8, 64, 256, 1000)
    for values, style, name in (((0.92, 1.27, 3.47, 3.58), "--", "before"), ((0.50, 0.42, 0.45, 0.44), "-", "after")):
        axes.plot(sites, values, style, marker="o", color=INK, label=name)
    axes.set(xscale="log", xlabel="sites", ylabel="ms a code", ylim=(0, 4))
    axes.set_xticks(sites, list(map(str, sites)))
    axes.minorticks_off()
    axes.legend(frameon=False, title="D = 64, ten volumes", fontsize=8)
    _save("core")


def nodes() -> None:
    """A round and the server's processor for it, over the number of SuperNodes (``make bench PARTS=nodes``)."""
    recorded = json.loads((FOLDER.parents[1] / "benchmarks/results/nodes.json").read_text(encoding="utf-8"))["figures"]
    values = {figure["name"]: figure["value"] for figure in recorded}
    counts = [2, 4, 8, 16, 32]
    _, axes = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    for name, style, colour, label in (
        ("a round of", "-", WARM, "a round"),
        ("server's processor a round,", "-", INK, "the server's processor"),
        ("of it SuperLink,", "--", INK, "of it SuperLink"),
        ("of it the core,", ":", INK, "of it the core"),
    ):
        axes.plot(counts, [values[f"{name} {n} nodes"] for n in counts], style, marker="o", color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="SuperNodes", ylabel="seconds")
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    axes.legend(frameon=False, title="one volume a round", fontsize=8)
    _save("nodes")


def _spent(epsilon: float, delta: float) -> Fraction:
    return max_mu_squared(AccountantName.EXACT, Budget(epsilon=epsilon, delta=delta))


def _page(width: float, height: float) -> Axes:
    figure = plt.figure(figsize=(width * 0.78, height * 0.78))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def _room(axes: Axes, left: float, right: float, title: str, fill: str) -> None:
    axes.add_patch(plt.Rectangle((left + 0.03, 0.15), right - left - 0.06, 3.2, facecolor=fill, edgecolor="none"))
    axes.text((left + right) / 2, 3.1, title, ha="center", va="center", color=INK, fontsize=8.5, weight="bold")


def _box(axes: Axes, x: float, y: float, width: float, text: str, *, height: float = 0.8, fill: str = "white") -> None:
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=fill, edgecolor=INK, linewidth=1))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, fontsize=8)


def _arrow(axes: Axes, start: Sequence[float], end: Sequence[float], *, text: str = "") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2})
    if text:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.2
        axes.text(*middle, text, ha="center", color=INK, fontsize=7)


def _save(name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    plt.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
    plt.close()


if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.hashsalt": "consilium", "font.size": 9})
    for draw in (odds, noise, student, sealed, joint, core, nodes):
        draw()
