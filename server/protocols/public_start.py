"""The public start, and a student trained on from it by the labels around the releases.

Everything here is post-processing: public images and label maps, the codec, and observations read from stored answers.
The label of a volume is first the public mean shape plus a code, all that the codec holds. Then it is the student's own
prediction, moved to where what was released says it lies: what the codec cannot draw stays the network's, and its own
errors do not where an answer speaks of them. Where paired public cases hold it to the truth it is that from the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from common.canonical import sha256_bytes
from common.codecs.codec import Codec, LinearCodec
from common.config import Study, TrainingConfig
from common.data.volume_cache import StoredVolumes, VolumeCache
from common.errors import InvalidInput
from common.models.fit import OnStep, fit, near, predict
from common.models.unet import build_unet, network_for, weights_from_bytes, weights_to_bytes
from common.protocols.frame import Frame, plan_frame, sharpen
from server.protocols.decode import labels_of
from server.protocols.paired import Paired, read_paired
from server.protocols.query_protocol import STUDENT_SEED
from server.public.material import START_FILE, OnStage, Public

Onto = Callable[[Float[np.ndarray, "k x y z"]], Float[np.ndarray, "k u v w"]]

PUBLIC_PASSES = 3
"""Rounds of self-training that make the public start."""

SPREAD = 0.5
"""The spread of a student's shapes over volumes is raised to this share of the public maps' own."""

SPREAD_COORDINATES = 16
"""The spread is compared on this many leading coordinates."""

STUDENT_PASSES = 3
"""Parts of a student's training: from the labels of codes, then from its own predictions, moved to the same codes."""

RESIDUAL = 0.45
"""Share of the shapes' variance the public start is expected to leave open."""

_FLOOR = 1e-6

TEMPERATURE = 0.5
"""Predictions are sharpened by it before they are encoded: hesitation fills the radius and moves no boundary."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A student made of public data alone, and the codes [n, l] of its sharpened predictions for the public volumes."""

    model: torch.nn.Module
    codes: Float[np.ndarray, "n l"]


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Public pairs that a student learns from too, and the network of them ``alone`` (:func:`refine_paired`)."""

    paired: Paired
    alone: torch.nn.Module


def public_start(
    images: Float[np.ndarray, "n c x y z"],
    codec: Codec,
    variances: Float[np.ndarray, "l"],
    recipe: TrainingConfig,
    *,
    seed: int,
    spread: float = SPREAD,
    paired: Paired | None = None,
    on_step: OnStep | None = None,
) -> Start:
    """Train a student without any answer: on the public mean shape, then on its own shapes with their spread restored;
    on ``paired`` cases alone where there are any.

    A network that learnt one blurred shape for all volumes still moves with the image, too timidly: its shapes keep
    their direction and lose their size. Each pass enlarges their offsets from their mean until they vary as much as
    ``spread`` of the public label maps do, then trains on. ``recipe.steps`` is split evenly over the mean shape and
    the passes.
    """
    steps = _split(recipe, PUBLIC_PASSES + 1)
    model = build_unet(
        recipe.channels, network=recipe.network, in_channels=images.shape[1], out_channels=codec.labels, seed=seed
    )
    if paired is not None:
        fit(model, paired.images, paired.targets, recipe, seed=seed, on_step=on_step)
        return Start(model=model, codes=codes_of(model, images, codec, temperature=TEMPERATURE))
    silence = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    fit(model, images, np.repeat(silence[None], len(images), axis=0), steps[0], seed=seed, on_step=on_step)
    for number, part in enumerate(steps[1:], start=1):
        labels = labels_of(codec, restore_spread(codes_of(model, images, codec), variances, share=spread))
        fit(
            model,
            images,
            labels,
            part,
            seed=seed + number,
            on_step=counted_on(on_step, sum(each.steps for each in steps[:number])),
        )
    return Start(model=model, codes=codes_of(model, images, codec, temperature=TEMPERATURE))


def keep_start(
    public: Public, codec: LinearCodec, images: Float[np.ndarray, "n c x y z"], *, on_stage: OnStage | None = None
) -> Start:
    """Train the public start on the public volumes' ``images`` and keep it, as a public object too."""
    study = public.study
    tell = on_stage or (lambda _name, _done, _total: None)
    start = public_start(
        images,
        codec,
        codec.powers,
        study.student
        if study.data.finer == 1
        else replace(study.student, patch=()),  # whole volumes of the coarse grid
        seed=STUDENT_SEED,
        paired=read_paired(public),
        on_step=lambda step, _loss: tell("public start", step, study.student.steps),
    )
    weights = weights_to_bytes(start.model)
    public.kept.write(START_FILE, weights)
    public.objects.put(weights)
    return start


def images_of(public: Public) -> Float[np.ndarray, "n c x y z"]:
    """The public volumes' images on the study's grid."""
    return np.stack([public.image(volume) for volume in public.volumes])


def joint_frame(
    start: Start, codec: LinearCodec, *, kernel: Float[np.ndarray, "k k"], noise_std: float, radius: float
) -> Frame:
    """The frame of the first round about these volumes: centred on the public start, along its tangent ``kernel``."""
    return plan_frame(
        kernel=kernel,
        centre=start.codes,
        variances=codec.powers,
        residual=RESIDUAL,
        temperature=TEMPERATURE,
        noise_std=noise_std,
        radius=radius,
        codec=sha256_bytes(codec.to_bytes()),
    )


def read_start(weights: bytes, study: Study) -> torch.nn.Module:
    """A public start from its kept weights."""
    data = study.data
    model = network_for(study.student, data)
    weights_from_bytes(weights, model)
    return model


def refine(
    start: torch.nn.Module,
    images: Float[np.ndarray, "n c x y z"],
    codec: Codec,
    codes: Float[np.ndarray, "n l"],
    recipe: TrainingConfig,
    *,
    seed: int,
    beside: Beside | None = None,
    passes: int | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> torch.nn.Module:
    """The student: ``start``, which is left as it is, trained on from the labels that the volumes' codes stand for.

    ``recipe.steps`` are split evenly over the ``passes``, :data:`STUDENT_PASSES`. The first learns from the codec's
    labels, each later one from the predictions of the one before, :func:`moved` to the same codes: a network that has
    seen all volumes says more finely where a structure ends than a code can.

    ``beside`` paired cases it learns from those too, in one pass, and from moved labels of the other volumes; then it
    goes back to :data:`~common.models.fit.NEAR` of the way from the network of the pairs alone, which else it would
    know less than. With the codes the start itself has this is self-training: the control. An interrupted run resumes
    from ``checkpoint``, one file a pass, which are deleted once the student is done.
    """
    passes = passes or (STUDENT_PASSES if beside is None else 1)
    inputs = images if beside is None else np.concatenate([images, beside.paired.images])
    model, done, files = start, 0, [_of_pass(checkpoint, number) for number in range(passes)]
    for number, (part, file) in enumerate(zip(_split(recipe, passes), files, strict=True)):
        says_more = number > 0 or beside is not None
        targets = moved(model, images, codec, codes) if says_more else labels_of(codec, codes)
        if beside is not None:
            targets = np.concatenate([targets, beside.paired.targets])
        model = copy.deepcopy(model)
        fit(model, inputs, targets, part, seed=seed + number, checkpoint=file, on_step=counted_on(on_step, done))
        done += part.steps
    if beside is not None:
        near(beside.alone.state_dict(), model)
    for file in files:
        if file is not None:
            file.unlink(missing_ok=True)
    return model


def refine_finer(
    start: torch.nn.Module,
    volumes: Iterable[tuple[Float[np.ndarray, "c u v w"], Onto]],
    codec: Codec,
    codes: Float[np.ndarray, "n l"],
    recipe: TrainingConfig,
    *,
    seed: int,
    checkpoint: Path,
    on_step: OnStep | None = None,
) -> torch.nn.Module:
    """:func:`refine` on a finer grid than was asked on: images there, each with what brings its label there. One pass:
    what the student sees there has no code.

    Volumes beyond the memory that :class:`~common.data.volume_cache.VolumeCache` grants lie beside ``checkpoint``.
    """
    with VolumeCache(checkpoint.with_suffix(".volumes")) as cache:
        images, targets = [], []
        for (image, onto), code in zip(volumes, codes, strict=True):
            images.append(cache.keep(image))
            targets.append(cache.keep(onto(codec.decode(code, noise_std=0.0))))
        model = copy.deepcopy(start)
        parts = StoredVolumes(images), StoredVolumes(targets)
        fit(model, *parts, recipe, seed=seed, checkpoint=checkpoint, on_step=on_step)
    checkpoint.unlink(missing_ok=True)
    return model


def refine_paired(
    start: torch.nn.Module,
    paired: Paired,
    recipe: TrainingConfig,
    *,
    seed: int,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> torch.nn.Module:
    """What the paired cases alone are worth: ``start`` trained on from them, as long as a student is.

    ``checkpoint`` stays: for the same arguments it gives the network at once.
    """
    model = copy.deepcopy(start)
    fit(model, paired.images, paired.targets, recipe, seed=seed, checkpoint=checkpoint, on_step=on_step)
    return model


def moved(
    start: torch.nn.Module, images: Float[np.ndarray, "n c x y z"], codec: Codec, codes: Float[np.ndarray, "n l"]
) -> Float[np.ndarray, "n k x y z"]:
    """The start's own sharpened predictions p, moved from their own codes to ``codes``: p · d(code) / d(own code),
    normalised in every voxel, with d the codec's decoding. Float32; p itself where a code is the start's own."""
    result = []
    for image, code in zip(images, codes, strict=True):
        own = sharpen(predict(start, image), temperature=TEMPERATURE)
        decoded, begun = labels_of(codec, np.stack([code, codec.encode(own)]))
        labels = own * (np.maximum(decoded, _FLOOR) / np.maximum(begun, _FLOOR))
        result.append((labels / labels.sum(axis=0)).astype(np.float32))
    return np.stack(result)


def codes_of(
    model: torch.nn.Module, images: Float[np.ndarray, "n c x y z"], codec: Codec, *, temperature: float = 1.0
) -> Float[np.ndarray, "n l"]:
    """The codec's codes of a model's predictions, sharpened and unclipped."""
    return np.stack([codec.encode(sharpen(predict(model, image), temperature=temperature)) for image in images])


def counted_on(on_step: OnStep | None, steps: int) -> OnStep | None:
    """Count a part's steps on from so many before it."""
    return None if on_step is None else lambda step, loss: on_step(steps + step, loss)


def restore_spread(
    codes: Float[np.ndarray, "n l"], variances: Float[np.ndarray, "l"], *, share: float = SPREAD
) -> Float[np.ndarray, "n l"]:
    """Enlarge the codes' offsets from their mean to ``share`` of the public shapes' variance; never shrinks them."""
    mean = codes.mean(axis=0)
    leading = slice(0, SPREAD_COORDINATES)
    found = float(np.square(codes - mean)[:, leading].sum() / len(codes))
    wanted = share * float(variances[leading].sum())
    factor = max(1.0, np.sqrt(wanted / found)) if found > 0 else 1.0
    result: np.ndarray = mean + factor * (codes - mean)
    return result


def _of_pass(checkpoint: Path | None, number: int) -> Path | None:
    """The checkpoint of a pass: the first one's is ``checkpoint`` itself."""
    return checkpoint if checkpoint is None or number == 0 else checkpoint.with_name(f"{checkpoint.name}.{number}")


def _split(recipe: TrainingConfig, parts: int) -> list[TrainingConfig]:
    if recipe.steps < parts:
        raise InvalidInput("student.steps", value=recipe.steps, limit=f"at least {parts} for a joint query")
    base, rest = divmod(recipe.steps, parts)
    return [replace(recipe, steps=base + (number < rest)) for number in range(parts)]
