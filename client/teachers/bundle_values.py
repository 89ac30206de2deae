"""A bundle made anew at the site: of what the server packed nothing is taken but values, each within its bounds.

MONAI evaluates what a bundle's configuration says, so a site runs no configuration it did not write. Refuses files that
are not what this program makes of the values in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.config import Study, TrainingConfig
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.models.bundle_facts import BundlePrivacy, Libraries, checked_figures
from common.models.student_bundle import FILES, INFERENCE, METADATA, PRIVACY, WEIGHTS, bundle_files
from common.models.unet import network_for, recipe_of, weights_from_bytes, weights_to_bytes
from common.reading import parse_json, parsing

MAX_TEXT_BYTES = 1 << 20
"""Of all files but the weights together."""

_REMEDY = (
    "run the same release of Consilium here and at the server; if it is the same, the bundle was tampered with: "
    "tell the consortium"
)


@dataclass(frozen=True, slots=True)
class BundleValues:
    """All that is taken from a bundle somebody else packed: numbers, names, and the bytes of its weights.

    ``recipe`` has the network, its channels and its patch; a recipe is no part of what a site consents to.
    """

    recipe: TrainingConfig
    weights: bytes
    privacy: BundlePrivacy
    figures: Mapping[str, float]
    libraries: Libraries
    inputs: InputRanges | None


def read_values(files: Mapping[str, bytes]) -> BundleValues:
    """The values in a bundle's files, each within its bounds; InvalidInput for files no export writes."""
    if files.keys() != set(FILES):
        wrong = sorted(files.keys() ^ set(FILES))
        raise InvalidInput("files of a bundle", value=wrong[:8], limit=f"exactly {', '.join(FILES)}")
    if sum(len(content) for name, content in files.items() if name != WEIGHTS) > MAX_TEXT_BYTES:
        raise InvalidInput("text in a bundle", limit=f"{MAX_TEXT_BYTES} bytes in all")
    with parsing("a bundle's configuration cannot be read", limit="one that Consilium exported", remedy=_REMEDY):
        described, workflow = (parse_json(files[name], what=name, remedy=_REMEDY) for name in (METADATA, INFERENCE))
        recipe = replace(recipe_of(workflow["network_def"]), patch=tuple(workflow["inferer"].get("roi_size", ())))
        ranges = described.get("input_ranges")
        return BundleValues(
            recipe=recipe,
            weights=files[WEIGHTS],
            privacy=BundlePrivacy.from_json(parse_json(files[PRIVACY], what=PRIVACY)),
            figures=checked_figures(described["eval_metrics"]),
            libraries=Libraries(
                monai=described["monai_version"],
                pytorch=described["pytorch_version"],
                numpy=described["numpy_version"],
                nibabel=described["required_packages_version"]["nibabel"],
            ),
            inputs=None if ranges is None else InputRanges.from_json(ranges, channels=len(ranges["intensity"])),
        )


def regenerate(values: BundleValues, study: Study) -> dict[str, bytes]:
    """The bundle that ``values`` make here: this program's own words about ``study``, the weights written anew.

    InvalidInput unless the weights are tensors of the network that ``values`` describe, and nothing else.
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
    """InvalidInput naming the first of ``files`` that is not, byte for byte, what was made here; weights are values."""
    for name in FILES:
        if name != WEIGHTS and own[name] != files[name]:
            raise InvalidInput(
                "a bundle's file differs from the one this program writes for the study",
                value=name,
                remedy=_REMEDY,
            )
