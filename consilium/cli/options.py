"""Defines options and arguments that several commands share, and the progress bar they use."""

from __future__ import annotations

import errno
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import InvalidInput
from common.objects import check_new, check_replaceable, read_given
from common.plain import plain
from common.privacy.mechanism import AccountantName, Relation, Unit
from common.protocol_terms import CODECS
from consilium.cli.say import console, say


def file_to_write(path: Path | None) -> Path | None:
    """Refuse an output file that cannot be written, before the work for it begins. Callback of an option.

    Args:
        path: The file; None if the option was left out.

    Returns:
        The path.

    Raises:
        InvalidInput: If it is a folder or a device.
        OSError: If the system refuses to write there.
    """
    if path is None:
        return None
    check_replaceable(path)
    if path.is_dir():
        raise InvalidInput("output file", value=str(path), limit="not a folder", remedy="name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    _try_to_write(path.parent, named=path)
    return path


def new_file(path: Path | None) -> Path | None:
    """Refuse an output file that exists or cannot be written, before the work for it begins. Callback of ``--out``.

    Args:
        path: The file; None if the option was left out.

    Returns:
        The path.

    Raises:
        InvalidInput: If something of that name exists.
        OSError: If the system refuses to write there.
    """
    file_to_write(path)
    if path is not None:
        check_new(path)
    return path


def _no_site(path: Path) -> Path:
    """Refuse a site's directory given as a study's directory; the callback of an argument."""
    if (path / "site.toml").exists() and not (path / "keys").exists():
        raise InvalidInput(
            "directory of a study",
            value=str(path),
            limit="not a site's directory",
            remedy="run this command at the server, with the directory that `consilium study init` made",
        )
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """Refuse an output folder that cannot be written, before the work for it begins. Callback of an option.

    Args:
        path: The folder, which may be missing; None if the option was left out.

    Returns:
        The path.

    Raises:
        InvalidInput: If it is a file.
        OSError: If the system refuses to write there.
    """
    if path is not None:
        if path.exists() and not path.is_dir():
            raise InvalidInput("output folder", value=str(path), limit="not a file", remedy="choose another folder")
        _try_to_write(path, named=path)
    return path


def _metrics_to_write(asked: str | None) -> str | None:
    """Refuse a folder of curves that cannot be written, before the training begins. Callback of ``--metrics``."""
    if folder := (asked or "").partition(":")[2]:
        folder_to_write(Path(folder))
    return asked


def _try_to_write(folder: Path, *, named: Path) -> None:
    """Test with an unnamed file that the folder, or its nearest existing parent, can be written to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(named)) from None


StudyDir = Annotated[Path, typer.Argument(help="The study's directory.", callback=_no_site)]
SiteDir = Annotated[Path, typer.Option("--site-dir", help="The site's directory.")]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]
OwnCases = Annotated[
    Path | None, typer.Option(help="Labelled cases, in any layout; by default all of this site's own.")
]
ArchiveFile = Annotated[
    Path, typer.Option("--out", help="New file, NAME.tar.gz, that only you can read.", callback=new_file)
]
PublicKey = Annotated[
    str | None, typer.Option(help="The ledger's public key, from a source you trust: 64 hex digits or a PEM file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="FORM:FOLDER",
        callback=_metrics_to_write,
        help="Also write the training's curves into FOLDER. FORM is tensorboard or mlflow; the package of that name "
        "must be installed. Nothing is sent anywhere.",
    ),
]
Again = Annotated[
    bool,
    typer.Option(
        "--again", help="Train even if patients were charged for a private training before, and charge them again."
    ),
]
ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Epsilon = Annotated[float, typer.Option("--epsilon", help="Privacy budget ε.")]
Delta = Annotated[float, typer.Option("--delta", help="Privacy budget δ.")]
Accountant = Annotated[
    AccountantName, typer.Option("--accountant", help="Accountant that decides whether a release fits the budget.")
]
UnitOption = Annotated[
    Unit,
    typer.Option(
        "--unit",
        help="Whom the guarantee protects. hospital: all that one hospital holds, so each of its patients, too. "
        "patient: one patient; the student then gains more if hospitals have several voters.",
    ),
]
TriedUnit = Annotated[
    Unit,
    typer.Option(
        "--unit",
        help="Whom the guarantee protects: patient or hospital. Real studies protect hospitals unless they are created "
        "with --unit patient. The default here is patient, because with few hospitals the noise that hides a whole "
        "hospital leaves almost no gain.",
    ),
]
RelationOption = Annotated[Relation, typer.Option("--relation", help="Neighbouring relation: replace-one or zero-out.")]
Voters = Annotated[
    int, typer.Option("--voters", help="Number m of voters (teachers) of each site, trained on disjoint patients.")
]
TriedHospitals = Annotated[
    int | None,
    typer.Option(
        "--hospitals", help="Number of hospitals K [those of the data's sites.csv, or 3].", show_default=False
    ),
]
TriedVoters = Annotated[
    int | None,
    typer.Option(
        "--voters",
        help="Number m of voters (teachers) of each site, on disjoint patients [as `consilium plan` recommends].",
        show_default=False,
    ),
]
Aggregation = Annotated[
    str | None,
    typer.Option(
        "--aggregation",
        help="Who adds the noise. open: the server; its operator must be trusted, and it tests every hospital's code. "
        "sealed-sum: the sites; the operator need not be trusted, but one hospital can spoil a sum, and only a "
        "dispute shows which one [sealed-sum for a quorum of 3 or more].",
    ),
]
Colluders = Annotated[
    int,
    typer.Option(
        "--colluders",
        help="In a sealed sum: number of sites that may collude with the server without breaking the guarantee.",
    ),
]
SpareDraws = Annotated[
    int, typer.Option("--spare-draws", help="In a sealed sum: extra budget for repeating sums when a site drops out.")
]
Verdicts = Annotated[
    int | None,
    typer.Option(
        "--verdicts",
        help="Number of hospitals that must find the student better than public data before it is released "
        "[more than half of the quorum in a sealed study, 0 in an open one].",
        show_default=False,
    ),
]
Codec = Annotated[
    str,
    typer.Option("--codec", help=f"Codec, which turns predictions into short vectors: {', '.join(sorted(CODECS))}."),
]

LOG_TO: Any = typer.Option(
    "--log-to",
    envvar="CONSILIUM_LOG_TO",
    help="Also send security events to: file:PATH, syslog, journald, udp://, tcp:// or tls://HOST:PORT. Repeatable.",
)

PLAIN: dict[str, Any] = {"show_default": False}
"""Arguments for options whose help text states the default itself."""

CORES: dict[str, Any] = {"min": 1, "max": 1024}
"""Limits of an option for a number of processes or threads."""

Jointly = Annotated[
    bool | None,
    typer.Option(
        "--joint/--no-joint",
        help="--joint: ask about all public volumes together, in rounds. --no-joint: ask one query about each "
        "volume [with the codec pca, the protocol that suits the public label maps; with any other codec, --no-joint].",
        **PLAIN,
    ),
]
Paired = Annotated[
    int,
    typer.Option(
        "--paired", help="Number of public volumes that are published with their label maps; only with joint queries."
    ),
]


def check_port(host: str, port: int) -> None:
    """Refuse an address on which the command cannot listen, before it starts anything.

    Args:
        host: The address.
        port: The port.

    Raises:
        InvalidInput: If another program listens there, or the system refuses.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        raise InvalidInput(
            "--port",
            value=port,
            limit="a port that no other program uses" if used else f"a port on {host} ({error.strerror})",
            remedy="end that program, or give another port" if used else "give another port or address",
        ) from error


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names.

    Args:
        text: The list; may be empty.

    Returns:
        The names.
    """
    return tuple(text.split(",")) if text else ()


def triple(
    text: str,
    kind: type,
    *,
    what: str,
    limit: str = "three numbers separated by commas",
    above: float = -math.inf,
    below: float = math.inf,
) -> Any:
    """Parse three comma-separated numbers.

    Args:
        text: The numbers.
        kind: ``int`` or ``float``.
        what: Name of the option in errors.
        limit: What is allowed, for errors.
        above: Every number is larger than this.
        below: Every number is smaller than this.

    Returns:
        A tuple of three numbers.

    Raises:
        InvalidInput: If there are not three numbers, or one is outside the limits.
    """
    numbers: tuple[Any, ...] = ()
    with suppress(ValueError):
        numbers = tuple(kind(part) for part in text.split(","))
    if len(numbers) != 3 or not all(above < number < below for number in numbers):  # also false for NaN
        raise InvalidInput(what, value=text, limit=limit)
    return numbers


@contextmanager
def counting(
    title: str, *, total: int | None = None, show: bool = True, of_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, which appears at the first count.

    Args:
        title: Text before the bar.
        total: Number at which the work is done; None if it is not known yet.
        show: True to show a bar.
        of_bytes: True if the counts are bytes.

    Yields:
        A function that takes the number done so far and, if it is known by then, the total.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from server.aggregation.progress import ProgressBars

    columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    if of_bytes:
        columns = (DownloadColumn(), TransferSpeedColumn())
    bar = ProgressBars(
        TextColumn(plain(title), markup=False), BarColumn(), *columns, console=console(stderr=True), show=show
    )

    def on_done(done: int, of: int | None = total) -> None:
        if not bar.task_ids:  # start at the first count, so that an early error has no bar above it
            bar.add_task(plain(title), total=of)
        bar.update(bar.task_ids[0], completed=done, total=of)

    try:
        yield on_done
    finally:
        if bar.task_ids:
            bar.stop()


Absent = Annotated[
    str, typer.Option(help="SITE=CHANNEL: a channel that a hospital has for no patient; at most one for each hospital.")
]


MAX_FILE_BYTES = 1 << 30
"""Largest file that another hospital made, such as a verdict or the evidence of a draw."""


def read_file(path: Path) -> bytes:
    """Read a file that the user named.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        InvalidInput: If it cannot be read, or is too large.
    """
    try:
        return read_given(path, most_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidInput(
            f"file cannot be read ({error.strerror or type(error).__name__})",
            value=str(path),
            remedy="check the path, and that this user may read the file",
        ) from error


def say_not_anchored(what: str) -> None:
    """Print a warning that a document was made without the ledger's public key.

    Args:
        what: The document.
    """
    say(
        f"warning: {what} does not show that the consortium signed this ledger: without --public-key the signatures "
        "were checked only with the key that the ledger itself names; to fix: give --public-key with `signing_key` "
        "from a hospital's kit",
        err=True,
    )


def say_unit(unit: Unit) -> None:
    """If the command's privacy unit is the patient, print that `study init` protects whole hospitals by default.

    Args:
        unit: The privacy unit of the command.
    """
    if unit is Unit.PATIENT:
        note = "unit patient: a study of `consilium study init` protects whole hospitals unless it gets --unit patient"
        say(f"{note}; `consilium plan` compares the two", err=True)
