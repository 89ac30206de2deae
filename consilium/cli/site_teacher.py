"""Defines `consilium site teacher add` and `remove`: use a model that the hospital already has as a teacher."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import ResultAsJson, SiteDir, triple
from consilium.cli.say import say

teacher_app = typer.Typer(
    no_args_is_help=True, help="Use a model that the hospital already has as a teacher, instead of training one."
)

Voter = Annotated[int, typer.Option(help="Number of the voter that this teacher answers for.", min=0)]


@teacher_app.command("add")
def add(
    site_dir: SiteDir,
    source: Annotated[
        Path | None, typer.Argument(help="A MONAI bundle (folder or zip) or a TorchScript file.", show_default=False)
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            help="Use a program as the teacher: its command line, with {input} and {output}, or {input_dir} and "
            "{output_dir}, in place of the paths."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="The study's label for each output of the model: in order, NAME,NAME,… or by number, 0=NAME,4=NAME,…"
        ),
    ] = None,
    channels: Annotated[
        str | None,
        typer.Option(help="The study's channels in the order of the model's input; by default the study's order."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="With --command: a file or folder that is part of the model; it is hashed. Repeatable."),
    ] = None,
    reads: Annotated[
        list[Path] | None,
        typer.Option(help="With --command: another path that the program may read; it is not hashed. Repeatable."),
    ] = None,
    activation: Annotated[
        str, typer.Option(help="Function that turns the model's output into probabilities: softmax, sigmoid or none.")
    ] = "softmax",
    intensity: Annotated[
        str, typer.Option(help="Normalisation of a TorchScript's input: z-score, unit (0 to 1) or as-is.")
    ] = "z-score",
    spacing: Annotated[
        str | None, typer.Option(help="Voxel spacing in mm of a TorchScript's input, X,Y,Z; by default the study's.")
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Size in voxels of a TorchScript's sliding window, X,Y,Z; by default whole volumes."),
    ] = None,
    timeout: Annotated[int, typer.Option(help="Time limit in seconds for each volume.", min=1)] = 600,
    memory: Annotated[int, typer.Option(help="Memory limit in GiB.", min=1)] = 16,
    voter: Voter = 0,
    as_json: ResultAsJson = False,
) -> None:
    """Add a hospital's own model as a teacher: a MONAI bundle, a TorchScript file, or a program such as nnU-Net.

    The model is tried on a synthetic volume, and its hash is recorded in the site's ledger. After its next start the
    worker uses it on public volumes. The model runs without network, may read and write only its own files, and its
    output is checked. Only for studies of unit hospital, because the model may have been trained on any patient.
    Example: consilium site teacher add liver-bundle.zip --site-dir /srv/consilium --labels background,liver
    Example: consilium site teacher add --site-dir /srv/consilium --labels background,liver --model /models/nnunet
        --command 'env nnUNet_results=/models/nnunet nnUNetv2_predict -i {input_dir} -o {output_dir} -d 4 -c 3d_fullres
        -npp 0 -nps 0'
    """
    from client.foreign.bring import AddTeacherOptions
    from client.foreign.bring import add as add_teacher
    from client.records.declared import Activation, Intensity

    sizes = partial(triple, limit="three numbers above 0 and below 10000, as X,Y,Z", above=0, below=10_000)
    try:
        chosen = Activation(activation), Intensity(intensity)
    except ValueError as error:
        raise InvalidInput(
            "--activation or --intensity", limit=f"{', '.join(Activation)}; {', '.join(Intensity)}", value=str(error)
        ) from error
    brought = AddTeacherOptions(
        source=source,
        command=command,
        voter=voter,
        labels=labels,
        channels=channels,
        models=tuple(model or ()),
        reads=tuple(reads or ()),
        activation=chosen[0],
        intensity=chosen[1],
        spacing_mm=sizes(spacing, float, what="--spacing") if spacing else (),
        patch=sizes(patch, int, what="--patch") if patch else (),
        timeout_s=timeout,
        memory_gib=memory,
    )
    added = add_teacher(site_dir, brought)
    declared = added.declared
    if as_json:
        facts = {
            "voter": voter,
            "kind": declared.kind,
            "sha256": declared.served,
            "tried": added.shares,
            "used": asdict(added.used),
        }
        say(json.dumps(facts))
        return
    say(f"voter {voter}: {declared.kind} {declared.served[:16]}… recorded in the site's ledger")
    say("tried on a made-up volume: " + ", ".join(f"{n} {s:.1%}" for n, s in added.shares.items()))
    say(f"peak use: {added.used}")
    say("a running worker uses it after `consilium site up` is started again")


@teacher_app.command("remove")
def remove(site_dir: SiteDir, voter: Voter = 0) -> None:
    """Remove a teacher that was added. A trained teacher that it replaced is used again.

    Example: consilium site teacher remove --site-dir /srv/consilium
    """
    from client.foreign.bring import remove as remove_teacher

    remove_teacher(site_dir, voter)
    say(f"voter {voter}: removed; the site's ledger keeps its rows about it")
