"""Options and arguments that several commands have in the same words, and the bar they count on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Relation, Unit

StudyDir = Annotated[Path, typer.Argument(help="The study's directory.")]
SiteDir = Annotated[Path, typer.Option("--site-dir", help="The site's directory.")]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]
PublicKey = Annotated[
    str | None, typer.Option(help="The ledger's public key as you know it: 64 hex digits or a PEM file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Epsilon = Annotated[float, typer.Option("--epsilon", help="Privacy budget ε.")]
Delta = Annotated[float, typer.Option("--delta", help="Privacy budget δ.")]
Accountant = Annotated[AccountantName, typer.Option("--accountant", help="Accountant that gates.")]
UnitOption = Annotated[Unit, typer.Option("--unit", help="Unit of privacy.")]
RelationOption = Annotated[Relation, typer.Option("--relation", help="Neighbouring relation.")]
Voters = Annotated[int, typer.Option("--voters", help="Voters m a site, on disjoint patients.")]
Aggregation = Annotated[
    str | None,
    typer.Option(
        "--aggregation",
        help="Who adds the noise: open, the server, or sealed-sum, the sites, to codes it cannot read "
        "[sealed-sum from a quorum of 3].",
    ),
]
Colluders = Annotated[
    int, typer.Option("--colluders", help="Sealed sum: sites that the guarantee lets conspire with the server.")
]
SpareDraws = Annotated[
    int, typer.Option("--spare-draws", help="Sealed sum: charges beyond the plan, for sums that a dying site spoils.")
]
Codec = Annotated[str, typer.Option("--codec", help="Codec: pca, ball-ae or paper-pca.")]

PLAIN: dict[str, Any] = {"show_default": False}
"""Where the help text says the default, in the same words as for the others."""

Jointly = Annotated[
    bool | None,
    typer.Option(
        "--joint/--no-joint",
        help="Ask where structures are in all public volumes together, in four rounds, or in one release each "
        "[with pca rounds, about where or what they look like, as the public label maps suit].",
        **PLAIN,
    ),
]
Paired = Annotated[int, typer.Option("--paired", help="Public cases that keep their label maps (joint).")]


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas; none of an empty text."""
    return tuple(text.split(",")) if text else ()


def triple(text: str, kind: type, *, what: str) -> Any:
    """Three numbers separated by commas."""
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInput(what, value=text, limit="three numbers separated by commas") from error
    if len(values) != 3:
        raise InvalidInput(what, value=text, limit="three numbers separated by commas")
    return values


@contextmanager
def counting(
    title: str, *, total: int | None = None, show: bool = True, of_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """A bar on stderr; what is yielded takes how many are done and, where it is known by then, of how many."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    if of_bytes:
        columns = (DownloadColumn(), TransferSpeedColumn())
    bar = Progress(TextColumn(title), BarColumn(), *columns, console=Console(stderr=True), disable=not show)

    def on_done(done: int, of: int | None = total) -> None:
        if not bar.task_ids:  # at the first count: not above an error
            bar.start()
            bar.add_task(title, total=of)
        bar.update(bar.task_ids[0], completed=done, total=of)

    try:
        yield on_done
    finally:
        if bar.task_ids:
            bar.stop()


Absent = Annotated[
    str, typer.Option(help="SITE=CHANNEL: a channel that a hospital has of nobody; of each one at most.")
]
