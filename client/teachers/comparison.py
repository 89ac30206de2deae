"""Compares the student with the public models and teachers that a site has, on the site's own cases.

``client.teachers.evaluation`` calls it. This comparison is the best test for poisoned answers: the server's own tests
detect few of them, and a site's Dice alone does not show what a model from public data would have reached.

* Public models are the public start (the weights from which a joint study's teachers begin) or the codec's mean shape
  (what the codec decodes from the zero code). They were trained on no case of this site, so every case is compared.
* The site's own teachers are compared on cases that none of them was trained on.

Differences are paired over cases. If a comparison is impossible, it is reported with the reason; nothing is refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from client.site.enrolment import study_start
from client.teachers.evaluation_input import PARTS
from client.teachers.teacher import Teachers
from common.codecs import load_codec, shapes
from common.config import Study
from common.errors import InvalidInput
from common.measured_gain import GainVerdict, MeasuredGain, measured_gain
from common.models.fit import predict
from common.models.unet import load_weights, network_for
from common.objects import ObjectStore
from common.reading import lenient_json

Answer = Callable[[Float[np.ndarray, "c x y z"]], Float[np.ndarray, "k x y z"]]
"""A function from a volume to its class probabilities, both on the study's grid."""

Dice = tuple[float, ...]
"""One case's Dice of each structure: nan if it is in neither label map, 0 if the maps do not overlap."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model with which the student is compared.

    Attributes:
        name: Name in texts.
        answer: The model, as a function from a volume to probabilities.
        public: True if it was made without any site's data. A student that scores lower than it is of no use.
        without: Function that takes a voter's number and returns the model without this voter's teacher; None if no
            other voter has a teacher. The student is compared with this model on the cases of the left-out voter.
    """

    name: str
    answer: Answer
    public: bool
    without: Callable[[int], Answer | None] = lambda voter: None

    def untrained(self, part: str, voter: int) -> Answer | None:
        """Return the model that may score a case: without the voter that was trained on it.

        Args:
            part: How the site's teachers used the case, of :data:`~client.teachers.evaluation_input.PARTS`.
            voter: The case's voter.

        Returns:
            The model; None if no voter is left.
        """
        return self.without(voter) if part == PARTS[0] and not self.public else self.answer


@dataclass(frozen=True, slots=True)
class MissingComparison:
    """A reference with which this site cannot compare, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class MissedStructure:
    """A structure for which the student has Dice 0 in most cases.

    Attributes:
        structure: Name of the structure.
        cases: Number of cases in which the structure is in the student's label map or in the hospital's.
        missed: Number of these in which the student has Dice 0.
        who: Name of the scored model in sentences: student or adapted network.
    """

    structure: str
    cases: int
    missed: int
    who: str = "student"

    def sentence(self) -> str:
        """Return the finding as a sentence."""
        return f"{self.structure}: GONE: the {self.who} finds nothing of it in {self.missed} of {self.cases} cases"


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """The student compared with a reference, for one structure or for all together.

    Attributes:
        measured: The student's gain over the reference, over the cases in which at least one of them has a Dice.
        public: True if the reference was made without any site's data.
        structure: Name of the structure, or :data:`ALL`.
        missed: Number of cases in which the student has Dice 0.
        reference_missed: Number of cases in which the reference has Dice 0.
    """

    measured: MeasuredGain
    public: bool
    structure: str
    missed: int
    reference_missed: int

    @property
    def alarming(self) -> bool:
        """True if the student is proven worse than a model made from public data only."""
        return self.public and self.measured.word is GainVerdict.WORSE

    @property
    def figures(self) -> str:
        """The mean Dice of both models and their difference, without the verdict."""
        return f"{self._where}{self.measured.figures}"

    @property
    def _where(self) -> str:
        return "" if self.structure == ALL else f"{self.structure}: "

    def sentence(self) -> str:
        """Return the comparison as a sentence."""
        missed = ""
        if self.missed > self.reference_missed:
            missed = f" Nothing found in {self.missed} of them, {self.measured.reference} in {self.reference_missed}."
        return f"{self._where}{self.measured.sentence}{missed}"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        found = self.measured
        return {
            "reference": found.reference,
            "public": self.public,
            "structure": self.structure,
            "cases": found.cases,
            "student": found.student,
            "other": found.other,
            "difference": found.gain,
            "half_width": found.half_width,
            "missed": self.missed,
            "reference_missed": self.reference_missed,
            "word": str(found.word),
            "alarming": self.alarming,
            "sentence": self.sentence(),
        }


ALL = "all structures"
PUBLIC_START = "the public start"
MEAN_SHAPE = "the public mean shape"
OWN_TEACHERS = "this site's own teachers"


def references(site_dir: Path, study: Study, *, codec: str | None) -> tuple[list[Reference], list[MissingComparison]]:
    """Collect the models with which this site can compare a student, from its own directory.

    The mean shape is left out if there is a public start, which knows more than the mean shape and is harder to beat.

    Args:
        site_dir: The site's directory.
        study: The study.
        codec: The codec's hash, as the bundle states it; None if it states none.

    Returns:
        The references, and those that are missing with reasons.
    """
    found: list[Reference] = []
    missing: list[MissingComparison] = []
    for name, load, public in (
        (PUBLIC_START, partial(_start, site_dir, study), True),
        (MEAN_SHAPE, partial(_mean_shape, site_dir, study, codec), True),
        (OWN_TEACHERS, partial(_teachers, site_dir, study), False),
    ):
        if name == MEAN_SHAPE and found:  # the start knows more than the mean shape
            continue
        try:
            own = load()
            answer, without = own if isinstance(own, tuple) else (own, lambda _voter: None)
            found.append(Reference(name, _at(answer, study.data.finer), public, partial(_without, without, study)))
        except InvalidInput as error:
            missing.append(MissingComparison(name, str(error)))
    return found, missing


def _at(answer: Answer, finer: int) -> Answer:
    """Return a function that predicts on the student's grid, which has ``finer`` times the voxels along each axis.

    It averages the volume onto the grid of ``answer``, predicts there, and enlarges the prediction.
    """
    if finer == 1:
        return answer
    return lambda image: shapes.enlarge(answer(shapes.pool(image, factor=finer)), factor=finer)


def _start(site_dir: Path, study: Study) -> Answer:
    path = study_start(site_dir, study)
    if path is None:
        raise InvalidInput("the study has no public start, so the site's kit contained none")
    recipe, data = study.student, study.data
    model = network_for(recipe, data)
    load_weights(path, model)
    return partial(predict, model.eval(), patch=recipe.patch)


def _mean_shape(site_dir: Path, study: Study, codec: str | None) -> Answer:
    """Return a model that predicts the codec's mean shape (the decoded zero code) for every volume."""
    cache = site_dir / "cache"
    if codec is None or not (cache / codec).is_file():
        raise InvalidInput(
            "this site does not have the study's codec, because it has answered no query of the study",
            remedy="evaluate again after the site has answered",
        )
    opened = load_codec(ObjectStore(cache).get(codec), expected_hash=codec)
    shape = opened.decode(np.zeros(opened.dimension), noise_std=0.0)
    expected = (len(study.data.labels), *study.data.grid)
    if shape.shape != expected:
        raise InvalidInput("shape of the codec's mean prediction", value=shape.shape, limit=f"{expected}, the study's")
    return lambda _image: shape


def _without(without: Callable[[int], Answer | None], study: Study, voter: int) -> Answer | None:
    answer = without(voter)
    return None if answer is None else _at(answer, study.data.finer)


def _teachers(site_dir: Path, study: Study) -> tuple[Answer, Callable[[int], Answer | None]]:
    """Return the mean prediction of the site's teachers, and a function that returns the mean without one voter."""
    teachers = Teachers.load(site_dir / "teachers", data=study.data)
    voters = [number for number, model in enumerate(teachers.models) if model is not None]
    if not voters:
        raise InvalidInput("none of the site's teachers has weights", remedy="run `consilium site train`")

    def mean_of(image: Float[np.ndarray, "c x y z"], *, but: int | None = None) -> Float[np.ndarray, "k x y z"]:
        each = [found for number, found in enumerate(teachers.predict(image)) if found is not None and number != but]
        result: np.ndarray = np.mean(each, axis=0)
        return result

    def without(voter: int) -> Answer | None:
        return partial(mean_of, but=voter) if set(voters) - {voter} else None

    return mean_of, without


def codec_of(bundle: Path) -> str | None:
    """Return the codec's hash from a bundle's statement of privacy.

    Args:
        bundle: The bundle's folder.

    Returns:
        The hash; None if the bundle states none.
    """
    try:
        name = lenient_json((bundle / "configs" / "privacy.json").read_text(encoding="utf-8"))["codec"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and len(name) == 64 and set(name) <= set("0123456789abcdef") else None


def missed_structures(
    structures: Sequence[str], student: Sequence[Dice], *, who: str = "student"
) -> list[MissedStructure]:
    """Find the structures for which the student has Dice 0 in most cases. No reference is needed.

    Args:
        structures: Names of the structures.
        student: The student's Dice of each case.
        who: Name of the scored model in sentences.

    Returns:
        The structures with Dice 0 in more than half of the cases in which they are in the student's label map or in the
        hospital's.
    """
    found = []
    for structure, column in zip(structures, zip(*student, strict=True), strict=True):
        present = [dice for dice in column if not math.isnan(dice)]
        missed = sum(dice == 0 for dice in present)
        if 2 * missed > len(present):
            found.append(MissedStructure(structure, len(present), missed, who))
    return found


def compare(
    reference: Reference,
    structures: Sequence[str],
    student: Sequence[Dice],
    other: Sequence[Dice],
    *,
    who: str = "student",
) -> list[CaseComparison]:
    """Compare the student with a reference on the same cases, for all structures together and for each one.

    If a case lacks a structure and one model found it there, that model has Dice 0. The other model, which correctly
    found nothing, has no Dice and counts as 1. Without this rule a student that finds a structure in every case would
    not be compared on the cases that lack it.

    Args:
        reference: The reference.
        structures: Names of the structures.
        student: The student's Dice of each case.
        other: The reference's Dice of the same cases.
        who: Name of the scored model in sentences.

    Returns:
        One comparison for each structure with a case to compare.
    """
    rows = []
    for structure in (ALL, *structures):
        one = None if structure == ALL else structures.index(structure)
        pairs = [
            pair
            for ours, theirs in zip(student, other, strict=True)
            if (pair := _pair(ours, theirs) if one is None else _pair(ours[one : one + 1], theirs[one : one + 1]))
        ]
        if measured := measured_gain(pairs, reference=reference.name, who=who):
            missed, reference_missed = (sum(dice == 0 for dice in column) for column in zip(*pairs, strict=True))
            rows.append(CaseComparison(measured, reference.public, structure, missed, reference_missed))
    return rows


def _pair(ours: Dice, theirs: Dice) -> tuple[float, float] | None:
    """Return both mean Dice over the structures for which at least one has a value; None if neither has one."""
    pairs = [
        (1.0 if math.isnan(a) else a, 1.0 if math.isnan(b) else b)
        for a, b in zip(ours, theirs, strict=True)
        if not (math.isnan(a) and math.isnan(b))
    ]
    return (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)) if pairs else None
