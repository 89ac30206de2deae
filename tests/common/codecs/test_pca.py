"""Tests the linear codec's mathematics against SciPy's optimiser, NumPy's SVD and Monte Carlo."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from common.codecs import fit_codec
from common.codecs.codec import check_code
from common.codecs.pca import FILL, PcaCodec, principal_components, water_fill
from common.config import CodecConfig
from common.errors import InvalidInput
from tests.contracts.codec_contract import CodecContract, patients, soft

SPECTRUM = np.array([9.0, 4.0, 2.0, 1.0, 0.3, 0.02])


def error_after_decoding(powers: np.ndarray, variances: np.ndarray, noise_std: float) -> float:
    return float((variances * noise_std**2 / (powers + noise_std**2)).sum())


@pytest.mark.parametrize("noise_std", [0.05, 0.3, 1.0, 5.0])
def test_water_filling_is_the_best_way_to_spend_the_radius(noise_std: float) -> None:
    powers = water_fill(SPECTRUM, noise_std=noise_std, power=0.64)
    scale = noise_std**2
    oracle = minimize(
        lambda p: error_after_decoding(p * scale, SPECTRUM, noise_std),
        np.full(6, 0.64 / 6 / scale),
        bounds=[(0, None)] * 6,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 0.64 / scale},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    best = error_after_decoding(oracle.x * scale, SPECTRUM, noise_std)
    assert error_after_decoding(powers, SPECTRUM, noise_std) <= best * (1 + 1e-6)


@settings(max_examples=100)
@given(
    variances=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    noise_std=st.floats(0, 1e3),
    power=st.floats(1e-3, 1e3),
)
def test_the_radius_is_spent_exactly_and_never_on_nothing(
    variances: list[float], noise_std: float, power: float
) -> None:
    spectrum = np.sort(variances)[::-1]
    powers = water_fill(spectrum, noise_std=noise_std, power=power)
    assert powers.sum() == pytest.approx(power, rel=1e-6)
    assert powers.min() >= 0
    assert powers[0] > 0  # eq (7) of Fay et al. 2021 may keep no component at all
    assert (np.diff(powers) <= 1e-9 * power).all()


@pytest.mark.parametrize("noise_std", [3e7, 1e8, 2.0**60])
def test_whatever_the_noise_one_coordinate_gets_the_radius(noise_std: float) -> None:
    powers = water_fill(SPECTRUM, noise_std=noise_std, power=1.0)
    assert powers[0] == pytest.approx(1, rel=0.1)
    assert not powers[1:].any()


def test_more_noise_keeps_fewer_coordinates() -> None:
    kept = [int((water_fill(SPECTRUM, noise_std=s, power=0.64) > 0).sum()) for s in (0.0, 0.1, 1.0, 10.0)]
    assert kept[0] == 6
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 1


def test_components_are_those_of_the_singular_value_decomposition() -> None:
    samples = np.random.default_rng(0).normal(size=(12, 50)) * np.linspace(3, 0.1, 50)
    basis, variances = principal_components(samples, most=5)
    _, singular, rows = np.linalg.svd(samples - samples.mean(0), full_matrices=False)
    np.testing.assert_allclose(variances, (singular**2 / 12)[:5])
    np.testing.assert_allclose(np.abs((basis * rows[:5]).sum(1)), 1)
    np.testing.assert_allclose(basis @ basis.T, np.eye(5), atol=1e-12)
    mirrored, _ = principal_components(-samples, most=5)  # the code fixes the sign, because solvers differ
    for rows in (basis, mirrored):
        assert (rows.max(axis=1) > -rows.min(axis=1)).all()


def test_components_of_no_variance_are_left_out() -> None:
    samples = np.outer(np.arange(6.0), np.ones(20))  # all on one line
    basis, variances = principal_components(samples, most=5)
    assert basis.shape == (1, 20)
    assert variances[0] == pytest.approx(20 * np.arange(6.0).var())
    with pytest.raises(InvalidInput, match="all alike"):
        principal_components(np.ones((4, 20)), most=5)


class Fitted(CodecContract):
    name = "pca"


@pytest.fixture(scope="module")
def codec() -> PcaCodec:
    fitted = fit_codec(Fitted.study(), patients(16, seed=1), noise_std=0.05)
    assert isinstance(fitted, PcaCodec)
    return fitted


def test_the_planned_power_fills_four_fifths_of_the_radius(codec: PcaCodec) -> None:
    assert np.sqrt(codec.powers.sum()) == pytest.approx(FILL * codec.radius)


def test_decoding_weights_are_wieners(codec: PcaCodec) -> None:
    """Decoding must weight a noisy code by its regression slope on the true code, estimated here from draws."""
    rng, noise_std = np.random.default_rng(5), 0.2
    codes = rng.normal(size=(40_000, codec.dimension)) * np.sqrt(codec.powers)
    noisy = codes + noise_std * rng.normal(size=codes.shape)
    slopes = (codes * noisy).sum(0) / (noisy**2).sum(0)
    np.testing.assert_allclose(codec.powers / (codec.powers + noise_std**2), slopes, atol=0.02)
    weights = codec.powers / (codec.powers + noise_std**2)
    np.testing.assert_allclose(
        codec.decode(noisy[0], noise_std=noise_std), codec.decode(weights * noisy[0], noise_std=0.0), atol=1e-5
    )


def test_averaging_codes_averages_shapes_in_log_ratios(codec: PcaCodec) -> None:
    """A sum of codes can be decoded because the mean of the voters' codes is the code of a mean shape."""
    first, second = (codec.encode(soft(m)) for m in patients(2, seed=7))
    mean = codec.decode((first + second) / 2, noise_std=0.0)
    ratios = [np.log(codec.decode(z, noise_std=0.0).astype(np.float64)) for z in (first, second)]
    blended = np.exp((ratios[0] + ratios[1]) / 2)
    np.testing.assert_allclose(mean, blended / blended.sum(0), atol=1e-4)


def test_a_study_may_set_the_length_of_a_code_at_any_noise() -> None:
    for noise in (0.0, 5.0):
        codec = fit_codec(Fitted.study(dimension=6), patients(12, seed=1), noise_std=noise)
        assert codec.dimension == 6
        assert codec.powers.sum() == pytest.approx((0.8 * codec.radius) ** 2)
    assert fit_codec(Fitted.study(), patients(12, seed=1), noise_std=5.0).dimension < 6
    with pytest.raises(InvalidInput, match=r"codec\.dimension"):
        fit_codec(Fitted.study(dimension=9, augmentations=0), patients(5, seed=1), noise_std=0.0)
    with pytest.raises(InvalidInput, match=r"codec\.dimension.*0 to 24"):
        Fitted.study(dimension=25)
    with pytest.raises(InvalidInput, match=r"codec\.dimension.*0 to 0"):
        Fitted.study(dimension=6, joint=True)


def test_max_dimension_caps_the_code() -> None:
    small = fit_codec(Fitted.study(max_dimension=2), patients(8, seed=1), noise_std=0.0)
    assert small.dimension == 2


def test_without_augmentation_there_is_at_most_one_component_a_map_less_one() -> None:
    fitted = fit_codec(Fitted.study(augmentations=0), patients(6, seed=1), noise_std=0.0)
    assert fitted.dimension == 5


def test_its_arrays_cannot_be_changed(codec: PcaCodec) -> None:
    for name in ("basis", "centre", "metric", "variances", "powers"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(codec, name)[...] = 0


def test_a_power_beyond_the_radius_is_refused(codec: PcaCodec) -> None:
    with pytest.raises(InvalidInput, match="power"):
        replace(codec, powers=codec.powers * 2)


def test_another_codec_name_is_refused_by_the_study() -> None:
    with pytest.raises(InvalidInput, match=r"codec.name: got 'telepathy'; allowed: ball-ae, paper-pca, pca"):
        CodecConfig(name="telepathy")


@pytest.mark.slow
def test_reading_and_using_a_linear_codec_imports_no_torch(codec: PcaCodec, tmp_path: Path) -> None:
    (tmp_path / "codec").write_bytes(codec.to_bytes())
    np.save(tmp_path / "prediction.npy", soft(patients(1, seed=3)[0]))
    program = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from common.codecs import load_codec\n"
        "codec = load_codec(Path('codec').read_bytes())\n"
        "codec.decode(codec.encode(np.load('prediction.npy')), noise_std=0.1)\n"
        "sys.exit('torch' in sys.modules or 'monai' in sys.modules)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=600
    )
    assert done.returncode == 0


def test_a_codec_no_site_would_read_is_refused_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.codecs.codec.MAX_CODEC_BYTES", 1 << 17)
    fitted = fit_codec(Fitted.study(), patients(16, seed=1), noise_std=0.05)
    with pytest.raises(InvalidInput, match="too large"):
        fitted.to_bytes()


def test_the_centre_and_the_metric_are_of_the_mean_of_the_public_maps_as_they_are() -> None:
    """Augmented copies or log-ratios would erode thin structures, so the mean uses neither."""
    maps = patients(16, seed=1)
    fitted = fit_codec(Fitted.study(), maps, noise_std=0.05)
    assert isinstance(fitted, PcaCodec)
    mean = torch.nn.functional.one_hot(torch.tensor(maps).long(), 3).double().mean(0).permute(3, 0, 1, 2)
    pooled = torch.nn.functional.avg_pool3d(mean, 2).numpy()
    np.testing.assert_allclose(fitted.centre, np.log((pooled[1:] + 0.01) / (pooled[0] + 0.01)), atol=1e-5)
    np.testing.assert_allclose(fitted.metric, np.sqrt(1 - (pooled**2).sum(axis=0) + 0.02), atol=1e-6)


def test_a_list_in_place_of_a_code_is_named_by_its_type() -> None:
    with pytest.raises(InvalidInput, match=r"code: got 'list'; allowed: a numpy array of shape"):
        check_code([0.0, 0.0], dimension=2)  # type: ignore[arg-type]
