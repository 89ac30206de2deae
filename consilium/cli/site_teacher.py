"""`consilium site teacher add` and `remove`: a teacher that the hospital has already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from common.errors import InvalidInput
from consilium.cli.options import ResultAsJson, SiteDir

N = TypeVar("N", int, float)

teacher_app = typer.Typer(no_args_is_help=True, help="A teacher that the hospital has already, in place of training.")


@teacher_app.command("add")
def add(
    site_dir: SiteDir,
    source: Annotated[
        Path | None, typer.Argument(help="A MONAI bundle (folder or zip) or a TorchScript file.", show_default=False)
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="A program in its place: words with {input} and {output}, or {input_dir} and {output_dir}."),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="The study's label of each output in turn, NAME,NAME,… or by number, 0=NAME,4=NAME,…"),
    ] = None,
    channels: Annotated[
        str | None, typer.Option(help="The study's channels in the order the model takes them; the study's by default.")
    ] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="With --command: files it is made of; they are hashed. May be repeated.")
    ] = None,
    reads: Annotated[
        list[Path] | None, typer.Option(help="With --command: what else it may read, not hashed. May be repeated.")
    ] = None,
    activation: Annotated[
        str, typer.Option(help="What makes probabilities of a model's output: softmax, sigmoid or none.")
    ] = "softmax",
    intensity: Annotated[
        str, typer.Option(help="How a TorchScript's input is normalised: z-score, unit (0 to 1) or as-is.")
    ] = "z-score",
    spacing: Annotated[
        str | None, typer.Option(help="Voxels in mm a TorchScript works on, X,Y,Z; the study's by default.")
    ] = None,
    patch: Annotated[
        str | None, typer.Option(help="Voxels of a TorchScript's sliding window, X,Y,Z; whole volumes by default.")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds a volume may take.", min=1)] = 600,
    memory: Annotated[int, typer.Option(help="GiB of memory it may take.", min=1)] = 16,
    voter: Annotated[int, typer.Option(help="The voter whose teacher it is.", min=0)] = 0,
    as_json: ResultAsJson = False,
) -> None:
    """Let a model that the hospital has vote: a MONAI bundle, a TorchScript file, or a program such as nnU-Net.

    It is tried once on a made-up volume, its hash goes into the site's ledger, and the worker asks it about public
    volumes from its next start on: without network, reading its own files, writing nowhere else, its output checked.
    Only for studies of unit hospital: which patients such a model has seen nobody can say.
    Example: consilium site teacher add liver-bundle.zip --site-dir /srv/consilium --labels background,liver
    Example: consilium site teacher add --site-dir /srv/consilium --labels background,liver --model /models/nnunet
    --command 'env nnUNet_results=/models/nnunet nnUNetv2_predict -i {input_dir} -o {output_dir} -d 4 -c 3d_fullres
    -npp 0 -nps 0'
    """
    from client.foreign.bring import Brought
    from client.foreign.bring import add as add_teacher
    from client.foreign.declared import Activation, Intensity

    try:
        chosen = Activation(activation), Intensity(intensity)
    except ValueError as error:
        raise InvalidInput("--activation or --intensity", limit="as in --help", value=str(error)) from error
    brought = Brought(
        source=source,
        command=command,
        voter=voter,
        labels=labels,
        channels=channels,
        models=tuple(model or ()),
        reads=tuple(reads or ()),
        activation=chosen[0],
        intensity=chosen[1],
        spacing_mm=_three("--spacing", spacing, float),
        patch=_three("--patch", patch, int),
        timeout_s=timeout,
        memory_gib=memory,
    )
    added = add_teacher(site_dir, brought)
    declared = added.declared
    if as_json:
        facts = {"voter": voter, "kind": declared.kind, "sha256": declared.served, "tried": added.shares}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"voter {voter}: {declared.kind} {declared.served[:16]}… on record in the site's ledger")
    typer.echo("tried on a made-up volume: " + ", ".join(f"{n} {s:.1%}" for n, s in added.shares.items()))
    typer.echo("a worker that runs takes it up when `consilium site up` is started again")


@teacher_app.command("remove")
def remove(
    site_dir: SiteDir,
    voter: Annotated[int, typer.Option(help="The voter whose teacher it is.", min=0)] = 0,
) -> None:
    """Take away a teacher that was added; a trained one that was there before votes again.

    Example: consilium site teacher remove --site-dir /srv/consilium
    """
    from client.foreign.bring import remove as remove_teacher

    remove_teacher(site_dir, voter)
    typer.echo(f"voter {voter}: removed; the site's ledger keeps what it has of it")


def _three(option: str, text: str | None, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        found = tuple(kind(part) for part in (text or "").split(",") if part)
        if len(found) not in (0, 3) or not all(0 < number < 10_000 for number in found):
            raise ValueError
    except ValueError as error:
        raise InvalidInput(option, value=text, limit="three positive numbers, X,Y,Z") from error
    return found
