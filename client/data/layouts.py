"""Recognises the layout of a site's data, and matches what it finds to a study.

Training, `site doctor`, `site consent`, `consilium predict` and `consilium data split` call it.

:func:`open_dataset` finds the layout and reads its index; :func:`match_study` puts channels into the study's order and
labels into the study's numbers, by name. Neither opens a scan. The module refuses a directory of unknown layout, and
names that are neither the study's nor mapped to one of the study's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from client.data.bids import BidsLayout, Choice, several
from common.config import DataConfig
from common.data.access import entries, is_closed
from common.data.dataset import Case, Dataset, Problem
from common.data.dicom_labels import ENDING
from common.data.msd import case_of_channels
from common.data.patients import counted_once, find_table, with_patients
from common.errors import InvalidInput
from common.names import comparable, contrast, is_utf8
from common.plain import plain
from common.reading import MAX_TOML_BYTES, parse_toml, read_text
from common.registry import registered


class Layout(Protocol):
    """A way in which datasets are stored on disk.

    Attributes:
        name: Name of the layout in settings, such as ``bids``.
        says: The files of this layout in words, for errors.
    """

    @property
    def name(self) -> str: ...

    @property
    def says(self) -> str: ...

    def matches(self, directory: Path) -> bool:
        """Tell whether a directory looks like this layout. No scan is opened.

        Args:
            directory: The dataset's folder.

        Returns:
            True if it does.
        """
        ...

    def read(self, directory: Path) -> Dataset:
        """Read the dataset's index.

        Args:
            directory: The dataset's folder.

        Returns:
            The dataset; anything wrong with one case is a Problem of that case.

        Raises:
            InvalidInput: If there is no index.
        """
        ...


LAYOUT_CLASSES: dict[str, str] = {
    "table": "client.data.case_table:TableLayout",
    "nnunet": "client.data.nnunet:NnunetLayout",
    "msd": "common.data.msd:MsdLayout",
    "bids": "client.data.bids:BidsLayout",
    "brats": "client.data.brats:BratsLayout",
}
"""The layouts in the order in which they are tried. A table of cases comes first, because a person wrote it."""

LAYOUTS: dict[str, Layout] = {name: registered(target)() for name, target in LAYOUT_CLASSES.items()}

AUTO = "auto"

_UNNAMED = ("MRI",)
"""Channels of a study that names no contrast; an image of any contrast fits."""


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """How a site's data are read.

    Attributes:
        layout: Name of the layout, or ``auto`` to recognise it.
        patients: Table that names the patient of every case.
        absent: Channels of the study that the site has for none of its patients. Its teachers are trained and used
            without these channels.
        labels: Maps the dataset's label names to the study's.
        channels: Maps the dataset's channel names to the study's.
        choice: In BIDS, which of several files of one contrast to use.
    """

    layout: str = AUTO
    patients: Path | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def overridden(self, *, layout: str | None, label_map: Path | None) -> DatasetSettings:
        """Return a copy of these settings in which options of the command line replace values of ``site.toml``.

        Args:
            layout: ``--layout``; None to keep the setting.
            label_map: File of ``--label-map``; None to keep the settings.

        Returns:
            The settings.

        Raises:
            InvalidInput: If the file cannot be read.
        """
        settings = self
        if label_map is not None:
            names = load_names(label_map)
            settings = replace(
                settings, labels=names.labels, channels=names.channels, choice=names.choice, absent=names.absent
            )
        return settings if layout is None else replace(settings, layout=layout)


def read_settings(document: dict[str, object], *, root: Path) -> DatasetSettings:
    """Read the dataset's sections of a TOML document, and remove them from it.

    Args:
        document: The document; ``[dataset]``, ``[labels]``, ``[channels]`` and ``[bids.…]`` are removed.
        root: Folder to which paths are relative.

    Returns:
        The settings.

    Raises:
        InvalidInput: For an unknown key, or a value of another form.
    """
    tables = {name: _strings(document.pop(name, {}), name) for name in ("dataset", "labels", "channels")}
    choice = document.pop("bids", {})
    if not isinstance(choice, dict):
        raise InvalidInput("[bids]", value=choice, limit='tables such as [bids.T1w] with lines such as acq = "mprage"')
    unknown = sorted(tables["dataset"].keys() - {"layout", "patients", "absent"})
    if unknown:
        raise InvalidInput("unknown key in [dataset]", value=unknown[0], limit="layout, patients, absent")
    layout = tables["dataset"].get("layout", AUTO)
    if layout != AUTO and layout not in LAYOUTS:
        raise InvalidInput("dataset.layout", value=layout, limit=", ".join((AUTO, *LAYOUTS)))
    patients = tables["dataset"].get("patients")
    return DatasetSettings(
        layout=layout,
        patients=None if patients is None else root / patients,
        labels=tables["labels"],
        channels=tables["channels"],
        choice={contrast: _strings(table, f"bids.{contrast}") for contrast, table in choice.items()},
        absent=tuple(name.strip() for name in tables["dataset"].get("absent", "").split(",") if name.strip()),
    )


def _strings(table: object, name: str) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise InvalidInput(f"[{name}]", value=table, limit='a TOML table of strings, with lines such as name = "value"')
    return table


def load_names(path: Path) -> DatasetSettings:
    """Read the file of ``--label-map``: TOML with tables ``[dataset]``, ``[labels]``, ``[channels]`` and ``[bids.…]``.

    Args:
        path: The file.

    Returns:
        The settings.

    Raises:
        InvalidInput: If the file cannot be read or has another key.
    """
    remedy = "give TOML with tables [labels] and [channels]"
    text = read_text(path, what="file of --label-map", most_bytes=MAX_TOML_BYTES, remedy=remedy)
    document: dict[str, object] = parse_toml(text, what="file of --label-map", value=path.name, remedy=remedy)
    settings = read_settings(document, root=path.parent)
    if document:
        raise InvalidInput(
            "unknown key in the file of --label-map",
            value=sorted(document)[0],
            limit="dataset, labels, channels, bids",
        )
    return settings


def open_for_training(directory: Path, data: DataConfig, settings: DatasetSettings) -> Dataset:
    """Open a site's dataset with the study's label numbers and channel order, and leave out a patient's repeated scans.

    An error in the index, which a person wrote, is raised before a scan is opened. A scan that occurs twice within one
    patient is used once. A scan that occurs under two patients is kept for both and listed in ``doubled``
    (:func:`common.data.patients.counted_once`).

    Args:
        directory: The dataset's folder.
        data: The study's labels, channels and grid.
        settings: How the data are read.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If :func:`open_dataset` or :func:`match_study` refuses the dataset.
    """
    return counted_once(indexed(directory, data, settings))


def indexed(directory: Path, data: DataConfig, settings: DatasetSettings) -> Dataset:
    """Read the index of a site's dataset, with the study's label numbers and channel order. No scan is opened.

    Args:
        directory: The dataset's folder.
        data: The study's labels, channels and grid.
        settings: How the data are read.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If :func:`open_dataset` or :func:`match_study` refuses the dataset.
    """
    dataset = open_dataset(directory, layout=settings.layout, patients=settings.patients, choice=settings.choice)
    return match_study(dataset, data, labels=settings.labels, channels=settings.channels, absent=settings.absent)


def open_dataset(
    directory: Path, *, layout: str = AUTO, patients: Path | None = None, choice: Choice | None = None
) -> Dataset:
    """Read the index of a dataset.

    Args:
        directory: The dataset's folder.
        layout: One of :data:`LAYOUTS`, or ``auto``.
        patients: Table of cases and patients; by default ``patients.tsv`` or ``.csv`` in the directory, if there is
            one.
        choice: In BIDS, which of several files of one contrast to use.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If the directory is missing, its layout is not recognised, or the layout refuses its content.
    """
    if layout != AUTO and layout not in LAYOUTS:
        raise InvalidInput("layout", value=layout, limit=", ".join((AUTO, *LAYOUTS)))
    if not directory.is_dir():
        fault = "is a file" if directory.exists() else "does not exist"
        raise InvalidInput(f"the data directory {fault}", value=str(directory), remedy="check the path")
    found = LAYOUTS[layout] if layout != AUTO else _detect(directory)
    if choice:
        if not isinstance(found, BidsLayout):
            raise InvalidInput(
                "site.toml has a [bids] section, but the data are not in BIDS layout",
                value=found.name,
                remedy="remove the section from site.toml",
            )
        found = BidsLayout(choice)
    dataset = found.read(directory)
    _check_locale(dataset)
    dataset = named_in_utf8(dataset)
    table = patients or find_table(directory)
    return dataset if table is None else with_patients(dataset, table)


def _check_locale(dataset: Dataset) -> None:
    """Refuse names that another locale would read differently: the patient would get another slot there.

    A name whose bytes are not UTF-8 is left to :func:`named_in_utf8`, because no locale can store it.
    """
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return
    names = [*dataset.listed, *map(dataset.patient_of, dataset.listed)]
    not_ascii = next((name for name in names if not name.isascii() and (is_utf8(name) or _is_utf8_on_disk(name))), None)
    if not_ascii is not None:
        raise InvalidInput(
            f"name of a case or patient in a locale that reads file names as {encoding}",
            value=ascii(not_ascii),
            limit="ASCII characters only, or a UTF-8 locale",
            remedy="set LC_ALL=C.UTF-8 for all commands of this site, and where you start its daemons",
        )


def _is_utf8_on_disk(name: str) -> bool:
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return False
    return True


def named_in_utf8(dataset: Dataset) -> Dataset:
    """Return the dataset without cases whose name, or whose patient's name, is not UTF-8.

    Such a name cannot be stored. Each of these cases becomes a Problem and is assigned to no voter.

    Args:
        dataset: The dataset.

    Returns:
        The dataset. In its problems the invalid characters of names are escaped.
    """
    ids = dict.fromkeys([*dataset.listed, *(one.id for one in dataset.cases), *(one.case for one in dataset.problems)])
    wrong = {one for one in ids if not (is_utf8(one) and is_utf8(dataset.patient_of(one)))}
    if not wrong:
        return dataset
    return replace(
        dataset,
        cases=tuple(case for case in dataset.cases if case.id not in wrong),
        listed=tuple(case for case in dataset.listed if case not in wrong),
        patients={case: patient for case, patient in dataset.patients.items() if case not in wrong},
        unnamed={plain(case): plain(dataset.patient_of(case)) for case in dataset.listed if case in wrong},
        problems=(
            *(problem for problem in dataset.problems if problem.case not in wrong),
            *(Problem(plain(case), "its file name is not UTF-8; to fix: rename the file") for case in sorted(wrong)),
        ),
    )


def _detect(directory: Path) -> Layout:
    for layout in LAYOUTS.values():
        if layout.matches(directory):
            return layout
    if any(map(is_closed, entries(directory))):  # not named: it may be a patient's folder
        raise InvalidInput(
            "folders in the data directory cannot be read (Permission denied)",
            value=str(directory),
            limit=f"folders that user {os.getuid()}, who runs this command, can read",
            remedy="let this user read and enter these folders",
        )
    raise InvalidInput(
        "the layout of the data directory is not recognised",
        value=str(directory),
        limit="; ".join(f"{layout.name}: {layout.says}" for layout in LAYOUTS.values()),
        remedy="put a cases.csv with the columns image, label and patient_id into the directory",
    )


def match_study(
    dataset: Dataset,
    data: DataConfig,
    *,
    labels: Mapping[str, str] | None = None,
    channels: Mapping[str, str] | None = None,
    absent: Sequence[str] = (),
) -> Dataset:
    """Convert a dataset's index to the study's label numbers and to the study's order of channels.

    Names that the study also uses need no mapping; letter case, blanks and common other names of a contrast do not
    matter. An error that concerns a single case, such as a missing contrast, becomes a Problem of that case.

    Args:
        dataset: The dataset.
        data: The study's labels, channels and grid.
        labels: The study's name for each of the site's label names or numbers.
        channels: The study's name for each of the site's channel names.
        absent: Channels of the study that the site does not have.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If the index names a label that is neither mapped nor the study's, or lacks a channel of the
            study.
    """
    places = _places(absent, data)
    whole, data = data, replace(data, channels=tuple(c for i, c in enumerate(data.channels) if i not in places))
    given = _given_labels(data, labels or {})
    pairs = _label_pairs(dataset, data, labels or {}, given)
    order = _channel_order(dataset.channels, data, channels or {}) if dataset.channels else None
    structures = _structures(dataset, data, given, pairs)
    cases: list[Case] = []
    problems = list(dataset.problems)
    for case in dataset.cases:
        try:
            own = _own_pairs(case, data, given) if case.label_names else pairs
            ordered = _in_order(case, dataset, data, channels or {}, order)
        except InvalidInput as error:
            ordered = Problem(case.id, error.without_value)
        if isinstance(ordered, Problem):
            problems.append(ordered)
        else:
            named = structures if _is_dicom(case) else ()
            cases.append(replace(ordered, label_map=own, absent=places, structures=named))
    return replace(
        dataset,
        labels=data.labels,
        label_values=(),
        channels=whole.channels,
        absent=places,
        cases=tuple(cases),
        problems=tuple(problems),
    )


def named_dataset(
    directory: Path, *, layout: str = AUTO, labels: Sequence[str] = (), channels: Sequence[str] = ()
) -> Dataset:
    """Read a dataset with its own labels and channels, before there is a study.

    Args:
        directory: The dataset's folder.
        layout: One of :data:`LAYOUTS`, or ``auto``.
        labels: Labels in order; by default those the dataset names.
        channels: Channels in order; by default those the dataset names.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If neither the arguments nor the dataset name them.
    """
    dataset = open_dataset(directory, layout=layout)
    for what, given, own in (("labels", labels, dataset.labels), ("channels", channels, dataset.channels)):
        if not given and not own:
            raise InvalidInput(f"the dataset names no {what}", value=str(directory), remedy=f"give --{what}")
    terms = DataConfig(tuple(labels) or dataset.labels, (1, 1, 1), (8, 8, 8), tuple(channels) or dataset.channels)
    try:
        return match_study(dataset, terms)
    except InvalidInput as error:  # its remedy names site.toml and --label-map, which only a site has
        remedy = "give the data's own names in their order: --labels (background first) and --channels"
        raise InvalidInput(error.what, value=error.value, limit=error.limit, remedy=remedy) from error


def _places(absent: Sequence[str], data: DataConfig) -> tuple[int, ...]:
    known = {contrast(name): place for place, name in enumerate(data.channels)}
    unknown = next((name for name in absent if contrast(name) not in known), None)
    if unknown is not None:
        raise InvalidInput(
            "dataset.absent in site.toml", value=unknown, limit=f"channels of the study: {', '.join(data.channels)}"
        )
    places = tuple(sorted({known[contrast(name)] for name in absent}))
    if len(places) == len(data.channels):
        raise InvalidInput(
            "dataset.absent in site.toml",
            value=list(absent),
            limit="some of the study's channels, but not all of them",
        )
    return places


def _in_order(
    case: Case, dataset: Dataset, data: DataConfig, mapping: Mapping[str, str], order: tuple[int, ...] | None
) -> Case | Problem:
    """Return the case with the study's channels in the study's order, or why it has not one file for each.

    If ``order`` is None, channels are matched by the names of the case's own files.
    """
    names = dataset.channels
    if order is None:
        names = tuple(dict.fromkeys(name for name, _ in case.channel_files))
        own_mapping = {name: to for name, to in mapping.items() if name in names}
        order = _channel_order(names, data, own_mapping, any_name=data.channels == _UNNAMED)
    if not case.channel_files:
        return case if order == tuple(range(len(names))) else replace(case, channel_order=order)
    wanted = tuple(names[i] for i in order)
    files = {name: [path for own, path in case.channel_files if own == name] for name in wanted}
    first = {number: files[name][0] for number, name in enumerate(wanted) if files[name]}
    doubled = next((name for name in wanted if len(files[name]) > 1), None)
    if doubled is not None and len(first) == len(wanted):
        return Problem(case.id, several(f"{doubled} images", doubled, files[doubled]))
    return case_of_channels(case, first, wanted)


def _given_labels(data: DataConfig, mapping: Mapping[str, str]) -> dict[str, int]:
    """Return the study's value for each label name or number that the site's settings map."""
    study = {comparable(name): value for value, name in enumerate(data.labels)}
    for target in mapping.values():
        if comparable(target) not in study:
            raise InvalidInput(
                "the label table ([labels] or --label-map) names a label that the study lacks",
                value=target,
                limit=", ".join(data.labels),
            )
    return {comparable(name): study[comparable(target)] for name, target in mapping.items()}


def _label_pairs(
    dataset: Dataset, data: DataConfig, mapping: Mapping[str, str], given: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:
    """Return, for each label, its number in the site's files and its number in the study.

    The result is empty if each label has the same number in both. A mapped name that the dataset lacks has no effect: a
    structure of that name may occur in an RT Structure Set, and no single file may decide whether the dataset is used.
    """
    values = dataset.label_values or tuple(range(len(dataset.labels)))
    table = dict(zip(values, dataset.labels, strict=True))
    if not table:
        table = {int(name): name for name in mapping if re.fullmatch(r"\d{1,9}", name)}
        if not table:
            return ()
        table.setdefault(0, data.labels[0])
    known = {comparable(name) for name in table.values()} | {str(value) for value in table}
    unknown = [name for name in mapping if comparable(name) not in known]
    pairs = _mapped(table, data, given, unknown=unknown)
    lost = [name for value, name in enumerate(data.labels) if value not in {target for _, target in pairs}]
    if lost:
        raise InvalidInput(
            "no label of the dataset is mapped to this label of the study",
            value=lost,
            remedy="map a label of the dataset to it in [labels] of site.toml, or with --label-map"
            + _unknown_note(unknown),
        )
    return () if all(value == target for value, target in pairs) else pairs


def _unknown_note(unknown: Sequence[str]) -> str:
    return f"; the map names labels that the dataset lacks: {', '.join(unknown)}" if unknown else ""


def _is_dicom(case: Case) -> bool:
    return case.label is not None and case.label.suffix.lower() == ENDING


def _structures(
    dataset: Dataset, data: DataConfig, given: Mapping[str, int], pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[str, int], ...]:
    """Return pairs of a structure's name in an RT Structure Set and the study's label.

    The names are the study's own, those of the dataset's table, and those that the site's settings map.
    """
    values = dataset.label_values or tuple(range(len(dataset.labels)))
    targets = dict(pairs) or {value: value for value in values}
    own = {comparable(name): value for value, name in enumerate(data.labels)}
    table = {comparable(name): targets[value] for value, name in zip(values, dataset.labels, strict=True)}
    return tuple(sorted({**own, **table, **given}.items()))


def _own_pairs(case: Case, data: DataConfig, given: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of a value in the case's label map and the study's label, by the case's own table of label names.

    Returns no pair if the table names every label of the study under the study's own value.
    """
    pairs = _mapped(dict(case.label_names), data, given)
    everything = {value for value, _ in pairs} == set(range(len(data.labels)))
    return () if everything and all(value == target for value, target in pairs) else pairs


def _mapped(
    table: Mapping[int, str], data: DataConfig, given: Mapping[str, int], *, unknown: Sequence[str] = ()
) -> tuple[tuple[int, int], ...]:
    """Return the study's value for each value of a table; InvalidInput for an unknown label that is not mapped."""
    study = {comparable(name): value for value, name in enumerate(data.labels)}
    pairs: list[tuple[int, int]] = []
    unmapped: list[str] = []
    for value, name in table.items():
        number = given.get(comparable(name), given.get(str(value), study.get(comparable(name))))
        if number is None:
            unmapped.append(f"{value} = {name}")
        else:
            pairs.append((value, number))
    if unmapped:
        raise InvalidInput(
            "the site's labels differ from the study's",
            value=unmapped,
            limit=", ".join(data.labels),
            remedy="map each to a label of the study in [labels] of site.toml, or with --label-map"
            + _unknown_note(unknown),
        )
    return tuple(pairs)


def _channel_order(
    names: tuple[str, ...], data: DataConfig, mapping: Mapping[str, str], *, any_name: bool = True
) -> tuple[int, ...]:
    """Return, for each of the study's channels, the number of the dataset's channel.

    With ``any_name``, a single channel on both sides matches under any name.
    """
    study = {contrast(name) for name in data.channels}
    for target in mapping.values():
        if contrast(target) not in study:
            raise InvalidInput(
                "the channel map ([channels] or --label-map) names a channel that the study lacks",
                value=target,
                limit=", ".join(data.channels),
            )
    unknown = [name for name in mapping if name not in names]
    if unknown:
        raise InvalidInput(
            "channel map names a channel that the dataset lacks", value=unknown[0], limit=", ".join(names)
        )
    if any_name and len(names) == len(data.channels) == 1:
        return (0,)
    if names == ("image",) and not mapping:
        return tuple(range(len(data.channels)))  # one file with all channels, unnamed: the study's order is assumed
    means = [contrast(mapping.get(name, name)) for name in names]
    doubled = sorted({name for name in means if means.count(name) > 1 and name in study})
    missing = [name for name in data.channels if contrast(name) not in means]
    if doubled or missing:
        raise InvalidInput(
            f"channel {doubled[0]} occurs twice" if doubled else f"channel {missing[0]} is missing",
            value=names,
            limit=", ".join(data.channels),
            remedy="map the site's channels to the study's in [channels] of site.toml, or with --label-map",
        )
    return tuple(means.index(contrast(name)) for name in data.channels)
