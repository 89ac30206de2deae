"""Rehearses a study on public cases: measures how far teachers score above a network trained on public data alone.

`consilium plan --cases` and the dashboard call it. Stand-in teachers are trained, like a hospital's teachers, on some
public cases with labels and scored on others. A control, trained without any hospital's answer, is scored on the same
cases. If the stand-in teachers do not score higher than the control, the study can bring no gain at any budget. A
rehearsal charges nothing and reads no private case. Fewer than four cases with a structure are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float, UInt8

from common.canonical import check_integer
from common.config import DataConfig, TrainingConfig
from common.data.copies import check_no_copy
from common.errors import InvalidInput
from common.protocol_terms import PROTOCOLS, terms_of
from common.registry import registered
from server.planning.public_shapes import LEAST_MAPS, codec_of, halves
from server.planning.recommend import LEAST_CASES, Rehearsal

if TYPE_CHECKING:
    import torch

    from common.codecs.codec import LinearCodec

STAND_INS = 2
"""Largest number of stand-in teachers trained on each half of the cases."""

OnTraining = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class PublicCases:
    """Public cases on one grid.

    Attributes:
        images: Float array [n, c, x, y, z] of n cases with c channels.
        labels: Uint8 label maps [n, x, y, z].
        data: Meaning of the labels, and the grid.
    """

    images: Float[np.ndarray, "n c x y z"]
    labels: UInt8[np.ndarray, "n x y z"]
    data: DataConfig


class Begin(Protocol):
    """Function that trains, on public cases, a protocol's public start and the control ``zero_code``."""

    def __call__(
        self,
        cases: PublicCases,
        codec: LinearCodec,
        recipe: TrainingConfig,
        pairs: np.ndarray | None,
        given: torch.nn.Module | None,
    ) -> tuple[torch.nn.Module | None, torch.nn.Module]:
        """Train two networks on the public cases, without any hospital's answer.

        Args:
            cases: The public cases.
            codec: A codec of other public label maps.
            recipe: The student's training recipe.
            pairs: Indices of the cases that are the study's public pairs (images with label maps); None if it has none.
            given: The network that the study begins from; None if there is none.

        Returns:
            The public start, or None if there is none; and the control ``zero_code``.
        """
        ...


def rehearse(
    cases: PublicCases,
    label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
    *,
    protocol: str,
    patients: int,
    recipes: tuple[TrainingConfig, TrainingConfig],
    paired: bool = False,
    given: torch.nn.Module | None = None,
    on_training: OnTraining = lambda _what: None,
) -> Rehearsal:
    """Train and score the control and the stand-in teachers.

    Args:
        cases: Public cases with labels.
        label_maps: Uint8 label maps [x, y, z] of other patients, on the cases' grid.
        protocol: Name of the protocol.
        patients: Number of cases from which each stand-in teacher learns; if half of the cases are fewer, it learns
            from that half.
        recipes: Training recipes of a teacher and of a student.
        paired: True if the cases are the study's public pairs, from which the study itself learns. Half of them then
            train the public start. Of the rest, one half trains stand-in teachers that are scored on the other half.
            This start has fewer cases than the study's start, so the gain of the stand-in teachers appears larger than
            that of the real ones will be.
        given: The network that the study begins from; None if there is none. Public start and stand-in teachers begin
            from it. The control is then the better of two networks: the given one, and a student trained from it
            without answers.
        on_training: Called with the name of the network that is trained next.

    Returns:
        The Dice of stand-in teachers and control on every case that contains a structure.

    Raises:
        InvalidInput: If there are fewer than four cases (eight if ``paired``) or label maps, if a case is given twice,
            or if the protocol cannot be rehearsed.
    """
    check_integer("patients of a stand-in teacher", patients, least=1)
    rows = np.flatnonzero(cases.labels.any(axis=(1, 2, 3)))  # leave out cases without any structure
    if len(rows) < (2 * LEAST_CASES if paired else LEAST_CASES):
        limit = f"at least {LEAST_CASES} that contain a structure; {2 * LEAST_CASES} if the study also learns from them"
        raise InvalidInput(
            "public cases of a rehearsal, a trial of the protocol with stand-in teachers", value=len(rows), limit=limit
        )
    check_no_copy(
        cases.images,
        "public case",
        limit="different cases, because half of them train and the other half is scored",
    )
    check_integer("public label maps", len(label_maps), least=LEAST_MAPS, limit=f"at least {LEAST_MAPS}")
    codec, begin = codec_of(label_maps, labels=len(cases.data.labels)), _begin(protocol)
    scored, used = np.empty((2, len(cases.images))), 0
    for pairs, rest in halves(rows) if paired else ((None, rows),):
        on_training("the control without answers")
        begun, control = begin(cases, codec, recipes[1], pairs, given)
        controls = [_dice(each, cases, rest) for each in (control, given) if each is not None]
        scored[1, rest] = max(controls, key=np.mean)
        for own, others in halves(rest):
            each: list[list[float]] = []
            for first in range(0, max(1, len(own) - patients + 1), patients)[:STAND_INS]:
                on_training("a stand-in teacher")
                part = own[first : first + patients]
                model = _stand_in(cases, part, begun, recipes[0], seed=len(each), stay=paired)
                each.append(_dice(model, cases, others))
                used = len(part)
            scored[0, others] = np.mean(each, axis=0)
    return Rehearsal(used, *(tuple(each[rows].tolist()) for each in scored))


def _begin(protocol: str) -> Begin:
    """Return the function that makes a protocol's public start and control.

    Raises:
        InvalidInput: If the planner cannot recommend the protocol, and it can therefore not be rehearsed.
    """
    prospects = terms_of(protocol).prospects
    if prospects is None:
        limit = ", ".join(name for name, terms in PROTOCOLS.items() if terms.prospects is not None)
        raise InvalidInput("protocol to rehearse", value=protocol, limit=limit)
    found: Begin = registered(prospects.rehearsal)
    return found


def _stand_in(
    cases: PublicCases,
    rows: np.ndarray,
    begun: torch.nn.Module | None,
    recipe: TrainingConfig,
    *,
    seed: int,
    stay: bool,
) -> torch.nn.Module:
    from common.models.fit import average_with_start, fit
    from common.models.unet import network_for

    model = network_for(recipe, cases.data, seed=seed)
    if begun is not None:
        model.load_state_dict(begun.state_dict())
    fit(model, cases.images[rows], cases.labels[rows], recipe, seed=seed, classes=len(cases.data.labels))
    if begun is not None and stay:
        average_with_start(begun.state_dict(), model)
    return model


def _dice(model: torch.nn.Module, cases: PublicCases, rows: np.ndarray) -> list[float]:
    from common.metrics import score
    from common.models.fit import predict

    found = []
    for row in rows:
        drawn = predict(model, cases.images[row]).argmax(axis=0).astype(np.uint8)
        found.append(score([drawn], [cases.labels[row]], cases.data.members).mean)
    return found
