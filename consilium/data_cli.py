"""``consilium data …``: make synthetic data, split a dataset into a study's roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make synthetic data, split a dataset.")

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command("synth")
def synth(
    out: Annotated[Path, typer.Option(help="Directory for the new dataset.")],
    cases: Annotated[int, typer.Option(help="Number of patients.")] = 40,
    hospitals: Annotated[int, typer.Option(help="Hospitals: each has its own contrast, noise and spacing.")] = 4,
    structures: Annotated[int, typer.Option(help="Structures to segment, 2 or 3.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of everything drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write an MSD dataset of 3D phantoms, whose shape varies from patient to patient.

    Example: consilium data synth --out phantoms --cases 100 --hospitals 4
    """
    from common.data.synthetic import write_phantoms

    with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("phantoms", total=cases)
        dataset = write_phantoms(
            out,
            cases=cases,
            seed=seed,
            hospitals=hospitals,
            structures=structures,
            on_case=lambda done: progress.update(task, completed=done),
        )
    facts = {"out": str(out), "cases": len(dataset.cases), "labels": list(dataset.labels)}
    typer.echo(json.dumps(facts) if as_json else f"{out}: {len(dataset.cases)} cases, {', '.join(dataset.labels)}")


@app.command("split")
def split(
    data: Annotated[Path, typer.Option(help="A labelled MSD dataset.")],
    out: Annotated[Path, typer.Option(help="Directory for the parts; must not exist.")],
    sites: Annotated[int, typer.Option(help="Hospitals that share the private cases.")],
    public_images: Annotated[int, typer.Option(help="Public volumes to be labelled.")] = 16,
    label_maps: Annotated[int, typer.Option(help="Public label maps, of other cases.")] = 24,
    validation: Annotated[int, typer.Option(help="Cases for choices.")] = 10,
    test: Annotated[int, typer.Option(help="Cases for the last look.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the deal.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Deal a dataset into sites, public images, public label maps, validation and test; no case has two roles.

    Example: consilium data split --data phantoms --out split --sites 4
    """
    from common.data.split import SplitPlan, split_dataset

    plan = SplitPlan(sites=sites, public_images=public_images, label_maps=label_maps, validation=validation, test=test)
    counts = split_dataset(data, out, plan=plan, seed=seed)
    typer.echo(json.dumps(counts) if as_json else "\n".join(f"{role}: {count}" for role, count in counts.items()))
