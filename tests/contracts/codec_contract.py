"""States what every codec promises. A codec's test inherits :class:`CodecContract` and only names the codec.

The shapes are made here: two halves of a tilted ellipsoid whose centre, size and cut vary from patient to patient.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import cast

import numpy as np
import pytest

from common.codecs import Codec, codec_class, fit_codec, label_map_hash, load_codec
from common.codecs.codec import pack, unpack
from common.config import CodecConfig, Study
from common.errors import InvalidInput
from common.privacy.mechanism import radius_int
from common.privacy.quantise import quantise, within
from tests.worlds import make_study

GRID = (16, 24, 16)
LABELS = 3


def patients(count: int, *, seed: int) -> np.ndarray:
    """Return label maps uint8 [n, x, y, z] of ``count`` different patients."""
    rng = np.random.default_rng(seed)
    where = np.stack(np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in GRID), indexing="ij"))
    maps = []
    for _ in range(count):
        centre, radii, tilt = rng.normal(0, 0.7, 3), (4.5, 8, 4.5) * rng.uniform(0.8, 1.2, 3), rng.normal(0, 0.15)
        x, y, z = where - centre.reshape(3, 1, 1, 1)
        x, y = x + tilt * y, y - tilt * x
        inside = (x / radii[0]) ** 2 + (y / radii[1]) ** 2 + (z / radii[2]) ** 2 <= 1
        maps.append(np.where(inside, np.where(y > rng.normal(0, 0.8), 1, 2), 0).astype(np.uint8))
    return np.stack(maps)


def soft(label_map: np.ndarray) -> np.ndarray:
    """Return a confident prediction of a label map."""
    result: np.ndarray = (0.97 * np.eye(LABELS)[label_map] + 0.01).astype(np.float32).transpose(3, 0, 1, 2)
    return result


def dice(prediction: np.ndarray, truth: np.ndarray) -> float:
    pairs = [(prediction == c, truth == c) for c in range(1, LABELS)]
    return float(np.mean([2 * (p & t).sum() / (p.sum() + t.sum()) for p, t in pairs]))


def distance(probabilities: np.ndarray, truth: np.ndarray) -> float:
    return float(((probabilities - soft(truth)) ** 2).mean())


class CodecContract:
    """Tests a codec's promises; a subclass sets ``name``."""

    name: str
    planned_noise = 0.05
    radius = 1.0
    variance_floor = 0.05
    """A coordinate is alive when its variance over patients it was not fitted on is above this share of C²/l."""

    @classmethod
    def study(cls, **codec: object) -> Study:
        settings = {"name": cls.name, "radius": cls.radius, "max_dimension": 24, "augmentations": 24, **codec}
        return make_study("front", "back", grid=GRID, codec=CodecConfig(**settings))  # type: ignore[arg-type]

    @pytest.fixture(scope="class")
    @classmethod
    def maps(cls) -> list[np.ndarray]:
        return list(patients(16, seed=1))

    @pytest.fixture(scope="class")
    @classmethod
    def others(cls) -> np.ndarray:
        return patients(12, seed=2)

    @pytest.fixture(scope="class")
    @classmethod
    def codec(cls, maps: list[np.ndarray]) -> Codec:
        return fit_codec(cls.study(), maps, noise_std=cls.planned_noise)

    def test_it_describes_itself(self, codec: Codec) -> None:
        assert isinstance(codec, Codec)
        assert type(codec) is codec_class(self.name)
        assert codec.name == self.name
        assert 1 <= codec.dimension <= 24
        assert (codec.radius, codec.labels, codec.grid) == (self.radius, LABELS, GRID)

    def test_codes_are_finite_float64_of_the_dimension(self, codec: Codec, others: np.ndarray) -> None:
        for label_map in others:
            code = codec.encode(soft(label_map))
            assert code.dtype == np.float64
            assert code.shape == (codec.dimension,)
            assert np.isfinite(code).all()

    def test_quantised_codes_lie_in_the_ball_whatever_the_prediction(self, codec: Codec, others: np.ndarray) -> None:
        bound = radius_int(codec.radius)
        empty, full = np.zeros(GRID, np.uint8), np.ones(GRID, np.uint8)
        for label_map in (*others, empty, full):
            assert within(quantise(codec.encode(soft(label_map)), radius_int=bound), bound_int=bound)

    def test_clipping_is_rare_on_shapes_of_the_population(self, codec: Codec, others: np.ndarray) -> None:
        norms = [np.linalg.norm(codec.encode(soft(label_map))) for label_map in others]
        assert np.median(norms) < codec.radius

    def test_codes_of_different_patients_differ(self, codec: Codec, others: np.ndarray) -> None:
        codes = np.stack([codec.encode(soft(label_map)) for label_map in others])
        assert codes.var(axis=0).sum() > 0.1 * codec.radius**2  # a collapsed code would carry no information

    def test_at_least_half_of_the_coordinates_carry_something(self, codec: Codec, others: np.ndarray) -> None:
        """Dead coordinates cost noise without information; a code uniform in the ball has variance C²/(l + 2)."""
        variances = np.var([codec.encode(soft(label_map)) for label_map in others], axis=0)
        assert (variances > self.variance_floor * codec.radius**2 / codec.dimension).mean() >= 0.5

    def test_decoding_gives_probabilities_for_any_code_and_noise(self, codec: Codec) -> None:
        rng = np.random.default_rng(3)
        for scale in (0.0, 0.1, 1.0, 100.0):
            for noise_std in (0.0, 0.1, 10.0):
                decoded = codec.decode(scale * rng.normal(size=codec.dimension), noise_std=noise_std)
                assert decoded.dtype == np.float32
                assert decoded.shape == (LABELS, *GRID)
                assert np.isfinite(decoded).all()
                assert decoded.min() >= 0
                np.testing.assert_allclose(decoded.sum(axis=0), 1, atol=1e-5)

    def test_the_zero_code_decodes_to_the_public_mean_shape(self, codec: Codec, maps: list[np.ndarray]) -> None:
        decoded = codec.decode(np.zeros(codec.dimension), noise_std=self.planned_noise)
        mean_shape = np.eye(LABELS)[maps].mean(axis=0).transpose(3, 0, 1, 2)
        assert ((decoded - mean_shape) ** 2).mean() < 0.1 * mean_shape.var(axis=(1, 2, 3)).mean()
        np.testing.assert_array_equal(decoded, codec.decode(np.zeros(codec.dimension), noise_std=10.0))

    def test_decoding_beats_the_mean_shape_on_patients_it_was_not_fitted_on(
        self, codec: Codec, others: np.ndarray
    ) -> None:
        mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
        decoded = [codec.decode(codec.encode(soft(m)), noise_std=0.0) for m in others]
        assert np.mean([distance(d, m) for d, m in zip(decoded, others, strict=True)]) < 0.5 * np.mean(
            [distance(mean_shape, m) for m in others]
        )
        assert (
            np.mean([dice(d.argmax(0), m) for d, m in zip(decoded, others, strict=True)])
            > np.mean([dice(mean_shape.argmax(0), m) for m in others]) + 0.05
        )

    def test_knowing_the_noise_makes_decoding_better(self, codec: Codec, others: np.ndarray) -> None:
        rng, noise_std = np.random.default_rng(4), 0.5 * codec.radius
        noisy = [codec.encode(soft(m)) + noise_std * rng.normal(size=codec.dimension) for m in others]
        told, untold = (
            np.mean([distance(codec.decode(z, noise_std=s), m) for z, m in zip(noisy, others, strict=True)])
            for s in (noise_std, 0.0)
        )
        assert told < untold

    def test_bytes_bring_back_the_same_codec(self, codec: Codec, others: np.ndarray) -> None:
        data = codec.to_bytes()
        again = load_codec(data, expected_hash=hashlib.sha256(data).hexdigest())
        assert again.to_bytes() == data
        assert again.provenance == codec.provenance
        code = codec.encode(soft(others[0]))
        np.testing.assert_array_equal(again.encode(soft(others[0])), code)
        np.testing.assert_array_equal(again.decode(code, noise_std=0.1), codec.decode(code, noise_std=0.1))

    @pytest.mark.slow
    def test_fitting_again_gives_the_same_hash_and_another_seed_another(
        self, codec: Codec, maps: list[np.ndarray]
    ) -> None:
        again = fit_codec(self.study(), maps, noise_std=self.planned_noise)
        other = fit_codec(self.study(), maps, noise_std=self.planned_noise, seed=1)
        assert again.to_bytes() == codec.to_bytes() != other.to_bytes()

    def test_it_says_which_public_maps_it_was_fitted_on(self, codec: Codec, maps: list[np.ndarray]) -> None:
        assert codec.provenance.label_maps == tuple(label_map_hash(m) for m in maps)
        assert codec.provenance.noise_std == self.planned_noise
        named = tuple(hashlib.sha256(bytes([i])).hexdigest() for i in range(len(maps)))
        assert fit_codec(self.study(), maps, noise_std=0.05, map_hashes=named).provenance.label_maps == named

    def test_it_refuses_to_be_fitted_on_a_private_case(self, maps: list[np.ndarray]) -> None:
        with pytest.raises(InvalidInput, match=r"label map 3 .*private"):
            fit_codec(self.study(), maps, noise_std=0.05, private_hashes={label_map_hash(maps[2])})
        named = tuple(hashlib.sha256(bytes([i])).hexdigest() for i in range(len(maps)))
        with pytest.raises(InvalidInput, match=r"label map 5 .*private"):
            fit_codec(self.study(), maps, noise_std=0.05, map_hashes=named, private_hashes=[named[4]])

    @pytest.mark.parametrize("fault", ["grid", "type", "label", "absent", "twice", "one", "alike", "hashes"])
    def test_it_refuses_to_be_fitted_on_maps_that_are_not_the_studys(self, maps: list[np.ndarray], fault: str) -> None:
        bad, hashes = list(maps), None
        match fault:
            case "grid":
                bad[1] = bad[1][:-1]
            case "type":
                bad[1] = bad[1].astype(np.int64)
            case "label":
                bad[1] = bad[1] + 1
            case "absent":  # no map shows the second structure
                bad = [np.where(each == 2, 1, each).astype(np.uint8) for each in bad]
            case "twice":
                bad[1] = bad[0]
            case "one":
                bad = bad[:1]
            case "alike":
                bad = [bad[0], bad[0].copy()]
            case "hashes":
                hashes = [label_map_hash(bad[0])]
        with pytest.raises(InvalidInput):
            fit_codec(self.study(), bad, noise_std=0.05, map_hashes=hashes)

    @pytest.mark.parametrize("noise_std", [float("nan"), float("inf"), -1.0])
    def test_it_refuses_impossible_noise(self, codec: Codec, maps: list[np.ndarray], noise_std: float) -> None:
        with pytest.raises(InvalidInput):
            codec.decode(np.zeros(codec.dimension), noise_std=noise_std)
        with pytest.raises(InvalidInput):
            fit_codec(self.study(), maps, noise_std=noise_std)

    def test_it_refuses_predictions_that_are_not_probabilities_on_its_grid(
        self, codec: Codec, others: np.ndarray
    ) -> None:
        good = soft(others[0])
        nan, negative, unnormalised = good.copy(), good.copy(), 2 * good
        nan[0, 0, 0, 0] = np.nan
        negative[:2, 0, 0, 0] = (1.5, -0.5)
        for bad in (nan, negative, unnormalised, good[:-1], good[:, :-1], np.full_like(good, np.inf)):
            with pytest.raises(InvalidInput):
                codec.encode(bad)
        with pytest.raises(InvalidInput, match=r"class probabilities: got 'list'; allowed: a numpy array of shape"):
            codec.encode(cast("np.ndarray", good.tolist()))

    def test_it_refuses_codes_that_are_not_its_own(self, codec: Codec) -> None:
        for bad in (np.zeros(codec.dimension + 1), np.zeros((1, codec.dimension)), np.full(codec.dimension, np.nan)):
            with pytest.raises(InvalidInput):
                codec.decode(bad, noise_std=0.1)

    def test_it_does_not_modify_its_arguments(self, codec: Codec, others: np.ndarray) -> None:
        prediction = soft(others[0])
        prediction.flags.writeable = False
        code = codec.encode(prediction)
        code.flags.writeable = False
        codec.decode(code, noise_std=0.1)

    def test_damaged_bytes_are_refused(self, codec: Codec) -> None:
        data = codec.to_bytes()
        for bad in (b"", b"PK", data[:-10], data[: len(data) // 2], data + b"x", b"x" + data):
            with pytest.raises(InvalidInput):
                load_codec(bad)
        with pytest.raises(InvalidInput, match="hash .*allowed: " + "0" * 64):
            load_codec(data, expected_hash="0" * 64)

    def test_an_unknown_codec_version_or_part_is_refused(self, codec: Codec) -> None:
        header, arrays = unpack(codec.to_bytes())
        name = next(iter(arrays))
        nan = {**arrays, name: np.full_like(arrays[name], np.nan)}
        for bad_header, bad_arrays in (
            ({**header, "name": "telepathy"}, arrays),
            ({**header, "schema": 2}, arrays),
            ({**header, "extra": 1}, arrays),
            (header, {**arrays, "extra": np.zeros(1)}),
            (header, {k: v for k, v in arrays.items() if k != name}),
            (header, {**arrays, name: arrays[name][..., :-1]}),
            (header, nan),
        ):
            with pytest.raises(InvalidInput):
                load_codec(pack(bad_header, bad_arrays))

    def test_pickled_and_compressed_members_are_refused(self) -> None:
        stream = io.BytesIO()
        np.savez(stream, header=np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(InvalidInput):
            load_codec(stream.getvalue())
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("header.npy", bytes(1 << 16))
        with pytest.raises(InvalidInput, match="uncompressed"):
            load_codec(stream.getvalue())
