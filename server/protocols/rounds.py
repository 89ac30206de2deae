"""Asks in rounds: each round is one query about all public volumes, which depends on the answers of earlier rounds.

The joint and the appearance protocol build on it. A *frame* is the public centre, axes and weights with which sites
compute their codes in one round. It is computed from the frame and the stored answer of the round before, which is
post-processing. The frame's hash is part of the query's id, and a query with another id is charged anew. The frame is
therefore stored before its query is asked, so that a resumed run asks the same query. This module does not import
torch, because it runs while the ledger is open. A codec that is not linear is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.codecs import load_codec
from common.codecs.codec import LinearCodec
from common.config import Study
from common.errors import InvalidInput
from common.objects import json_bytes
from common.privacy.mechanism import GRID_BITS, QuerySpec
from common.protocols.frame import Frame, Observation
from common.study_mechanism import study_mechanism
from common.wording import many
from server.protocols.plausible import NoiseShare
from server.protocols.query_protocol import Answer, AnswerOf, QueryPlan, QueryProtocol, StudentData, query_about
from server.public.material import CodecRecord, PublicMaterial
from server.public.public_files import parse_record

FRAMES = "frames.json"
"""File with the hash and dimension of every round's frame so far. The first frame exists before the first round."""


class InRounds(QueryProtocol):
    """Base of the protocols that ask about all public volumes at once, in rounds."""

    def query_plan(self, study: Study) -> QueryPlan:
        planned, prospects = study.privacy.planned_queries, study.codec.terms.prospects
        times = "" if planned == 1 else f", up to {planned} times"
        plan = f"{prospects.query if prospects else 'a query'} in {many(planned, 'round')}"
        return QueryPlan(plan, which="the", each=f"all of them together{times},")

    def configure(self, public: PublicMaterial, answer_of: AnswerOf) -> Iterator[tuple[QuerySpec, ...]]:
        """Yield the query of each round in turn, until all rounds are answered or a query gets no answer.

        If all rounds are answered already, the last query is yielded again, because sites may lack its receipts.

        Yields:
            One query at a time.
        """
        planned = public.study.privacy.planned_queries
        answers = answered_rounds(public, answer_of)
        if len(answers) == planned:
            yield (answers[-1].query,)
        while len(answers) < planned:
            query = query_after(public, answers)
            yield (query,)
            answer = answer_of(query.id)
            if answer is None:
                return
            answers = (*answers, answer)


def answered_rounds(public: PublicMaterial, answer_of: AnswerOf) -> tuple[Answer, ...]:
    """Return the stored answers of the rounds so far, in order.

    Args:
        public: The study's public material (terms, codec, volumes).
        answer_of: Returns the stored answer to a query id, or None.

    Returns:
        The answers, up to the first round without one.
    """
    answers = []
    for number, frame in enumerate(frames(public), start=1):
        answer = answer_of(_query(public, frame, number).id)
        if answer is None:
            break
        answers.append(answer)
    return tuple(answers)


def query_after(public: PublicMaterial, answers: Sequence[Answer]) -> QuerySpec:
    """Return the query of the next round. Compute and store its frame first, if that was not done before.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers of all rounds so far, in order. The newest one determines the next frame.

    Returns:
        The query. Its id depends on the frame.

    Raises:
        InvalidInput: If the frame of round 1 is missing, which `consilium codec fit` makes.
    """
    kept = frames(public)
    if len(kept) == len(answers):
        kept = keep_frame(public, _next(public, answers[-1]), after=kept)
    return _query(public, kept[len(answers)], len(answers) + 1)


def round_query(
    study: Study, *, codec: CodecRecord, volumes: Sequence[str], frame: CodecRecord, number: int = 1
) -> QuerySpec:
    """Return the query of a round about all volumes, relative to a frame.

    Args:
        study: The study.
        codec: Its codec.
        volumes: Hashes of all public volumes.
        frame: Hash and dimension of the frame.
        number: Number of the round, from 1.

    Returns:
        The query.
    """
    return query_about(
        study, volumes, codec=codec.sha256, dimension=frame.dimension, number=number, centre=frame.sha256
    )


def frames(public: PublicMaterial) -> tuple[CodecRecord, ...]:
    """Return the hash and the dimension of the frame of every round so far.

    Args:
        public: The study's public material (terms, codec, volumes).

    Returns:
        One record for each round, in order.

    Raises:
        InvalidInput: If the first frame has not been made.
    """
    records = parse_record(public.kept.read(FRAMES), name=FRAMES, remedy="run `consilium codec fit`")
    return tuple(CodecRecord.from_json(record) for record in records)


def keep_frame(public: PublicMaterial, frame: Frame, *, after: tuple[CodecRecord, ...]) -> tuple[CodecRecord, ...]:
    """Store a round's frame as a public object.

    Args:
        public: The study's public material (terms, codec, volumes).
        frame: The frame.
        after: Records of the frames of the rounds before it.

    Returns:
        The records of all frames so far.
    """
    record = CodecRecord(sha256=public.objects.put(frame.to_bytes()), dimension=frame.dimension)
    kept = (*after, record)
    public.kept.write(FRAMES, json_bytes([one.to_json() for one in kept]))
    return kept


def frame_of(public: PublicMaterial, answer: Answer) -> Frame:
    """Return the frame of the round that an answer belongs to.

    Args:
        public: The study's public material (terms, codec, volumes).
        answer: The stored answer.

    Returns:
        The frame.
    """
    return Frame.from_bytes(public.objects.get(answer.query.centre))


def observation(answer: Answer, frame: Frame) -> Observation:
    """Convert an answer to the offsets from its frame's centre along the frame's directions, with their noise variance.

    Args:
        answer: The stored answer.
        frame: Its frame.

    Returns:
        The observation.
    """
    noise_std = answer.query.mechanism.mean_noise_std(voters=answer.voters)
    return frame.read(answer.noisy_sum / (answer.voters * 2.0**GRID_BITS), noise_std=noise_std)


def surprise(public: PublicMaterial, answers: Sequence[Answer]) -> tuple[float, int, NoiseShare]:
    """Compare the answers' sum of squares with the value that their frames expect.

    The frame of a round is centred on the estimate from the rounds before it, so the rounds are independent and their
    sums can be added.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: The stored answers, one a round.

    Returns:
        A tuple of three values: the sum over all coordinates of the squared answer divided by its expected variance;
        the number of coordinates, which is the sum's expected value; and the part of the sum that is due to noise.
    """
    total, dimension, noise_share = 0.0, 0, NoiseShare()
    for answer in answers:
        frame = frame_of(public, answer)
        seen = observation(answer, frame)
        total, dimension = total + frame.surprise(seen), dimension + frame.dimension
        noise_share += NoiseShare.of(frame.noise_shares(seen))
    return total, dimension, noise_share


def codec_of(public: PublicMaterial) -> LinearCodec:
    """Return the study's codec, which must be linear.

    Args:
        public: The study's public material (terms, codec, volumes).

    Returns:
        The codec.

    Raises:
        InvalidInput: If the codec is not linear.
    """
    name = public.codec.sha256
    codec = load_codec(public.objects.get(name), expected_hash=name)
    if codec.linear is None:
        raise InvalidInput("codec of a query about all volumes", value=codec.name, limit="a linear codec, such as pca")
    return codec.linear


def rounds_of(public: PublicMaterial, answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Return those of the study's stored answers that belong to its rounds, in order.

    Args:
        public: The study's public material (terms, codec, volumes).
        answers: Stored answers in any order.

    Returns:
        The answers of the rounds, up to the first round without one.
    """
    return answered_rounds(public, {answer.query.id: answer for answer in answers}.get)


def rounds_to_learn(student_data: StudentData) -> tuple[Answer, ...]:
    """Return the answers of all rounds, from which the student learns.

    Args:
        student_data: Public data and released labels to learn from.

    Returns:
        The answers, at least one.

    Raises:
        InvalidInput: If there is no answer, or every label is rejected.
    """
    rounds = rounds_of(student_data.public, student_data.answers)
    if not rounds:
        raise InvalidInput(
            "number of stored answers", value=0, limit="at least one", remedy="run `consilium study run` first"
        )
    if not any(volume in student_data.labels for volume in rounds[-1].query.volumes):
        raise InvalidInput(
            "labels that are not rejected",
            value=0,
            limit="at least one",
            remedy="accept a label again on the dashboard's page Labels",
        )
    return rounds


def _next(public: PublicMaterial, answer: Answer) -> Frame:
    """Return the frame of the next round. Its weights assume that as many voters answer as in the last round."""
    study, frame = public.study, frame_of(public, answer)
    noise_std = study_mechanism(study, dimension=1).mean_noise_std(voters=answer.voters)
    return frame.after(observation(answer, frame), noise_std=noise_std, radius=study.codec.radius)


def _query(public: PublicMaterial, frame: CodecRecord, number: int) -> QuerySpec:
    return round_query(public.study, codec=public.codec, volumes=public.volumes, frame=frame, number=number)
