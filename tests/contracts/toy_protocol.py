"""A query protocol in one file: every query is about two volumes, and a code is the two volumes' codes side by side.

Registered by one line in test_protocols. Labels, student and controls are those of one query a volume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from common.codecs.base import Codec
from common.config import Study
from common.privacy.mechanism import QuerySpec
from common.protocols.base import Encoder, Fetch, SiteProtocol
from common.protocols.per_volume import PlainEncoder
from server.protocols.base import Answer, AnswerOf, Label, Lesson, Training, Wording, at_least, query_about
from server.protocols.per_volume import PerVolume
from server.study.workspace import Public

if TYPE_CHECKING:
    import torch


class PairsSite(SiteProtocol):
    def describes(self, query: QuerySpec) -> bool:
        return query.centre == "zero" and len(query.volumes) == 2

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        return SideBySide(codec)


class SideBySide(PlainEncoder):
    def of_voter(self, codes: np.ndarray) -> np.ndarray:
        return codes.ravel()


@dataclass(frozen=True)
class Half:
    """One volume's half of an answer."""

    query: QuerySpec
    noisy_sum: NDArray[np.int64]
    voters: int


class Pairs(PerVolume):
    name: ClassVar[str] = "pairs"

    def wording(self, study: Study) -> Wording:
        return Wording(plan=f"{study.privacy.planned_queries} pairs", which="the", each="each pair")

    def check_volumes(self, study: Study, count: int) -> None:
        at_least(count, needed=2 * study.privacy.planned_queries)

    def asked_about(self, study: Study, volumes: Sequence[str]) -> tuple[str, ...]:
        return tuple(volumes[: 2 * study.privacy.planned_queries])

    def volumes_answered(self, answers: int, *, asked: int) -> int:
        return 2 * answers

    def questions(self, public: Public, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        asked = self.asked_about(public.study, public.volumes)
        yield tuple(
            query_about(public.study, pair, codec=public.codec.sha256, dimension=2 * public.codec.dimension)
            for pair in zip(asked[::2], asked[1::2], strict=True)
        )

    def labels(self, public: Public, answers: Sequence[Answer]) -> Iterator[Label]:
        return super().labels(public, halves(answers))

    def control(self, lesson: Lesson, name: str, *, trained: Callable[[str], torch.nn.Module]) -> Training | None:
        return super().control(replace(lesson, answers=halves(lesson.answers)), name, trained=trained)


def halves(answers: Sequence[Answer]) -> list[Half]:
    found = []
    for answer in answers:
        mechanism = replace(answer.query.mechanism, dimension=answer.query.mechanism.dimension // 2)
        for volume, part in zip(answer.query.volumes, np.split(answer.noisy_sum, 2), strict=True):
            found.append(Half(replace(answer.query, volumes=(volume,), mechanism=mechanism), part, answer.voters))
    return found
