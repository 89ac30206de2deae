"""Look at every case of a dataset as training would, and say of each whether it is good, odd or broken.

Reads one case after the other, so memory is that of one. Beyond what training refuses, it compares the cases with each
other: the same voxels twice, a structure many times larger or smaller than usual. A verdict carries the case's number
in the dataset's order, so that a report can do without names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from common.config import DataConfig
from common.data.dataset import Case, Dataset, Problem
from common.data.volume import Example, load_case, load_example
from common.errors import InvalidInput

UNUSUAL_FACTOR = 4.0
LEAST_CASES_TO_COMPARE = 8


class CaseVerdict(StrEnum):
    """GOOD: used as it is. ODD: used, and something was put right or looks unusual. BROKEN: left out."""

    GOOD = "good"
    ODD = "odd"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Examined:
    """One case's verdict. ``number`` counts from 1 in the order of ids; ``case`` is for the site's own eyes.

    ``findings`` say why, without a name; ``remedy`` is what to do about a broken case. ``volumes_ml`` are the
    structures' sizes on the study's grid, empty for a case that does not read.
    """

    number: int
    case: str
    verdict: CaseVerdict
    findings: tuple[str, ...] = ()
    remedy: str = ""
    volumes_ml: tuple[float, ...] = ()


def readable(dataset: Dataset, *, on_case: Callable[[int, int], None] = lambda done, total: None) -> Dataset:
    """The dataset without the cases whose files cannot be used; why stands among its problems, by name.

    Opens every file once, before there is a study's grid. InvalidInput where no case is left.
    """
    terms = DataConfig(dataset.labels, (1.0, 1.0, 1.0), (8, 8, 8), dataset.channels, dataset.regions)
    good, bad = [], []
    for number, case in enumerate(dataset.cases, start=1):
        try:
            load_case(case, terms) if case.label is None else load_example(case, terms)
            good.append(case)
        except InvalidInput as error:
            bad.append(Problem(case.id, str(error)))
        on_case(number, len(dataset.cases))
    if not good:
        first = (*dataset.problems, *bad)[0]
        raise InvalidInput("usable cases", value=0, limit="at least one", remedy=f"{first.case}: {first.reason}")
    return replace(dataset, cases=tuple(good), problems=(*dataset.problems, *bad))


def examine(
    dataset: Dataset, data: DataConfig, *, on_case: Callable[[int], None] = lambda done: None
) -> tuple[Examined, ...]:
    """A verdict on every case of a dataset that was matched to the study, listed or not, in the order of ids."""
    known = {problem.case: problem for problem in dataset.problems}
    cases = {case.id: case for case in dataset.cases}
    seen: dict[str, int] = {}
    results: list[Examined] = []
    for number, name in enumerate(sorted(known.keys() | cases.keys()), start=1):
        if name in known:
            reason, remedy = _split(known[name].reason)
            results.append(Examined(number, name, CaseVerdict.BROKEN, (reason,), remedy))
        else:
            results.append(_examine(number, cases[name], dataset, data, seen, results))
        on_case(number)
    return tuple(_compared(results, data))


def _examine(
    number: int, case: Case, dataset: Dataset, data: DataConfig, seen: dict[str, int], before: list[Examined]
) -> Examined:
    try:
        if case.label is None:
            volume = load_case(case, data)
            example = Example(volume, np.zeros(data.grid, dtype=np.uint8), volume.notes)
        else:
            example = load_example(case, data)
    except InvalidInput as error:
        reason, remedy = _split(str(error))
        return Examined(number, case.id, CaseVerdict.BROKEN, (reason,), remedy)
    voxel_ml = math.prod(data.spacing_mm) / 1000
    counts = np.bincount(example.label.ravel(), minlength=len(data.labels))[1:]
    content = hashlib.sha256(example.volume.image.tobytes()).hexdigest()
    same = seen.setdefault(content, number)
    sizes = tuple(float(count) * voxel_ml for count in counts) if case.label is not None else ()
    if same != number:
        patients = {dataset.patient_of(before[same - 1].case), dataset.patient_of(case.id)}
        whose = "of another patient: that patient would count twice" if len(patients) > 1 else "of the same patient"
        return Examined(
            number,
            case.id,
            CaseVerdict.BROKEN,
            (f"the same voxels as case {same}, {whose}",),
            "take one of them out",
            sizes,
        )
    findings = dict.fromkeys(example.notes)
    return Examined(number, case.id, CaseVerdict.ODD if findings else CaseVerdict.GOOD, tuple(findings), "", sizes)


def _compared(results: list[Examined], data: DataConfig) -> Iterator[Examined]:
    """Structures of unusual size, told by the median over the cases that have them."""
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
            result = replace(result, verdict=CaseVerdict.ODD, findings=(*result.findings, *unusual))
        yield result


def _split(text: str) -> tuple[str, str]:
    """A reason and its remedy, as the errors of this package join them."""
    reason, _, remedy = text.partition("; to fix: ")
    return reason, remedy
