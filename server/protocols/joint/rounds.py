"""The rounds of a joint query: one release about all public volumes each, asked relative to what those before it said.

A round's frame is made of the one before it and of that one's stored answer: post-processing. It is part of the query's
id, so it is made once and kept by hash before anything is asked: a run that resumes asks the same question, and another
frame would be another charge. Free of torch: this happens while the ledger is open.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from common.privacy.mechanism import GRID_BITS, QuerySpec
from common.protocols.joint.frame import Frame, Observation
from common.study_mechanism import study_mechanism
from server.aggregation.aggregator import plan_queries
from server.ledger.server_ledger import Ledger, StoredAnswer
from server.postprocess.decode import mean_noise_std
from server.study.workspace import CodecRecord, Workspace


def ask_rounds(
    workspace: Workspace, ledger: Ledger, ask: Callable[[QuerySpec, int], None], *, should_stop: Callable[[], bool]
) -> None:
    """Have the study's rounds answered one after another, until done, stopped, or one is left without an answer.

    ``ask`` is given a round's query and how many rounds came before; one that is answered already may owe receipts.
    """
    planned = workspace.study().privacy.planned_queries
    answers = answered_rounds(workspace, ledger)
    if len(answers) == planned:
        ask(answers[-1].query, planned - 1)
    while len(answers) < planned and not should_stop():
        query = query_after(workspace, answers)
        ask(query, len(answers))
        answer = ledger.answer(query.id)
        if answer is None:
            break
        answers = (*answers, answer)


def answered_rounds(workspace: Workspace, ledger: Ledger) -> tuple[StoredAnswer, ...]:
    """The stored answers of the rounds so far, in order."""
    answers = []
    for number, frame in enumerate(workspace.frames(), start=1):
        answer = ledger.answer(_query(workspace, frame, number).id)
        if answer is None:
            break
        answers.append(answer)
    return tuple(answers)


def query_after(workspace: Workspace, answers: tuple[StoredAnswer, ...]) -> QuerySpec:
    """The query of the round after ``answers``; makes and keeps its frame if there is none yet."""
    frames = workspace.frames()
    if len(frames) == len(answers):
        frames = keep_frame(workspace, _next(workspace, answers[-1]), after=frames)
    return _query(workspace, frames[len(answers)], len(answers) + 1)


def keep_frame(workspace: Workspace, frame: Frame, *, after: tuple[CodecRecord, ...]) -> tuple[CodecRecord, ...]:
    """Keep a round's frame as a public object, on record ``after`` those of the rounds before it; all their records."""
    record = CodecRecord(sha256=workspace.objects.put(frame.to_bytes()), dimension=frame.dimension)
    frames = (*after, record)
    workspace.save_frames(frames)
    return frames


def believed(
    workspace: Workspace, answers: tuple[StoredAnswer, ...]
) -> tuple[Float[np.ndarray, "n l"], Float[np.ndarray, "n l"]]:
    """The volumes' codes by the public start, and after these answers. Every later frame holds the answers before."""
    first, last = (_frame(workspace, answer) for answer in (answers[0], answers[-1]))
    return np.array(first.centre), last.estimate(_observation(answers[-1], last))


def surprise(workspace: Workspace, answers: tuple[StoredAnswer, ...]) -> tuple[float, int]:
    """How large these answers are beside what their frames expected, summed over rounds, and the numbers in them.

    A round's frame is centred on the answers before it, so the rounds' surprises are independent and add up.
    """
    total, dimension = 0.0, 0
    for answer in answers:
        frame = _frame(workspace, answer)
        total, dimension = total + frame.surprise(_observation(answer, frame)), dimension + frame.dimension
    return total, dimension


def _next(workspace: Workspace, answer: StoredAnswer) -> Frame:
    """As many voters as the last round had are expected in the next."""
    study, frame = workspace.study(), _frame(workspace, answer)
    noise_std = mean_noise_std(study_mechanism(study, dimension=1).noise_std, voters=answer.voters)
    return frame.after(_observation(answer, frame), noise_std=noise_std, radius=study.codec.radius)


def _query(workspace: Workspace, frame: CodecRecord, number: int) -> QuerySpec:
    study, volumes = workspace.study(), workspace.volumes()
    (query,) = plan_queries(study, codec=workspace.codec(), volumes=volumes, frame=frame, number=number)
    return query


def _observation(answer: StoredAnswer, frame: Frame) -> Observation:
    noise_std = mean_noise_std(answer.query.mechanism.noise_std, voters=answer.voters)
    return frame.read(answer.noisy_sum / (answer.voters * 2.0**GRID_BITS), noise_std=noise_std)


def _frame(workspace: Workspace, answer: StoredAnswer) -> Frame:
    return Frame.from_bytes(workspace.objects.get(answer.query.centre))
