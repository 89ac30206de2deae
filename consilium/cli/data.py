"""``consilium data …``: make phantoms, and deal a dataset to hospitals, the public, validation and test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import ResultAsJson, counting

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make synthetic data, split a dataset.")

Seed = Annotated[int, typer.Option(help="Decides every draw.", min=0)]


@app.command("synth")
def synth(
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.")],
    cases: Annotated[int, typer.Option(help="How many cases in all.", min=1)],
    seed: Seed,
    hospitals: Annotated[int, typer.Option(help="How many scanners they come from.", min=1)] = 1,
    structures: Annotated[int, typer.Option(help="Structures to segment, 2 or 3.", min=2, max=3)] = 2,
    as_json: ResultAsJson = False,
) -> None:
    """Write an MSD dataset of 3D phantoms: shapes vary by patient, scanners by hospital.

    Example: consilium data synth --out phantoms --cases 108 --seed 1 --hospitals 4
    """
    from common.data.synthetic import write_phantoms

    with counting("phantoms", total=cases) as on_case:
        dataset = write_phantoms(
            out, cases=cases, seed=seed, hospitals=hospitals, structures=structures, on_case=on_case
        )
    if as_json:
        facts = {"dataset": str(out), "cases": len(dataset.cases), "labels": dataset.labels, "seed": seed}
        typer.echo(json.dumps({**facts, "hospitals": hospitals}))
    else:
        typer.echo(f"{out}: {len(dataset.cases)} cases of {hospitals} hospital(s), labels {', '.join(dataset.labels)}")


@app.command("split")
def split(
    data: Annotated[Path, typer.Option(help="The dataset to split (MSD layout).")],
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.")],
    seed: Seed,
    hospitals: Annotated[
        int | None, typer.Option(help="Sites that share what is not set aside; by default those the dataset names.")
    ] = None,
    public_images: Annotated[int, typer.Option(help="Public volumes, without labels.", min=0)] = 24,
    label_maps: Annotated[int, typer.Option(help="Public label maps, of other cases.", min=0)] = 12,
    validation: Annotated[int, typer.Option(help="Cases for choosing settings.", min=0)] = 8,
    test: Annotated[int, typer.Option(help="Cases for the final figures only.", min=0)] = 16,
    as_json: ResultAsJson = False,
) -> None:
    """Deal a dataset to sites/*, public/images, public/label-maps, validation and test; split.json records it.

    Example: consilium data split --data phantoms --out split --seed 1 --public-images 24 --label-maps 12
    """
    from common.data.msd import read_dataset
    from common.data.split import SplitCounts, plan_split, write_split

    dataset = read_dataset(data)
    counts = SplitCounts(
        hospitals=hospitals, public_images=public_images, label_maps=label_maps, validation=validation, test=test
    )
    plan = plan_split(dataset, counts, seed=seed)
    record = write_split(plan, dataset, out)
    if as_json:
        typer.echo(json.dumps(record))
        return
    sizes = ", ".join(f"{name} {len(cases)}" for name, cases in plan.sites.items())
    typer.echo(
        f"{out}: sites {sizes}; public images {len(plan.public_images)}, public label maps {len(plan.label_maps)}, "
        f"validation {len(plan.validation)}, test {len(plan.test)}"
    )
    for problem in plan.problems:
        typer.echo(f"left out {problem.case}: {problem.reason}")
