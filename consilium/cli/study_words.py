"""Prints the texts of `consilium study` about a study's plan, its state, and the end of its run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from common.config import DataConfig, Study
from common.data.dataset import Dataset, left_out_lines
from common.data.msd import nifti_files, other_files
from common.errors import BudgetExceeded, ConsiliumError, InvalidInput
from common.plain import joined, plain
from consilium.cli.say import json_text, say
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from server.study.start import GivenStart
    from server.study.status import StudyStatus


class AnswersMissing(ConsiliumError):
    """A run has ended, and some planned queries of the study have no answer."""

    exit_code = BudgetExceeded.exit_code

    def __init__(self, standing: StudyStatus) -> None:
        facts = standing.facts
        super().__init__(
            f"the study ended with {facts.answers} of {facts.planned} answers ({standing.state}); to fix: see the "
            "reasons above; `consilium study resume` continues as long as the budget lasts"
        )


def ask_about_spoiled(workspace: Workspace, *, go_on: bool) -> None:
    """Refuse to start a run after a spoiled draw (attempt at a sealed sum) until somebody decides to continue.

    Args:
        workspace: The study's directory.
        go_on: True to record the decision to continue.

    Raises:
        Refused: If a decision is missing.
    """
    from server.ledger.server_ledger import Ledger
    from server.study.spoiled import accept_spoiled, check_answered

    if not workspace.study().privacy.sealed:
        return
    if go_on:
        accept_spoiled(workspace)
    with Ledger.open(workspace.ledger_file) as ledger:
        check_answered(workspace, ledger, workspace.study())


def print_status(workspace: Workspace, *, as_json: bool) -> StudyStatus:
    """Print a study's state.

    Args:
        workspace: The study's directory.
        as_json: Print JSON.

    Returns:
        The state.
    """
    from server.study.status import study_status

    status = study_status(workspace)
    say(json_text(status.to_json()) if as_json else joined(status.lines()))
    return status


def goes_on(directory: Path) -> str:
    """Say that a detached run goes on, and how to watch or stop it.

    Args:
        directory: The study's directory.

    Returns:
        A line.
    """
    study = shlex.quote(str(directory))
    return (
        f"the run goes on at the server; `consilium study watch {study}` attaches again, "
        f"`consilium study stop {study}` ends it"
    )


def print_detached(workspace: Workspace, *, complete: bool, as_json: bool) -> None:
    """Print that a detached run goes on, or that there is nothing to run; as JSON, print the study's state.

    Args:
        workspace: The study's directory.
        complete: True if the study was complete before.
        as_json: Print JSON; the text then goes to stderr.
    """
    named = shlex.quote(str(workspace.root))
    done = f"the study is complete, so no query is asked; `consilium study status {named}` shows it"
    say(done if complete else goes_on(workspace.root), err=as_json)
    if as_json:
        print_status(workspace, as_json=True)


def print_end(workspace: Workspace, *, as_json: bool) -> None:
    """Print the study's state after its run ended, and its student's gain over the controls.

    Args:
        workspace: The study's directory.
        as_json: Print JSON.

    Raises:
        AnswersMissing: If the run ended by itself and planned queries have no answer.
    """
    standing = print_status(workspace, as_json=as_json)
    if not as_json and workspace.bundle_dir.exists():
        _print_worth(workspace, warned=bool(standing.warnings))
    if standing.facts.unanswered and not standing.running and not workspace.stop_file.exists():
        raise AnswersMissing(standing)


def _print_worth(workspace: Workspace, *, warned: bool) -> None:
    from common.worth import ONE_RUN, GainWord
    from server.study.read_facts import read_measured

    found = read_measured(workspace.root, workspace.study().id)
    if found is None:
        root = shlex.quote(str(workspace.root))
        say(
            "the student's gain was not measured, because there is no validation set; to measure it: `consilium study "
            f"publish {root} --validation DIR`, then `consilium student export {root}`"
        )
        return
    say(f"Dice on the validation set: {found.line()}\n{ONE_RUN}")
    if found.worth.word is GainWord.PROVEN and warned:
        say(
            "the warning above is about the answers alone. The student was measured afterwards; the measurement does "
            "not show that all sites answered honestly"
        )


def say_rooms(workspace: Workspace, *, whole: bool = False) -> None:
    """Print which patient pools have too little budget left to answer all planned queries of a study.

    Args:
        workspace: The study's directory.
        whole: True to print every pool.
    """
    from server.ledger.server_ledger import Ledger
    from server.study.pools import revoked_pools, rooms

    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        found = rooms(ledger, study, revoked=revoked_pools(workspace))
    for room in found:
        if room.releases < room.wanted and not room.revoked:
            say(f"warning: {room.sentence}")
        elif whole:
            say(room.sentence)


def say_outlook(study: Study, *, hospitals: int, workspace: Workspace | None = None) -> bool:
    """Print what `consilium plan` says about this study, and its recommendation if this study is not worth its budget.

    Args:
        study: The study.
        hospitals: Number of hospitals.
        workspace: The study's directory once its codec is fitted. Before, the plan assumes codes of the largest
            allowed length whose coordinates all vary alike.

    Returns:
        False if the plan advises against spending the budget.

    Raises:
        InvalidInput: If ``workspace`` is given and holds no fitted codec.
    """
    from server.planning.codec_spread import codec_stds
    from server.planning.planner import Outlook, plan
    from server.planning.recommend import NOT_REHEARSED, recommend, study_prospects
    from server.protocols.query_protocol import protocol_of

    privacy = study.privacy
    dimension = study.codec.max_dimension if workspace is None else workspace.codec().dimension
    stds = () if workspace is None else codec_stds(workspace)
    if study.start.weights:
        say(f"plan: {NOT_REHEARSED}")
    terms: dict[str, Any] = {
        "budget": privacy.budget,
        "accountant": privacy.accountant,
        "protection": privacy.protection,
        "hospitals": hospitals,
        "colluders": privacy.sealed_colluders,
    }
    try:
        advised = recommend(**terms, paired=study.codec.paired)
        expected = study_prospects(study, hospitals=hospitals)
        if expected is not None:
            say(f"plan: this study with {expected.hospitals} hospitals: {expected.summary}")
            if advised.worth_asking and not expected.worth_asking:
                say(f"recommended instead: {advised.summary}")
            return expected.worth_asking
        if study.codec.terms.prospects:
            say(f"plan: {protocol_of(study).agenda(study).plan}; `consilium plan --label-maps` predicts the gain")
            return True
        found = plan(
            **terms,
            queries=privacy.planned_queries,
            voters_per_site=privacy.voters_per_site,
            radius=study.codec.radius,
            dimension=dimension,
            spectrum=[std**2 for std in stds] or None,
            spare_draws=privacy.spare_draws,
        )
    except InvalidInput as error:  # print it and continue, since nothing depends on it
        say(f"plan: {error}")
        return True
    say(f"plan: {found.summary}")
    if found.verdict is not Outlook.INFORMATIVE:
        say(f"recommended instead: {advised.summary} (`consilium plan --study` shows more)")
    return found.verdict is not Outlook.PRIOR


def ask_to_spend(*, go_on: bool) -> None:
    """Ask at a terminal whether to spend a budget although the plan advises against it. Without a terminal only warn.

    Args:
        go_on: True to spend it without asking.

    Raises:
        InvalidInput: If the answer is no.
    """
    doubt = "the plan above advises against spending this budget, and a spent budget cannot be restored"
    if not go_on and sys.stdin.isatty():
        if not typer.confirm(f"{doubt}; spend it"):
            raise InvalidInput(
                "spending the budget was not confirmed",
                limit="the answer y",
                remedy="plan another study with `consilium plan --study`, or run this one with --yes",
            )
    elif not go_on:
        say(f"warning: {doubt}", err=True)


def say_left_out(what: str, dataset: Dataset, *, err: bool = False) -> None:
    """Print how many cases of a public dataset are used, and which are left out and why.

    Args:
        what: Name of the dataset in sentences.
        dataset: The dataset.
        err: Print to stderr.
    """
    unlabelled = len(dataset.cases) - len(dataset.labelled)
    for line in left_out_lines(len(dataset.labelled), dataset.problems):
        say(plain(f"{what} {line}"), err=err)
    if unlabelled:
        say(f"{what} cases without a label map, which are not used: {unlabelled}", err=err)


def say_files(what: str, folder: Path, *, err: bool = False) -> None:
    """Print how many public NIfTI files of a folder are used, and what else is in the folder and why it is left out.

    Args:
        what: Name of the files in sentences.
        folder: The folder.
        err: Print to stderr.
    """
    others = other_files(folder)
    for line in left_out_lines(len(nifti_files(folder, what=f"folder of {what}")), others, of="files"):
        say(plain(f"{what}, {line}"), err=err)


def given_network(path: Path | None, data: DataConfig) -> GivenStart | None:
    """Read the network of ``--start``.

    Args:
        path: A bundle or a file of weights.
        data: The study's labels and channels.

    Returns:
        The network; None without the option.
    """
    if path is None:
        return None
    from server.study.start import read_given  # torch

    return read_given(path, data)


def create_and_say(
    directory: Path,
    study: Study,
    *,
    ledger: Path | None,
    standing: Path | None,
    given: GivenStart | None = None,
) -> None:
    """Create a study's directory, then print the study's terms, the plan's verdict, and what the study costs each pool.

    Args:
        directory: The new directory.
        study: The study.
        ledger: A ledger to share; None for its own.
        standing: Path of the ledger's standing file; None for its place beside the ledger.
        given: The network that the study begins from, if any.
    """
    from server.study import consent_text as describe
    from server.study import create_study as setup

    weights = None if given is None else given.weights
    setup.create_study(Workspace(directory), study, ledger=ledger, standing=standing, start=weights)
    if given is not None and (remark := given.remark(study.data)):
        say(remark, err=True)
    say(describe.for_consortium(study, sites=study.privacy.quorum))
    neighbours = [path for path in setup.studies_beside(directory) if Workspace(path).ledger_file.exists()]
    if ledger is None and neighbours:
        say(f"this study has its own ledger; to count patients' budgets over both studies: --ledger {neighbours[0]}")
    say_outlook(study, hospitals=study.privacy.quorum)
    say(
        "to give pools another lifetime ε: `consilium study init --pool-epsilon`, or for one hospital "
        "`consilium provision approve --pool-epsilon`"
    )
    say_rooms(Workspace(directory), whole=True)
    say(f"created {directory}; next: `consilium study publish {shlex.quote(str(directory))} --images DIR`")
