"""Deal a labelled dataset into a study's roles: the sites' own cases, public images, public label maps, validation,
test.

Roles are disjoint: a case is in exactly one, so a public label map never belongs to a public image and no basis is
fitted on a protected patient. What went where, with content hashes, is recorded in ``split.json``. Refuses counts
that leave a site without a case, and an output directory that exists.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.canonical import sha256_file
from common.data.msd import Case, Dataset, read_dataset, write_dataset
from common.errors import InvalidInput
from common.objects import write_atomically

SPLIT_SCHEMA = 1
PUBLIC_IMAGES, LABEL_MAPS, VALIDATION, TEST = "public-image", "label-map", "validation", "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """How many sites, and how many cases each public role takes; the sites share the rest."""

    sites: int
    public_images: int
    label_maps: int
    validation: int
    test: int

    def __post_init__(self) -> None:
        for name, least in (("sites", 1), ("public_images", 1), ("label_maps", 2), ("validation", 0), ("test", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 100_000:
                raise InvalidInput(f"split: {name}", value=value, limit=f"an integer from {least}")

    @property
    def reserved(self) -> int:
        """Cases that go to no site."""
        return self.public_images + self.label_maps + self.validation + self.test


def deal(dataset: Dataset, *, plan: SplitPlan, seed: int) -> dict[str, str]:
    """The role of every labelled case by its id: a public role, or the name of a site. The same seed, the same deal.

    Public roles are drawn at random over all cases. The rest stays with its hospital where the dataset names as many
    hospitals as there are sites; otherwise it is dealt at random, as evenly as can be.
    """
    cases = dataset.labelled
    if len(cases) < plan.reserved + plan.sites:
        raise InvalidInput(
            "labelled cases for this split",
            value=len(cases),
            limit=f"at least {plan.reserved + plan.sites}: {plan.reserved} for public roles, one for each site",
            remedy="ask for fewer public images, label maps, validation or test cases, or fewer sites",
        )
    order = [cases[i] for i in np.random.default_rng([seed, len(cases)]).permutation(len(cases))]
    names = [PUBLIC_IMAGES] * plan.public_images + [LABEL_MAPS] * plan.label_maps
    names += [VALIDATION] * plan.validation + [TEST] * plan.test
    roles = {case.id: role for case, role in zip(order, names, strict=False)}
    rest = order[plan.reserved :]
    hospitals = sorted({case.hospital for case in cases if case.hospital is not None})
    if len(hospitals) == plan.sites and all(case.hospital is not None for case in cases):
        roles |= {case.id: str(case.hospital) for case in rest}
        empty = set(hospitals) - {case.hospital for case in rest}
        if empty:
            raise InvalidInput("hospitals without a case of their own", value=sorted(empty), remedy="use another seed")
    else:
        width = len(str(plan.sites))
        roles |= {case.id: f"hospital-{i % plan.sites + 1:0{max(2, width)}d}" for i, case in enumerate(rest)}
    return roles


def split_dataset(source: Path, out: Path, *, plan: SplitPlan, seed: int) -> dict[str, int]:
    """Write ``sites/*``, ``public/images``, ``public/label-maps``, ``validation`` and ``test`` below ``out``.

    Sites, validation and test are MSD datasets; public images come without labels, label maps without images. Returns
    how many cases each role got. ``out`` appears only once it is whole.
    """
    dataset = read_dataset(source)
    roles = deal(dataset, plan=plan, seed=seed)
    if out.exists():
        raise InvalidInput("output directory exists", value=str(out), remedy="choose a new one")
    by_role: dict[str, list[Case]] = {}
    for case in dataset.labelled:
        by_role.setdefault(roles[case.id], []).append(case)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what an interrupted split left
    for role, cases in sorted(by_role.items()):
        match role:
            case "public-image":
                _copy([case.image for case in cases], partial / "public" / "images")
            case "label-map":
                _copy([case.label for case in cases if case.label is not None], partial / "public" / "label-maps")
            case _:
                folder = partial / role if role in (VALIDATION, TEST) else partial / "sites" / role
                write_dataset(folder, name=role, labels=dataset.labels, channels=dataset.channels, cases=cases)
    record = {
        "schema": SPLIT_SCHEMA,
        "source": str(source.absolute()),
        "seed": seed,
        "plan": asdict(plan),
        "left_out": [asdict(problem) for problem in dataset.problems],
        "cases": {
            case.id: {
                "role": roles[case.id],
                "image_sha256": sha256_file(case.image),
                "label_sha256": sha256_file(case.label) if case.label is not None else None,
            }
            for case in dataset.labelled
        },
    }
    write_atomically(partial / "split.json", (json.dumps(record, indent=1) + "\n").encode())
    partial.rename(out)
    return dict(sorted(Counter(roles.values()).items()))


def _copy(files: Sequence[Path], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copyfile(path, directory / path.name)
