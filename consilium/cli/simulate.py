"""Defines ``consilium simulate``: simulates a study on a researcher's own data, to estimate its result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options
from consilium.cli.demo import asked_of, summary, watching
from consilium.cli.say import console, interruptible, say

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    data: Annotated[Path | None, typer.Option(help="A dataset with labels, in any layout that sites may use.")] = None,
    phantoms: Annotated[bool, typer.Option("--phantoms", help="Use synthetic phantoms instead of --data.")] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for all results; give the same directory again to resume.", callback=options.folder_to_write
        ),
    ] = Path("simulate-out"),
    layout: Annotated[
        str, typer.Option(help="Layout of the folder, such as msd; by default it is recognised.")
    ] = "auto",
    labels: Annotated[str, typer.Option(help="Label names, background first; by default those of the data.")] = "",
    channels: Annotated[str, typer.Option(help="Channel names; by default those of the data.")] = "",
    hospitals: options.TriedHospitals = None,
    epsilon: options.Epsilon = 8.0,
    delta: options.Delta = 1e-5,
    accountant: options.Accountant = AccountantName.EXACT,
    unit: options.TriedUnit = Unit.PATIENT,
    relation: options.RelationOption = Relation.REPLACE_ONE,
    voters: options.TriedVoters = None,
    queries: Annotated[
        int | None,
        typer.Option(
            "--public-images",
            "--queries",
            help="Number of volumes set aside as public, without labels, about which the teachers are asked [a fifth "
            "of the data]. A joint query asks about all of them in each of its rounds.",
            **options.PLAIN,
        ),
    ] = None,
    label_maps: Annotated[
        int | None,
        typer.Option(
            help="Number of public label maps; their patients have no public volume and are at no hospital [an eighth "
            "of the data].",
            **options.PLAIN,
        ),
    ] = None,
    aggregation: options.Aggregation = None,
    colluders: options.Colluders = 1,
    codec: options.Codec = "pca",
    rounds: options.Jointly = None,
    paired: options.Paired = 0,
    teacher_steps: Annotated[
        int | None, typer.Option(help="Training steps of a teacher [as the recipe says].", min=1, **options.PLAIN)
    ] = None,
    student_steps: Annotated[
        int | None, typer.Option(help="Training steps of the student [as the recipe says].", min=8, **options.PLAIN)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of phantoms, split and training; noise has no seed. A simulation is one split with one draw of "
            "noise: repeat it with other seeds and --out, or use `consilium bench utility --seeds`, for intervals."
        ),
    ] = 0,
    absent: options.Absent = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Simulate a whole study on your own data in one process: teachers, codes, noise, ledgers, student, report.

    Protocol, noise and ledgers are those of a federation. One person plays every party, so the result is an estimate
    without a guarantee, and there is no certificate. `consilium demo` runs real daemons.
    Stop it at any time; run the same command again to resume.
    Example: consilium simulate --data Task04_Hippocampus --hospitals 8 --out sim
    Example: consilium simulate --phantoms --out sim
    """

    given = {**locals(), "simulated": True}
    from consilium.demo.run import run_demo

    if (data is None) != phantoms:
        raise InvalidInput("data to simulate on", limit="either --data DIR or --phantoms, not both")
    asked = asked_of(given, "out", "phantoms", "as_json")
    options.say_unit(unit)
    with interruptible(), watching(console(stderr=True)) as watch:
        report = run_demo(out, asked, watch=watch, show_dashboard=False)
    if as_json:
        say((out / "report.json").read_text(encoding="utf-8"), nl=False)
        return
    say("a simulation: one person held every party's data and keys, so the result is an estimate without a guarantee")
    say(summary(out))
    say(f"report: {report}")
