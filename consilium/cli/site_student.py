"""Defines ``consilium site student pull`` (fetch the study's student) and ``site evaluate`` (score it at this site)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidInput, Refused
from common.wording import many
from consilium.cli.options import AsJson, OwnCases, SiteDir, counting, file_to_write, folder_to_write
from consilium.cli.say import json_text, say

if TYPE_CHECKING:
    from client.teachers.evaluation import Evaluation
    from client.teachers.pulled_student import PulledStudent

student_app = typer.Typer(no_args_is_help=True, help="Fetch the study's student to this site.")


@student_app.callback()
def _student() -> None:
    """Fetch the study's student to this site."""


@student_app.command("pull")
def pull(
    site_dir: SiteDir,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the student; by default student in the site's directory.", callback=folder_to_write
        ),
    ] = None,
    to_evaluate: Annotated[
        bool,
        typer.Option(
            "--to-evaluate", help="Fetch a student that is not released yet, to evaluate it and to give a verdict."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch the study's student and verify it: signature, hash, study, and this site's receipts.

    If the study has a gate, the student is released once enough hospitals found it better; exit code 6 until then. Exit
    code 5: the server signed facts that contradict this site's receipts. After an interruption, run the command again.
    Example: consilium site student pull --site-dir /srv/consilium
    """
    from client.teachers.pulled_student import pull as pull_student

    with counting("student", of_bytes=True) as on_bytes:
        pulled = pull_student(
            site_dir, out=out, to_evaluate=to_evaluate, on_bytes=on_bytes, on_wait=partial(say, err=True)
        )
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
            **({"gate": pulled.gate} if pulled.gate else {}),
        }
        say(json_text(facts))
        return
    say(f"{pulled.bundle}: student {statement.bundle[:16]}…, {pulled.guarantee}, {many(statement.queries, 'answer')}")
    say(
        f"signed by the server at row {statement.head.seq} of its ledger, which agrees with this site's "
        f"{many(pulled.receipts, 'receipt')} of the study"
        if pulled.receipts
        else "signed by the server; this site holds no receipt of the study to check it against"
    )
    if pulled.gate:
        _say_gate(site_dir, pulled)
    say(f"next: `consilium site evaluate{' --verdict FILE' if to_evaluate else ''}`")


def _say_gate(site_dir: Path, pulled: PulledStudent) -> None:
    """Print the hospitals' verdicts, and whether this site's is among them."""
    from client.teachers.pulled_student import own_verdict

    say(pulled.gate)
    own = own_verdict(site_dir, pulled.statement.bundle)
    if own is not None and own not in (pulled.statement.verdicts or ()):
        say(
            f"this site's own verdict, {own.word}, is not among these, so the server has not read it; tell the other "
            "sites if you sent it"
        )


def check_student(site_dir: Path, *, made: str = "") -> None:
    """Check the server's signed statement about the pulled student; print a note if it is absent.

    The weights are not compared with it: :func:`~client.teachers.pulled_student.signed_student` compares them.

    Args:
        site_dir: The site's directory.
        made: Subject and verb of the warning about a student that the hospitals' verdicts do not release, such as
            ``the result is``. Empty if the student is only evaluated, which needs no release.
    """
    from client.policy import load_site
    from client.teachers.pulled_student import STATEMENT, STUDENT_DIR, check_pulled, pulled_statement

    needed = bool(made) and load_site(site_dir).load_study().gate.verdicts
    if not needed and not (site_dir / STUDENT_DIR / STATEMENT).is_file():
        say(
            "note: the server's signed statement is not beside the student, so the student was not checked; "
            "`consilium site student pull` fetches both",
            err=True,
        )
    elif not made:
        pulled_statement(site_dir)
    else:
        try:
            check_pulled(site_dir)
        except Refused as held:
            say(f"warning: {made} made from a student that is not released: {held}", err=True)


def evaluate(
    site_dir: SiteDir,
    data: OwnCases = None,
    model: Annotated[Path | None, typer.Option(help="A bundle; by default the student that was pulled.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Score each file's own voxels instead of the study's grid.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 10 if the student should not be used.")
    ] = False,
    verdict: Annotated[
        Path | None,
        typer.Option(
            help="Also write a signed verdict of one word on the student to this new file, for the consortium.",
            callback=file_to_write,
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Also write the signed mean Dice of each structure to this new file, for the consortium.",
            callback=file_to_write,
        ),
    ] = None,
    even_if_unfit: Annotated[
        bool,
        typer.Option(
            "--even-if-unfit",
            help="Give verdict and figures even if this site's own teachers score far below their level on these "
            "cases, or no network finds anything. The usual causes are exchanged labels, a wrong orientation or "
            "another modality.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score the student on this site's own labelled cases. Scores and pictures stay here; nothing is sent.

    The public start (or the codec's mean shape) and this site's teachers are scored on the same cases. A warning says
    if the student is worse than the model from public data, or misses a structure in most cases.

    --verdict writes one word (better, not-better, worse) that you may send. It depends on your cases, and no ε bounds
    what it reveals. --figures writes each structure's mean Dice in hundredths, over 5 patients or more; no ε bounds
    what these figures reveal.

    No verdict is given on cases that do not fit this site's models: its own teachers score far lower on them than on
    the site's own cases, or no model finds a structure. Check labels, orientation and modality then. Cases of patients
    on whom an adapted network (--model) was trained are not scored.

    Exit code 10: with --strict, after such a warning, or if the cases do not fit.
    Example: consilium site evaluate --site-dir /srv/consilium --data /data/unseen
    """
    from datetime import UTC, datetime

    import torch

    from client.teachers.evaluation import WORSE
    from client.teachers.evaluation import evaluate as evaluate_student
    from client.teachers.verdict import check_outputs, give_statements

    if (verdict is not None or figures is not None) and model is not None:
        raise InvalidInput(
            "--verdict or --figures with --model", limit="without --model, because they are about the pulled student"
        )
    if figures is not None and native:
        raise InvalidInput(
            "--figures with --native",
            limit="without --native, because hospitals' figures are compared on the study's grid",
        )
    check_outputs(site_dir, verdict=verdict, figures=figures)
    if model is None:
        check_student(site_dir)
    torch.set_num_threads(1)
    with counting("cases") as on_case:
        result, folder = evaluate_student(
            site_dir,
            now=datetime.now(UTC),
            data=data,
            model=model,
            native=native,
            even_if_unfit=even_if_unfit,
            on_case=on_case,
        )
    if result.fit.refused and (verdict or figures):
        _print(result, folder, as_json=as_json)
        result.fit.check("verdict" if verdict else "figures")
    said, measured = give_statements(site_dir, result, verdict=verdict, figures=figures, now=datetime.now(UTC))
    _print(result, folder, as_json=as_json)
    if measured is not None and not as_json:
        told = ", ".join(f"{one.structure} {one.hundredths / 100:.2f}" for one in measured.dice)
        say(f"{figures}: {told}, signed; send it to the consortium if you consent to these figures leaving")
    if said is not None and not as_json:
        say(f"{verdict}: {said.word}, signed; send it to the consortium if you consent to that word leaving")
    if strict and (result.alarms or result.fit.refused):
        raise typer.Exit(WORSE)


def _print(result: Evaluation, folder: Path, *, as_json: bool) -> None:
    from client.teachers.evaluation_input import PARTS
    from client.teachers.evaluation_text import table

    if as_json:
        say(json_text({**result.to_json(), "folder": str(folder)}))
    else:
        say(table(result))
        if any(score.part == PARTS[0] for score in result.scores):
            say(
                f"this site's teachers were trained on the cases '{PARTS[0]}', and the {result.who} on none of "
                "them; to score cases that no teacher was trained on, give --data"
            )
        say(f"{folder}: evaluation.html, evaluation.json, cases.csv, best.png, worst.png; they stay at this site")
