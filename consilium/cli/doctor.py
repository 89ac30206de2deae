"""What `consilium site doctor` looks at: the site's directory, its data, or both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from client.data.layouts import DatasetSettings, load_names
from client.operations.doctor import Finding, State
from common.errors import InvalidInput


def look(
    site_dir: Path | None,
    *,
    data: Path | None,
    study: Path | None,
    layout: str | None,
    label_map: Path | None,
    report: Path | None,
) -> list[Finding]:
    """The findings about the site (``site_dir``), then those about the data (``data``), with a progress bar on stderr.

    What the data is for, and how it is to be read, is taken from the site's directory where no option says otherwise.
    """
    if site_dir is None and data is None:
        raise InvalidInput("nothing to look at", remedy="give --site-dir, --data, or both")
    findings = [] if site_dir is None else _site(site_dir)
    if data is not None:
        findings += _data(site_dir, data, study=study, layout=layout, label_map=label_map, report=report)
    return findings


def _site(site_dir: Path) -> list[Finding]:
    from client.operations.readiness import check_site

    return [
        Finding(found.name, State.OK if found.ok else State.FAIL, found.found, found.remedy)
        for found in check_site(site_dir)
    ]


def _data(
    site_dir: Path | None,
    data: Path,
    *,
    study: Path | None,
    layout: str | None,
    label_map: Path | None,
    report: Path | None,
) -> list[Finding]:
    from rich.console import Console
    from rich.progress import Progress

    from client.operations.doctor_data import check_data
    from client.policy import load_site
    from common.config import load_study

    settings = DatasetSettings()
    if site_dir is not None:
        config = load_site(site_dir)
        study, settings = study or config.path(config.study), config.dataset
    if study is None:
        raise InvalidInput("no study to check the data for", remedy="give --study, or --site-dir")
    if label_map is not None:
        names = load_names(label_map)
        settings = replace(settings, labels=names.labels, channels=names.channels, choice=names.choice)
    if layout is not None:
        settings = replace(settings, layout=layout)
    terms = load_study(study)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("cases", total=None)
        return check_data(
            data,
            terms.data,
            settings,
            stated=terms.privacy,
            pictures=None if report is None else report / "pictures",
            on_case=lambda done, total: bar.update(task, completed=done, total=total),
        )
