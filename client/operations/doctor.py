"""Runs the checks of `consilium site doctor`: of the site's directory, of its data, or of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from client.data.layouts import DatasetSettings
from client.operations.doctor_data import check_data
from client.operations.findings import Checkup
from client.operations.readiness import check_site
from client.policy import load_site
from common.config import load_study
from common.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of `site doctor`. If ``study``, ``layout`` or ``label_map`` is None, ``site.toml`` decides.

    Attributes:
        site_dir: The site's directory; None to check data only.
        data: Folder of a dataset; None to check the directory only.
        study: The study's file.
        layout: Layout of the dataset.
        label_map: File that maps the dataset's labels to the study's.
        report: Directory below which pictures of suspicious cases are written; None for no pictures.
    """

    site_dir: Path | None = None
    data: Path | None = None
    study: Path | None = None
    layout: str | None = None
    label_map: Path | None = None
    report: Path | None = None


def look(options: DoctorOptions, *, on_case: Callable[[int, int], None]) -> list[Checkup]:
    """Check a site's directory, then its data. Each is checked only if the options name it.

    Args:
        options: What to check.
        on_case: Called with the number of cases done and the total.

    Returns:
        The findings.

    Raises:
        InvalidInput: If there is nothing to check, or no study is known.
    """
    if options.site_dir is None and options.data is None:
        raise InvalidInput("there is nothing to check", remedy="give --site-dir, --data, or both")
    findings = [] if options.site_dir is None else list(check_site(options.site_dir))
    return findings if options.data is None else [*findings, *_data(options, options.data, on_case)]


def _data(options: DoctorOptions, data: Path, on_case: Callable[[int, int], None]) -> list[Checkup]:
    study, settings = options.study, DatasetSettings()
    if options.site_dir is not None:
        config = load_site(options.site_dir)
        study, settings = study or config.path(config.study), config.dataset
    if study is None:
        raise InvalidInput("no study to check the data for", remedy="give --study, or --site-dir")
    settings = settings.overridden(layout=options.layout, label_map=options.label_map)
    terms = load_study(study)
    return check_data(
        data,
        terms.data,
        settings,
        stated=terms.privacy,
        pictures=None if options.report is None else options.report / "pictures",
        on_case=on_case,
    )
