"""Tests one question about many volumes through the real core, ledger and workers: one charge, one code, one answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from client.policy import Consent, review
from common.config import CodecConfig
from common.errors import InvalidInput, QuorumNotReached
from common.messages import Offer
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from common.protocol_terms import MAX_JOINT_ROUNDS
from common.protocols.frame import Frame
from server.protocols.joint.belief import estimated_codes
from server.protocols.query_protocol import Answer
from server.protocols.rounds import InRounds, answered_rounds, frames, keep_frame, query_after, round_query
from server.public.material import CodecRecord
from server.study.workspace import Workspace
from tests.federation import Federation, StubVoters, make_study
from tests.joint_federation import VOLUMES, frame_of, joint_federation

pytestmark = pytest.mark.slow


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    made = joint_federation(tmp_path, rounds=1)
    yield made
    made.close()


def probabilities(voters: StubVoters) -> np.ndarray:
    return replace(voters, failure=None).answer()


def expected(fed: Federation, silent: dict[str, int] | None = None) -> np.ndarray:
    """Return the sum of all voters' clipped joint codes by the definition: sharpen, project, weigh, clip, truncate."""
    frame = Frame.from_bytes(fed.objects.get(fed.frame.sha256))
    total = np.zeros(frame.dimension, dtype=np.int64)
    query = planned(fed)
    for name, voters in fed.voters.items():
        squares = probabilities(voters).astype(np.float64) ** 2
        offsets = np.tile(fed.codec.encode(squares / squares.sum(axis=0)), (VOLUMES, 1)) - frame.centre
        kept = frame.basis.shape[2]
        vector = np.einsum("dnm,nm->d", frame.basis.astype(np.float64), offsets[:, :kept]) * frame.weights
        vector = vector[frame.weights > 0]
        one = quantise(vector, radius_int=query.mechanism.radius_int)
        total += (2 - (silent or {}).get(name, 0)) * one
    return total


def planned(fed: Federation) -> QuerySpec:
    record = CodecRecord(sha256=fed.codec_hash, dimension=fed.codec.dimension)
    return round_query(fed.study, codec=record, volumes=fed.volumes, frame=fed.frame)


def test_one_answer_about_all_volumes_is_one_charge(fed: Federation) -> None:
    before = fed.ledger.row_count
    fed.core().run(fed.transport)
    (answer,) = fed.ledger.answers(fed.study.id)
    assert answer.query.volumes == fed.volumes
    np.testing.assert_array_equal(answer.noisy_sum, expected(fed))
    assert len(fed.events("released")) == 1
    assert fed.ledger.row_count > before
    spent = next(iter(fed.ledger.study_spending(fed.study.id).readings().values())).epsilon
    assert spent <= fed.study.privacy.epsilon


def test_asking_again_answers_from_the_ledger(fed: Federation) -> None:
    fed.core().run(fed.transport)
    rows = fed.ledger.row_count
    fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows


class _FailsOnOneVolume(StubVoters):
    """Stands in for two voters; the second has no answer for one volume."""

    def predict(self, volume: bytes) -> list[Callable[[], np.ndarray | None]]:
        first, second = super().predict(volume)
        return [first, (lambda: None) if volume == b"volume 3" else second]


def test_a_voter_without_one_volume_is_that_voters_zero_code_and_nobody_elses(fed: Federation) -> None:
    site = fed.sites[1]
    fed.voters[site.name] = _FailsOnOneVolume(radius=fed.voters[site.name].radius, voters=2)
    fed.site_ledgers[site.name].close()
    fed.hospitals.open(site)
    fed.core().run(fed.transport)
    (answer,) = fed.ledger.answers(fed.study.id)
    assert len(answer.roster) == len(fed.sites)
    np.testing.assert_array_equal(answer.noisy_sum, expected(fed, silent={site.name: 1}))


@pytest.mark.parametrize("spoilt", ["other volumes", "other codec", "no frame"])
def test_a_frame_that_does_not_fit_is_the_zero_code_with_the_roster_unchanged(fed: Federation, spoilt: str) -> None:
    right = fed.frame
    match spoilt:
        case "other volumes":
            wrong = frame_of(fed, volumes=VOLUMES - 1).to_bytes()
        case "other codec":
            wrong = frame_of(fed, codec="a" * 64).to_bytes()
        case _:
            wrong = b"nothing"
    fed.frame = CodecRecord(sha256=fed.objects.put(wrong), dimension=right.dimension)
    fed.core().run(fed.transport)
    (answer,) = fed.ledger.answers(fed.study.id)
    assert len(answer.roster) == len(fed.sites)
    assert not answer.noisy_sum.any()


def test_a_site_declines_a_joint_query_its_study_does_not_describe(fed: Federation) -> None:
    joint = planned(fed)
    single = replace(joint, volumes=joint.volumes[:1], centre="zero")
    plain = replace(fed.study, codec=replace(fed.study.codec, joint=False))
    for study, query, reason in (
        (fed.study, joint, "accepted"),
        (fed.study, replace(joint, centre="zero"), "wrong-codec"),
        (plain, joint, "wrong-codec"),
        (plain, replace(joint, centre="zero"), "wrong-codec"),
        (plain, replace(single, mechanism=replace(single.mechanism, dimension=1)), "accepted"),
    ):
        offer = Offer(study=study.id, ledger="ledger", batch="b" * 64, queries=(query,))
        assert review(offer, Consent.of(study)) == reason


def test_a_joint_study_plans_few_rounds() -> None:
    terms = make_study(planned_queries=MAX_JOINT_ROUNDS + 1)
    with pytest.raises(InvalidInput, match="planned_queries"):
        replace(terms, codec=replace(terms.codec, joint=True))
    with pytest.raises(InvalidInput, match="joint"):
        CodecConfig(name="ball-ae", joint=True)


# --- rounds


@dataclass
class Study:
    """Holds a joint study of three rounds in its directory, and asks its sites."""

    fed: Federation
    workspace: Workspace
    asked: list[QuerySpec] = field(default_factory=list)

    def run(self, *, stop_after: int = 99) -> tuple[Answer, ...]:
        """Start a new run that asks at most ``stop_after`` rounds."""
        rounds = InRounds().configure(self.workspace.public(), self.fed.ledger.answer)
        for queries in itertools.islice(rounds, stop_after):
            self.asked += queries
            self.fed.core(queries=queries, before=queries[0].round - 1).run(self.fed.transport)
        return self.answered()

    def answered(self) -> tuple[Answer, ...]:
        return answered_rounds(self.workspace.public(), self.fed.ledger.answer)

    def frame(self, answer: Answer) -> Frame:
        return Frame.from_bytes(self.fed.objects.get(answer.query.centre))


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Study]:
    fed = joint_federation(tmp_path, rounds=3)
    workspace = fed.workspace()
    assert fed.frame is not None
    keep_frame(workspace.public(), Frame.from_bytes(fed.objects.get(fed.frame.sha256)), after=())
    yield Study(fed, workspace)
    fed.close()


def test_every_round_is_one_charge_and_its_frame_is_centred_on_the_earlier_answers(study: Study) -> None:
    answers = study.run()
    assert [answer.query.round for answer in answers] == [1, 2, 3]
    assert len(study.fed.events("released")) == 3
    for earlier, later in itertools.pairwise(answers):
        frame = study.frame(earlier)
        noise = float(earlier.query.mechanism.noise_std) / 2**16 / earlier.voters
        seen = frame.read(earlier.noisy_sum / earlier.voters / 2**16, noise_std=noise)
        np.testing.assert_allclose(study.frame(later).centre, frame.estimate(seen))
        assert (study.frame(later).variances <= frame.variances).all()
    done = [event["done"] for event in study.fed.events("stage-progress")]
    assert (done[0], done[-1]) == (0, 3)
    assert done == sorted(done)
    spent = next(iter(study.fed.ledger.study_spending(study.fed.study.id).readings().values())).epsilon
    assert spent <= study.fed.study.privacy.epsilon


def test_rounds_come_nearer_to_what_the_voters_say(study: Study) -> None:
    """No noise is drawn here, but the estimate assumes noise; each round shrinks it less."""
    answers = study.run()
    first = study.frame(answers[0])
    means = []
    for voters in study.fed.voters.values():
        squares = probabilities(voters).astype(np.float64) ** 2
        means.append(np.tile(study.fed.codec.encode(squares / squares.sum(axis=0)), (VOLUMES, 1)))
    told = first.centre + first.across(first.along(np.mean(means, axis=0)))
    errors = [
        np.linalg.norm(told - estimated_codes(study.workspace.public(), answers[:count])[1]) for count in (1, 2, 3)
    ]
    start, _ = estimated_codes(study.workspace.public(), answers)
    np.testing.assert_array_equal(start, first.centre)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < np.linalg.norm(told - start)


def test_a_run_that_was_stopped_goes_on_with_the_next_round_and_pays_for_none_again(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(study.run(stop_after=1)) == 1
    rows = study.fed.ledger.row_count
    second = query_after(study.workspace.public(), study.answered())
    with monkeypatch.context() as patched:  # the stored frame is used, never computed again

        def other(*_: object, **__: object) -> Frame:
            raise AssertionError("made again")

        patched.setattr(Frame, "after", other)
        assert len(study.run(stop_after=1)) == 2
    assert study.asked[1] == second
    assert study.fed.ledger.row_count > rows
    assert len(study.run()) == 3
    rows = study.fed.ledger.row_count
    assert len(study.run()) == 3  # all answered: a run for the receipts alone
    assert study.fed.ledger.row_count == rows
    assert [query.round for query in study.asked] == [1, 2, 3, 3]


def test_where_a_round_finds_nobody_the_rounds_that_were_answered_count(study: Study) -> None:
    answers = study.run(stop_after=1)
    study.fed.transport.intercept = lambda _node, _body, _reply: None  # nobody answers any more
    with pytest.raises(QuorumNotReached):
        study.run()
    again = study.answered()
    assert [answer.query.id for answer in again] == [answer.query.id for answer in answers]
    assert len(frames(study.workspace.public())) == 2
    _, codes = estimated_codes(study.workspace.public(), again)
    assert np.isfinite(codes).all()
