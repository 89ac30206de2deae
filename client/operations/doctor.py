"""Runs the checks of `consilium site doctor`: of the site's directory, of its data, or of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from client.data.layouts import DatasetSettings
from client.operations.doctor_data import check_data
from client.operations.findings import Checkup, failure
from client.operations.readiness import check_site
from client.policy import load_site
from client.site.books import slots_file
from common.config import load_study
from common.errors import InvalidInput


def look(
    site_dir: Path | None,
    data: Path | None,
    *,
    study: Path | None,
    layout: str | None,
    label_map: Path | None,
    report: Path | None,
    on_case: Callable[[int, int], None],
) -> list[Checkup]:
    """Check a site's directory, then its data. Options that are None are read from ``site.toml``.

    Args:
        site_dir: The site's directory; None to check data only.
        data: Folder of a dataset; None to check the directory only.
        study: The study's file; None for the file that ``site.toml`` names.
        layout: Layout of the dataset; None to read it from ``site.toml``.
        label_map: File that maps the dataset's labels to the study's; None to read the mapping from ``site.toml``.
        report: Directory below which pictures of suspicious cases are written; None for no pictures.
        on_case: Called with the number of cases done and the total.

    Returns:
        The findings.

    Raises:
        InvalidInput: If there is nothing to check, or no study is known.
    """
    if site_dir is None and data is None:
        raise InvalidInput("there is nothing to check", remedy="give --site-dir, --data, or both")
    findings = [] if site_dir is None else list(check_site(site_dir))
    if data is None:
        return findings
    settings, slots = DatasetSettings(), None
    if site_dir is not None:
        config = load_site(site_dir)
        try:
            slots = slots_file(config)
        except InvalidInput as error:
            findings.append(failure("patients", error, "restore the files of the assignment of patients to voters"))
        study, settings = study or config.path(config.study), config.dataset
    if study is None:
        raise InvalidInput("no study to check the data for", remedy="give --study, or --site-dir")
    settings = settings.overridden(layout=layout, label_map=label_map)
    terms = load_study(study)
    pictures = None if report is None else report / "pictures"
    found = check_data(
        data, terms.data, settings, stated=terms.privacy, slots=slots, pictures=pictures, on_case=on_case
    )
    return [*findings, *found]
