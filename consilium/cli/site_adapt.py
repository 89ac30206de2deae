"""Defines ``consilium site adapt``: adapts the student to the hospital's own cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import CORES, Again, OwnCases, ResultAsJson, SiteDir, counting, folder_to_write
from consilium.cli.say import interruptible, json_text, say
from consilium.cli.site_student import check_student

STRENGTH, DELTA, RELATION = 1.0, 1e-5, "add-remove"
"""Defaults of options. Another value is refused if the command would not read it."""


def adapt(
    site_dir: SiteDir,
    student: Annotated[Path | None, typer.Option(help="The student's bundle; by default the pulled student.")] = None,
    data: OwnCases = None,
    way: Annotated[
        str | None,
        typer.Option(
            help="How the network is made: student (unchanged), own (trained on this site's cases alone), trained-on "
            "(the student, trained further on these cases), near (as trained-on, but kept near the student's weights), "
            "half-way (mean of the weights of student and trained-on), merged (mean of the weights of half-way and of"
            " its further training on these cases and on public volumes that it labelled), averaged (mean prediction "
            "of own and trained-on) or averaged-rehearsed (mean prediction of own and of that further training). "
            "Without this option the default is taken, or another way if cross-validation proves it better. The "
            "default is merged with fewer than 7 patients and averaged-rehearsed with 7 or more; without public "
            "volumes it is half-way or averaged."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each training; the student's own by default.", min=1, max=1_000_000)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="First learning rate; the student's own by default.")
    ] = None,
    strength: Annotated[
        float,
        typer.Option(
            "--lambda",
            help="With --way near: how strongly weights are kept near the student's (λ of MR-MTL).",
            min=0,
            max=1000,
        ),
    ] = STRENGTH,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the network's folder and the report; by default adapted in the site's directory.",
            callback=folder_to_write,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put the new network and report in the place of finished ones.")
    ] = False,
    even_if_unfit: Annotated[
        bool,
        typer.Option(
            "--even-if-unfit",
            help="Train even if this site's own teachers score far below their level on the cases of --data, or no "
            "model finds anything. The usual causes are exchanged labels, a wrong orientation or another modality.",
        ),
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Train with differential privacy: dp-sgd (one clip for all weights), dp-mac (clips each block of the "
            "network) or dp-bbb (learns a distribution of each weight). The network may then leave the hospital, and "
            "the ledger records its ε."
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε that the private training may cost each patient.")] = None,
    delta: Annotated[float, typer.Option(help="δ at which the ε of --epsilon holds.")] = DELTA,
    relation: Annotated[
        str, typer.Option(help="Neighbouring relation of that ε: add-remove or replace-one.")
    ] = RELATION,
    noise_multiplier: Annotated[
        str | None,
        typer.Option(help="Noise multiplier of the private training; by default the smallest that --epsilon allows."),
    ] = None,
    again: Again = False,
    threads: Annotated[int, typer.Option(help="Processor threads of a training.", **CORES)] = 1,
    as_json: ResultAsJson = False,
) -> None:
    """Adapt the student to this hospital's own patients, at the hospital. No budget is spent and nothing is sent.

    The network was trained on patients and has no guarantee: it must not leave the hospital, and its name says so. Stop
    the command with Ctrl-C; run it again to resume. A finished network is replaced only with --replace. Exit code 6: a
    training or a withdrawal is in progress here.

    With --strategy the network is trained with differential privacy and may leave the hospital, with the (ε, δ) of this
    training in addition to the student's. Patients are charged in the site's ledger before the first step, and no
    setting is chosen by their data.
    Example: consilium site adapt --site-dir /srv/consilium
    Example: consilium site adapt --site-dir /srv/consilium --strategy dp-sgd --epsilon 4
    """
    import torch

    from client.adapting.adapt import AdaptOptions
    from client.adapting.adapt import adapt as adapt_student
    from client.adapting.adapted import text
    from client.adapting.methods import Method
    from client.adapting.private import adapt_privately
    from client.training.command import PrivateOptions

    if way is not None and way not in tuple(Method):
        raise InvalidInput("--way", value=way, limit=", ".join(Method))
    torch.set_num_threads(threads)
    pulled = {"--lambda": None if strength == STRENGTH else strength}
    if strategy is None:
        private = {"--epsilon": epsilon, "--noise-multiplier": noise_multiplier, "--again": again or None}
        private |= {"--delta": None if delta == DELTA else delta}
        private |= {"--relation": None if relation == RELATION else relation}
        if unread := [name for name, value in private.items() if value is not None]:
            raise InvalidInput(", ".join(unread), limit="only together with --strategy", remedy="add --strategy dp-sgd")
        if way not in (None, Method.NEAR) and pulled["--lambda"] is not None:
            raise InvalidInput("--lambda", value=strength, limit="only with --way near, or without --way")
    if strategy is not None:
        chosen = {"--student": student, "--data": data, "--way": way, "--replace": replace or None, **pulled}
        chosen["--even-if-unfit"] = even_if_unfit or None
        if unread := [name for name, value in chosen.items() if value is not None]:
            raise InvalidInput(
                ", ".join(unread),
                limit="not with --strategy, which starts from the pulled student and chooses no setting",
            )
        asked = PrivateOptions(
            strategy,
            epsilon,
            delta,
            relation,
            steps=steps,
            learning_rate=learning_rate,
            noise_multiplier=noise_multiplier,
        )
        with interruptible():
            done = adapt_privately(
                site_dir, asked, again=again, out=out, progress=_steps, on_warning=lambda text: say(text, err=True)
            )
        say(json_text(done.to_json()) if as_json else done.to_text())
        return
    if student is None:
        check_student(site_dir, made="the network is")
    options = AdaptOptions(
        site_dir,
        student,
        data,
        None if way is None else Method(way),
        steps,
        learning_rate,
        strength,
        out,
        replace,
        even_if_unfit,
    )
    with interruptible():
        result = adapt_student(options, progress=_steps)
    if as_json:
        say(json.dumps(result.to_json(), indent=1, allow_nan=False))
        return
    say(text(result))
    say(f"{result.bundle}: the network, for `consilium predict --model`")
    say(f"{result.report}: adapted.html, adapted.json and pictures; they stay at this site")


@contextmanager
def _steps(total: int) -> Iterator[Callable[[int, float], None]]:
    """Show one progress bar over the steps of all trainings; yield the function that counts steps."""
    with counting("training steps", total=total) as show:
        done = 0

        def on_step(more: int, loss: float) -> None:
            nonlocal done
            done += more
            show(done)

        yield on_step
