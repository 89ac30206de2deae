"""What a hospital measured of a study's student on its own cases: a Dice a structure, signed, sent if it consents.

Each figure is the mean over at least :data:`LEAST_PATIENTS` patients, in hundredths, and nothing else is in it: no
case, no count, no spread. It is made of patients' data and is under no ε, as a verdict is. Refuses figures on another
student, of a site whose key is not known, of structures that the study has not, and any number but 0 to 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.document import Between, Count, Document, Filed, Key, Sha256
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import Signed
from common.ledger.rows import Time
from common.names import check_text
from common.site_verdict import check_said

LEAST_PATIENTS = 5
"""Of fewer patients no figure of a structure is sent: one patient would move it by more than a fifth."""

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
class SiteFigures(Signed, Filed):
    """``dice`` of ``site`` on the student whose bundle's archive has this SHA-256, signed by its ledger's key."""

    DOMAIN: ClassVar = b"consilium/site-figures/v1"
    SCHEMA: ClassVar = ("site's figures", 1)
    FILE: ClassVar = ("figures", MAX_FIGURES_BYTES)

    study_id: Annotated[Sha256, Key("study")]
    bundle: Sha256
    site: SiteName
    dice: Annotated[tuple[StructureFigure, ...], Count("structures of a hospital's figures", 1, MAX_STRUCTURES)]
    time_utc: Time
    signature: str = ""

    def check_is_of(self, keys: Mapping[str, str], *, study: str, bundle: str, structures: Sequence[str]) -> None:
        """InvalidInput unless a site of ``keys`` signed them about this very student, each structure once."""
        check_said(self, keys, study=study, bundle=bundle, what="figures", option="--figures")
        names = [one.structure for one in self.dice]
        if len(set(names)) < len(names) or not set(names) <= set(structures):
            raise InvalidInput(f"structures in the figures of {self.site}", value=names, limit=", ".join(structures))
