"""States what every query protocol promises. A test inherits :class:`ProtocolContract` and names the
protocol.

A whole study of four sites is run once a class through pipeline, core, workers and both ledgers, on phantoms.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from client.policy import Consent, review
from common.codecs import load_codec
from common.errors import InvalidInput
from common.events import read_events
from common.messages import Offer
from common.privacy.mechanism import QuerySpec
from common.protocols.site_protocol import site_protocol
from server.ledger.server_ledger import Ledger
from server.postprocess.labels import Released, read_released
from server.postprocess.networks import student_data_of
from server.protocols.controls import CONTROLS
from server.protocols.query_protocol import Answer, protocol_of
from server.study import consent_text
from tests.dashboard_study import QUERIES, Recorded, make_study_directory


def never(_query: str) -> Answer | None:
    return None


class ProtocolContract:
    """Tests a protocol's promises; a subclass names its study and its number of queries."""

    name: str
    queries: int
    volumes = QUERIES
    rounds = 0
    protocol = ""

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp(cls.name)
        made = make_study_directory(
            folder, steps=4, rounds=cls.rounds, queries=cls.queries, protocol=cls.protocol, volumes=cls.volumes
        )
        made.run()
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def released(cls, recorded: Recorded) -> Released:
        return read_released(recorded.workspace)

    @staticmethod
    def offered(released: Released, query: QuerySpec) -> str:
        study = released.public.study
        offer = Offer(study=study.id, ledger="ledger", batch="b" * 64, queries=(query,))
        return review(offer, Consent.of(study))

    def test_a_study_selects_it_by_its_terms(self, released: Released) -> None:
        study = released.public.study
        assert study.codec.protocol_name == self.name
        site, server = study.codec.terms.site, study.codec.terms.server
        assert [target.rpartition(":")[2] for target in (site, server)] == [
            type(site_protocol(study)).__name__,
            type(protocol_of(study)).__name__,
        ]

    def test_a_site_accepts_what_it_asks_and_declines_another_shape(self, released: Released) -> None:
        first = next(protocol_of(released.public.study).configure(released.public, never))
        for query in first:
            assert self.offered(released, query) == "accepted"
            other = "a" * 64 if query.centre == "zero" else "zero"
            assert self.offered(released, replace(query, centre=other)) == "wrong-codec"

    def test_the_same_answers_are_asked_the_same_questions(self, recorded: Recorded, released: Released) -> None:
        protocol, known = protocol_of(released.public.study), {a.query.id: a for a in released.answers}
        before = sorted(path.name for path in recorded.workspace.objects_dir.iterdir())
        first, again = (
            [query.id for group in protocol.configure(released.public, known.get) for query in group] for _ in range(2)
        )
        assert first == again
        assert set(first) <= known.keys()
        assert sorted(path.name for path in recorded.workspace.objects_dir.iterdir()) == before
        begun = [query.id for query in next(protocol.configure(released.public, never))]
        assert begun == [answer.query.id for answer in released.answers][: len(begun)]

    def test_every_planned_query_is_one_charge_and_one_answer(self, recorded: Recorded, released: Released) -> None:
        assert len(released.answers) == released.public.study.privacy.planned_queries == self.queries
        with Ledger.open(recorded.workspace.ledger_file) as ledger:
            spent = max(g.epsilon for g in ledger.study_spending(released.public.study.id).readings().values())
            exact = min(g.epsilon for g in ledger.study_spending(released.public.study.id).readings().values())
        assert exact <= released.public.study.privacy.epsilon <= spent + 1e-6

    def test_a_voters_code_has_the_querys_dimension(self, recorded: Recorded, released: Released) -> None:
        public = released.public
        codec = load_codec(public.objects.get(public.codec.sha256))
        study, asked = public.study, released.answers[-1].query
        encoder = site_protocol(study).encoder(asked, codec, fetch=public.objects.get)
        flat = np.full((len(study.data.labels), *study.data.grid), 1 / len(study.data.labels), dtype=np.float32)
        image = np.zeros((len(study.data.channels), *study.data.grid), dtype=np.float32)
        codes = np.stack([encoder.of_volume(flat, lambda: image) for _ in asked.volumes])
        code = encoder.of_voter(codes)
        assert code.shape == (asked.mechanism.dimension,)
        assert code.dtype == np.float64
        assert np.isfinite(code).all()

    def test_rounds_whose_encoders_have_one_key_encode_a_volume_alike(self, released: Released) -> None:
        public, study = released.public, released.public.study
        codec = load_codec(public.objects.get(public.codec.sha256))
        encoders = [
            site_protocol(study).encoder(each.query, codec, fetch=public.objects.get) for each in released.answers
        ]
        drawn = np.random.default_rng(1).dirichlet(np.ones(len(study.data.labels)), size=study.data.grid)
        maps = np.moveaxis(drawn, -1, 0).astype(np.float32)
        image = np.random.default_rng(2).normal(size=(len(study.data.channels), *study.data.grid)).astype(np.float32)
        alike = [one for one in encoders if one.volume_key == encoders[0].volume_key]
        for one in alike:
            np.testing.assert_array_equal(
                one.of_volume(maps, lambda: image), encoders[0].of_volume(maps, lambda: image)
            )

    def test_every_volume_that_is_asked_about_gets_probabilities(self, released: Released) -> None:
        study, protocol = released.public.study, protocol_of(released.public.study)
        labels = list(protocol.aggregate(released.public, released.answers).labels())
        query_plan = protocol.query_plan(study)
        asked = query_plan.asked(released.public.volumes)
        assert sorted(label.volume for label in labels) == sorted(asked)
        assert query_plan.labelled(len(released.answers), asked=len(asked)) == len(asked)
        assert query_plan.labelled(0, asked=len(asked)) == 0
        for label in labels:
            assert label.probabilities.shape == (len(study.data.labels), *study.data.grid)
            assert label.probabilities.min() >= 0
            np.testing.assert_allclose(label.probabilities.sum(axis=0), 1, atol=1e-5)
        nothing = protocol.aggregate(released.public, ())
        assert [*nothing.labels(), *nothing.doubts(draws=1)] == []
        assert nothing.plausibility() is None

    def test_student_and_controls_are_made_of_different_things_and_named_by_them(self, released: Released) -> None:
        protocol, student_data = protocol_of(released.public.study), student_data_of(released)
        student = protocol.finish(student_data).inputs
        # The last control may need a trained network.
        controls = [protocol.control(student_data, name) for name in CONTROLS[:2]]
        inputs = [student, *(training.inputs for training in controls if training is not None)]
        assert len(set(inputs)) == len(inputs) == 3
        assert protocol.finish(student_data).inputs == student

    def test_a_run_trains_student_and_controls_and_a_second_run_nothing(self, recorded: Recorded) -> None:
        def trained() -> list[str]:
            events = read_events(recorded.workspace.events_file)
            return [event["event"] for event in events if event["event"] in ("student-trained", "control-trained")]

        assert trained() == ["student-trained"] + ["control-trained"] * len(CONTROLS)
        before, rows = trained(), len(read_released(recorded.workspace).answers)
        recorded.run("2")
        assert (trained(), len(read_released(recorded.workspace).answers)) == (before, rows)

    def test_too_few_public_volumes_are_refused(self, released: Released) -> None:
        query_plan = protocol_of(released.public.study).query_plan(released.public.study)
        query_plan.check_volumes(QUERIES)
        with pytest.raises(InvalidInput, match="public volumes"):
            query_plan.check_volumes(0)

    def test_its_plan_is_in_the_words_that_a_hospital_reads(self, released: Released) -> None:
        study = released.public.study
        words = protocol_of(study).query_plan(study)
        assert f"plan {words.plan}," in consent_text.for_consortium(study, sites=4)
        said = " ".join(consent_text.for_site(study).split())
        assert f"segment {words.which} public volumes" in said
        assert f"For {words.each} your site sends" in said

    @pytest.mark.slow
    def test_no_torch_is_loaded_before_there_is_something_to_train(self, released: Released) -> None:
        """Queries are asked and answers read while the ledger is open, which loading torch would prolong."""
        targets = released.public.study.codec.terms
        program = "import importlib, sys; [importlib.import_module(n.partition(':')[0]) for n in sys.argv[1:]]; "
        program += "sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program, targets.site, targets.server], check=False)
        assert done.returncode == 0
