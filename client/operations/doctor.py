"""Runs the checks of `consilium site doctor`: of the site's directory, and of its data, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from client.data.case_checks import CaseVerdict, CheckedCase, examine
from client.data.cases import delta_warning
from client.data.layouts import DatasetSettings, match_study, open_dataset
from client.operations.findings import CheckResult, State, fail, failure, note, unnamed_failure
from client.operations.readiness import check_site
from client.policy import load_site
from client.records.patient_deal import (
    LOOK_ALIKE_REMEDY,
    check_listed,
    look_alike_names,
    look_alike_text,
    look_alikes,
)
from client.records.scan_patients import check_scans
from client.site.books import slots_file
from common.config import DataConfig, load_study
from common.data.dataset import Case, Dataset, DuplicateCases, PatientIdentity, case_names
from common.data.patients import counted_once, scans_by_patient
from common.data.volume import Volume, load_case, load_label
from common.errors import InvalidInput
from common.names import modality_in
from common.objects import write_atomically
from common.stated_budget import StatedBudget
from common.wording import many

if TYPE_CHECKING:
    from jaxtyping import UInt8

_STATES = {
    CaseVerdict.GOOD: State.OK,
    CaseVerdict.ODD: State.NOTE,
    CaseVerdict.DOUBLED: State.FAIL,
    CaseVerdict.BROKEN: State.FAIL,
}
SHOWN_CASES = 5
"""Number of cases that a finding about many cases names on the terminal."""


def diagnose(
    site_dir: Path | None,
    data: Path | None,
    *,
    study: Path | None,
    layout: str | None,
    label_map: Path | None,
    report: Path | None,
    on_case: Callable[[int, int], None],
) -> list[CheckResult]:
    """Check a site's directory, then its data. Options that are None are read from ``site.toml``.

    Args:
        site_dir: The site's directory; None to check data only.
        data: Folder of a dataset; None to check the directory only.
        study: The study's file; None for the file that ``site.toml`` names.
        layout: Layout of the dataset; None to read it from ``site.toml``.
        label_map: File that maps the dataset's labels to the study's; None to read the mapping from ``site.toml``.
        report: Directory below which pictures of suspicious cases are written; None for no pictures.
        on_case: Called with the number of cases done and the total.

    Returns:
        The findings.

    Raises:
        InvalidInput: If there is nothing to check, or no study is known.
    """
    if site_dir is None and data is None:
        raise InvalidInput("there is nothing to check", remedy="give --site-dir, --data, or both")
    findings = [] if site_dir is None else list(check_site(site_dir))
    if data is None:
        return findings
    settings, slots = DatasetSettings(), None
    if site_dir is not None:
        config = load_site(site_dir)
        try:
            slots = slots_file(config)
        except InvalidInput as error:
            findings.append(failure("patients", error, "restore the files of the assignment of patients to voters"))
        study, settings = study or config.path(config.study), config.dataset
    if study is None:
        raise InvalidInput("no study to check the data for", remedy="give --study, or --site-dir")
    settings = settings.overridden(layout=layout, label_map=label_map)
    terms = load_study(study)
    pictures = None if report is None else report / "pictures"
    found = check_data(
        data, terms.data, settings, stated=terms.privacy, slots=slots, pictures=pictures, on_case=on_case
    )
    return [*findings, *found]


def check_data(
    directory: Path,
    data: DataConfig,
    settings: DatasetSettings,
    *,
    stated: StatedBudget | None = None,
    slots: Path | None = None,
    pictures: Path | None = None,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> list[CheckResult]:
    """Check everything about a dataset that can be checked before training.

    Args:
        directory: The dataset's folder.
        data: The study's labels, channels and grid.
        settings: How the data are read.
        stated: The study's budget, whose δ is compared with the number of patients; None to skip this.
        slots: The pool's file of the assignment of patients to voters; None without a site.
        pictures: Directory for a picture of each case that is not good but can be shown; None for no pictures.
        on_case: Called with the number of cases done and the total.

    Returns:
        The findings; a single failure if the dataset cannot be used at all.
    """
    try:
        own = open_dataset(directory, layout=settings.layout, patients=settings.patients, choice=settings.choice)
        dataset = match_study(own, data, labels=settings.labels, channels=settings.channels, absent=settings.absent)
    except (InvalidInput, OSError) as error:
        return [unnamed_failure("dataset", error)]
    if pictures is not None:
        pictures.mkdir(mode=0o700, parents=True, exist_ok=True)
        pictures.chmod(0o700)
        for old in pictures.glob("case-*.png"):
            old.unlink()
    total = len(dataset.cases) + len(dataset.problems)
    findings = [_patients(dataset), *_assignable(dataset, slots), *_delta(dataset, stated)]
    findings += _modality(own.channels, data, settings)
    once = counted_once(dataset)
    findings += map(_doubled, once.doubled)
    repeated = {case.id for case in dataset.labelled} - {case.id for case in once.labelled}
    results = examine(dataset, data, repeated=repeated, on_case=lambda done: on_case(done, total))
    good, odd, doubled, broken = (sum(one.verdict is verdict for one in results) for verdict in CaseVerdict)
    usable = good + odd + doubled
    also = f"{doubled} used although another case has the same voxels, " if doubled else ""
    findings.append(
        CheckResult(
            "cases",
            State.OK if usable else State.FAIL,
            f"{many(len(results), 'case')}: {good} good, {odd} odd and used, {also}{broken} left out; "
            "files and labels were checked; `consilium site evaluate` checks whether images suit the study's networks",
            "" if usable else "repair the cases below",
        )
    )
    labelled = {case.id for case in dataset.labelled}
    if not any(one.case in labelled and one.verdict is not CaseVerdict.BROKEN for one in results):
        remedy = "give the folder that contains images and label maps, or repair the cases below"
        findings.append(fail("cases", "no case with a label map is usable", remedy))
    if dataset.unlisted:
        findings.append(
            CheckResult(
                "cases",
                State.NOTE,
                f"{len(dataset.unlisted)} more in imagesTr or labelsTr, which dataset.json does not list; no voter "
                "uses them",
                "list them in dataset.json, or take their files out",
                subject=", ".join(problem.case for problem in dataset.unlisted),
            )
        )
    if dataset.unlabelled:
        findings.append(
            CheckResult(
                "cases",
                State.NOTE,
                f"{many(len(dataset.unlabelled), 'case')} without a label map; no voter uses a case without one",
                "if they should have one, put it where the layout expects it",
                subject=case_names(dataset.unlabelled),
            )
        )
    findings += _foreign(results, data)
    cases = {case.id: case for case in dataset.cases}
    for result in results:
        if result.verdict is not CaseVerdict.GOOD:
            findings.append(_case(result, cases.get(result.case), data, pictures))
    return findings


def _doubled(pair: DuplicateCases) -> CheckResult:
    return fail(
        "patients",
        "one scan or label map occurs under two patients, so the guarantee for one patient does not cover this person",
        "take one of the two out, give each its own file, or give both the same patient in patients.csv",
        subject=f"{pair.same_as}, {pair.case}",
    )


def _case(result: CheckedCase, case: Case | None, data: DataConfig, pictures: Path | None) -> CheckResult:
    picture = ""
    if pictures is not None and case is not None and (shown := _readable(case, data)) is not None:
        path = pictures / f"case-{result.number:04d}.png"
        write_atomically(path, _drawn(*shown, data, title=f"case {result.number}"), mode=0o600)
        picture = f"{pictures.name}/{path.name}"
    return CheckResult(
        "case",
        _STATES[result.verdict],
        "; ".join(result.findings),
        result.remedy,
        number=result.number,
        subject=result.case,
        picture=picture,
    )


def _patients(dataset: Dataset) -> CheckResult:
    count = len(dataset.patients_listed)
    state = State.NOTE if dataset.patient_identity is PatientIdentity.FILE else State.OK
    remedy = "if patients have several scans, put a patients.csv beside the data" if state is State.NOTE else ""
    cases = len(dataset.listed) + len(dataset.unnamed)
    text = f"{many(count, 'patient')} in {many(cases, 'labelled case')}: {dataset.patient_identity.sentence}"
    return CheckResult("patients", state, text, remedy)


def _assignable(dataset: Dataset, slots: Path | None) -> list[CheckResult]:
    """Report patients whom training would refuse to assign to voters, and patients whose names look alike."""
    scans = scans_by_patient(dataset)
    try:
        if slots is not None:
            check_scans(slots, scans, identity=dataset.patient_identity)
        check_listed(slots, scans)
        alike = look_alikes(slots, scans)
    except InvalidInput as error:
        return [unnamed_failure("patients", error)]
    if not alike:
        return []
    named = look_alike_names(alike)
    return [CheckResult("patients", State.NOTE, look_alike_text(alike), LOOK_ALIKE_REMEDY, subject=named)]


def _delta(dataset: Dataset, stated: StatedBudget | None) -> list[CheckResult]:
    if stated is None:
        return []
    warning = delta_warning(stated, patients=len(dataset.patients_listed))
    return [] if warning is None else [note("delta", warning, "ask the consortium for a smaller δ")]


def _modality(channels: tuple[str, ...], data: DataConfig, settings: DatasetSettings) -> list[CheckResult]:
    """Report a single channel that the dataset names by another modality; match_study accepts any single name."""
    if len(channels) != 1 or len(data.channels) != 1 or channels[0] in settings.channels:
        return []
    (own,), (wanted,) = channels, data.channels
    if (kind := modality_in(own)) == "MR" or kind == modality_in(wanted):
        return []
    return [
        fail(
            "modality",
            f"the dataset says that its images are {kind}; allowed: the modality of the study's channel, {wanted}",
            "use scans of that modality; if these are, correct the channel's name in the dataset's index, or map it in "
            "[channels] of site.toml",
            subject=own,
        )
    ]


def _foreign(results: Sequence[CheckedCase], data: DataConfig) -> list[CheckResult]:
    """Report scans whose DICOM header or Hounsfield values show another modality than the study's channels name."""
    usable = [result for result in results if result.verdict is not CaseVerdict.BROKEN]
    found = [result for result in usable if result.foreign]
    if not found:
        return []
    kinds = ", ".join(sorted(frozenset().union(*(result.foreign for result in found))))
    return [
        CheckResult(
            "modality",
            State.FAIL if len(found) == len(usable) else State.NOTE,
            f"{len(found)} of {len(usable)} usable cases are {kinds} by their DICOM header or values; allowed: the "
            f"modality of the study's channels, {', '.join(data.channels)}",
            "use scans of that modality; if the study means these, ask the consortium to name its channel so",
            subject=", ".join([*(result.case for result in found[:SHOWN_CASES]), *["…"] * (len(found) > SHOWN_CASES)]),
        )
    ]


def _readable(case: Case, data: DataConfig) -> tuple[Volume, UInt8[np.ndarray, "x y z"] | None] | None:
    """Return a case's image, and its label map if it can be used; None if the image cannot be read."""
    try:
        volume = load_case(case, data)
    except Exception:  # noqa: BLE001  # examine has reported it
        return None
    try:
        if case.label is None:
            return volume, None
        return volume, load_label(
            case.label, data, volume=volume, mapping=dict(case.label_map), structures=dict(case.structures)
        )
    except Exception:  # noqa: BLE001  # examine has reported it
        return volume, None


def _drawn(volume: Volume, label: UInt8[np.ndarray, "x y z"] | None, data: DataConfig, *, title: str) -> bytes:
    """Draw a case in three planes through its structures, each in a line style of its own."""
    from common.case_pictures import OUTLINES, TRUTH, draw_planes

    named = list(zip(data.labels[1:], cycle(OUTLINES.values())))
    here = [] if label is None else [named[value - 1] for value in np.unique(label[label > 0])]
    said = "; ".join(f"{name}: {style.words}" for name, style in here) or "no structure"
    return draw_planes(
        volume.image[0],
        {} if label is None else {TRUTH: label},
        data.spacing_mm,
        title="\n".join(wrap(f"{title} ({'no label map fits' if label is None else said})", 110)),
        by_label=True,
    )
