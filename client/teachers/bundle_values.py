"""Rebuilds a student's bundle at the site, from values only: no file of the server's bundle is used directly.

``client.teachers.pulled_student`` calls it. MONAI evaluates expressions in a bundle's configuration, so a site runs no
configuration that it did not write itself. Steps:

1. :func:`read_values` reads numbers, names and weights from the received files, and checks each against its bounds.
2. :func:`regenerate` computes the content of all files again from these values.
3. :func:`check_same` refuses received files that differ from the regenerated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.config import Study, TrainingConfig
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.models.bundle_facts import BundlePrivacy, LibraryVersions, checked_figures
from common.models.student_bundle import FILES, INFERENCE, METADATA, PRIVACY, WEIGHTS, bundle_files
from common.models.unet import network_for, recipe_of, weights_from_bytes, weights_to_bytes
from common.reading import parse_json, parsing

MAX_TEXT_BYTES = 1 << 20
"""Largest total size of all files except the weights."""

_REMEDY = (
    "run the same release of Consilium here and at the server; if it is the same, the bundle was tampered with: "
    "tell the consortium"
)


@dataclass(frozen=True, slots=True)
class BundleValues:
    """Everything taken from a bundle that another program packed.

    Attributes:
        recipe: Network, channels and patch. They come from the bundle, because a site does not consent to a recipe.
        weights: The bytes of the weights' file.
        privacy: The bundle's figures on privacy: ε by accountant, δ, unit and relation.
        figures: Scores by name.
        libraries: Versions of the libraries with which the student was trained.
        inputs: Range of the inputs the student was trained on; None if the bundle names none.
    """

    recipe: TrainingConfig
    weights: bytes
    privacy: BundlePrivacy
    figures: Mapping[str, float]
    libraries: LibraryVersions
    inputs: InputRanges | None


def read_values(files: Mapping[str, bytes]) -> BundleValues:
    """Read the values in a bundle's files.

    Args:
        files: Content by name.

    Returns:
        The values.

    Raises:
        InvalidInput: If a file is missing or additional, too large, or not of the form that this program exports.
    """
    if files.keys() != set(FILES):
        wrong = sorted(files.keys() ^ set(FILES))
        raise InvalidInput("files of a bundle", value=wrong[:8], limit=f"exactly {', '.join(FILES)}")
    if sum(len(content) for name, content in files.items() if name != WEIGHTS) > MAX_TEXT_BYTES:
        raise InvalidInput("size of a bundle's text files", limit=f"at most {MAX_TEXT_BYTES} bytes in all")
    with parsing("a bundle's configuration cannot be read", limit="bundles that Consilium exported", remedy=_REMEDY):
        described, workflow = (parse_json(files[name], what=name, remedy=_REMEDY) for name in (METADATA, INFERENCE))
        ranges = described.get("input_ranges")
        return BundleValues(
            recipe=recipe_of(workflow),
            weights=files[WEIGHTS],
            privacy=BundlePrivacy.from_json(parse_json(files[PRIVACY], what=PRIVACY)),
            figures=checked_figures(described["eval_metrics"]),
            libraries=LibraryVersions(
                monai=described["monai_version"],
                pytorch=described["pytorch_version"],
                numpy=described["numpy_version"],
                nibabel=described["required_packages_version"]["nibabel"],
            ),
            inputs=None if ranges is None else InputRanges.from_json(ranges, channels=len(ranges["intensity"])),
        )


def regenerate(values: BundleValues, study: Study) -> dict[str, bytes]:
    """Return the content of the bundle's files as this program writes them from the bundle's values and the study.

    Args:
        values: The values taken from the received bundle.
        study: The study this site consented to.

    Returns:
        Content by file name.

    Raises:
        InvalidInput: If the weights are anything but tensors of the network that the values describe.
    """
    network = network_for(values.recipe, study.data)
    weights_from_bytes(values.weights, network)
    own = values.recipe
    student = replace(study.student, channels=own.channels, network=own.network, patch=own.patch)
    return bundle_files(
        replace(study, student=student),
        weights=weights_to_bytes(network),
        privacy=values.privacy,
        dice=values.figures,
        libraries=values.libraries,
        inputs=values.inputs,
    )


def check_same(files: Mapping[str, bytes], own: Mapping[str, bytes]) -> None:
    """Refuse received files that differ from those regenerated here.

    Weights are not compared: they are the result of a training and cannot be regenerated here.

    Args:
        files: The received files.
        own: The regenerated files.

    Raises:
        InvalidInput: For the first file that differs by a byte.
    """
    for name in FILES:
        if name != WEIGHTS and own[name] != files[name]:
            raise InvalidInput(
                "a file of the bundle differs from the file that this program writes for the study",
                value=name,
                remedy=_REMEDY,
            )
