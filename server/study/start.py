"""Reads the network with whose weights a study's training begins: a MONAI bundle, or a file of weights.

Nothing in a bundle is executed. It refuses a bundle that is marked as adapted to a hospital's patients, a bundle with
other labels or channels than the study, and weights that do not fit the student's network. The origin of a file of
weights is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.canonical import check_hash, sha256_bytes
from common.config import MAX_START_NAME, DataConfig, StartConfig, Study, TrainingConfig
from common.errors import InvalidInput
from common.models.bundle import SEEN_WEIGHTS, open_bundle
from common.models.student_bundle import PRIVACY, WEIGHTS
from common.models.unet import network_for, weights_from_bytes
from common.objects import MAX_OBJECT_BYTES, read_regular
from common.reading import lenient_json
from common.wording import many


@dataclass(frozen=True, slots=True)
class GivenStart:
    """A network with which a study's training begins.

    Attributes:
        config: The section [start] of the study file.
        weights: Content of the file of weights.
        recipe: Network and channels of a bundle; None for a file of weights, which does not state them.
        spacing_mm: Voxel spacing at which a bundle's network was trained, in mm; empty for a file of weights.
    """

    config: StartConfig
    weights: bytes
    recipe: TrainingConfig | None = None
    spacing_mm: tuple[float, ...] = ()

    def of_network(self, recipe: TrainingConfig) -> TrainingConfig:
        """Return a training recipe with this network and its channels.

        Args:
            recipe: The recipe.

        Returns:
            The recipe with the bundle's network and channels; unchanged for a file of weights.
        """
        if self.recipe is None:
            return recipe
        return replace(recipe, channels=self.recipe.channels, network=self.recipe.network)

    def model(self, recipe: TrainingConfig, data: DataConfig) -> torch.nn.Module:
        """Build the network with these weights, in evaluation mode.

        Args:
            recipe: Recipe that names the network.
            data: The study's labels and channels.

        Returns:
            The network.

        Raises:
            InvalidInput: If the weights do not fit the recipe's network.
        """
        model = network_for(recipe, data)
        weights_from_bytes(self.weights, model)
        return model.eval()

    def remark(self, data: DataConfig) -> str:
        """Return a warning if the network was trained at another voxel spacing than the study's.

        Args:
            data: The study's data section.

        Returns:
            The warning; empty if the spacings agree, or if the network's spacing is unknown.
        """
        if not self.spacing_mm or tuple(self.spacing_mm) == tuple(data.student.spacing_mm):
            return ""
        return (
            f"warning: the given network was trained at {self.spacing_mm} mm, and this study's volumes have "
            f"{data.student.spacing_mm} mm; it may segment these less well"
        )


def read_given(path: Path, data: DataConfig) -> GivenStart:
    """Read a network for a study with these labels and channels.

    Args:
        path: A bundle's directory, or a file of weights.
        data: The study's labels and channels.

    Returns:
        The network. :func:`check_fits` checks later whether its weights fit the student's network.

    Raises:
        InvalidInput: If the network was adapted to a hospital's patients, or has other labels or channels than the
            study.
    """
    if path.is_file():
        content = read_regular(path, most_bytes=MAX_OBJECT_BYTES)
        return GivenStart(StartConfig(sha256_bytes(content), path.name[:MAX_START_NAME]), content)
    if (path / SEEN_WEIGHTS).exists():
        raise InvalidInput(
            "the given network has seen a hospital's patients and must not leave that hospital",
            value=str(path),
            limit="a public network, or a student that a study released",
        )
    bundle = open_bundle(path)
    for what, found, wanted in (
        ("labels", bundle.data.labels, data.labels),
        ("channels", len(bundle.data.channels), len(data.channels)),
        *([("channels", bundle.data.channels, data.channels)] if len(data.channels) > 1 else []),
    ):
        if found != wanted:
            raise InvalidInput(
                f"{what} of the given network",
                value=found,
                limit=f"those of the study, {wanted}",
                remedy="give a network for this study's labels and channels, or leave --start out",
            )
    content = read_regular(path / WEIGHTS, most_bytes=MAX_OBJECT_BYTES)
    study = _study_of(path)
    name = f"student of the study {study[:16]}" if study else path.resolve().name[:MAX_START_NAME]
    config = StartConfig(sha256_bytes(content), name, study)
    return GivenStart(config, content, bundle.recipe, tuple(bundle.data.spacing_mm))


def check_fits(study: Study, weights: bytes | None) -> None:
    """Check that the given initial weights are the ones that the study file names, and that they fit the student.

    Args:
        study: The study, whose section [start] may name weights.
        weights: The weights' bytes; None if none are given.

    Raises:
        InvalidInput: If the given weights, or their absence, contradict the study file; or if they do not fit the
            student's network.
    """
    named = study.start.weights
    found = "" if weights is None else sha256_bytes(weights)
    if found != named:
        raise InvalidInput(
            "weights of the given network",
            value=found or "none given",
            limit=named or "none, because the study file names none",
            remedy="give the network that start.weights names: --start BUNDLE" if named else "leave --start out",
        )
    if weights is None:
        return
    try:
        weights_from_bytes(weights, network_for(study.student, study.data))
    except InvalidInput as error:
        recipe = study.student
        raise InvalidInput(
            f"the given network does not fit the student ({error.what})",
            value=study.start.name,
            limit=f"weights of the network {recipe.network} with channels {recipe.channels}, "
            f"{many(len(study.data.channels), 'input channel')} and {len(study.data.labels)} labels",
            remedy="give a network with these properties; or set network and channels in [student] and [teacher] of "
            "the study file to those of the given network; or leave --start out",
        ) from error


def _study_of(bundle: Path) -> str:
    """Return the id of the study that released this bundle as its student; empty for any other network."""
    try:
        return check_hash(lenient_json((bundle / PRIVACY).read_text(encoding="utf-8"))["study"])
    except (OSError, ValueError, KeyError, TypeError, InvalidInput):
        return ""
