"""Tests Algorithm 1's parts against the formulas they come from, and the templates of the paper's experiment."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from common.codecs import codec_class, fit_codec
from common.codecs.paper import PaperPcaCodec, paper_radius
from common.config import load_study, parse_study
from common.errors import InvalidInput
from common.study_mechanism import study_mechanism
from consilium.cli.main import app
from server.study import templates as studies
from tests.commands import typed
from tests.contracts.codec_contract import GRID, LABELS, CodecContract, patients, soft


class Fitted(CodecContract):
    name = "paper-pca"
    radius = paper_radius(labels=LABELS, grid=GRID)


def fitted(*, noise_std: float) -> PaperPcaCodec:
    codec = fit_codec(Fitted.study(), patients(16, seed=1), noise_std=noise_std)
    assert isinstance(codec, PaperPcaCodec)
    return codec


def test_two_codes_differ_by_at_most_the_root_of_d_and_clipping_to_half_of_it_says_the_same() -> None:
    """By eq (4), ‖A(y - y')‖ ≤ √d for y, y' in [0, 1]^d, reached at opposite corners; the clipped sum's Δ =
    2C is √d.
    """
    corners = np.array(list(itertools.product([0.0, 1.0], repeat=8)))
    widest = max(float(np.linalg.norm(a - b)) for a in corners for b in corners)
    assert widest == pytest.approx(math.sqrt(8))
    assert 2 * paper_radius(labels=2, grid=(2, 2, 1)) == pytest.approx(widest)


def test_codes_are_projections_and_decoding_adds_them_to_the_mean() -> None:
    codec, prediction = fitted(noise_std=1.0), soft(patients(1, seed=6)[0]).astype(np.float64)
    maps = np.stack([np.eye(LABELS)[m].transpose(3, 0, 1, 2) for m in patients(16, seed=1)])
    # The mean over maps, not over augmented copies.
    np.testing.assert_allclose(codec.mean, maps.mean(axis=0), atol=1e-12)
    rows = codec.basis.reshape(codec.dimension, -1).astype(np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.eye(codec.dimension), atol=1e-5)
    code = codec.encode(prediction.astype(np.float32))
    np.testing.assert_allclose(code, rows @ (prediction - codec.mean).ravel(), atol=1e-4)
    recovered = (codec.mean.ravel() + rows.T @ code).reshape(codec.mean.shape)
    inside = (recovered > 1e-3).all(axis=0)  # where no value was cut off
    decoded = codec.decode(code, noise_std=0.0)
    np.testing.assert_allclose(decoded[:, inside], (recovered / recovered.sum(axis=0))[:, inside], atol=1e-5)


@pytest.mark.slow
def test_eq_7_keeps_the_variances_above_the_noise_and_never_none() -> None:
    exact = np.stack([np.eye(LABELS)[m].transpose(3, 0, 1, 2).ravel() for m in patients(16, seed=1)])
    many, few, one = (fitted(noise_std=s).dimension for s in (0.0, 5.0, 1e4))
    assert (many, one) == (24, 1)
    assert 1 < few < many
    largest = np.linalg.svd(exact - exact.mean(0), compute_uv=False)[0] ** 2 / 16
    assert fitted(noise_std=math.sqrt(2 * largest)).dimension == 1  # copies vary a little more than the maps


def test_a_study_may_set_the_length_of_a_code() -> None:
    study = Fitted.study(dimension=7)
    codec = fit_codec(study, patients(16, seed=1), noise_std=1e4)
    assert codec.dimension == 7  # eq (7) would keep one
    with pytest.raises(InvalidInput, match=r"codec\.dimension"):
        fit_codec(Fitted.study(dimension=7, augmentations=0), patients(5, seed=1), noise_std=1.0)


def test_another_radius_would_not_be_the_papers_noise_and_is_refused() -> None:
    with pytest.raises(InvalidInput, match="√d/2"):
        fit_codec(Fitted.study(radius=1.0), patients(4, seed=1), noise_std=1.0)


# ---- the study templates


@pytest.mark.parametrize("name", studies.names())
def test_a_template_is_the_papers_experiment(name: str) -> None:
    study = parse_study(studies.template(name))
    privacy = study.privacy
    assert (privacy.epsilon, privacy.delta, privacy.planned_queries, privacy.quorum) == (8.0, 1e-3, 80, 8)
    assert (privacy.accountant, privacy.unit, privacy.relation) == ("paper", "hospital", "replace-one")
    assert len(study.data.labels) == 4  # three-class Dice
    for recipe in (study.teacher, study.student):
        assert recipe.network == "paper-unet"  # four poolings: tests/common/models/test_unet.py
        assert recipe.patch == (64, 64, 64)
        assert recipe.augmentation == "rotate-mirror"
    assert codec_class(study.codec.name).name == study.codec.name


def test_the_templates_have_the_papers_noise() -> None:
    """Algorithm 2 needs the paper's headline noise 1.282564; Algorithm 1 needs √d/2 times as much, with d = 4 · 64³."""
    noise = {
        name: study_mechanism(parse_study(studies.template(name)), dimension=1).mean_noise_std(voters=8)
        for name in studies.names()
    }
    assert noise["paper-ae"] == pytest.approx(1.282564, abs=1e-5)
    assert noise["paper-pca"] == pytest.approx(1.282564 * math.sqrt(4 * 64**3) / 2, rel=1e-5)


def test_a_template_becomes_a_study_on_the_command_line(tmp_path) -> None:
    run = CliRunner().invoke
    printed = run(app, ["study", "template", "paper-ae"])
    assert printed.exit_code == 0
    (tmp_path / "study.toml").write_text(printed.stdout, encoding="utf-8")
    made = run(app, ["study", "create", str(tmp_path / "trial"), "--study", str(tmp_path / "study.toml")])
    assert made.exit_code == 0, made.output
    template, trial = load_study(tmp_path / "study.toml"), load_study(tmp_path / "trial" / "study.toml")
    assert replace(trial, pool=template.pool) == template
    assert trial.pool_budget.epsilon > template.privacy.epsilon  # room for another study of the same hospitals
    for words in ("(paper)", "(exact)", "δ = 0.001, unit hospital, relation replace-one"):
        assert words in made.stdout
    at_once = run(app, ["study", "create", str(tmp_path / "second"), "--template", "paper-ae"])
    assert at_once.exit_code == 0, at_once.output
    assert load_study(tmp_path / "second" / "study.toml") == trial
    for words in ([], ["--template", "paper-ae", "--study", str(tmp_path / "study.toml")]):
        refused = run(app, ["study", "create", str(tmp_path / "third"), *words])
        assert isinstance(refused.exception, InvalidInput)
        assert not (tmp_path / "third").exists()
    with pytest.raises(InvalidInput, match="paper-ae, paper-pca"):
        studies.template("paper-mac")


def test_init_gives_paper_pca_its_only_radius(tmp_path) -> None:
    words = "--name t --labels background,lesion --grid 16,16,16 --queries 4 --quorum 2 --codec paper-pca"
    typed(app, "study", "init", tmp_path / "trial", *words.split())
    assert load_study(tmp_path / "trial" / "study.toml").codec.radius == math.sqrt(2 * 16**3) / 2
