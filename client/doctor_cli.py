"""Where `consilium site doctor` gets what it looks at: the options, else site.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from client.doctor import Finding
from common.data.layouts import DatasetSettings, load_names
from common.errors import InvalidInput


def data_findings(
    site_dir: Path | None,
    *,
    data: Path | None,
    study: Path | None,
    layout: str | None,
    label_map: Path | None,
    report: Path | None,
) -> list[Finding]:
    """The findings about the data, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from client.doctor_data import check_data
    from client.policy import load_site
    from common.config import load_study

    settings = DatasetSettings()
    if site_dir is not None:
        config = load_site(site_dir)
        data, study = data or config.path(config.data), study or config.path(config.study)
        settings = config.dataset
    if data is None or study is None:
        raise InvalidInput("nothing to look at", remedy="give --site-dir, or --data and --study")
    if label_map is not None:
        names = load_names(label_map)
        settings = replace(settings, labels=names.labels, channels=names.channels)
    if layout is not None:
        settings = replace(settings, layout=layout)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("cases", total=None)
        return check_data(
            data,
            load_study(study).data,
            settings,
            pictures=None if report is None else report / "pictures",
            on_case=lambda done, total: bar.update(task, completed=done, total=total),
        )
