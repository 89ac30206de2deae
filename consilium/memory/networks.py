"""Trains a student in memory from labels and compares it with its controls on held-out cases.

``consilium.train_student`` and ``consilium.compare`` are defined here. Torch is imported only when a network is trained
or applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from common.canonical import MAX_INTEGER, check_integer
from common.config import STUDENT_RECIPE, Study, TrainingConfig
from common.data.copies import check_no_copy, voxel_hash
from common.data.volume_cache import together
from common.data_config import MAX_LABELS
from common.errors import InvalidInput
from common.privacy.checks import check_kind
from consilium.memory.given import array_given, images_given, label_map_given, listed, probabilities_given

if TYPE_CHECKING:
    import torch

    from common.measured_gain import MeasuredGain, Score

SEED = 0
STUDENT = "student"


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A trained network, called with an image float32 [c, x, y, z] to get probabilities float32 [k, x, y, z].

    Attributes:
        model: The torch module.
        recipe: The recipe of its training.
        seed: The seed of its training.
        fresh: True if its training began from random weights, False if it began from a public start.
        shape: Shape [c, x, y, z] of the images it was trained on, and the only one it takes; empty if unknown.
        trained_on: Hashes of the images it was trained on. ``compare`` scores no network on these images.

    >>> network = c.train_student(images[:2], maps[:2], recipe=study.student, classes=2)
    >>> network(np.zeros((1, 8, 8, 8), dtype=np.float32)).shape
    (2, 8, 8, 8)
    """

    model: torch.nn.Module
    recipe: TrainingConfig
    seed: int
    fresh: bool = True
    shape: tuple[int, ...] = ()
    trained_on: frozenset[str] = frozenset()

    def __call__(self, image: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "k x y z"]:
        """Return the class probabilities [k, x, y, z] of one image.

        Args:
            image: Finite numbers [c, x, y, z], or [x, y, z] if there is one channel, normalised as in the training.

        Returns:
            Float32 array [k, x, y, z].

        Raises:
            InvalidInput: For another shape or type, NaN or infinite values.
        """
        from common.models.fit import predict

        array = array_given(image, what="image")
        (checked,) = images_given([array], shape=self.shape or array.shape, what="image")
        if checked.ndim != 4:
            raise InvalidInput("shape of the image", value=checked.shape, limit="[c, x, y, z]")
        return predict(self.model, np.ascontiguousarray(checked), patch=self.recipe.patch)


@dataclass(frozen=True, slots=True, eq=False)
class Controls(Mapping[str, Network]):
    """A student's controls by name, together with their study. They are trained without the teachers' answers.

    Attributes:
        study: The study that the controls belong to.
        networks: The trained controls by name.

    >>> c.Controls(study, {})
    Controls(study=..., networks={})
    """

    study: Study
    networks: Mapping[str, Network]

    def __post_init__(self) -> None:
        check_kind("study", self.study, Study)
        if not isinstance(self.networks, Mapping) or not all(map(callable, self.networks.values())):
            raise InvalidInput("controls", value=type(self.networks).__name__, limit="a network for each name")

    def __getitem__(self, name: str) -> Network:
        return self.networks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.networks)

    def __len__(self) -> int:
        return len(self.networks)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The Dice of a student and of its controls on held-out cases.

    Attributes:
        scores: Scores by name; the student's is under ``"student"``.
        gain: The student's mean Dice minus the best control's, compared case by case; None without a control.

    >>> student = c.train_student(images[:2], maps[:2], recipe=study.student, classes=2)
    >>> result = c.compare(student, c.Controls(study, {}), held_out=[(images[2], maps[2])])
    >>> list(result.scores), result.gain
    (['student'], None)
    """

    scores: Mapping[str, Score]
    gain: MeasuredGain | None

    def __str__(self) -> str:
        from common.measured_gain import case_mean

        cases = len(self.scores[STUDENT].cases)
        means = (f"{name.replace('_', ' ')} {case_mean(score):.3f}" for name, score in self.scores.items())
        told = f"Dice on {cases} held-out cases: {', '.join(means)}"
        return told if self.gain is None else f"{told}\n{self.gain.sentence}"


def train_student(
    images: Sequence[np.ndarray] | np.ndarray,
    labels: Sequence[np.ndarray] | np.ndarray,
    *,
    recipe: TrainingConfig = STUDENT_RECIPE,
    seed: int = SEED,
    classes: int | None = None,
) -> Network:
    """Train a network from random weights on images and their labels.

    The same arguments give the same weights on the same machine with the same number of threads.

    Args:
        images: Arrays [c, x, y, z], or [x, y, z] of one channel, all of one shape.
        labels: Probabilities [k, x, y, z] for each image, such as ``asked.labels()``; or, with ``classes``, label maps
            of integers [x, y, z].
        recipe: Network and schedule, such as ``study.student``.
        seed: Seed of the first weights, the batches and the augmentation.
        classes: Number of label values in the label maps, the background included.

    Returns:
        The network, as a callable.

    Raises:
        InvalidInput: For images and labels that do not fit each other, NaN, or labels that are no probabilities.

    >>> network = c.train_student(images[:2], maps[:2], recipe=study.student, classes=2)
    >>> network.recipe == study.student
    True
    """
    from server.protocols.student_fit import train_student as trained

    check_kind("recipe", recipe, TrainingConfig)
    check_integer("seed", seed, least=0, most=MAX_INTEGER)
    pictures, told = listed(images, what="images"), listed(labels, what="labels")
    if len(pictures) != len(told):
        raise InvalidInput("images and labels", value=(len(pictures), len(told)), limit="as many labels as images")
    shape = array_given(pictures[0], what="image 1").shape
    shape = (1, *shape) if len(shape) == 3 else shape
    if len(shape) != 4 or 0 in shape:
        raise InvalidInput("shape of image 1", value=shape, limit="[c, x, y, z], or [x, y, z] for one channel, none 0")
    if classes is None:
        first = array_given(told[0], what="label 1")
        if first.ndim != 4:
            limit = "probabilities [k, x, y, z]"
            raise InvalidInput(
                "shape of label 1", value=first.shape, limit=limit, remedy="for label maps give classes=…"
            )
        classes = len(first)
    check_integer("classes", classes, least=2, most=MAX_LABELS)
    targets = [
        probabilities_given(label, grid=shape[1:], classes=classes, what=f"label {number}")
        for number, label in enumerate(told, start=1)
    ]
    inputs = images_given(pictures, shape=shape, what="image")
    model, _ = trained(together(inputs), together(targets), recipe, seed=seed)
    return Network(model, recipe, seed, shape=shape, trained_on=frozenset(map(voxel_hash, inputs)))


def compare(
    student: Network | Callable[[Float[np.ndarray, "c x y z"]], Any],
    controls: Controls,
    *,
    held_out: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Comparison:
    """Score a student and its controls on cases that neither was trained on.

    Args:
        student: The student, or any callable from an image [c, x, y, z] to probabilities or a label map.
        controls: Its controls, such as the result of :meth:`~consilium.memory.asked.Asked.controls`.
        held_out: Pairs of an image on the study's grid and its label map of integers. Each pair counts as one case, so
            give one image of each patient.

    Returns:
        The Dice of the student and of each control, over the study's structures, and the student's gain over the best
        control with its 95 % interval over the cases. The best control is chosen on these same cases, which can only
        make the gain look smaller.

    Raises:
        InvalidInput: For cases that do not fit the study, an image given twice or trained on, label maps without any
            structure, or a student with another recipe, seed or start than its controls, because the gain would measure
            that difference as well.

    >>> always = lambda image: maps[0]
    >>> print(c.compare(always, c.Controls(study, {}), held_out=[(images[0], maps[0])]))
    Dice on 1 held-out cases: student 1.000
    """
    from common.metrics import score
    from server.postprocess.scores import gain_of

    data = check_kind("controls", controls, Controls).study.data
    if not callable(student):
        raise InvalidInput("student", value=type(student).__name__, limit="a network, or a function of an image")
    _check_alike(student, controls)
    pairs = listed(held_out, what="held-out cases")
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInput(f"held-out case {number}", limit="a pair (image, label map)")
    images = images_given([pair[0] for pair in pairs], shape=(len(data.channels), *data.grid), what="held-out image")
    classes, truths = len(data.labels), []
    for number, (_, label) in enumerate(pairs, start=1):
        what = f"held-out label map {number}"
        truths.append(label_map_given(label, grid=data.grid, classes=classes, what=what))
    check_no_copy(images, "held-out image", limit="different images, because each counts as one case")
    networks = {STUDENT: student, **controls}
    for name, network in networks.items():
        for number, image in enumerate(images, start=1):
            if isinstance(network, Network) and voxel_hash(image) in network.trained_on:
                raise InvalidInput(
                    f"held-out image {number}",
                    value=f"an image that the network {name} was trained on",
                    limit="images that no compared network was trained on",
                    remedy="hold out other images",
                )
    if not any(truth.any() for truth in truths):
        raise InvalidInput("held-out label maps without any structure", limit="at least one map with a structure")
    scores = {}
    for name, network in networks.items():
        found = (
            probabilities_given(network(image.copy()), grid=data.grid, classes=classes, what=f"answer of {name}")
            for image in images
        )
        scores[name] = score((each.argmax(axis=0).astype(np.uint8) for each in found), truths, data.members)
    return Comparison(scores, gain_of(scores))


def _check_alike(student: object, controls: Controls) -> None:
    """Refuse a trained student that differs from its controls in more than the teachers' answers."""
    if not isinstance(student, Network):
        return
    for name, control in controls.items():
        if student.fresh != control.fresh:
            raise InvalidInput(
                "student",
                value="a network from random weights" if student.fresh else "a network from a public start",
                limit=f"a network with the same start as its control {name}",
                remedy="compare asked.student(), which follows this study's protocol",
            )
        if (student.recipe, student.seed) != (control.recipe, control.seed):
            raise InvalidInput(
                "student's recipe and seed",
                limit=f"the recipe and seed of its control {name}",
                remedy="train the student with recipe=study.student and the controls' seed",
            )
