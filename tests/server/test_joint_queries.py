"""One question about many volumes, through the real core, ledger and workers: one charge, one code, one answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.policy import Consent, review
from common.codecs.frame import Frame, plan_frame
from common.config import CodecConfig
from common.errors import InvalidInput
from common.messages import Offer
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from server.query import plan_queries
from server.workspace import CodecRecord
from tests.federation import Federation, StubVoters, make_study

VOLUMES = 5


def no_noise(count: int, noise_std: object) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    terms = make_study(planned_queries=1, voters_per_site=2)
    study = replace(terms, codec=replace(terms.codec, joint=True))
    made = Federation(tmp_path, study=study, volumes=VOLUMES, sampler=no_noise)
    for voters in made.voters.values():
        voters.voters = 2
    made.frame = keep(made, frame_of(made))
    yield made
    made.close()


def frame_of(fed: Federation, *, volumes: int = VOLUMES, codec: str = "") -> Frame:
    rng = np.random.default_rng(0)
    size = volumes * min(4, fed.codec.dimension)
    factors = rng.normal(size=(size, size))
    return plan_frame(
        kernel=factors @ factors.T,
        centre=rng.normal(0, 0.1, size=(volumes, fed.codec.dimension)),
        variances=np.linspace(0.2, 0.1, fed.codec.dimension),
        residual=0.5,
        temperature=0.5,
        noise_std=1e-4,
        radius=fed.study.codec.radius,
        codec=codec or fed.codec_hash,
    )


def keep(fed: Federation, frame: Frame) -> CodecRecord:
    return CodecRecord(sha256=fed.objects.put(frame.to_bytes()), dimension=frame.dimension)


def probabilities(voters: StubVoters) -> np.ndarray:
    return replace(voters, failure=None).predict(b"")[0]


def expected(fed: Federation, silent: dict[str, int] | None = None) -> np.ndarray:
    """The sum of every voter's clipped joint code, by the definition: sharpen, project, weigh, clip, truncate."""
    frame = Frame.from_bytes(fed.objects.get(fed.frame.sha256))
    total = np.zeros(frame.dimension, dtype=np.int64)
    query = planned(fed)
    for name, voters in fed.voters.items():
        squares = probabilities(voters).astype(np.float64) ** 2
        offsets = np.tile(fed.codec.encode(squares / squares.sum(axis=0)), (VOLUMES, 1)) - frame.centre
        kept = frame.basis.shape[2]
        vector = np.einsum("dnm,nm->d", frame.basis.astype(np.float64), offsets[:, :kept]) * frame.weights
        one = quantise(vector, radius_int=query.mechanism.radius_int)
        total += (2 - (silent or {}).get(name, 0)) * one
    return total


def planned(fed: Federation) -> QuerySpec:
    record = CodecRecord(sha256=fed.codec_hash, dimension=fed.codec.dimension)
    (query,) = plan_queries(fed.study, codec=record, volumes=fed.volumes, frame=fed.frame)
    return query


def test_one_answer_about_all_volumes_is_one_charge(fed: Federation) -> None:
    before = fed.ledger.row_count
    fed.core().run(fed.transport)
    (answer,) = fed.ledger.answers(fed.study.id)
    assert answer.query.volumes == fed.volumes
    np.testing.assert_array_equal(answer.noisy_sum, expected(fed))
    assert len(fed.events("released")) == 1
    assert fed.ledger.row_count > before
    spent = next(iter(fed.ledger.study_guarantees(fed.study.id).values())).epsilon
    assert spent <= fed.study.privacy.epsilon


def test_asking_again_answers_from_the_ledger(fed: Federation) -> None:
    fed.core().run(fed.transport)
    rows = fed.ledger.row_count
    fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows


class _FailsOnOneVolume(StubVoters):
    """The second voter has nothing to say of one volume."""

    def predict(self, volume: bytes) -> list[np.ndarray | None]:
        first, second = super().predict(volume)
        return [first, None if volume == b"volume 3" else second]


def test_a_voter_without_one_volume_is_that_voters_zero_code_and_nobody_elses(fed: Federation) -> None:
    site = fed.sites[1]
    fed.voters[site.name] = _FailsOnOneVolume(radius=fed.voters[site.name].radius, voters=2)
    fed.site_ledgers[site.name].close()
    fed.workers[site.node_id] = fed._worker(site)
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


def test_a_joint_study_plans_one_release() -> None:
    terms = make_study(planned_queries=2)
    with pytest.raises(InvalidInput, match="planned_queries"):
        replace(terms, codec=replace(terms.codec, joint=True))
    with pytest.raises(InvalidInput, match="joint"):
        CodecConfig(name="ball-ae", joint=True)
