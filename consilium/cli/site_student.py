"""``consilium site student pull`` and ``site evaluate``: the study's student at this site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli.options import AsJson, SiteDir, counting

if TYPE_CHECKING:
    from client.teachers.evaluation import Evaluation

student_app = typer.Typer(no_args_is_help=True, help="The study's student at this site.")


@student_app.callback()
def _student() -> None:
    """The study's student at this site."""


@student_app.command("pull")
def pull(
    site_dir: SiteDir,
    out: Annotated[Path | None, typer.Option(help="Where to put it; student in the site's directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the study's student and prove it: signed, by hash, of this study, and true to this site's receipts.

    Exit code 5: the server signed what contradicts this site's receipts. Interrupted, run it again.
    Example: consilium site student pull --site-dir /srv/consilium
    """
    from client.teachers.student import pull as pull_student

    with counting("student", of_bytes=True) as on_bytes:
        pulled = pull_student(site_dir, out=out, on_bytes=on_bytes)
    statement = pulled.statement
    if as_json:
        facts = {
            "bundle": str(pulled.bundle),
            "sha256": statement.bundle,
            "study": statement.study_id,
            "ledger_row": statement.head.seq,
            "ledger_hash": statement.head.hash,
            "queries": statement.queries,
            "receipts": pulled.receipts,
            "guarantee": pulled.guarantee.to_json(),
        }
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(f"{pulled.bundle}: student {statement.bundle[:16]}…, {pulled.guarantee}, {statement.queries} queries")
    typer.echo(
        f"signed by the server at row {statement.head.seq} of its ledger; it continues the {pulled.receipts} receipts "
        "this site holds of the study"
        if pulled.receipts
        else "signed by the server; this site holds no receipt of the study to check it against"
    )
    typer.echo("next: `consilium site evaluate`")


def evaluate(
    site_dir: SiteDir,
    data: Annotated[
        Path | None, typer.Option(help="Labelled cases, in any layout; by default all of this site's own.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A bundle; by default the student that was pulled.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Score each file's own voxels instead of the study's grid.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 10 where something speaks against using the student.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score the student on this site's own labelled cases. Figures and pictures stay here; nothing is sent.

    Beside it stand the public start (or the codec's mean shape) and this site's teachers on the same cases: a student
    below public data, or one that lost a structure, is said plainly.
    Exit code 10: --strict, and the student is worse than what public data alone gives, or a structure is gone.
    Example: consilium site evaluate --site-dir /srv/consilium --data /data/unseen
    """
    from datetime import UTC, datetime

    import torch

    from client.teachers.evaluation import WORSE
    from client.teachers.evaluation import evaluate as evaluate_student

    torch.set_num_threads(1)
    with counting("cases") as on_case:
        result, folder = evaluate_student(
            site_dir, now=datetime.now(UTC), data=data, model=model, native=native, on_case=on_case
        )
    _print(result, folder, as_json=as_json)
    if strict and result.alarms:
        raise typer.Exit(WORSE)


def _print(result: Evaluation, folder: Path, *, as_json: bool) -> None:
    from client.teachers.evaluation import PARTS, table

    if as_json:
        typer.echo(json.dumps({**result.to_json(), "folder": str(folder)}, indent=1))
    else:
        typer.echo(table(result))
        if any(score.part == PARTS[0] for score in result.scores):
            typer.echo(
                f"cases '{PARTS[0]}' trained this site's teachers. The student saw none of them, only what was "
                "released of all teachers' votes; for cases nobody used, give --data"
            )
        typer.echo(
            f"{folder}: evaluation.html, evaluation.json, cases.csv, best.png, worst.png; they stay at this site"
        )
