"""Defines ``consilium bench private``, which compares the private training strategies at one site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.config import TrainingConfig
from consilium.cli import options
from consilium.cli.options import names
from research.command_shared import SEEDS, Channels, Labels, Layout, Spacing, Width, as_text, show, study_data, widths


def private(
    data: Annotated[Path, typer.Option("--data", help="A dataset, in any layout: one site's cases and public ones.")],
    layout: Layout = "auto",
    public_images: Annotated[
        int, typer.Option("--public-images", help="Number of public volumes to train the public start on.", min=1)
    ] = 12,
    public_maps: Annotated[
        int, typer.Option("--public-maps", help="Number of public label maps to train the public start on.", min=2)
    ] = 8,
    grid: Annotated[str, typer.Option("--grid", help="Grid in voxels; by default that of the public maps.")] = "",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of every training.")] = 8.0,
    delta: Annotated[float, typer.Option("--delta", help="δ of every training.")] = 1e-5,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Steps of every training; by default each strategy's own.", min=1, max=1_000_000),
    ] = None,
    network: Annotated[str, typer.Option("--network", help="The teachers' network.")] = "unet",
    width: Width = "16,32,64",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Methods to compare, such as dp-sgd,dp-mac; by default dp-sgd,dp-sgd-layers,dp-bbb,dp-mac.",
        ),
    ] = "",
    starts: Annotated[
        str, typer.Option("--starts", help="Start from the public start, from random weights, or from both.")
    ] = "public,random",
    seeds: Annotated[
        int,
        typer.Option("--seeds", help="Number of repetitions; each holds out another fifth of the patients.", **SEEDS),
    ] = 3,
    cache: Annotated[
        Path,
        typer.Option(
            "--cache", help="Folder for starts and finished cells; keep it to resume.", callback=options.folder_to_write
        ),
    ] = Path("bench-cache"),
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the JSON here as well.", callback=options.file_to_write)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare DP-SGD, DP-SGD with a clipping norm for each layer, DP-BBB and DP-MAC at one site, from two starts.

    Prints the Dice on a held-out fifth of the patients, the processor time of a step, and how the gradients of DP-MAC's
    blocks differ from those of back-propagation. The starts are a public start and random weights.
    The run can be stopped and started again: finished cells are kept.
    Example: consilium bench private --data Task04_Hippocampus --seeds 3
    Example: consilium bench private --data TCGA_LGG --grid 32,32,16 --seeds 3 --out tumours.json
    """
    from common.data.split import SplitCounts
    from research.private_volumes import METHODS, SharedTerms, measure, private_markdown
    from research.roles import BenchData

    counts = SplitCounts(1, public_images=public_images, label_maps=public_maps)
    source = BenchData(data, counts, layout, None, None, names(labels), names(channels))
    on = study_data(source, grid=grid, spacing=spacing)
    terms = SharedTerms(epsilon, delta, steps, TrainingConfig(channels=widths(width), network=network))
    document = measure(
        source, on, terms, seeds=seeds, cache=cache, methods=names(methods) or METHODS, starts=names(starts)
    )
    show(document, as_text(private_markdown), data=data, out=out, as_json=as_json)
