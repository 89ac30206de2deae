"""Reads a folder of labelled scans, in any layout of a site's data, as arrays: ``consilium.read_cases``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from common.config import Study
from common.errors import InvalidInput
from common.privacy.checks import check_kind
from common.reading import as_path


def read_cases(
    folder: Path | str,
    study: Study,
    *,
    labels: Mapping[str, str] | None = None,
    channels: Mapping[str, str] | None = None,
) -> tuple[list[Float[np.ndarray, "c x y z"]], list[UInt8[np.ndarray, "x y z"]], list[str]]:
    """Read a folder of labelled scans onto a study's grid.

    Args:
        folder: An MSD, nnU-Net, BIDS or BraTS folder, or one with a table ``cases.csv``. The layout is recognised.
        study: The study, to whose labels, channels, spacing and grid every scan is converted.
        labels: Maps the folder's name of a label to the study's name, for each label whose two names differ.
        channels: Maps the folder's name of a channel to the study's name, for each channel whose two names differ.

    Returns:
        A tuple of images, float32 [c, x, y, z] and normalised; label maps, uint8 [x, y, z]; and patient ids. Scans of
        one patient must not be given to different teachers.

    Raises:
        InvalidInput: For a folder of no known layout, and for a scan that cannot be used. The error states the scan's
            position in the folder; `consilium site doctor` names the scan. No scan is left out silently, except a copy
            of a scan of the same patient.

    >>> c.read_cases("no-such-folder", study)
    Traceback (most recent call last):
    ...
    common.errors.InvalidInput: the data directory does not exist: got 'no-such-folder'; to fix: check the path
    """
    from client.data.layouts import DatasetSettings, open_for_training
    from common.data.volume import load_example

    check_kind("study", study, Study)
    for what, given in (("labels", labels), ("channels", channels)):
        if not isinstance(given, Mapping | None):
            raise InvalidInput(
                what, value=type(given).__name__, limit="a dict from the folder's names to the study's names"
            )
    settings = DatasetSettings(labels=dict(labels or {}), channels=dict(channels or {}))
    dataset, remedy = (
        open_for_training(as_path(folder, what="folder of scans"), study.data, settings),
        "run `consilium site doctor --data FOLDER`, which names each scan and its problem",
    )
    if dataset.problems:
        told = f"{len(dataset.problems)} of {len(dataset.listed) + len(dataset.unnamed)}"
        raise InvalidInput("scans that cannot be used", value=told, limit="none", remedy=remedy)
    images, label_maps, patients = [], [], []
    for number, case in enumerate(dataset.cases, start=1):
        try:
            example = load_example(case, study.data)
        except InvalidInput as error:
            what = f"scan {number} of {len(dataset.cases)}: {error.what}"
            raise InvalidInput(what, value=error.value, limit=error.limit, remedy=remedy) from error
        images.append(example.volume.image)
        label_maps.append(example.label)
        patients.append(dataset.patient_of(case.id))
    return images, label_maps, patients
