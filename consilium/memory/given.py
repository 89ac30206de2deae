"""Checks what a script passes to a study in memory: images, label maps, teachers and teachers' answers.

``consilium.memory.asked`` and ``consilium.memory.networks`` call it. Each mistake is an
:class:`~common.errors.InvalidInput` that names the item, its value and the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, UInt8

from common.codecs.codec import check_probabilities
from common.config import Study
from common.data.label_maps import one_hot
from common.errors import InvalidInput, QuorumNotReached

Teacher: TypeAlias = Callable[[Float[np.ndarray, "c x y z"]], Any]
"""A function from an image, float32 [c, x, y, z], to probabilities [k, x, y, z] or an integer label map [x, y, z]."""


def images_given(images: Any, *, shape: tuple[int, ...], what: str) -> list[np.ndarray]:
    """Check images and convert them to float32.

    Args:
        images: Arrays [c, x, y, z], or [x, y, z] if there is one channel.
        shape: The required shape [c, x, y, z].
        what: Name of an image in errors.

    Returns:
        The images.

    Raises:
        InvalidInput: For another shape, or values that are not finite numbers.
    """
    found = []
    for number, image in enumerate(listed(images, what=f"{what}s"), start=1):
        array = array_given(image, what=f"{what} {number}")
        array = array[None] if array.ndim == 3 and shape[0] == 1 else array
        if array.shape != shape or not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
            raise InvalidInput(
                f"{what} {number}", value=(str(array.dtype), array.shape), limit=f"numbers in an array of shape {shape}"
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InvalidInput(f"{what} {number}", limit="finite numbers", remedy="look for NaN and infinite voxels")
        found.append(array)
    return found


def label_map_given(label_map: Any, *, grid: tuple[int, ...], classes: int, what: str) -> UInt8[np.ndarray, "x y z"]:
    """Check a label map and convert it to uint8.

    Args:
        label_map: Integers on the grid.
        grid: The required shape [x, y, z].
        classes: Number of labels; values must be below it.
        what: Name of the label map in errors.

    Returns:
        The label map.

    Raises:
        InvalidInput: For another shape, type or value.
    """
    array = array_given(label_map, what=what)
    whole = array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer)
    if array.shape != grid or not whole:
        raise InvalidInput(what, value=(str(array.dtype), array.shape), limit=f"integers in an array of shape {grid}")
    outside = array[(array < 0) | (array >= classes)]
    if outside.size:
        raise InvalidInput(f"{what}: label", value=int(outside[0]), limit=f"0 to {classes - 1}")
    return array.astype(np.uint8)


def probabilities_given(found: Any, *, grid: tuple[int, ...], classes: int, what: str) -> Float[np.ndarray, "k x y z"]:
    """Check the answer of a teacher or network and convert it to float32 probabilities.

    Args:
        found: Probabilities [k, x, y, z], or a label map, which becomes probabilities of 0 and 1.
        grid: The required grid [x, y, z].
        classes: Number of labels k.
        what: Name of the answer in errors.

    Returns:
        Float32 array [k, x, y, z].

    Raises:
        InvalidInput: For another shape, or values that are no probabilities.
    """
    array = array_given(found, what=what)
    if array.ndim == 3:
        return one_hot(label_map_given(array, grid=grid, classes=classes, what=what), classes)
    if not np.issubdtype(array.dtype, np.floating):
        raise InvalidInput(
            what,
            value=(str(array.dtype), array.shape),
            limit="floating-point probabilities [k, x, y, z], or a label map [x, y, z]",
        )
    try:
        check_probabilities(array, labels=classes, grid=grid)  # type: ignore[arg-type]
    except InvalidInput as error:
        shape = "give an array [k, x, y, z] with the classes first and without a batch axis"
        remedy = shape if error.value else "give a softmax over the classes, or a label map of integers"
        raise InvalidInput(f"{what}: {error.what}", value=error.value, limit=error.limit, remedy=remedy) from error
    return array.astype(np.float32)


def sites_given(teachers: Sequence[Teacher | Sequence[Teacher]], study: Study) -> list[tuple[Teacher, ...]]:
    """Return the teachers of every site.

    Args:
        teachers: A flat list, assigned to sites in order, or one list for each site.
        study: The study.

    Returns:
        The teachers of each site.

    Raises:
        InvalidInput: If the numbers do not fit the study's voters.
        QuorumNotReached: If there are fewer sites than the quorum.
    """
    voters, quorum, given = study.privacy.voters_per_site, study.privacy.quorum, listed(teachers, what="teachers")
    if any(callable(each) for each in given):
        for number, each in enumerate(given, start=1):
            if not callable(each):
                limit = "only callables, or one list for each site"
                raise InvalidInput(f"teacher {number}", value=type(each).__name__, limit=limit)
        if len(given) % voters:
            limit = f"a multiple of {voters}, the study's number of voters of a site"
            raise InvalidInput(
                "number of teachers", value=len(given), limit=limit, remedy="give one list of teachers for each site"
            )
        sites = [tuple(given[first : first + voters]) for first in range(0, len(given), voters)]
    else:
        sites = [_site(each, number, voters=voters) for number, each in enumerate(given, start=1)]
    if len(sites) < quorum:
        raise QuorumNotReached(
            f"teachers of {len(sites)} sites were given and the study's quorum is {quorum}; to fix: give the teachers "
            "of more sites, or lower the quorum"
        )
    return sites


def _site(given: Any, number: int, *, voters: int) -> tuple[Teacher, ...]:
    listed_here = isinstance(given, Sequence) and not isinstance(given, str)
    teachers = tuple(given) if listed_here else ()
    strange = [type(each).__name__ for each in teachers if not callable(each)]
    if strange or not 1 <= len(teachers) <= voters:
        limit = f"a list of 1 to {voters} callables; the study has {voters} voters a site"
        value = strange or (len(teachers) if listed_here else type(given).__name__)
        raise InvalidInput(f"teachers of site {number}", value=value, limit=limit)
    return teachers


def listed(given: Any, *, what: str) -> list[Any]:
    """Return the items of a non-empty list or of a stacked array.

    Args:
        given: The value.
        what: Name of the items in errors.

    Returns:
        The items.

    Raises:
        InvalidInput: If the value is neither a list nor an array, or is empty.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray) or getattr(given, "ndim", 1) == 0:
        raise InvalidInput(
            what,
            value=type(given).__name__,
            limit="a list of items, or one stacked array",
            remedy="make a list of the items, as list(...) does",
        )
    if not len(given):
        raise InvalidInput(f"number of {what}", value=0, limit="at least one")
    return list(given)


def array_given(given: Any, *, what: str) -> np.ndarray:
    """Convert a value to a numpy array of numbers.

    Args:
        given: The value.
        what: Name of the value in errors.

    Returns:
        The array.

    Raises:
        InvalidInput: If numpy cannot read it as an array of numbers.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise InvalidInput(what, value="a masked array", limit="a plain array", remedy="fill the masked voxels")
    try:
        array = np.asarray(given)
    except Exception as error:
        raise InvalidInput(
            what,
            value=type(given).__name__,
            limit="a value that numpy can convert to an array",
            remedy="of a torch tensor give .detach().cpu().float().numpy()",
        ) from error
    if array.dtype == object:
        raise InvalidInput(what, value=type(given).__name__, limit="an array of numbers")
    return array
