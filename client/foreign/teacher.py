"""Runs a teacher that the hospital added instead of training it; checks the teacher's files and output every time.

The worker calls it. The volume is written as NIfTI on its own grid; the program returns NIfTI on any grid, as a label
map in its own numbers or as class probabilities. It refuses label numbers that were not declared, another number of
channels, values that are no probabilities, an output that covers too little of the scan, and files that differ from
those declared.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from jaxtyping import Float
from monai.data import MetaTensor
from monai.transforms import SpatialResample

from client.foreign.confined import SCRATCH_BYTES, ResourceLimits, read_plain_file, run_confined
from client.foreign.watch import ResourceUsage
from client.records.declared import DECLARED, ForeignKind, TeacherDeclaration
from common.canonical import sha256_bytes, sha256_file
from common.config import DataConfig
from common.data.nifti import Scan, read_nifti
from common.data.volume import Volume, volume_from_bytes
from common.errors import InvalidInput

LEAST_COVERED = 0.1
"""Least share of the scan that an output must cover. With less, its affine is assumed to be wrong."""
PROBABILITY_SLACK = 1e-2
KEPT_BYTES = 1 << 29
"""Largest size of the answers kept in memory. They are needed again because all rounds of a joint query, which asks
about all public volumes at once, use the same volumes."""

log = logging.getLogger(__name__)

MODEL = "model"
CASE = "case"


@dataclass(frozen=True, slots=True)
class ForeignTeacher:
    """A voter's teacher that the hospital added.

    Attributes:
        declared: Its declaration.
        folder: The voter's folder.
        data: The study's labels, channels and grid.
        kept: Recent answers by the volume's hash. # sensitive
    """

    declared: TeacherDeclaration
    folder: Path
    data: DataConfig
    kept: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)

    @classmethod
    def load(cls, folder: Path, data: DataConfig) -> ForeignTeacher:
        """Load a declaration and check the teacher's files.

        Args:
            folder: The voter's folder.
            data: The study's labels, channels and grid.

        Returns:
            The teacher.

        Raises:
            InvalidInput: If a file is not as declared, or labels or channels are not the study's.
        """
        declared = TeacherDeclaration.read(folder / DECLARED)
        declared.label_numbers(data)
        made = cls(declared, folder, data)
        made.check_files()
        return made

    def check_files(self) -> None:
        """Check that every file of the teacher has the declared hash.

        Raises:
            InvalidInput: If a file is missing or has another hash.
        """
        found = hashes(self.folder, [Path(name) for name in self.declared.files])
        changed = sorted(name for name, hash_ in self.declared.files.items() if found.get(name) != hash_)
        if changed:
            raise InvalidInput(
                "the teacher's file differs from the one on record",
                value=changed[0],
                remedy="put the file back, or add the teacher again with `consilium site teacher add`",
            )

    def ask(self, volume: bytes) -> Float[np.ndarray, "k x y z"]:
        """Predict a public volume on the study's grid, or return the answer kept from before. # sensitive

        Args:
            volume: The volume as NIfTI.

        Returns:
            Class probabilities, float32 [k, x, y, z], read-only.

        Raises:
            InvalidInput: If the files or the output are refused.
            DaemonFailed: If the program fails or exceeds its limits.
        """
        name = sha256_bytes(volume)
        if name in self.kept:
            return self.kept[name]
        answer, used = self.run(volume)
        log.info("foreign-teacher used=%r", str(used))
        answer.flags.writeable = False
        self.kept[name] = answer
        while sum(one.nbytes for one in self.kept.values()) > KEPT_BYTES:
            self.kept.popitem(last=False)
        return answer

    def run(self, content: bytes) -> tuple[Float[np.ndarray, "k x y z"], ResourceUsage]:
        """Predict a public volume on the study's grid, and measure what the program used. # sensitive

        Args:
            content: The volume as NIfTI.

        Returns:
            Class probabilities, float32 [k, x, y, z], and the peak use of each resource.

        Raises:
            InvalidInput: If the files or the output are refused.
            DaemonFailed: If the program fails or exceeds its limits.
        """
        self.check_files()
        volume = volume_from_bytes(content, self.data)
        with _scratch() as scratch:
            given, out, home = (scratch / name for name in ("in", "out", "home"))
            for folder in (given, out, home):
                folder.mkdir()
            self._write_input(read_nifti(content, channels=len(self.data.channels)), given)
            argv = self._argv(given, out)
            within = ResourceLimits(
                reads=(str(given), str(self.folder), *_runtime(argv[0], self.declared)),
                writes=(str(home), str(out)),
                timeout_s=self.declared.timeout_s,
                memory_gib=self.declared.memory_gib,
                disk_bytes=_scratch_bytes(volume, outputs=self.declared.outputs),
            )
            used = run_confined(argv, within, cwd=home, log=scratch / "log")
            found = read_nifti(read_plain_file(_only_output(out)), channels=None)
        return on_grid(found, volume, self.declared.label_numbers(self.data), classes=len(self.data.labels)), used

    def _write_input(self, scan: Scan, given: Path) -> None:
        """Write one file with all channels; for ``{input_dir}`` also one file for each channel, named as in nnU-Net."""
        order = [self.data.channels.index(name) for name in self.declared.channels]
        array = np.asarray(scan.array[order], dtype=np.float32)
        whole = array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)
        _save(given / f"{CASE}.nii.gz", whole, scan.affine)
        if any("{input_dir}" in word for word in self.declared.command):
            (given / "channels").mkdir()
            for number, channel in enumerate(array):
                _save(given / "channels" / f"{CASE}_{number:04d}.nii.gz", channel, scan.affine)

    def _argv(self, given: Path, out: Path) -> list[str]:
        image, result = str(given / f"{CASE}.nii.gz"), str(out / f"{CASE}.nii.gz")
        if self.declared.kind is not ForeignKind.COMMAND:
            own = (str(self.folder / DECLARED), str(self.folder / MODEL), image, result)
            return [sys.executable, "-P", "-m", "client.foreign.model", *own]
        places = {"input": image, "output": result, "input_dir": str(given / "channels"), "output_dir": str(out)}
        return [filled(word, places) for word in self.declared.command]


def filled(word: str, places: Mapping[str, str]) -> str:
    """Fill the paths into a word of a command's template. Other braces are left unchanged.

    Args:
        word: The word.
        places: Path by placeholder name.

    Returns:
        The word with paths.
    """
    for name, path in places.items():
        word = word.replace("{" + name + "}", path)
    return word


def read_command(text: str) -> tuple[str, ...]:
    """Parse the option ``--command`` as a shell would split it, without running a shell.

    Args:
        text: The command's template.

    Returns:
        The words; the first is the program's absolute path.

    Raises:
        InvalidInput: If the program does not exist, or the template lacks an input or output placeholder.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInput("--command", value=text, limit=f"a command line that a shell can split ({error})") from error
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise InvalidInput(
            "program of --command", value=words[:1], limit="an executable program", remedy="give its path"
        )
    if not any(f"{{{name}" in text for name in ("input}", "input_dir}")):
        raise InvalidInput("--command", value=text, limit="a command that contains {input} or {input_dir}")
    if not any(f"{{{name}" in text for name in ("output}", "output_dir}")):
        raise InvalidInput("--command", value=text, limit="a command that contains {output} or {output_dir}")
    return (os.path.abspath(program), *words[1:])


def hashes(folder: Path, paths: list[Path]) -> dict[str, str]:
    """Hash every file that the paths name, and all files in the folders that they name. Missing files are left out.

    Args:
        folder: Folder to which relative paths refer.
        paths: Files and folders.

    Returns:
        SHA-256 by name.
    """
    found: dict[str, str] = {}
    for path in paths:
        at = folder / path
        for file in sorted(_files(at)):
            name = file if path.is_absolute() else file.relative_to(folder)
            found[str(name)] = sha256_file(file)
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
    elif path.is_file():
        yield path


def _runtime(program: str, declared: TeacherDeclaration) -> tuple[str, ...]:
    """Return the paths that a program may read besides its input: the program's own files and its environment."""
    if declared.kind is not ForeignKind.COMMAND:
        return tuple(dict.fromkeys((sys.prefix, sys.base_prefix, *(path for path in sys.path if path))))
    found = []
    for path in (Path(program), Path(program).resolve()):
        found += [str(path), *([str(path.parent.parent)] if path.parent.name == "bin" else [])]
    return (*dict.fromkeys(found), *declared.reads, *(name for name in declared.files if os.path.isabs(name)))


def _scratch_bytes(volume: Volume, *, outputs: int) -> int:
    """Return how many bytes a program may write for one volume: sixteen float32 answers, plus a constant."""
    return SCRATCH_BYTES + 16 * 4 * max(outputs, len(volume.image)) * math.prod(volume.native_shape)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a temporary folder and delete it at the end with everything in it."""
    folder = Path(tempfile.mkdtemp(prefix="consilium-teacher-")).resolve()
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _save(path: Path, array: np.ndarray, affine: np.ndarray) -> None:
    image = nib.Nifti1Image(array, affine)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)


def _only_output(folder: Path) -> Path:
    """Return the one NIfTI file that the program wrote."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith((".nii", ".nii.gz")))
    if len(found) != 1:
        raise InvalidInput("NIfTI files that the teacher's program wrote", value=len(found), limit="exactly one")
    return found[0]


def on_grid(found: Scan, volume: Volume, labels: Mapping[int, int], *, classes: int) -> Float[np.ndarray, "k x y z"]:
    """Convert a teacher's output to class probabilities on the study's grid.

    An output with one channel is a label map in the model's own numbers. An output with several channels holds one
    probability map for each of these numbers. Voxels outside the output are background.

    Args:
        found: The output.
        volume: The volume it belongs to.
        labels: The study's label number by output number.
        classes: Number of the study's labels.

    Returns:
        Float32 [k, x, y, z] that sums to 1 in every voxel. # sensitive

    Raises:
        InvalidInput: For undeclared label numbers, another number of channels, values that are no probabilities, or an
            output that covers too little of the scan.
    """
    array = np.asarray(found.array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise InvalidInput("the teacher's output", value="NaN or infinite", limit="finite values")
    own = _one_hot(array[0], labels, classes) if len(array) == 1 else _summed(array, labels, classes)
    to_grid = SpatialResample(mode="bilinear", padding_mode="zeros", align_corners=True)
    target = {"dst_affine": torch.tensor(volume.affine), "spatial_size": volume.image.shape[1:]}
    ones = np.ones((1, *own.shape[1:]), np.float32)
    placed, covered = (
        np.asarray(to_grid(MetaTensor(torch.tensor(one), affine=torch.tensor(found.affine)), **target).array)
        for one in (own, ones)
    )
    scanned = np.asarray(
        to_grid(
            MetaTensor(torch.ones((1, *volume.native_shape)), affine=torch.tensor(volume.native_affine)), **target
        ).array
    )
    share = float((covered * scanned).sum() / max(float(scanned.sum()), 1.0))
    if share < LEAST_COVERED:
        raise InvalidInput(
            "share of the scan that the teacher's output covers",
            value=round(share, 3),
            limit=f"{LEAST_COVERED} or more",
            remedy="change the program so that its output has the affine of its input",
        )
    result = np.clip(placed, 0, 1)
    result[0] += np.maximum(1 - result.sum(axis=0), 0)
    result /= result.sum(axis=0, keepdims=True)
    probabilities: np.ndarray = result.astype(np.float32)
    return probabilities


def _one_hot(array: Float[np.ndarray, "x y z"], labels: Mapping[int, int], classes: int) -> np.ndarray:
    values = np.unique(array)
    unknown = [float(value) for value in values if value not in labels]
    if unknown:
        limit = ", ".join(map(str, sorted(labels)))
        raise InvalidInput(
            "values in the teacher's label map",
            value=unknown[:5],
            limit=f"the values that --labels declares: {limit}",
            remedy="add the teacher again with the right --labels",
        )
    result = np.zeros((classes, *array.shape), np.float32)
    for value in values:
        result[labels[int(value)]][array == value] = 1
    return result


def _summed(array: Float[np.ndarray, "k x y z"], labels: Mapping[int, int], classes: int) -> np.ndarray:
    if sorted(labels) != list(range(len(array))):
        raise InvalidInput("channels of the teacher's output", value=len(array), limit=f"{len(labels)}, as declared")
    low, high = float(array.min()), float(array.max())
    off = float(np.abs(array.sum(axis=0) - 1).max())
    if low < -PROBABILITY_SLACK or high > 1 + PROBABILITY_SLACK or off > PROBABILITY_SLACK:
        raise InvalidInput(
            "the teacher's output", value=f"{low:g} to {high:g}", limit="probabilities that sum to 1",
            remedy="name the function that turns the output into probabilities: --activation",
        )  # fmt: skip
    result = np.zeros((classes, *array.shape[1:]), np.float32)
    for output, label in labels.items():
        result[label] += array[output]
    return result
