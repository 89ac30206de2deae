"""Prints the texts that several commands share: a study's plan, its pools' budgets, and which public files it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.config import Study
from common.data.dataset import Dataset, left_out_lines
from common.data.msd import nifti_files, other_files
from common.errors import InvalidInput
from common.plain import plain
from consilium.cli.say import say
from server.study.workspace import Workspace


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
        found = rooms(ledger, study, revoked=revoked_pools(ledger, workspace))
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
    from server.planning.planner import PlanVerdict, plan
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
            say(f"plan: {protocol_of(study).query_plan(study).plan}; `consilium plan --label-maps` predicts the gain")
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
    if found.verdict is not PlanVerdict.INFORMATIVE:
        say(f"recommended instead: {advised.summary} (`consilium plan --study` shows more)")
    return found.verdict is not PlanVerdict.PRIOR


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
