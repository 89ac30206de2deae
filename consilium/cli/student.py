"""Defines ``consilium student …``: train the student and its controls from stored answers, export and publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.reading import naming_file
from common.wording import many
from consilium.cli.options import Metrics, StudyDir, folder_to_write, read_file
from consilium.cli.say import interruptible, say
from server.study.workspace import Workspace

student_app = typer.Typer(no_args_is_help=True, add_completion=False)


@student_app.command("train")
def student_train(
    directory: StudyDir,
    decisions: Annotated[
        Path | None,
        typer.Option(
            help="The dashboard's file decisions.jsonl; labels that a user rejected there are left out from now on."
        ),
    ] = None,
    metrics: Metrics = None,
) -> None:
    """Train the student and its controls on the labels that the stored answers give.

    This costs no privacy and can be repeated.

    Example: consilium student train trial --decisions trial-dashboard/decisions.jsonl
    """
    from server.aggregation.pipeline import locked_events
    from server.postprocess.decisions import take_over
    from server.postprocess.labels import read_released, write_labels
    from server.postprocess.networks import fit_controls, fit_student
    from server.study.study_curves import curves_from_here

    with (
        interruptible(),
        curves_from_here(Workspace(directory), metrics),
        locked_events(Workspace(directory)) as (workspace, events),
    ):
        if decisions is not None:
            take_over(decisions, workspace.decisions_file)
        released = read_released(workspace)
        write_labels(released, events=events)
        fit_student(released, events=events)
        fit_controls(released, events=events)
    say(f"student: {Workspace(directory).student_dir}")


@student_app.command("export")
def student_export(directory: StudyDir) -> None:
    """Export the student as a MONAI bundle that states its privacy cost.

    Verdicts count for one bundle only. If the ledger's head or the network changed, hospitals sign them again.
    Example: consilium student export trial
    """
    from server.aggregation.pipeline import locked_events
    from server.postprocess.bundle import export_student
    from server.study.gate import shut_line

    with locked_events(Workspace(directory)) as (workspace, events):
        export_student(workspace, events=events)
    say(f"bundle: {workspace.bundle_dir}")
    if line := shut_line(workspace):
        say(line)


@student_app.command("verdict")
def student_verdict(
    directory: StudyDir,
    files: Annotated[list[Path], typer.Argument(help="Verdicts that hospitals sent, one file each.")],
) -> None:
    """Read hospitals' signed verdicts on the student, and print whether they release it.

    Example: consilium student verdict trial north-verdict.json south-verdict.json
    """
    from server.aggregation.pipeline import locked_events
    from server.study.gate import gate_state, publish_verdicts, take_verdict

    with locked_events(Workspace(directory)) as (workspace, events):
        for path in files:
            with naming_file(path, remedy="give the file that the hospital wrote with `site evaluate --verdict`"):
                taken = take_verdict(workspace, read_file(path))
            events.emit("verdict-taken", site=taken.site, word=taken.word, bundle=taken.bundle)
            say(f"{taken.site}: {taken.word}")
        publish_verdicts(workspace)
        say(gate_state(workspace).words)


@student_app.command("publish")
def student_publish(
    directory: StudyDir,
    out: Annotated[
        Path,
        typer.Option(
            help="New folder for bundle, model card, certificate and signed checksums.", callback=folder_to_write
        ),
    ],
) -> None:
    """Collect student, model card and privacy certificate in one folder, signed with the consortium's key.

    Exit code 6: the study's gate has not released the student; `student verdict` reads the hospitals' verdicts.
    Recipients check the folder with openssl and sha256sum, as docs/deployment.md says, against the consortium's public
    key (consortium.pem in any site's startup kit).
    Example: consilium student publish trial --out trial-student
    """
    from consilium.reports.publication import publish_student

    names = publish_student(Workspace(directory), out)
    say(f"{out}: {many(len(names), 'file')}, signed; MODEL_CARD.md and certificate.pdf are for readers")
