"""Trains the public start, a network trained on public data alone, and the student that continues from it.

The joint and the appearance protocol call it. Everything here is post-processing: it uses public images and label maps,
the codec, and stored answers. A joint query's student is trained in passes. In the first pass a volume's label is its
decoded code. In later passes the label is the student's own prediction, shifted to where the released code places the
structures. Details that the codec cannot express then come from the network, while the answers correct errors of
position. With public pairs (public images with label maps) the shifted prediction is used from the first pass. A recipe
with fewer steps than passes is refused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from common.codecs.codec import Codec, LinearCodec
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.models.fit import OnStep, average_with_start, fit, predict
from common.models.unet import network_of, weights_to_bytes
from common.protocols.frame import Frame, plan_frame, sharpen
from server.protocols.decode import labels_of
from server.protocols.query_protocol import STUDENT_SEED
from server.protocols.student_fit import given_model
from server.public.material import START_FILE, OnStage, PublicMaterial
from server.public.paired import Paired

PUBLIC_PASSES = 3
"""Number of passes of self-training of the public start."""

SPREAD = 0.5
"""In self-training, the variance of a network's codes over the volumes is raised to at least this share of the variance
of the public label maps' codes.
"""

SPREAD_COORDINATES = 16
"""Number of leading code coordinates in which the variances of :data:`SPREAD` are compared."""

STUDENT_PASSES = 3
"""Number of passes of a student's training: the first on decoded codes, the others on its own shifted predictions."""

RESIDUAL = 0.45
"""Share of the variance of public shapes' codes that the public start is expected to leave unexplained."""

_FLOOR = 1e-6

TEMPERATURE = 0.5
"""Temperature that sharpens predictions before encoding, because soft predictions would use up the clipping norm."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The public start, with its codes for the public volumes.

    Attributes:
        model: A network trained on public data alone.
        codes: Codes [n, l] of its sharpened predictions for the public volumes.
    """

    model: torch.nn.Module
    codes: Float[np.ndarray, "n l"]


@dataclass(frozen=True, slots=True, eq=False)
class PairTraining:
    """The public pairs that a student also learns from, and a network trained on them alone.

    Attributes:
        paired: The pairs: public images with label maps.
        alone: The network trained on the pairs alone (:func:`refine_paired`).
    """

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
    given: torch.nn.Module | None = None,
    on_step: OnStep | None = None,
) -> Start:
    """Train a network on public data, without any answer of a hospital.

    With public pairs the network is trained on those alone. Otherwise it is first trained on the public mean shape,
    then in passes on its own predictions. After the mean shape, the predictions follow each image but vary too little
    between images. Each pass therefore enlarges the offsets of the network's codes from their mean, until their
    variance is ``spread`` times that of the public label maps' codes. Then it trains on the labels of these codes.
    ``recipe.steps`` is split evenly over the training on the mean shape and the passes.

    If a network is given and there are no public pairs, the given network is returned unchanged as the start, because
    training on the mean shape would destroy what it has learnt. With public pairs, the given network is trained further
    on them.

    Args:
        images: Public volumes, float [n, c, x, y, z].
        codec: The study's codec.
        variances: Variance [l] of the public label maps' codes.
        recipe: The student's training recipe.
        seed: Seed of initial weights and batches.
        spread: Least ratio between the variance of the network's codes and that of the public label maps' codes.
        paired: The study's public pairs; None if it has none.
        given: The network that the study was given to begin from; None if there is none.
        on_step: Called with step and loss.

    Returns:
        The network, and the codes of its predictions.

    Raises:
        InvalidInput: If the recipe has fewer steps than passes.
    """
    steps = _split(recipe, PUBLIC_PASSES + 1)
    if given is not None and paired is None:
        return Start(model=given, codes=codes_of(given, images, codec, temperature=TEMPERATURE))
    model = network_of(recipe, channels=images.shape[1], classes=codec.labels, seed=seed)
    if given is not None:
        model.load_state_dict(given.state_dict())
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
    public: PublicMaterial, codec: LinearCodec, images: Float[np.ndarray, "n c x y z"], *, on_stage: OnStage
) -> Start:
    """Make the public start with :func:`public_start`, store its weights, and publish them as a public object.

    Args:
        public: The study's public material (terms, codec, volumes).
        codec: Its codec.
        images: The public volumes, float [n, c, x, y, z].
        on_stage: Called with the progress.

    Returns:
        The public start.
    """
    study = public.study
    start = public_start(
        images,
        codec,
        codec.powers,
        study.student
        if study.data.finer == 1
        else replace(study.student, patch=()),  # train on whole volumes of the coarse grid
        seed=STUDENT_SEED,
        paired=public.pairs(),
        given=given_model(public),
        on_step=lambda step, _loss: on_stage("public start", step, study.student.steps),
    )
    weights = weights_to_bytes(start.model)
    public.kept.write(START_FILE, weights)
    public.objects.put(weights)
    return start


def images_of(public: PublicMaterial) -> Float[np.ndarray, "n c x y z"]:
    """Return the public volumes' images on the study's grid.

    Args:
        public: The study's public material (terms, codec, volumes).

    Returns:
        Float array [n, c, x, y, z], in query order.
    """
    return np.stack([public.image(volume) for volume in public.volumes])


def joint_frame(
    start: Start,
    codec: LinearCodec,
    *,
    codec_sha256: str,
    kernel: Float[np.ndarray, "k k"],
    noise_std: float,
    radius: float,
) -> Frame:
    """Return the frame of a joint query's first round, centred on the public start's codes.

    Args:
        start: The public start.
        codec: The study's codec.
        codec_sha256: Hash of the codec's file.
        kernel: The public start's neural tangent kernel (:func:`~server.protocols.joint.kernel.tangent_kernel`), over
            the first q code coordinates of all n volumes, [k, k] with k = n·q. The frame's directions are its leading
            eigenvectors.
        noise_std: Standard deviation of the noise on each coordinate of the mean code.
        radius: Clipping norm C.

    Returns:
        The frame.
    """
    return plan_frame(
        kernel=kernel,
        centre=start.codes,
        variances=codec.powers,
        residual=RESIDUAL,
        temperature=TEMPERATURE,
        noise_std=noise_std,
        radius=radius,
        codec=codec_sha256,
    )


def refine(
    start: torch.nn.Module,
    images: Float[np.ndarray, "n c x y z"],
    codec: Codec,
    codes: Float[np.ndarray, "n l"],
    recipe: TrainingConfig,
    *,
    seed: int,
    beside: PairTraining | None = None,
    passes: int | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> torch.nn.Module:
    """Train the student: a copy of ``start``, trained on labels decoded from the volumes' codes.

    ``recipe.steps`` is split evenly over the passes. The first pass learns from the decoded codes. Each later pass
    learns from the predictions of the pass before, shifted to the same codes (:func:`moved`), because a network that
    has seen all volumes places the ends of a structure more finely than a code can.

    With public pairs there is one pass, on the pairs and on the start's shifted predictions for the other volumes. The
    result is then a weighted mean of the weights of two networks: the trained one counts with
    :data:`~common.models.fit.NEAR`, the network trained on the pairs alone with the rest. Without this step, the
    student would lose some of what the network of the pairs has learnt.

    If ``codes`` are the start's own codes, this is self-training without hospitals' answers, which gives a control.

    Args:
        start: The public start.
        images: Public volumes, float [n, c, x, y, z].
        codec: The study's codec.
        codes: Codes of the volumes, float [n, l].
        recipe: The student's training recipe.
        seed: Seed of the first pass; later passes count up from it.
        beside: The public pairs and the network trained on them alone; None if the study has no pairs.
        passes: Number of passes; by default :data:`STUDENT_PASSES`, or 1 with public pairs.
        checkpoint: File to resume from. Each pass has its own file, named after this one; all are deleted at the end.
        on_step: Called with step and loss.

    Returns:
        The trained network.

    Raises:
        InvalidInput: If the recipe has fewer steps than passes.
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
        average_with_start(beside.alone.state_dict(), model)
    for file in files:
        if file is not None:
            file.unlink(missing_ok=True)
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
    """Train a copy of ``start`` on the public pairs alone, for as many steps as a student has.

    The result is the control ``public_only`` of a study with public pairs (public images with label maps).

    Args:
        start: The public start; it is not changed.
        paired: The pairs.
        recipe: The student's training recipe.
        seed: Seed of the training.
        checkpoint: File to resume from. It is kept, so a second call with the same arguments returns at once.
        on_step: Called with step and loss.

    Returns:
        The trained network.
    """
    model = copy.deepcopy(start)
    fit(model, paired.images, paired.targets, recipe, seed=seed, checkpoint=checkpoint, on_step=on_step)
    return model


def moved(
    start: torch.nn.Module, images: Float[np.ndarray, "n c x y z"], codec: Codec, codes: Float[np.ndarray, "n l"]
) -> Float[np.ndarray, "n k x y z"]:
    """Return a network's sharpened predictions p, shifted towards the labels of the given codes.

    In every voxel the result is p · d(code) / d(own code), normalised. Here d is the codec's decoding and the own code
    is the code of p. If both codes are equal, the result is p.

    Args:
        start: The network.
        images: Public volumes, float [n, c, x, y, z].
        codec: The study's codec.
        codes: Target codes, float [n, l].

    Returns:
        Float32 probabilities [n, k, x, y, z].
    """
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
    """Return the unclipped codes [n, l] of a model's sharpened predictions.

    Args:
        model: The network.
        images: Volumes, float [n, c, x, y, z].
        codec: The study's codec.
        temperature: 1 leaves predictions as they are; lower values sharpen them.

    Returns:
        Float array [n, l].
    """
    return np.stack([codec.encode(sharpen(predict(model, image), temperature=temperature)) for image in images])


def counted_on(on_step: OnStep | None, steps: int) -> OnStep | None:
    """Return a callback that adds the steps of an earlier part of a training to the step that it reports.

    Args:
        on_step: The callback to pass the sum on to.
        steps: Number of steps of the earlier part.

    Returns:
        A function that calls ``on_step`` with ``steps`` added to the step; None if ``on_step`` is None.
    """
    return None if on_step is None else lambda step, loss: on_step(steps + step, loss)


def restore_spread(
    codes: Float[np.ndarray, "n l"], variances: Float[np.ndarray, "l"], *, share: float = SPREAD
) -> Float[np.ndarray, "n l"]:
    """Enlarge the codes' offsets from their mean until their variance is ``share`` times that of public shapes.

    Offsets whose variance is larger already are not changed. The variances are summed over the first
    :data:`SPREAD_COORDINATES` coordinates.

    Args:
        codes: Float array [n, l].
        variances: Variance [l] of the public label maps' codes.
        share: Least ratio between the codes' variance and that of public shapes.

    Returns:
        Float array [n, l]; ``codes`` is not modified.
    """
    mean = codes.mean(axis=0)
    leading = slice(0, SPREAD_COORDINATES)
    found = float(np.square(codes - mean)[:, leading].sum() / len(codes))
    wanted = share * float(variances[leading].sum())
    factor = max(1.0, np.sqrt(wanted / found)) if found > 0 else 1.0
    result: np.ndarray = mean + factor * (codes - mean)
    return result


def _of_pass(checkpoint: Path | None, number: int) -> Path | None:
    """Return the checkpoint file of a pass; that of the first pass is ``checkpoint`` itself."""
    return checkpoint if checkpoint is None or number == 0 else checkpoint.with_name(f"{checkpoint.name}.{number}")


def pass_ends(recipe: TrainingConfig) -> tuple[int, ...]:
    """Return the last step of each of a student's passes.

    Args:
        recipe: The student's training recipe.

    Returns:
        Step numbers, ascending.

    Raises:
        InvalidInput: If the recipe has fewer steps than passes.
    """
    return tuple(accumulate(part.steps for part in _split(recipe, STUDENT_PASSES)))


def _split(recipe: TrainingConfig, parts: int) -> list[TrainingConfig]:
    if recipe.steps < parts:
        raise InvalidInput("student.steps", value=recipe.steps, limit=f"at least {parts} for a joint query")
    base, rest = divmod(recipe.steps, parts)
    return [replace(recipe, steps=base + (number < rest)) for number in range(parts)]
