"""Tests the network: it is made from a seed and stored as plain weights, and nothing else can be loaded."""

from __future__ import annotations

import io
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from monai.bundle import ConfigParser

from client.training.private.gradients import per_patient, plain_weights, segmentation_loss
from client.training.private.strategies_3d import layer_parts
from common.canonical import sha256_file
from common.config import NETWORKS, DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.models.fit import soft_dice_ce
from common.models.unet import (
    build_unet,
    definition,
    input_weights,
    load_weights,
    recipe_of,
    save_weights,
    weights_to_bytes,
)
from tests.client.training.private.one_at_a_time import one_at_a_time


def small(seed: int = 0, *, out_channels: int = 3) -> torch.nn.Module:
    return build_unet((4, 8), in_channels=1, out_channels=out_channels, seed=seed)


@pytest.mark.slow
def test_networks_built_in_two_threads_leave_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    with ThreadPoolExecutor(2) as both:
        kinds = ["paper-unet", "unet"] * 20
        list(both.map(lambda kind: build_unet((4, 4, 4, 4, 4), network=kind, in_channels=1, out_channels=2), kinds))
    assert sys.stdout is printed
    assert printed.getvalue() == ""


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
    with pytest.raises(InvalidInput, match="SHA-256.*" + "0" * 64):
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


# ---- networks by name

CHANNELS = dict.fromkeys(NETWORKS, (4, 6, 8)) | {"paper-unet": (4, 4, 6, 6, 8)}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_named_network_maps_the_grid_by_its_seed_alone_and_can_be_trained_privately(network: str) -> None:
    before = torch.get_rng_state()
    made, again = (build_unet(CHANNELS[network], network=network, in_channels=2, out_channels=3, seed=5) for _ in "12")
    assert torch.equal(torch.get_rng_state(), before)
    assert weights_to_bytes(made) == weights_to_bytes(again)
    image = torch.randn(2, 2, 32, 32, 16, generator=torch.Generator().manual_seed(0))
    both = made(image)
    assert both.shape == (2, 3, 32, 32, 16)
    assert all(torch.isfinite(parameter).all() for parameter in made.parameters())
    # No patient's output depends on another patient.
    torch.testing.assert_close(made(image[:1]), both[:1], rtol=1e-3, atol=1e-4)
    target = torch.softmax(torch.randn(2, 1, 3, 32, 32, 16), dim=2)
    slow, fast = (
        way(segmentation_loss(made, soft_dice_ce))(plain_weights(made), image[:, None], target)[0]
        for way in (one_at_a_time, per_patient)
    )
    for name, entry in slow.items():
        torch.testing.assert_close(entry, fast[name], rtol=1e-2, atol=1e-4)
    assert sorted(layer_parts(made, 1.0).order) == sorted(name for name, _ in made.named_parameters())


@pytest.mark.parametrize("network", NETWORKS)
def test_a_bundles_words_for_a_network_are_read_back_and_monai_makes_the_same_of_them(network: str) -> None:
    words = json.loads(json.dumps(definition(network, CHANNELS[network], in_channels=1, out_channels=2)))
    recipe, window = recipe_of({"network_def": words}), {"roi_size": [32, 16, 16]}
    assert (recipe.network, recipe.channels, recipe.patch) == (network, CHANNELS[network], ())
    assert recipe_of({"network_def": words, "inferer": window}) == replace(recipe, patch=(32, 16, 16))
    theirs = ConfigParser({"network": words}).get_parsed_content("network")
    ours = build_unet(CHANNELS[network], network=network, in_channels=1, out_channels=2, seed=1)
    theirs.load_state_dict(ours.state_dict())
    image = torch.randn(1, 1, 32, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(image), ours.eval()(image))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_without_weights_on_a_channel_does_not_see_it(network: str) -> None:
    model = build_unet(CHANNELS[network], network=network, in_channels=3, out_channels=2, seed=1)
    image = torch.randn(1, 3, 32, 32, 32)
    other = image.clone()
    other[:, 1] += 5
    names = input_weights(model)
    assert len(names) == (2 if network == "residual" else 1)
    with torch.no_grad():
        assert not torch.equal(model(image), model(other))
        for name in names:
            model.get_parameter(name)[:, 1] = 0
        assert torch.equal(model(image), model(other))


def test_the_papers_network_has_four_poolings_and_todays_has_none() -> None:
    paper = build_unet(CHANNELS["paper-unet"], network="paper-unet", in_channels=1, out_channels=2)
    assert sum(isinstance(module, torch.nn.MaxPool3d) for module in paper.modules()) == 4
    convolutions = [m for m in paper.modules() if isinstance(m, torch.nn.Conv3d) and m.kernel_size == (3, 3, 3)]
    assert len(convolutions) == 2 * 5 + 2 * 4  # two a level, down and up
    assert convolutions[0].stride == (1, 1, 1)
    ours = build_unet((4, 8, 8, 8, 8), in_channels=1, out_channels=2)
    assert not any(isinstance(module, torch.nn.MaxPool3d) for module in ours.modules())
    assert next(m for m in ours.modules() if isinstance(m, torch.nn.Conv3d)).stride == (2, 2, 2)
    with pytest.raises(InvalidInput, match="paper-unet"):
        TrainingConfig((4, 8, 16), network="paper-unet")


def test_recipes_and_data_that_say_nothing_new_are_named_as_they_were() -> None:
    """Trainings, caches and studies are identified by these texts; those of 0.2.0 must not change."""
    assert repr(TrainingConfig((4, 8))) == (
        "TrainingConfig(channels=(4, 8), steps=300, batch_size=2, learning_rate=0.01, patch=(), augmentation='smooth', "
        "amp=False)"
    )
    data = DataConfig(("background", "ball"), (1, 1, 1), (8, 8, 8))
    assert repr(data) == (
        "DataConfig(labels=('background', 'ball'), spacing_mm=(1.0, 1.0, 1.0), grid=(8, 8, 8), channels=('MRI',))"
    )
    assert "network='dynunet'" in repr(TrainingConfig((4, 8), network="dynunet"))
