"""Defines ``consilium data …``: make phantoms; split a dataset into hospitals, public, validation and test cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.plain import plain
from common.wording import many
from consilium.cli.options import ResultAsJson, counting, folder_to_write, names
from consilium.cli.say import say

app = typer.Typer(no_args_is_help=True, add_completion=False)

Seed = Annotated[int, typer.Option(help="Seed of every random draw.", min=0)]


@app.command("synth")
def synth(
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.", callback=folder_to_write)],
    cases: Annotated[int, typer.Option(help="Number of cases in all.", min=1)],
    seed: Seed,
    hospitals: Annotated[int, typer.Option(help="Number of hospitals, each with its own scanner.", min=1)] = 1,
    structures: Annotated[int, typer.Option(help="Number of structures to segment, 2 or 3.", min=2, max=3)] = 2,
    tumours: Annotated[
        bool, typer.Option("--tumours", help="Make brain tumours in BraTS' layout: four contrasts, nested regions.")
    ] = False,
    as_json: ResultAsJson = False,
) -> None:
    """Write synthetic 3D cases: an MSD dataset of phantoms or, with --tumours, raw BraTS folders.

    Each patient has other shapes, and each hospital another scanner.
    Example: consilium data synth --out phantoms --cases 108 --seed 1 --hospitals 4
    Example: consilium data synth --out brats --cases 60 --seed 1 --tumours
    """
    from common.data.synthetic import write_phantoms
    from common.data.synthetic_tumours import write_tumours

    if tumours:
        with counting("tumours", total=cases) as on_case:
            write_tumours(out, cases=cases, seed=seed, on_case=on_case)
        facts = {"dataset": str(out), "cases": cases, "seed": seed}
        say(json.dumps(facts) if as_json else f"{out}: {many(cases, 'case')} of four contrasts, regions WT, TC, ET")
        return
    with counting("phantoms", total=cases) as on_case:
        dataset = write_phantoms(
            out, cases=cases, seed=seed, hospitals=hospitals, structures=structures, on_case=on_case
        )
    if as_json:
        facts = {"dataset": str(out), "cases": len(dataset.cases), "labels": dataset.labels, "seed": seed}
        say(json.dumps({**facts, "hospitals": hospitals}))
    else:
        made = f"{many(len(dataset.cases), 'case')} of {many(hospitals, 'hospital')}"
        say(f"{out}: {made}, labels {', '.join(dataset.labels)}")


@app.command("split")
def split(
    data: Annotated[Path, typer.Option(help="The dataset to split, in any layout.")],
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.", callback=folder_to_write)],
    seed: Seed,
    hospitals: Annotated[
        int | None,
        typer.Option(help="Number of sites that share the remaining cases [those that the data name]."),
    ] = None,
    sites: Annotated[
        Path | None,
        typer.Option(
            help="Table with the columns case_id and site, which assigns cases to hospitals [the data's sites.csv]."
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help="The dataset's layout; by default it is recognised.")] = "auto",
    labels: Annotated[str, typer.Option(help="Label names, background first; needed if the data name none.")] = "",
    channels: Annotated[str, typer.Option(help="Channel names, in order; by default those of the data.")] = "",
    public_images: Annotated[int, typer.Option(help="Number of public volumes without labels.", min=0)] = 24,
    label_maps: Annotated[int, typer.Option(help="Number of public label maps, from other cases.", min=0)] = 12,
    paired: Annotated[
        int, typer.Option(help="Number of public volumes with their labels, from other cases.", min=0)
    ] = 0,
    validation: Annotated[int, typer.Option(help="Number of cases for choosing settings.", min=0)] = 8,
    test: Annotated[int, typer.Option(help="Number of cases for the final figures only.", min=0)] = 16,
    as_json: ResultAsJson = False,
) -> None:
    """Divide a dataset into sites, public cases, validation and test, and record the division in split.json.

    Example: consilium data split --data phantoms --out split --seed 1 --public-images 24 --label-maps 12
    Example: consilium data split --data tumours --sites sites.csv --out split --seed 1 --paired 8
    """
    from client.data.case_checks import readable
    from client.data.layouts import named_dataset
    from common.data.dataset import left_out_lines, unlabelled_lines
    from common.data.split import SplitCounts, plan_split, with_own_sites, with_sites, write_split

    dataset = named_dataset(data, layout=layout, labels=names(labels), channels=names(channels))
    dataset = with_own_sites(dataset, data) if sites is None else with_sites(dataset, sites)
    with counting("cases", total=len(dataset.cases)) as on_case:
        dataset = readable(dataset, on_case=lambda done, _total: on_case(done))
    counts = SplitCounts(hospitals, public_images, label_maps, validation, test, paired)
    plan = plan_split(dataset, counts, seed=seed)
    record = write_split(plan, dataset, out)
    if as_json:
        say(json.dumps(record))
        return
    sizes = ", ".join(f"{name} {len(cases)}" for name, cases in plan.sites.items())
    say(
        f"{out}: sites {sizes}; public images {len(plan.public_images)}, public label maps {len(plan.label_maps)}, "
        f"paired {len(plan.paired)}, validation {len(plan.validation)}, test {len(plan.test)}"
    )
    for line in (*left_out_lines(len(plan.cases), plan.problems), *unlabelled_lines(dataset.unlabelled)):
        say(plain(line))
