"""Defines a hospital's signed scores of a study's student on its own cases: the mean Dice of each structure.

A site sends them only if it consents. Each figure is the mean over at least :data:`LEAST_PATIENTS` patients, in
hundredths. It contains no case, count or variance. The figures are computed from patients' data, and no ε bounds what
they reveal. Refuses figures about another student, of a site whose key is not known, of structures that the study does
not have, and numbers outside 0 to 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.config import Study
from common.document import Between, Count, Document, Key, Sha256
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.rows import Time
from common.names import check_text
from common.site_verdict import StatementOnStudent

LEAST_PATIENTS = 5
"""Smallest number of patients for a figure. With fewer, one patient could change it by more than a fifth."""

MAX_FIGURES_BYTES = 16_384
MAX_STRUCTURES = 64


def _check_structure(name: str) -> None:
    check_text(name, what="structure of a hospital's figures")


@dataclass(frozen=True, slots=True)
class StructureFigure(Document):
    """A structure's mean Dice in hundredths."""

    structure: Annotated[str, _check_structure]
    hundredths: Annotated[int, Between("Dice in hundredths", 0, 100)]


@dataclass(frozen=True, slots=True)
class SiteFigures(StatementOnStudent):
    """A site's signed scores ``dice`` of the student whose bundle archive has the SHA-256 ``bundle``."""

    DOMAIN: ClassVar = b"consilium/site-figures/v1"
    SCHEMA: ClassVar = ("site's figures", 1)
    FILE: ClassVar = ("figures", MAX_FIGURES_BYTES)

    study_id: Annotated[Sha256, Key("study")]
    bundle: Sha256
    site: SiteName
    dice: Annotated[tuple[StructureFigure, ...], Count("structures of a hospital's figures", 1, MAX_STRUCTURES)]
    time_utc: Time
    signature: str = ""

    def check_signed(self, keys: Mapping[str, str], *, study: Study, bundle: str) -> None:
        """Check that an admitted site signed these figures, and that they are about this study and this student.

        They may name only structures of the study, and none twice; a structure may be missing.

        Args:
            keys: Ledger keys (Ed25519, hex) by site.
            study: The study.
            bundle: SHA-256 of the bundle's archive.

        Raises:
            InvalidInput: If a check fails.
        """
        StatementOnStudent.check_signed(self, keys, study=study, bundle=bundle)
        names, structures = [one.structure for one in self.dice], study.data.structures
        if len(set(names)) < len(names) or not set(names) <= set(structures):
            raise InvalidInput(f"structures in the figures of {self.site}", value=names, limit=", ".join(structures))
