"""Records each scan's patient when patients are assigned to voters, and refuses a scan whose patient changes later.

Such a scan would move to another slot (a patient's place in the assignment), and so perhaps to another voter. A dataset
that no longer says which scans are of one patient is refused, too. Training and adapting call the checks before they
store anything. New scans of known patients, and new patients, are allowed.

The record is a file beside the slots file, with the slots file's key: it contains keyed hashes of scans and patients.
An assignment made by version 0.2.0 or older has no such file until the next training. An older copy of the file knows
fewer scans.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from client.records.patient_deal import Slots, load_slots
from common.data.dataset import PatientIdentity
from common.document import Document, Sha256
from common.errors import InvalidInput
from common.objects import write_json
from common.reading import parse_json


@dataclass(frozen=True, slots=True)
class ScanPatients(Document):
    """The patients of the scans that were listed when patients were assigned to voters.

    Attributes:
        deal: Name of the assignment (:attr:`~client.records.patient_deal.Slots.deal`), whose key makes the hashes.
        identity: How the dataset told which scans are of one patient.
        patients: Keyed hash of the patient, by keyed hash of the scan.
    """

    SCHEMA: ClassVar = ("record of the scans' patients", 1)

    deal: Sha256
    identity: PatientIdentity
    patients: dict[str, Sha256]


def check_scans(slots_file: Path, scans: Mapping[str, Iterable[str]], *, identity: PatientIdentity) -> None:
    """Refuse a dataset in which known scans belong to other patients than when the patients were assigned to voters.

    Nothing is stored.

    Args:
        slots_file: The slots file; it need not exist.
        scans: The scans of each patient of the dataset.
        identity: How the dataset states which scans are of one patient.

    Raises:
        InvalidInput: If a known scan belongs to another patient, or if :func:`check_identity` refuses how the dataset
            identifies patients.
    """
    if not slots_file.exists():
        return
    slots = load_slots(slots_file)
    known = _load(slots_file, slots)
    patient_of = {scan: patient for patient, ids in scans.items() for scan in ids}
    hashes = {scan: _hash_of_scan(slots, scan) for scan in patient_of}
    if known is not None and known.identity is not identity:
        check_identity(known.identity, identity, recognised=not known.patients.keys().isdisjoint(hashes.values()))
    stored = {} if known is None else known.patients
    apart = set(slots.order) - scans.keys()  # a file of version 0.2.0 shows only scans that were patients of their own
    moved = sorted(
        scan
        for scan, patient in patient_of.items()
        if scan in apart or stored.get(hashes[scan], now := _hash_of_patient(slots, patient)) != now
    )
    if moved:
        raise InvalidInput(
            "scans that belonged to another patient in an earlier training",
            value=moved[:3],
            remedy="name the same patient for each scan as before, or leave these scans out of the dataset",
        )


def check_identity(before: PatientIdentity, now: PatientIdentity, *, recognised: bool) -> None:
    """Refuse a dataset that identifies patients in another way than before, because they would get second slots.

    Args:
        before: How patients were identified when they were assigned to voters.
        now: How the dataset identifies them.
        recognised: Whether the dataset lists a scan that has been assigned.

    Raises:
        InvalidInput: If every file now counts as a patient and did not before; or if patients were named by a table or
            by folders, are now named in another way, and no scan is recognised.
    """
    if before not in (PatientIdentity.FILE, now) and (now is PatientIdentity.FILE or not recognised):
        raise InvalidInput(
            "patients are identified in another way than in an earlier training",
            value=now.sentence,
            limit=f"as before: {before.sentence}",
            remedy="put the table of patients, or the folders, back into the dataset",
        )


def record_scans(
    slots_file: Path, slots: Slots, scans: Mapping[str, Iterable[str]], *, identity: PatientIdentity
) -> None:
    """Store the patient of each scan beside the slots file. Scans that are no longer listed stay on record.

    Args:
        slots_file: The slots file.
        slots: Its content.
        scans: The scans of each patient of the dataset, as :func:`check_scans` accepted them.
        identity: How the dataset tells which scans are of one patient.
    """
    before = _load(slots_file, slots)
    patients = {
        _hash_of_scan(slots, scan): _hash_of_patient(slots, patient) for patient, ids in scans.items() for scan in ids
    }
    made = ScanPatients(slots.deal, identity, ({} if before is None else before.patients) | patients)
    if made != before:
        write_json(_file(slots_file), made.to_json(), mode=0o600)


def _file(slots_file: Path) -> Path:
    return slots_file.with_name(slots_file.name.replace("slots", "scans", 1))


def _load(slots_file: Path, slots: Slots) -> ScanPatients | None:
    """Return the record; None if there is none, or it is of another assignment, whose key is lost."""
    path = _file(slots_file)
    if not path.exists():
        return None
    try:
        found = ScanPatients.from_json(parse_json(path.read_bytes(), what="record of the scans' patients"))
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput(
            "record of the scans' patients cannot be read", value=path.name, remedy="restore it from a backup"
        ) from error
    return found if found.deal == slots.deal else None


def _hash_of_scan(slots: Slots, scan: str) -> str:
    return slots.subject(f"scan {unicodedata.normalize('NFC', scan)}")


def _hash_of_patient(slots: Slots, patient: str) -> str:
    return slots.subject(unicodedata.normalize("NFC", patient))
