"""Tests a private trainer's patients (in turn, cut to patches, from memory and from disk) and its clips by layer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from client.training.private import strategies_3d as volumes
from client.training.private.clipped_sums import RADIUS_INT, integer_sum
from client.training.private.settings import MAC_ONLY, PrivateSettings
from client.training.private.strategies_3d import Patients, layer_parts
from client.training.private.trainer import training_identity
from common.config import TrainingConfig
from common.data.volume_cache import StoredVolumes, VolumeCache
from common.errors import InvalidInput
from common.models.fit import one_hot
from common.models.unet import build_unet

CLASSES, GRID = 3, (12, 10, 8)
IDENTITY = "a323fcadf644803b6dc39275d68b367027710f7041a33aed830fb1d73e5e6987"


def scans(count: int = 6) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return images of two channels whose first channel is the label, so that a patch shows its position."""
    labels = [np.random.default_rng(i).integers(0, CLASSES, GRID).astype(np.uint8) for i in range(count)]
    images = [np.stack([label, label + 10.0]).astype(np.float32) for label in labels]
    return images, labels


def chunks(
    people: Patients, *, size: int = 2, turn: int = 0, batch: list[int] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    slots = np.array([0, 1, 2] if batch is None else batch)
    return [(chunk.images, chunk.targets) for chunk in people.chunks(slots, size, turn=turn)]


def test_patients_from_files_are_those_from_memory_to_the_bit(tmp_path: Path) -> None:
    images, labels = scans()
    with VolumeCache(tmp_path / "c", budget_bytes=0) as cache:
        stored = [StoredVolumes([cache.keep(array) for array in arrays]) for arrays in (images, labels)]
        slots = (0, 0, 1, 1, 2, 2)
        from_disk = Patients(*stored, slots, scans=2, classes=CLASSES, patch=(4, 6, 8), key=b"5")
        from_memory = Patients(
            np.stack(images), np.stack(labels), slots, scans=2, classes=CLASSES, patch=(4, 6, 8), key=b"5"
        )
        for found, expected in zip(chunks(from_disk), chunks(from_memory), strict=True):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def test_no_more_volumes_are_read_than_the_chunk_at_hand_needs() -> None:
    images, labels = scans()
    reads: list[int] = []

    class Counted(StoredVolumes):
        def __getitem__(self, index: int) -> np.ndarray:
            reads.append(index)
            return super().__getitem__(index)

    people = Patients(Counted(images), StoredVolumes(labels), tuple(range(6)), classes=CLASSES)
    given = people.chunks(np.arange(6), 2)
    assert reads == []
    for done in (2, 4, 6):
        next(given)
        assert len(reads) == done


def test_a_patch_of_an_image_and_of_its_label_lie_in_one_place_and_move_from_turn_to_turn() -> None:
    images, labels = scans()
    people = Patients(np.stack(images), np.stack(labels), tuple(range(6)), classes=CLASSES, patch=(4, 4, 4), key=b"1")
    ((image, target), *_) = chunks(people)
    assert image.shape == (2, 1, 2, 4, 4, 4)
    assert target.shape == (2, 1, CLASSES, 4, 4, 4)
    torch.testing.assert_close(image[:, :, 0], target.argmax(dim=2).float())
    assert torch.equal(chunks(people)[0][0], image)
    assert not torch.equal(chunks(people, turn=1)[0][0], image)


def test_where_a_patch_lies_does_not_depend_on_who_else_is_in_the_batch() -> None:
    images, labels = scans()
    people = Patients(np.stack(images), np.stack(labels), tuple(range(6)), classes=CLASSES, patch=(4, 4, 4), key=b"1")
    ((alone, _),) = chunks(people, size=6, batch=[4])
    ((among, _),) = chunks(people, size=6, batch=[0, 4, 5])
    assert among[4].any()
    assert torch.equal(among[4], alone[4])


def test_channels_are_hidden_by_slot_and_turn_whoever_else_is_in_the_batch_and_never_all() -> None:
    images, labels = np.ones((6, 4, 8, 8, 8), np.float32), np.zeros((6, 8, 8, 8), np.uint8)
    people = Patients(images, labels, tuple(range(6)), scans=8, classes=CLASSES, modality_dropout=0.5, key=b"1")
    ((alone, _),) = chunks(people, size=6, batch=[4])
    ((among, _),) = chunks(people, size=6, batch=[0, 4, 5])
    assert among[4].any()
    assert torch.equal(among[4], alone[4])
    kept = torch.cat([image for image, _ in chunks(people, size=1)]).flatten(3)
    assert bool(((kept == 0).all(dim=-1) | (kept == 1).all(dim=-1)).all())
    assert bool(kept[..., 0].sum(dim=2).ge(1).all())
    assert 0.3 < float(kept.mean()) < 0.8
    assert not torch.equal(chunks(people, turn=1)[0][0], chunks(people)[0][0])


def test_large_patches_are_taken_one_patient_at_a_time() -> None:
    images, labels = scans()
    people = Patients(np.stack(images), np.stack(labels), tuple(range(6)), classes=CLASSES, scans=2)
    with patch.object(volumes, "VOXELS_AT_ONCE", 2 * 2 * 12 * 10 * 8):
        assert [len(image) for image, _ in chunks(people, size=4, batch=[0, 1, 2, 3, 4])] == [2, 2, 2]
    with patch.object(volumes, "VOXELS_AT_ONCE", 1):
        assert [len(image) for image, _ in chunks(people, size=4)] == [1, 1, 1]


def test_a_patients_place_follows_from_its_slot_and_every_chunk_has_as_many_places() -> None:
    images, labels = scans()
    marked = np.stack([np.full_like(image, slot + 1) for slot, image in enumerate(images)])
    people = Patients(marked, np.stack(labels), (0, 1, 2, 5, 6, 7), classes=CLASSES)
    assert [image[:, 0, 0, 0, 0, 0].tolist() for image, _ in chunks(people, size=3, batch=[0, 2, 5, 7, 8])] == [
        [1, 6, 3],
        [0, 0, 4],
        [0, 0, 0],
    ]
    assert chunks(people, size=3, batch=[]) == []


def test_one_hot_targets_and_label_maps_are_the_same_patients() -> None:
    images, labels = scans()
    hot = np.stack([one_hot(label, CLASSES) for label in labels])
    maps = Patients(np.stack(images), np.stack(labels), tuple(range(6)), classes=CLASSES)
    ready = Patients(torch.tensor(np.stack(images)), torch.tensor(hot), tuple(range(6)))
    for found, expected in zip(chunks(maps), chunks(ready), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_a_patch_larger_than_the_grid_is_refused() -> None:
    images, labels = scans()
    with pytest.raises(InvalidInput, match="training patch"):
        Patients(np.stack(images), np.stack(labels), tuple(range(6)), classes=CLASSES, patch=(4, 4, 9))


def test_every_layer_is_clipped_on_its_own() -> None:
    """The gradients are long, so each layer's sum has the length of the clip, however long the neighbours' are."""
    model = build_unet((4, 8), in_channels=1, out_channels=2)
    parts = layer_parts(model, 4.0)
    assert len(parts.names) == 3
    generator = torch.Generator().manual_seed(0)
    sizes = {name: 10.0 ** (index % 4) for index, names in enumerate(parts.names) for name in names}
    vectors = {
        name: 100 * sizes[name] * torch.randn((1, *w.shape), generator=generator)
        for name, w in model.named_parameters()
    }
    total = integer_sum(vectors, parts)
    for index, names in enumerate(parts.names):
        layer = torch.cat([total[name].double().flatten() for name in names]) * parts.scale(index) / RADIUS_INT
        assert float(layer.norm()) == pytest.approx(4.0, rel=1e-4)


def test_every_network_parts_into_its_convolutions_and_every_parameter_has_one_place() -> None:
    model = build_unet((4, 8, 16), in_channels=1, out_channels=2)
    parts = layer_parts(model, 1.0)
    assert sorted(parts.order) == sorted(name for name, _ in model.named_parameters())
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.modules.conv._ConvNd)]
    assert len(parts.names) == len(convolutions)
    assert all(names[0].endswith("weight") and len(names) > 1 for names in parts.names)


def test_a_training_begun_before_there_was_a_clip_a_layer_keeps_its_name() -> None:
    """A site that paid for a journal under 0.2.0 continues this journal."""
    before = PrivateSettings("dp-sgd", 8.0, 1e-5)
    given = {"voter": 0, "patients": ("p1", "p2"), "deal": "d"}
    assert training_identity(before, TrainingConfig((4, 8)), **given) == IDENTITY
    layers = PrivateSettings("dp-sgd", 8.0, 1e-5, per_layer=True)
    assert training_identity(layers, TrainingConfig((4, 8)), **given) != IDENTITY


def test_a_dp_mac_training_of_an_earlier_version_or_of_another_penalty_is_another_training() -> None:
    """The identity of a dp-mac training in 0.2.0 lacked dp-mac's own settings, so a new training must not
    continue it.
    """
    given = {"voter": 0, "patients": ("p1", "p2"), "deal": "d"}
    recipe = TrainingConfig((4, 8))
    now = training_identity(PrivateSettings("dp-mac", 8.0, 1e-5), recipe, **given)
    stiff = training_identity(PrivateSettings("dp-mac", 8.0, 1e-5, mu=2.0), recipe, **given)
    with patch.object(
        PrivateSettings, "facts", lambda self: {k: v for k, v in asdict(self).items() if k not in MAC_ONLY}
    ):
        before = training_identity(PrivateSettings("dp-mac", 8.0, 1e-5), recipe, **given)
    assert len({now, stiff, before}) == 3
