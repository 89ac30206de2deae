"""The network: made from a seed, stored as plain weights, and nothing else is accepted back."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from common.canonical import sha256_file
from common.errors import InvalidInput
from common.models.unet import build_unet, load_weights, save_weights, weights_to_bytes


def small(seed: int = 0, *, out_channels: int = 3) -> torch.nn.Module:
    return build_unet((4, 8), in_channels=1, out_channels=out_channels, seed=seed)


def test_a_seed_decides_the_weights_and_global_randomness_is_left_alone() -> None:
    before = torch.get_rng_state()
    assert weights_to_bytes(small(3)) == weights_to_bytes(small(3))
    assert weights_to_bytes(small(3)) != weights_to_bytes(small(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_parameter_is_initialised_like_pytorch_does() -> None:
    model = build_unet((8, 16, 32), in_channels=2, out_channels=3, seed=1)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    reference = torch.nn.Conv3d(16, 32, 3).weight
    ours = next(p.detach() for p in model.parameters() if p.shape == reference.shape)
    assert float(ours.std()) == pytest.approx(float(reference.detach().std()), rel=0.1)
    assert float(ours.abs().max()) <= 1 / (16 * 27) ** 0.5


def test_logits_have_the_grid_of_the_image() -> None:
    assert small()(torch.zeros(2, 1, 8, 16, 24)).shape == (2, 3, 8, 16, 24)


def test_weights_come_back_bit_for_bit_under_their_hash(tmp_path: Path) -> None:
    model, other = small(1), small(2)
    saved = save_weights(tmp_path / "weights.pt", model)
    assert saved == sha256_file(tmp_path / "weights.pt")
    assert save_weights(tmp_path / "another-name.pt", model) == saved
    assert load_weights(tmp_path / "weights.pt", other, expected_hash=saved) == saved
    assert weights_to_bytes(other) == weights_to_bytes(model)


def test_a_changed_file_is_not_the_recorded_one(tmp_path: Path) -> None:
    save_weights(tmp_path / "weights.pt", small(1))
    with pytest.raises(InvalidInput, match="not the one recorded"):
        load_weights(tmp_path / "weights.pt", small(), expected_hash="0" * 64)


def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (marker,))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"w": Trap()}))
    with pytest.raises(InvalidInput, match="other than weights"):
        load_weights(tmp_path / "weights.pt", small())
    torch.save({"w": Trap()}, tmp_path / "weights.pt")
    with pytest.raises(InvalidInput, match="other than weights"):
        load_weights(tmp_path / "weights.pt", small())
    assert not marker.exists()


def test_weights_of_another_network_missing_or_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_weights(path, small())
    save_weights(path, small(out_channels=4))
    with pytest.raises(InvalidInput, match="another network"):
        load_weights(path, small())
    bad = small()
    with torch.no_grad():
        next(bad.parameters()).fill_(float("nan"))
    save_weights(path, bad)
    with pytest.raises(InvalidInput, match="NaN"):
        load_weights(path, small())
