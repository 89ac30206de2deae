"""Adds a hospital's own model as a teacher, or removes it: `consilium site teacher add` and `remove`.

1. Copy the model to a temporary folder, and write its declaration.
2. Let it predict one volume of random noise, confined by the kernel. All checks of later answers apply to this one.
3. Record it in the site's ledger.
4. Put it in the voter's folder.

The module refuses a study whose unit of privacy is the patient, because such a model may have seen any patient. It also
refuses a file that is no model or would have to be unpickled, and a model whose first answer fails a check. The site's
teachers and ledger do not change before step 3.
"""

from __future__ import annotations

import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

from client.foreign.teacher import MODEL, ForeignTeacher, hashes, read_command
from client.foreign.watch import ResourceUsage
from client.policy import load_site
from client.records.declared import (
    DECLARED,
    Activation,
    ForeignKind,
    Intensity,
    LabelOf,
    TeacherDeclaration,
    check_unit,
    has_foreign,
    read_labels,
)
from client.records.voter_files import voter_directory
from client.site.books import open_books, writing_teachers
from common.config import DataConfig
from common.errors import InvalidInput
from common.objects import write_json
from common.reading import lenient_json, parsing

MAX_BUNDLE_BYTES = 1 << 33
MAX_BUNDLE_FILES = 10_000
_INCOMING = "incoming"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddTeacherOptions:
    """The options of `site teacher add`. An option that is None or empty is read from the model, else from the study.

    Attributes:
        source: File or folder of the model; None for a command.
        command: Template of a command; None for a model.
        voter: Number of the voter.
        labels: ``--labels`` as typed.
        channels: ``--channels`` as typed.
        models: Files that belong to a command and are checked before each use.
        reads: Further paths that a command may read.
        activation: How the model's output becomes probabilities.
        intensity: How a TorchScript model's input is normalised.
        spacing_mm: Voxel spacing in mm of a TorchScript model.
        patch: Sliding window of a TorchScript model, in voxels; empty to predict whole volumes.
        timeout_s: Longest time for one volume, in seconds.
        memory_gib: Most memory for one volume, in GiB.
    """

    source: Path | None = None
    command: str | None = None
    voter: int = 0
    labels: str | None = None
    channels: str | None = None
    models: tuple[Path, ...] = ()
    reads: tuple[Path, ...] = ()
    activation: Activation = Activation.SOFTMAX
    intensity: Intensity = Intensity.Z_SCORE
    spacing_mm: tuple[float, ...] = ()
    patch: tuple[int, ...] = ()
    timeout_s: int = 600
    memory_gib: int = 16


@dataclass(frozen=True, slots=True)
class AddedTeacher:
    """The teacher that was added, with the result of its trial run on a volume of random noise.

    Attributes:
        declared: The declaration.
        shares: Share of each label in the prediction for this volume.
        used: The most processes, memory, disk and files that the program used while it computed this answer.
    """

    declared: TeacherDeclaration
    shares: dict[str, float]
    used: ResourceUsage


def add(site_dir: Path, brought: AddTeacherOptions) -> AddedTeacher:
    """Add a teacher for one voter. A running worker keeps the teachers it loaded until it is restarted.

    Args:
        site_dir: The site's directory.
        brought: The options.

    Returns:
        The declaration, with the result of the trial run.

    Raises:
        InvalidInput: If the study, the model or its first answer is refused.
        DaemonFailed: If the model's program fails or exceeds its limits.
    """
    config = load_site(site_dir)
    study = config.load_study()
    check_unit(study)
    if not 0 <= brought.voter < study.privacy.voters_per_site:
        raise InvalidInput("--voter", value=brought.voter, limit=f"0 to {study.privacy.voters_per_site - 1}")
    with writing_teachers({site_dir, config.books_dir}):
        folder = voter_directory(site_dir / "teachers", brought.voter)
        with _incoming(folder) as incoming:
            declared = _declare(brought, incoming, study.data)
            write_json(incoming / DECLARED, declared.to_json(), mode=0o600)
            trial, used = ForeignTeacher.load(incoming, study.data).run(_made_up(study.data))
            with open_books(config) as ledger:  # recorded before a worker can find it
                ledger.record_foreign(brought.voter, declared.served, brought=str(declared.kind))
            _remove(folder)
            if (incoming / MODEL).exists():
                (incoming / MODEL).rename(folder / MODEL)
            write_json(folder / DECLARED, declared.to_json(), mode=0o600)
    shares = trial.mean(axis=(1, 2, 3))
    named = {name: round(float(s), 4) for name, s in zip(study.data.labels, shares, strict=True)}
    return AddedTeacher(declared, named, used)


def remove(site_dir: Path, voter: int) -> None:
    """Remove an added teacher; its row in the site's ledger stays.

    Args:
        site_dir: The site's directory.
        voter: The voter.

    Raises:
        InvalidInput: If no teacher was added for this voter.
    """
    teachers = site_dir / "teachers"
    if not has_foreign(teachers, voter):
        raise InvalidInput(
            "no teacher was added for this voter", value=voter, limit="a voter that `consilium site teacher add` named"
        )
    with writing_teachers({site_dir}):
        _remove(voter_directory(teachers, voter))


def _remove(folder: Path) -> None:
    (folder / DECLARED).unlink(missing_ok=True)
    if (folder / MODEL).is_dir():
        shutil.rmtree(folder / MODEL)
    else:
        (folder / MODEL).unlink(missing_ok=True)


@contextmanager
def _incoming(folder: Path) -> Iterator[Path]:
    """Provide an empty temporary folder beside the teacher and delete it at the end; replace one that a crash left."""
    made, incoming = not folder.exists(), folder / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True, mode=0o700)
    try:
        yield incoming
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _declare(brought: AddTeacherOptions, incoming: Path, data: DataConfig) -> TeacherDeclaration:
    if (brought.source is None) == (brought.command is None):
        raise InvalidInput("teacher to add", limit="either a model's file or folder, or --command, but not both")
    command: tuple[str, ...] = ()
    if brought.source is not None:
        kind = _copied(brought.source, incoming / MODEL)
        files = hashes(incoming, [Path(MODEL)])
    else:
        kind, command = ForeignKind.COMMAND, read_command(brought.command or "")
        named = [path for word in command if (path := Path(word)).is_absolute() and path.is_file()]
        files = hashes(incoming, [*named, *_existing(brought.models)])
    labels = read_labels(brought.labels) if brought.labels else _own_labels(kind, incoming / MODEL, data)
    return TeacherDeclaration(
        kind=kind,
        labels=labels,
        channels=tuple(name.strip() for name in brought.channels.split(",")) if brought.channels else data.channels,
        files=files,
        timeout_s=brought.timeout_s,
        memory_gib=brought.memory_gib,
        activation=brought.activation,
        intensity=brought.intensity,
        spacing_mm=tuple(map(float, brought.spacing_mm or data.spacing_mm)),
        patch=brought.patch,
        command=command,
        reads=tuple(map(str, _existing(brought.reads))),
    )


def _existing(paths: tuple[Path, ...]) -> list[Path]:
    for path in paths:
        if not path.exists():
            raise InvalidInput("path of --model or --reads", value=str(path), limit="an existing path")
    return [path.absolute() for path in paths]


def _own_labels(kind: ForeignKind, model: Path, data: DataConfig) -> tuple[LabelOf, ...]:
    """Return which label each output channel of a bundle stands for, as its metadata names the channels.

    Raises InvalidInput if the model is no bundle, if its metadata names no channels, or if a name is not the study's.
    """
    found = _channel_names(model / "configs" / "metadata.json") if kind is ForeignKind.BUNDLE else {}
    known = {name.casefold(): name for name in data.labels}
    if not found or not all(name.casefold() in known for name in found.values()):
        raise InvalidInput(
            "labels of the teacher",
            value=list(found.values()) or "no names",
            limit=", ".join(data.labels),
            remedy=f"name the label of each output channel in order, such as --labels {','.join(data.labels)}",
        )
    return read_labels(",".join(f"{number}={known[name.casefold()]}" for number, name in found.items()))


def _channel_names(metadata: Path) -> dict[str, str]:
    """Return the name of each output channel by its number, from MONAI's metadata; empty if it states none."""
    try:
        found: object = lenient_json(metadata.read_text(encoding="utf-8"))
        for key in ("network_data_format", "outputs", "pred", "channel_def"):
            if not isinstance(found, dict):
                return {}
            found = found.get(key)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        return {}
    return found


def _copied(source: Path, target: Path) -> ForeignKind:
    """Copy a model into the site, and return its kind. The model's files are read, but never run or unpickled."""
    if not source.exists():
        raise InvalidInput(
            "a teacher's file or folder", value=str(source), limit="an existing path", remedy="check the path"
        )
    if source.suffix == ".onnx":
        raise InvalidInput(
            "ONNX file",
            value=source.name,
            limit="a MONAI bundle, a TorchScript file or a command",
            remedy="save the network it came from with torch.jit.script(net).save('model.ts'), "
            "or give a program that runs it: --command 'run-onnx {input} {output}'",
        )
    if source.is_dir():
        if not (source / "configs").is_dir():
            raise InvalidInput(
                "folder of a teacher", value=str(source), limit="the folder of a MONAI bundle, which contains configs/"
            )
        _check_links(source)
        try:
            shutil.copytree(source, target, symlinks=False)
        except OSError as error:
            raise InvalidInput(
                "folder of a teacher cannot be copied",
                value=str(source),
                limit="a folder of readable files, and of links to readable files",
            ) from error
        return ForeignKind.BUNDLE
    remedy = (
        "weights alone are no model: export TorchScript with torch.jit.script(net).save('model.ts'), "
        "or put them into a MONAI bundle"
    )
    limit = "TorchScript (torch.jit.save), or a zip file of a MONAI bundle"
    with (
        parsing("file of a teacher cannot be read", value=source.name, limit=limit, remedy=remedy),
        zipfile.ZipFile(source) as archive,
    ):
        names = archive.namelist()
        if any(Path(name).name == "constants.pkl" for name in names) and any("/code/" in name for name in names):
            shutil.copyfile(source, target)
            return ForeignKind.TORCHSCRIPT
        root = next((name.split("configs/")[0] for name in names if "configs/" in name), None)
        if root is None:
            raise zipfile.BadZipFile
        _unpack(archive, root, target)
    return ForeignKind.BUNDLE


def _check_links(source: Path) -> None:
    """Refuse a link that leads out of a bundle's folder, because its target would be copied into the site."""
    inside = source.resolve()
    for path in source.rglob("*"):
        if path.is_symlink() and inside not in path.resolve().parents:
            raise InvalidInput(
                "link in the folder of a teacher",
                value=path.relative_to(source).as_posix(),
                limit="a link to a file in the same folder",
                remedy="check what its links point to, copy the folder with `cp -rL`, and add the copy",
            )


def _unpack(archive: zipfile.ZipFile, root: str, target: Path) -> None:
    """Unpack a bundle's zip file; refuse a file outside ``target``, a link, and too many files or bytes."""
    entries = [entry for entry in archive.infolist() if entry.filename.startswith(root) and not entry.is_dir()]
    total = sum(entry.file_size for entry in entries)
    free = shutil.disk_usage(target.parent).free
    if len(entries) > MAX_BUNDLE_FILES or total > free // 2:
        raise InvalidInput(
            "bundle's zip file",
            value=f"{len(entries)} files of {total} bytes",
            limit=f"at most {MAX_BUNDLE_FILES} files, which unpacked take at most half of the {free} bytes that are "
            "free on the disk",
        )
    for entry in entries:
        path = (target / entry.filename.removeprefix(root)).resolve()
        link = stat.S_ISLNK(entry.external_attr >> 16)
        if link or target.resolve() not in path.parents or total > MAX_BUNDLE_BYTES:
            raise InvalidInput(
                "entry of the bundle's zip file",
                value=entry.filename,
                limit=f"regular files inside the bundle's folder, of at most {MAX_BUNDLE_BYTES} bytes in all",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)


def _made_up(data: DataConfig) -> bytes:
    """Return a volume of random noise with the study's shape, on which a teacher is tried."""
    shape = (*data.grid, len(data.channels)) if len(data.channels) > 1 else data.grid
    noise = np.random.default_rng(0).normal(100, 10, shape).astype(np.float32)
    image = nib.Nifti1Image(noise, np.diag([*data.spacing_mm, 1.0]))
    content: bytes = image.to_bytes()
    return content
