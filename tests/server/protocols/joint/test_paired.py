"""Tests public pairs: start, student and controls learn from them, and one control learns from nothing else."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy.special import softmax
from typer.testing import CliRunner

from common.codecs.pca import PcaCodec
from common.config import CodecConfig, Study, TrainingConfig, load_study, parse_study, render_study
from common.data.msd import Case, write_dataset
from common.errors import InvalidInput
from common.models import fit as fitting
from common.models.fit import fit, predict
from common.models.unet import build_unet, save_weights
from common.objects import ObjectStore
from common.protocols.frame import plan_frame
from consilium.cli.study import study_app
from server.protocols import public_start as joint
from server.protocols.controls import CONTROLS
from server.protocols.joint import belief, protocol
from server.protocols.public_start import TEMPERATURE, PairTraining, Start, moved, public_start, refine, refine_paired
from server.protocols.query_protocol import FitFiles, StudentData
from server.public.material import PAIRS_FILE, START_FILE, CodecRecord, PublicMaterial
from server.public.paired import Paired
from server.public.public_files import FilesInFolder
from server.study import consent_text
from server.study.workspace import Workspace
from tests.commands import refusal_of
from tests.contracts.codec_contract import patients
from tests.federation import make_study
from tests.studies import made_study

RECIPE = TrainingConfig(channels=(4, 8), steps=9, learning_rate=1e-3)


def drawn(count: int, *, seed: int) -> Paired:
    labels = patients(count, seed=seed)
    noise = np.random.default_rng(seed).normal(0, 0.1, labels.shape)
    return Paired(((labels > 0) + noise)[:, None].astype(np.float32), labels, int(labels.max()) + 1)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return drawn(3, seed=3).images


@pytest.fixture(scope="module")
def paired() -> Paired:
    return drawn(2, seed=4)


@pytest.fixture(scope="module")
def start(codec: PcaCodec, images: np.ndarray, paired: Paired) -> Start:
    return public_start(images, codec, codec.powers, RECIPE, seed=0, paired=paired)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(joint, "fit", lambda _model, images, targets, *_, **__: seen.append((images, targets)))
    return seen


def test_start_student_and_controls_learn_from_the_pairs_and_one_from_them_alone(
    codec: PcaCodec, images: np.ndarray, paired: Paired, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    public_start(images, codec, codec.powers, RECIPE, seed=0, paired=paired)
    refine(start.model, images, codec, start.codes + 0.1, RECIPE, seed=0, beside=PairTraining(paired, start.model))
    refine_paired(start.model, paired, RECIPE, seed=0)
    for own_images, targets in (seen[0], seen[2]):
        np.testing.assert_array_equal(own_images, paired.images)
        np.testing.assert_array_equal(targets.argmax(axis=1), paired.labels)
    np.testing.assert_array_equal(seen[1][0], np.concatenate([images, paired.images]))
    np.testing.assert_array_equal(seen[1][1][-2:].argmax(axis=1), paired.labels)
    assert (seen[1][1].max(axis=(1, 2, 3, 4)) <= 1).all()


def test_a_label_is_the_starts_prediction_moved_by_what_was_released_and_no_further(
    codec: PcaCodec, images: np.ndarray, start: Start
) -> None:
    squares = np.stack([predict(start.model, image) for image in images]).astype(np.float64) ** (1 / TEMPERATURE)
    own = squares / squares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(moved(start.model, images, codec, start.codes), own, atol=1e-5)
    other = start.codes + 0.5
    decoded = [np.stack([codec.decode(code, noise_std=0.0) for code in codes]) for codes in (other, start.codes)]
    expected = softmax(np.log(own) + np.log(decoded[0]) - np.log(decoded[1]), axis=1)
    np.testing.assert_allclose(moved(start.model, images, codec, other), expected, atol=1e-3)


def test_with_public_pairs_a_student_moves_three_tenths_of_the_way_from_the_network_of_the_pairs(
    codec: PcaCodec, images: np.ndarray, paired: Paired, start: Start
) -> None:
    """The way leads to the network trained on labels and pairs; the start and the pairs' network stay unchanged."""
    codes, alone = start.codes + 0.1, refine_paired(start.model, paired, RECIPE, seed=0)
    trained, before = copy.deepcopy(start.model), copy.deepcopy(alone.state_dict())
    targets = np.concatenate([moved(start.model, images, codec, codes), paired.targets])
    fit(trained, np.concatenate([images, paired.images]), targets, RECIPE, seed=0)
    found = refine(start.model, images, codec, codes, RECIPE, seed=0, beside=PairTraining(paired, alone)).state_dict()
    for name, there in trained.state_dict().items():
        assert torch.equal(alone.state_dict()[name], before[name])
        torch.testing.assert_close(found[name], 0.7 * before[name] + 0.3 * there)
    assert any(not torch.equal(found[name], before[name]) for name in found)


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [5, 14])
@pytest.mark.slow
def test_a_killed_student_goes_on_in_either_training_and_controls_find_the_pairs_network(
    killed_at: int, codec: PcaCodec, images: np.ndarray, paired: Paired, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "CHECKPOINT_EVERY", 4)
    data = replace(make_study().data, labels=("background", "left", "right"))
    study = replace(study_with(2), data=data, student=RECIPE)
    begun = np.zeros((3, codec.dimension))
    round_ = SimpleNamespace(query=SimpleNamespace(id="q", volumes=("0", "1", "2")), noisy_sum=np.zeros(4))
    monkeypatch.setattr(protocol, "rounds_to_learn", lambda *_: (round_,))
    monkeypatch.setattr(protocol, "estimated_codes", lambda *_: (begun, begun + 0.1))
    monkeypatch.setattr(protocol, "codec_of", lambda _public: codec)

    def lesson_in(folder: Path) -> StudentData:
        folder.mkdir()
        public = PublicMaterial(
            study,
            CodecRecord("a" * 64, 4),
            ("0", "1", "2"),
            ObjectStore(folder),
            FilesInFolder(folder),
            paired,
            {str(row): image for row, image in enumerate(images)},
        )
        save_weights(folder / START_FILE, build_unet(RECIPE.channels, in_channels=1, out_channels=3))
        labels = dict.fromkeys(public.volumes, np.zeros(0))
        return StudentData(public, (), labels)  # type: ignore[arg-type]

    whole, student_data = lesson_in(tmp_path / "whole"), lesson_in(tmp_path / "killed")
    told: list[int] = []
    training = protocol.Joint().finish(whole)
    expected = training.train(FitFiles.at(tmp_path / "whole"), lambda step, _loss: told.append(step))
    assert told == list(range(1, training.steps + 1))
    assert training.steps == 2 * RECIPE.steps

    def kill(step: int, _loss: float) -> None:
        if step == killed_at:
            raise Killed

    told.clear()
    training = protocol.Joint().finish(student_data)
    with pytest.raises(Killed):
        training.train(FitFiles.at(tmp_path / "killed"), kill)
    found = training.train(FitFiles.at(tmp_path / "killed"), lambda step, _loss: told.append(step))
    kept = (
        4 if killed_at < RECIPE.steps else RECIPE.steps + 4
    )  # of the student's own steps and the pairs', each by four
    assert told == list(range(kept + 1, training.steps + 1))
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for name in CONTROLS:
        told.clear()
        control = protocol.Joint().control(replace(student_data, trained=lambda _: expected), name)
        assert control is not None
        control.train(FitFiles.at(tmp_path / "killed", name), lambda step, _loss: told.append(step))
        assert told == ([] if name == "public_only" else list(range(1, RECIPE.steps + 1)))
    assert [path.name for path in (tmp_path / "killed").glob("*checkpoint*")] == [PAIRS_FILE]


def study_with(paired: int) -> Study:
    study = make_study()
    privacy = replace(study.privacy, planned_queries=4)
    return replace(study, privacy=privacy, codec=CodecConfig(joint=True, paired=paired))


def test_a_study_states_its_pairs_and_one_without_any_is_as_it_was() -> None:
    with_pairs, without = study_with(8), study_with(0)
    assert parse_study(render_study(with_pairs)) == with_pairs
    assert "8 public volumes" in consent_text.for_consortium(with_pairs, sites=3)
    assert consent_text.facts(with_pairs)["paired"] == 8
    assert with_pairs.id != without.id
    assert "paired" not in render_study(without)
    assert "paired" not in without.codec.to_table()
    for joint_query, count in ((False, 1), (True, -1)):
        with pytest.raises(InvalidInput, match=r"codec\.paired"):
            CodecConfig(joint=joint_query, paired=count)


def public_folder(folder: Path, study: Study) -> tuple[list[Path], Path]:
    """Write three public volumes, and a dataset of two more with their label maps."""
    folder.mkdir()
    grid, rng, cases, files = study.data.grid, np.random.default_rng(0), [], []
    for number in range(5):
        label = np.zeros(grid, dtype=np.uint8)
        label[2:6, 2:6, 2 + number % 2 : 6] = 1
        paths = [folder / f"{kind}-{number}.nii.gz" for kind in ("image", "label")]
        for path, array in zip(paths, ((label + rng.normal(0, 0.1, grid)).astype(np.float32), label), strict=True):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        files.append(paths[0])
        cases.append(Case(f"case-{number}", *paths))
    names, channels = study.data.labels, study.data.channels
    write_dataset(folder / "paired", name="paired", labels=names, channels=channels, cases=cases[:2])
    return files, folder / "paired"


def test_pairs_are_published_as_promised_and_read_back(tmp_path: Path) -> None:
    study = study_with(2)
    files, dataset = public_folder(tmp_path / "public", study)
    workspace = made_study(tmp_path / "study", study)
    images = tmp_path / "images"
    images.mkdir()
    for file in files[2:]:
        (images / file.name).write_bytes(file.read_bytes())
    arguments = ["publish", str(workspace.root), "--images", str(images)]
    refused = refusal_of(study_app, *arguments)
    assert "got 0; allowed: exactly 2" in str(refused)
    assert "--paired" in refused.remedy
    done = CliRunner().invoke(study_app, [*arguments, "--paired", str(dataset)], catch_exceptions=False)
    assert re.search("published 3 volumes.* 2 ", done.stdout)
    paired = public_of(workspace).pairs()
    assert paired is not None
    assert (paired.images.shape[0], paired.labels.max(), paired.targets.sum(axis=1).max()) == (2, 1, 1)
    (images / files[0].name).write_bytes(files[0].read_bytes())
    with pytest.raises(InvalidInput, match=r"public pairs.*--paired"):
        CliRunner().invoke(study_app, [*arguments, "--paired", str(dataset)], catch_exceptions=False)


def public_of(workspace: Workspace) -> PublicMaterial:
    """Return the study's public material before a codec is fitted."""
    workspace.save_codec(CodecRecord("a" * 64, 4))
    return workspace.public()


def test_study_init_takes_the_number_of_pairs(tmp_path: Path) -> None:
    arguments = ["init", str(tmp_path / "s"), "--name", "s", "--labels", "background,core", "--grid", "16,16,16"]
    arguments += ["--queries", "4", "--quorum", "2", "--joint", "--paired", "8"]
    assert CliRunner().invoke(study_app, arguments, catch_exceptions=False).exit_code == 0
    assert load_study(tmp_path / "s" / "study.toml").codec.paired == 8


def test_a_study_trains_on_its_pairs_from_the_public_start_to_the_last_control(
    codec: PcaCodec, paired: Paired, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public start and all trainings receive the same pairs. With other pairs the student's inputs differ."""
    study = study_with(2)
    images = dict.fromkeys(("v1", "v2"), np.zeros((1, 8, 8, 8)))
    stores = ObjectStore(tmp_path), FilesInFolder(tmp_path)
    public = PublicMaterial(study, CodecRecord("a" * 64, 4), tuple(images), *stores, paired, images)
    save_weights(tmp_path / START_FILE, build_unet(study.student.channels, in_channels=1, out_channels=2))
    round_ = SimpleNamespace(query=SimpleNamespace(id="q", volumes=("v1", "v2")), noisy_sum=np.zeros(4, dtype=np.int64))
    monkeypatch.setattr(protocol, "rounds_to_learn", lambda *_: (round_,))
    monkeypatch.setattr(protocol, "estimated_codes", lambda *_: (np.zeros((2, 4)), np.ones((2, 4))))
    monkeypatch.setattr(protocol, "codec_of", lambda _public: None)
    trained: list[tuple[str, object]] = []
    monkeypatch.setattr(joint, "refine", lambda *_, beside, **__: trained.append(("all", beside.paired)))
    monkeypatch.setattr(joint, "refine_paired", lambda _start, paired, *_, **__: trained.append(("alone", paired)))
    labels = dict.fromkeys(("v1", "v2"), np.zeros((2, 8, 8, 8)))
    student_data = StudentData(public, (), labels)  # type: ignore[arg-type]
    asked = protocol.Joint()
    ready = replace(student_data, trained=lambda _: None)  # type: ignore[arg-type, return-value]
    trainings = [asked.finish(ready), *(asked.control(ready, name) for name in CONTROLS)]
    for training in trainings:
        assert training is not None
        training.train(FitFiles.at(tmp_path), lambda _step, _loss: None)
    assert trained == [("alone", paired), ("all", paired)] * 3 + [("alone", paired)]
    assert trainings[0] is not None
    assert asked.finish(replace(student_data, public=replace(public, paired=()))).inputs != trainings[0].inputs

    told: list[object] = []

    def stop(*_: object, paired: object, **__: object) -> None:
        told.append(paired)
        raise InterruptedError

    monkeypatch.setattr(joint, "public_start", stop)
    monkeypatch.setattr(protocol, "codec_of", lambda _public: codec)
    monkeypatch.setattr(joint, "images_of", lambda _public: np.stack([paired.images[0]] * 2))
    volume = public.objects.put(b"volume")
    with pytest.raises(InterruptedError):
        asked.prepare(lambda: replace(public, volumes=(volume,)), sites=2, on_stage=lambda *_: None)
    assert told == [paired]


@pytest.mark.parametrize(("size", "least", "most"), [(0.0, 0.0, 0.15), (1.0, 0.8, 1.0)])
def test_with_public_pairs_answers_without_information_move_no_label(
    monkeypatch: pytest.MonkeyPatch, size: float, least: float, most: float
):
    frame = plan_frame(
        kernel=np.diag(1.0 / np.arange(1, 61)),
        centre=np.zeros((3, 20)),
        variances=np.ones(20),
        residual=0.5,
        temperature=1.0,
        noise_std=0.1,
        radius=1.0,
        codec="a" * 64,
    )
    rng, asked = np.random.default_rng(0), np.count_nonzero(frame.weights)
    shares = []
    for _ in range(40):
        truth = size * np.sqrt(frame.variances[:asked]) * rng.normal(size=asked) * frame.weights[:asked]
        seen = frame.read(truth + rng.normal(0, 0.1, asked), noise_std=0.1)
        monkeypatch.setattr(belief, "frame_of", lambda *_: frame)
        monkeypatch.setattr(belief, "observation", lambda *_, seen=seen: seen)
        shares.append(belief.offset_scale(SimpleNamespace(), [SimpleNamespace()]))
    assert least <= np.mean(shares) <= most
