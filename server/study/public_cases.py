"""Reads labelled public cases into a study's object store: its public pairs, and the cases that it scores networks on.

Publishing (:mod:`server.study.create_study`) calls it. It refuses a case that cannot be read on the study's grid, one
that is given twice, another number of pairs than the study states, and a scored case that the study learns from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from common.config import Study
from common.data.copies import voxel_hash
from common.data.dataset import Dataset, check_labels
from common.errors import InvalidInput
from server.public.material import PairedFiles
from server.study.workspace import Workspace


@contextmanager
def naming(what: str, *, remedy: str) -> Iterator[None]:
    """Name the file in an InvalidInput of the block, and add a remedy to the error's own.

    Args:
        what: The file, and what it is not.
        remedy: Further remedy.

    Raises:
        InvalidInput: The block's, with the file's name.
    """
    try:
        yield
    except InvalidInput as error:
        remedies = ", or ".join(filter(None, (error.remedy, remedy)))
        raise InvalidInput(f"{what} ({error.what})", value=error.value, limit=error.limit, remedy=remedies) from error


def scored_cases(
    workspace: Workspace, study: Study, validation: Dataset | None, *, learnt: Collection[str]
) -> tuple[PairedFiles, ...]:
    """Return the cases to score on, after storing new ones. They are compared with volumes by their voxels.

    Args:
        workspace: The study's directory.
        study: The study.
        validation: New cases; None for the published ones.
        learnt: Content hashes of the volumes that the study learns from.

    Returns:
        The files of the cases.

    Raises:
        InvalidInput: If a case cannot be read or is given twice, if no new case has a label map, or if the study learns
            from one of the cases.
    """
    from common.data.volume import volume_from_bytes

    def voxels(image: str) -> str:
        return voxel_hash(volume_from_bytes(workspace.objects.get(image), study.data).image)

    if validation is None:
        cases = {voxels(files.image): files for files in workspace.validation()}
    else:
        cases = _store_cases(workspace, study, validation)
    if (validation is not None and not cases) or (cases and cases.keys() & set(map(voxels, learnt))):
        raise InvalidInput(
            "validation cases",
            value=len(cases),
            limit="at least one with a label map, and none that the study learns from",
            remedy="give labelled public cases of people who are in none of the study's public volumes",
        )
    return tuple(cases.values())


def paired_files(workspace: Workspace, study: Study, paired: Dataset | None) -> tuple[PairedFiles, ...]:
    """Store the study's public pairs and return their files.

    Args:
        workspace: The study's directory.
        study: The study, which states the number of pairs.
        paired: The pairs; None for none.

    Returns:
        Their files.

    Raises:
        InvalidInput: For another number of pairs, or a pair that cannot be read or is given twice.
    """
    cases = () if paired is None else paired.labelled
    if len(cases) != study.codec.paired:
        raise InvalidInput(
            "public pairs (volumes with their label maps)",
            value=len(cases),
            limit=f"exactly {study.codec.paired}, the number that codec.paired of the study states",
            remedy="give them with --paired, or create the study with another number",
        )
    return () if paired is None else tuple(_store_cases(workspace, study, paired).values())


def _store_cases(workspace: Workspace, study: Study, dataset: Dataset) -> dict[str, PairedFiles]:
    """Put a dataset's labelled cases into the object store, and return their files by the hash of the image's voxels.

    Each case must be readable on the study's grid, and none may be a copy of another one.
    """
    from common.data.volume import example_from_bytes

    check_labels(dataset, study.data)
    found: dict[str, PairedFiles] = {}
    for case in dataset.labelled:
        assert case.label is not None  # labelled
        image, label = case.image.read_bytes(), case.label.read_bytes()
        with naming(f"{case.id} is no case of this study", remedy="take it out of the dataset"):
            voxels = voxel_hash(example_from_bytes(image, label, study.data).volume.image)
        found[voxels] = PairedFiles(workspace.objects.put(image), workspace.objects.put(label))
    if len(found) != len(dataset.labelled):
        raise InvalidInput(
            "public volumes with label maps, of which one is given twice",
            limit="each volume once",
            remedy="remove the duplicate",
        )
    return found
