"""Tests a study that begins from a given network: which networks begin there, what hospitals read, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.site.enrolment import SiteKit, create_site, start_warning, study_start
from common.admission import StatedBooks
from common.canonical import sha256_bytes, sha256_file
from common.config import (
    CodecConfig,
    DataConfig,
    StartConfig,
    Study,
    TrainingConfig,
    load_study,
    parse_study,
    render_study,
)
from common.data.msd import read_dataset
from common.data.synthetic import study_data, write_phantoms
from common.data.volume import load_label, load_volume
from common.errors import InvalidInput
from common.metrics import mean_dice
from common.models.bundle import SEEN_WEIGHTS
from common.models.fit import predict
from common.models.student_bundle import WEIGHTS
from common.models.unet import build_unet, network_for, weights_from_bytes, weights_to_bytes
from consilium.cli.study import study_app
from consilium.in_process import Sites, Wire, site_config
from server.aggregation.pipeline import run_study
from server.ledger.server_ledger import Ledger
from server.planning.recommend import NOT_REHEARSED
from server.postprocess.labels import read_released
from server.postprocess.networks import student_data_of
from server.postprocess.scores import figures, gain_of, kept_scores
from server.protocols.controls import CONTROLS, PUBLIC_NETWORK, STUDENT, control_training, controls_of
from server.protocols.query_protocol import protocol_of
from server.study import create_study as setup
from server.study.consent_text import facts, for_consortium, for_site
from server.study.start import GivenStart, read_given
from server.study.workspace import Workspace
from tests.commands import typed
from tests.dashboard_study import Recorded, make_study_directory
from tests.studies import kit_without_keys, made_study
from tests.worlds import make_study

DATA = DataConfig(labels=("background", "body"), spacing_mm=(1.0, 1.0, 1.0), grid=(16, 16, 16))
RECIPE = TrainingConfig(channels=(4, 8), steps=4)


def study_of(start: StartConfig, *, teacher: TrainingConfig = RECIPE, data: DataConfig = DATA) -> Study:
    return make_study(data=data, codec=CodecConfig(), teacher=teacher, student=RECIPE, start=start)


def weights_of(*, seed: int = 5, classes: int = 2) -> bytes:
    return weights_to_bytes(build_unet(RECIPE.channels, in_channels=1, out_channels=classes, seed=seed))


@pytest.fixture
def given(tmp_path: Path) -> GivenStart:
    (tmp_path / "zoo.pt").write_bytes(weights_of())
    return read_given(tmp_path / "zoo.pt", DATA)


@pytest.fixture
def made(given: GivenStart, tmp_path: Path) -> Workspace:
    return made_study(tmp_path / "study", study_of(given.config), start=given.weights)


def test_a_study_without_a_given_network_keeps_its_id_and_its_file() -> None:
    plain = study_of(StartConfig())
    assert "start" not in plain.to_json()
    assert "start" not in render_study(plain)
    assert controls_of(plain) == CONTROLS


def test_the_given_network_is_part_of_the_studys_identity_and_of_its_file(given: GivenStart) -> None:
    study = study_of(given.config)
    assert parse_study(render_study(study)) == study
    ids = {study.id, study_of(StartConfig()).id, study_of(replace(given.config, weights="a" * 64)).id}
    assert len(ids) == 3


def test_hospitals_read_hash_name_and_origin_of_the_given_network(given: GivenStart) -> None:
    study = study_of(given.config)
    said = " ".join(for_site(study).split())
    assert sha256_bytes(given.weights) in said
    assert '"zoo.pt"' in said
    assert "your teachers, the student and" in said
    assert "consortium is responsible" in said
    assert given.config.weights in for_consortium(study, sites=2)
    assert facts(study)["start"] == {"weights": given.config.weights, "name": "zoo.pt"}
    grown = " ".join(for_site(study_of(replace(given.config, study="b" * 64))).split())
    assert f"study {'b' * 64}" in grown
    other = " ".join(for_site(study_of(given.config, teacher=replace(RECIPE, channels=(8, 16)))).split())
    assert "the student and" in other
    assert "your teachers, the student and" not in other


@pytest.mark.parametrize("wrong", [{"name": "zoo"}, {"study": "b" * 64}, {"weights": "abc"}, {"weights": "A" * 64}])
def test_a_section_that_names_no_weights_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        StartConfig(**wrong)


def test_a_study_is_not_made_without_the_weights_it_names_nor_with_others(given: GivenStart, tmp_path: Path) -> None:
    study = study_of(given.config)
    for start in (None, weights_of(seed=6)):
        with pytest.raises(InvalidInput, match=r"allowed: .*--start BUNDLE"):
            setup.create_study(Workspace(tmp_path / "refused"), study, start=start)
    with pytest.raises(InvalidInput, match=r"allowed: none.*--start"):
        setup.create_study(Workspace(tmp_path / "refused"), study_of(StartConfig()), start=given.weights)
    assert not (tmp_path / "refused").exists()


def test_weights_of_another_network_are_refused_and_the_message_says_which_it_must_be(tmp_path: Path) -> None:
    (tmp_path / "three.pt").write_bytes(weights_of(classes=3))
    three = read_given(tmp_path / "three.pt", DATA)
    with pytest.raises(InvalidInput, match=r"does not fit.*'three\.pt'.*channels \(4, 8\).*2 labels"):
        setup.create_study(Workspace(tmp_path / "refused"), study_of(three.config), start=three.weights)


def test_the_kit_holds_the_network_and_a_site_takes_no_other(
    made: Workspace, given: GivenStart, tmp_path: Path
) -> None:
    kit = kit_without_keys(made, tmp_path)
    create_site(tmp_path / "north", pool="north", data=tmp_path, kit=SiteKit.load(kit))
    study = load_study(tmp_path / "north" / "study.toml")
    start = study_start(tmp_path / "north", study)
    assert start is not None
    assert start.read_bytes() == given.weights
    start.write_bytes(weights_of(seed=6))
    with pytest.raises(InvalidInput, match=r"start\.pt.*new startup kit"):
        study_start(tmp_path / "north", study)
    (kit / "start.pt").write_bytes(weights_of(seed=6))
    with pytest.raises(InvalidInput, match="startup kit"):
        SiteKit.load(kit)
    (kit / "start.pt").unlink()
    with pytest.raises(InvalidInput, match="startup kit"):
        SiteKit.load(kit)


def test_a_site_reads_the_hash_of_a_start_that_its_study_does_not_name(given: GivenStart, tmp_path: Path) -> None:
    named = study_of(given.config)
    unnamed = study_of(StartConfig())
    assert start_warning(tmp_path, unnamed) is None
    (tmp_path / "start.pt").write_bytes(given.weights)
    assert start_warning(tmp_path, named) is None
    assert sha256_bytes(given.weights) in (start_warning(tmp_path, unnamed) or "")
    assert start_warning(tmp_path, replace(named, teacher=replace(RECIPE, channels=(8, 16))))


def test_teachers_of_another_network_begin_from_nothing_given(given: GivenStart, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "study")
    setup.create_study(
        workspace, study_of(given.config, teacher=replace(RECIPE, channels=(8, 16))), start=given.weights
    )
    kit = kit_without_keys(workspace, tmp_path)
    assert not (kit / "start.pt").exists()
    create_site(tmp_path / "north", pool="north", data=tmp_path, kit=SiteKit.load(kit))
    assert study_start(tmp_path / "north", load_study(tmp_path / "north" / "study.toml")) is None


@pytest.mark.slow
class TestARun:
    """Gives the first study's student to the next studies as their start, for each protocol."""

    @pytest.fixture(scope="class")
    @classmethod
    def first(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        made = make_study_directory(tmp_path_factory.mktemp("first"), steps=30)
        made.run()
        return made.workspace.bundle_dir

    @pytest.fixture(scope="class", params=[{}, {"rounds": 2}, {"queries": 2, "protocol": "appearance"}], ids=str)
    @classmethod
    def grown(cls, request: pytest.FixtureRequest, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
        made = make_study_directory(
            tmp_path_factory.mktemp("grown"), steps=8, start=read_given(first, study_data(2)), **request.param
        )
        write_phantoms(made.workspace.root.parent / "validation", cases=5, seed=77)
        setup.publish_validation(made.workspace, read_dataset(made.workspace.root.parent / "validation"))
        made.run()
        return made

    def test_the_public_network_alone_is_scored_as_it_is(self, first: Path, grown: Recorded) -> None:
        workspace, data = grown.workspace, grown.workspace.study().data
        model = network_for(workspace.study().student, data)
        weights_from_bytes((first / WEIGHTS).read_bytes(), model)
        cases = read_dataset(workspace.root.parent / "validation").labelled
        dice = [
            mean_dice(
                predict(model.eval(), load_volume(case.image, data).image).argmax(0).astype(np.uint8),
                load_label(case.label, data),
                len(data.labels),
            )
            for case in cases
            if case.label
        ]
        scores = kept_scores(workspace)
        assert list(scores[PUBLIC_NETWORK].cases) == pytest.approx(dice)
        assert list(json.loads(workspace.scores_file.read_text())["controls"]) == [*CONTROLS, PUBLIC_NETWORK]
        assert figures(scores)["control public network"] == pytest.approx(np.mean(dice))
        alone = {STUDENT: scores[STUDENT], PUBLIC_NETWORK: scores[PUBLIC_NETWORK]}
        gain = gain_of(alone)
        assert gain is not None
        assert gain.reference.endswith("control public network")

    def test_student_and_every_control_begin_from_the_given_weights(self, first: Path, grown: Recorded) -> None:
        student_data = student_data_of(read_released(grown.workspace))
        still = replace(student_data.public.study.student, steps=4, learning_rate=1e-9)
        public = replace(student_data.public, study=replace(student_data.public.study, student=still))
        student_data = replace(student_data, public=public, trained=lambda _name: model)
        model = network_for(still, public.study.data)
        weights_from_bytes((first / WEIGHTS).read_bytes(), model)
        wanted = model.eval().state_dict()
        for name in (STUDENT, *controls_of(public.study)):
            training = (
                protocol_of(public.study).finish(student_data)
                if name == STUDENT
                else control_training(student_data, name)
            )
            assert training is not None
            found = training.train(None, lambda _step, _loss: None).state_dict()
            assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted), name

    def test_the_weights_that_sites_get_are_the_given_ones(self, first: Path, grown: Recorded) -> None:
        assert sha256_file(grown.workspace.start_file) == sha256_file(first / WEIGHTS)
        assert grown.workspace.study().start.study == json.loads((first / "configs/privacy.json").read_text())["study"]


@pytest.mark.slow
def test_study_init_takes_a_bundles_network_and_says_what_is_not_known(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made = make_study_directory(tmp_path / "first", steps=4)
    made.run()
    bundle = made.workspace.bundle_dir

    def init(folder: str, *more: str, labels: str = "") -> Callable[[], object]:
        data = made.workspace.study().data
        words = ["init", str(tmp_path / folder), "--name", folder, "--labels", labels or ",".join(data.labels)]
        words += ["--grid", "16,16,16", "--queries", "4", "--quorum", "3", "--start", str(bundle), *more]
        return lambda: CliRunner().invoke(study_app, words)

    done = init("second")()
    assert done.exit_code == 0, done.output
    study = load_study(tmp_path / "second" / "study.toml")
    assert study.teacher.channels == study.student.channels == (4, 8)
    assert study.start.weights == sha256_file(bundle / WEIGHTS)
    assert f"plan: {NOT_REHEARSED}" in done.output
    assert f"study {made.workspace.study().id[:16]}" in done.output
    wrong = init("third", labels="background,liver,spleen")()
    assert isinstance(wrong.exception, InvalidInput)
    assert "liver" in str(wrong.exception)
    assert not (tmp_path / "third").exists()

    seen = tmp_path / "seen"
    shutil.copytree(bundle, seen)
    (seen / WEIGHTS).rename(seen / SEEN_WEIGHTS)
    with pytest.raises(InvalidInput, match=f"patients.*{seen}"):
        read_given(seen, study.data)


@pytest.mark.slow
def test_a_study_takes_in_volumes_and_a_hospital_in_the_middle_and_its_answers_stay(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made = make_study_directory(tmp_path, steps=4, volumes=6, later=3)
    workspace, images = made.workspace, [case.image for case in read_dataset(tmp_path / "phantoms").cases]
    made.run("1")
    before = {answer.query.id: answer.noisy_sum.tobytes() for answer in read_released(workspace).answers}
    assert len(before) == 3
    with pytest.raises(InvalidInput, match="given twice"):
        setup.add_volumes(workspace, images[2:4])
    with pytest.raises(InvalidInput, match=r"7.*the 6 planned queries.*study init --ledger"):
        setup.add_volumes(workspace, images[3:7])
    assert len(setup.add_volumes(workspace, images[3:6])) == 6
    setup.add_site(workspace, made.opened.sites[-1])
    made.run("2")
    answers = read_released(workspace).answers
    assert len(answers) == 6
    assert {answer.query.id: answer.noisy_sum.tobytes() for answer in answers[:3]} == before
    names = [{entry.site for entry in answer.roster} for answer in answers]
    assert names == [{"north", "east", "south"}] * 3 + [{"north", "east", "south", "west"}] * 3
    with Ledger.open(workspace.ledger_file) as ledger:
        assert ledger.spent("west/patients").mu_squared == ledger.spent("north/patients").mu_squared / 2


@pytest.mark.slow
def test_the_next_study_begins_from_the_last_student_on_the_same_books(tmp_path: Path) -> None:
    """This is the procedure of docs/growing.md: run, `study init --ledger --start` with the same hospitals, run."""
    torch.set_num_threads(1)
    first = make_study_directory(tmp_path / "one", steps=4, volumes=6, later=3)
    first.run()
    before = dict(spent_by_pool(first.workspace))
    words = ["init", str(tmp_path / "second"), "--name", "second", "--ledger", str(first.workspace.root)]
    words += ["--start", str(first.workspace.bundle_dir), "--labels", ",".join(first.workspace.study().data.labels)]
    words += ["--grid", "{},{},{}".format(*first.workspace.study().data.grid), "--queries", "2", "--quorum", "3"]
    words += ["--epsilon", "1", "--delta", "1e-3", "--aggregation", "open", "--verdicts", "0", "--codec", "paper-pca"]
    typed(study_app, *words)
    second = Workspace(tmp_path / "second")
    study = replace(second.study(), student=replace(second.study().student, steps=2))  # no part of its id
    second.study_file.write_text(render_study(study))
    cases = read_dataset(tmp_path / "one" / "phantoms").cases
    setup.publish_volumes(second, [case.image for case in cases[:2]])
    setup.fit_study_codec(second, [case.label for case in cases[6:] if case.label], sites=3)
    first.opened.close()
    keys, terms = setup.server_keys(second), first.workspace.study()
    again = Sites(
        first.opened.root,
        first.opened.sites[:3],
        study,
        config=lambda site: site_config(site, terms, keys),
        voters=lambda site: first.teachers[site.name],
        fetch=second.objects.get,
    )
    for site in again.sites:
        head = again.ledgers[site.name].head()
        total = again.ledgers[site.name].spent().mu_squared
        books = StatedBooks(head.ledger_id, head.public_key, total, terms.privacy.protection)
        setup.add_site(second, site, books=books)
    run_study(second, Wire(again.workers), run="1")
    again.close()
    after = dict(spent_by_pool(second))
    assert before.keys() <= after.keys()
    with Ledger.open(second.ledger_file) as ledger:
        alone = ledger.study_spending(study.id).mu_squared
    assert alone > 0
    assert all(after[site.pool] == before[site.pool] + alone for site in again.sites)
    assert read_given(second.bundle_dir, study.data).config.study == study.id
    assert study.start.study == terms.id


def spent_by_pool(workspace: Workspace) -> Iterator[tuple[str, Fraction]]:
    with Ledger.open(workspace.ledger_file) as ledger:
        for declared in ledger.pools():
            yield declared.pool, ledger.spent(declared.pool).mu_squared


def test_a_joint_study_refuses_added_volumes_and_says_what_to_do(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "joint")
    study = replace(study_of(StartConfig()), codec=CodecConfig(joint=True))
    setup.create_study(workspace, study)
    with pytest.raises(InvalidInput, match="--start STUDY/bundle"):
        setup.add_volumes(workspace, [])
