"""Makes what tests share: a small study, a site's policy, patients with two structures, no noise. Needs no torch."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from common.config import CodecConfig, CollectionConfig, DataConfig, PrivacyConfig, Study
from common.data.dataset import Case
from common.data.msd import Dataset, write_dataset
from common.ledger.charges import PoolDeclaration
from common.ledger.receipts import Receipt
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

DATA = DataConfig(labels=("background", "front", "back"), spacing_mm=(1, 1, 1), grid=(16, 16, 16))
"""Data settings of :data:`STUDY` and of the patients that :func:`write_case` writes."""

SMALL_CODEC = CodecConfig(max_dimension=6, augmentations=0)

HURRIED = CollectionConfig(batch_size=2, offer_deadline_s=1.0, patience_s=1.0)
"""Settings that ask two queries at a time and wait one second for a silent site."""


def make_privacy(**terms: Any) -> PrivacyConfig:
    """Return a budget of ε = 8 and δ = 1e-3 for six queries of two sites or more, unless ``terms`` change it."""
    return PrivacyConfig(**{"epsilon": 8.0, "delta": 1e-3, "planned_queries": 6, "quorum": 2} | terms)


def make_study(
    *structures: str,
    name: str = "test",
    grid: tuple[int, int, int] = (8, 8, 8),
    data: DataConfig | None = None,
    codec: CodecConfig = SMALL_CODEC,
    **terms: Any,
) -> Study:
    """Return a study about these structures (one if none is named) on a grid of 1 mm voxels, or about ``data``.

    ``terms`` are further sections of the study (``teacher``, ``collection``, …) and settings of :func:`make_privacy`.
    """
    sections: dict[str, Any] = {key: terms.pop(key) for key in Study.__dataclass_fields__.keys() & terms.keys()}
    return Study(
        name=name,
        data=data or DataConfig(("background", *(structures or ("body",))), (1.0, 1.0, 1.0), grid),
        codec=codec,
        **{"privacy": make_privacy(**terms)} | sections,
    )


def study_toml(
    *labels: str,
    grid: tuple[int, int, int] = (8, 8, 8),
    spacing_mm: float = 1.0,
    name: str = "trial",
    teacher: str = "",
    **privacy: object,
) -> str:
    """Return a study's file: structures beside the background, and a budget of ε = 8, δ = 1e-3 for four queries.

    ``privacy`` replaces the budget, and ``teacher`` gives the lines of that section.
    """
    terms = {"epsilon": 8.0, "delta": 1e-3, "planned_queries": 4, "quorum": 2} | privacy
    data = {"labels": ["background", *labels], "spacing_mm": [spacing_mm] * 3, "grid": list(grid)}
    sections = [
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        for section, table in (("data", data), ("privacy", terms))
    ]
    sections += [f"[teacher]\n{teacher}"] if teacher else []
    return "\n".join(["schema = 1", f'name = "{name}"', *sections, ""])


STUDY = study_toml("front", "back", grid=DATA.grid, teacher="channels = [4, 8]\nsteps = 3\nbatch_size = 1")


def pool_of(site: Site, study: Study) -> PoolDeclaration:
    """Return a site's patient pool with the study's budget as its lifetime budget."""
    privacy = study.privacy
    return PoolDeclaration(site.pool, site.name, privacy.budget, privacy.accountant, privacy.protection)


def site_toml(
    *,
    site: str = "north",
    pool: str = "north",
    data: str = "set",
    sealing_key: str = "1" * 64,
    signing_key: str = "2" * 64,
    server: str = "server",
    delta: float = 1e-3,
    more: str = "",
) -> str:
    """Return a site's policy: caps of ε = 8 and ``delta`` for its pool, and one server; ``more`` follows the caps."""
    return f"""schema = 1
site = "{site}"
pool = "{pool}"
data = "{data}"
study = "study.toml"
[server]
sealing_key = "{sealing_key}"
signing_key = "{signing_key}"
objects_url = "https://{server}"
superlink = "{server}:9092"
root_certificates = "ca.crt"
[caps]
epsilon = 8.0
delta = {delta}
{more}"""


def write_case(folder: Path, name: str, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    labels = np.zeros((14, 16, 15), dtype=np.uint8)
    x, y, z = rng.integers(3, 6, 3)
    labels[x : x + 5, y : y + 4, z : z + 5] = 1
    labels[x : x + 5, y + 4 : y + 8, z : z + 5] = 2
    image = rng.normal(labels * 3.0, 0.5).astype(np.float32)
    (folder / "labels").mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(image, np.eye(4)), folder / f"{name}.nii.gz")
    nib.save(nib.Nifti1Image(labels, np.eye(4)), folder / "labels" / f"{name}.nii.gz")
    return Case(name, folder / f"{name}.nii.gz", folder / "labels" / f"{name}.nii.gz")


def site_data(folder: Path, *, patients: int = 6) -> Dataset:
    """Write a site's dataset with synthetic patients."""
    cases = [write_case(folder / "raw", f"p{i}", i) for i in range(patients)]
    return write_dataset(
        folder / "set", name="site", labels=DATA.labels, channels=DATA.channels, cases=cases, synthetic=True
    )


def silent(size: int, noise_std: Fraction) -> np.ndarray:
    """Return zeros in place of noise."""
    return np.zeros(size, dtype=np.int64)


def receipts_of(ledger: Ledger, site: str, *, after: int = 0) -> tuple[Receipt, ...]:
    """Return a site's receipts past row ``after``, oldest first, as the site reads them."""
    return tuple(Receipt.parse(render()) for render in ledger.receipts_due(site, after=after))
