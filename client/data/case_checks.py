"""Examines every case of a dataset as training would, and states whether it is good, odd or broken.

`site doctor` calls it. Cases are read one at a time. The module makes the checks of training, and two more that compare
cases: whether two cases have identical voxels, and whether a structure is much larger or smaller than in the other
cases. Each verdict states the case's number in the dataset's order, so that a report can omit names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from common.config import DataConfig
from common.data.access import why_unread
from common.data.dataset import Case, Dataset, Problem
from common.data.volume import Example, load_case, load_example
from common.errors import InvalidInput
from common.models.native import load_native

UNUSUAL_FACTOR = 4.0
LEAST_CASES_TO_COMPARE = 8


class CaseVerdict(StrEnum):
    """The verdict on a case.

    GOOD cases are used unchanged. ODD cases are used, but something was corrected or is unusual. DOUBLED cases are
    used too, although another case has the same voxels. BROKEN cases are left out.
    """

    GOOD = "good"
    ODD = "odd"
    DOUBLED = "doubled"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One case's verdict.

    Attributes:
        number: Position in the order of ids, from 1.
        case: The case's id; it must not leave the site.
        verdict: Good, odd, doubled or broken.
        findings: The reasons, without names.
        remedy: What to do about a broken case.
        volumes_ml: Size of each structure in ml on the study's grid; empty for a case that cannot be read.
        foreign: Modalities of the scan that are not the study's.
    """

    number: int
    case: str
    verdict: CaseVerdict
    findings: tuple[str, ...] = ()
    remedy: str = ""
    volumes_ml: tuple[float, ...] = ()
    foreign: frozenset[str] = frozenset()


def readable(dataset: Dataset, *, on_case: Callable[[int, int], None] = lambda done, total: None) -> Dataset:
    """Return the dataset without the cases whose files cannot be used.

    Every file is opened once. The study's settings are not needed: each label map is read on the voxels of its own
    image, so no case is left out for where its structures lie.

    Args:
        dataset: The dataset.
        on_case: Called with the number of cases done and the total.

    Returns:
        The dataset without these cases. Each of them is listed in ``problems``, with the reason.

    Raises:
        InvalidInput: If no case is left.
    """
    terms = DataConfig(dataset.labels, (1.0, 1.0, 1.0), (8, 8, 8), dataset.channels, dataset.regions)
    good, bad = [], []
    for number, case in enumerate(dataset.cases, start=1):
        try:
            load_native(case, terms)
            good.append(case)
        except Exception as error:  # noqa: BLE001  # as in training
            bad.append(Problem(case.id, why_unread(error)))
        on_case(number, len(dataset.cases))
    if not good:
        first = (*dataset.problems, *bad)[0]
        raise InvalidInput(
            "usable cases",
            value=0,
            limit="at least one",
            remedy=f"repair the cases; the problem of the first one, {first.case}, is: {first.reason}",
        )
    return replace(dataset, cases=tuple(good), problems=(*dataset.problems, *bad))


def examine(
    dataset: Dataset,
    data: DataConfig,
    *,
    repeated: Collection[str] = (),
    on_case: Callable[[int], None] = lambda done: None,
) -> tuple[CheckedCase, ...]:
    """Examine every case of a dataset that was matched to a study.

    Args:
        dataset: The dataset, with the study's label numbers and channel order.
        data: The study's labels, channels and grid.
        repeated: Cases that training leaves out because their patient has the same scan twice.
        on_case: Called with the number of cases done.

    Returns:
        One verdict for each case, in the order of ids.
    """
    known = {problem.case: problem for problem in dataset.problems}
    cases = {case.id: case for case in dataset.cases}
    seen: dict[str, int] = {}
    results: list[CheckedCase] = []
    for number, name in enumerate(sorted(known.keys() | cases.keys()), start=1):
        if name in known:
            reason, remedy = _split(known[name].reason)
            results.append(CheckedCase(number, name, CaseVerdict.BROKEN, (reason,), remedy))
        else:
            one = _examine(number, cases[name], dataset, data, seen, results)
            out = one.verdict is CaseVerdict.DOUBLED and name in repeated
            results.append(replace(one, verdict=CaseVerdict.BROKEN) if out else one)
        on_case(number)
    return tuple(_compared(results, data))


def _examine(
    number: int, case: Case, dataset: Dataset, data: DataConfig, seen: dict[str, int], before: list[CheckedCase]
) -> CheckedCase:
    try:
        if case.label is None:
            volume = load_case(case, data)
            example = Example(volume, np.zeros(data.grid, dtype=np.uint8), volume.notes)
        else:
            example = load_example(case, data)
    except Exception as error:  # noqa: BLE001  # as in training
        reason, remedy = _split(why_unread(error))
        return CheckedCase(number, case.id, CaseVerdict.BROKEN, (reason,), remedy)
    voxel_ml = math.prod(data.spacing_mm) / 1000
    counts = np.bincount(example.label.ravel(), minlength=len(data.labels))[1:]
    content = hashlib.sha256(example.volume.image.tobytes()).hexdigest()
    same = seen.setdefault(content, number)
    sizes = tuple(float(count) * voxel_ml for count in counts) if case.label is not None else ()
    if same != number:
        patients = {dataset.patient_of(before[same - 1].case), dataset.patient_of(case.id)}
        whose = "of another patient: that patient would count twice" if len(patients) > 1 else "of the same patient"
        return CheckedCase(
            number,
            case.id,
            CaseVerdict.DOUBLED,
            (f"the same voxels as case {same}, {whose}",),
            "take one of them out",
            sizes,
        )
    findings = dict.fromkeys(example.notes)
    verdict = CaseVerdict.ODD if findings else CaseVerdict.GOOD
    return CheckedCase(number, case.id, verdict, tuple(findings), "", sizes, example.volume.foreign)


def _compared(results: list[CheckedCase], data: DataConfig) -> Iterator[CheckedCase]:
    """Yield every verdict; a case is odd if one of its structures is far from the median of the cases that have it."""
    sizes = np.array([r.volumes_ml for r in results if r.volumes_ml and r.verdict is not CaseVerdict.BROKEN])
    if len(sizes) < LEAST_CASES_TO_COMPARE:
        yield from results
        return
    medians = [float(np.median(column[column > 0])) if (column > 0).any() else 0.0 for column in sizes.T]
    for result in results:
        unusual = [
            f"{name} measures {size:.2g} ml, {max(size / median, median / size):.0f} times "
            f"{'more' if size > median else 'less'} than the median"
            for name, size, median in zip(data.labels[1:], result.volumes_ml, medians, strict=False)
            if size > 0 and median > 0 and not 1 / UNUSUAL_FACTOR <= size / median <= UNUSUAL_FACTOR
        ]
        if unusual and result.verdict is not CaseVerdict.BROKEN:
            verdict = max(result.verdict, CaseVerdict.ODD, key=list(CaseVerdict).index)
            result = replace(result, verdict=verdict, findings=(*result.findings, *unusual))
        yield result


def _split(text: str) -> tuple[str, str]:
    """Split an error's text into reason and remedy."""
    reason, _, remedy = text.partition("; to fix: ")
    return reason, remedy
