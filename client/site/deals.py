"""Keeps a pool's slots files in agreement with its ledger.

A *deal* assigns a pool's patients to voters. Each patient has a numbered *slot* in it, and each slot belongs to one
voter. Training, withdrawal and the worker call this module. A slots file contains the patients' names, and the key
under which they are hashed. The ledger contains the patient of every slot, and every withdrawal, as keyed hashes. A
file restored from a backup is updated from the ledger before use, so no patient moves to another voter and no withdrawn
patient returns. It refuses to assign patients if a patient was withdrawn and the key that identifies this patient is
lost. In a study of unit patient it also refuses a teacher that was trained on another deal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from client.data.layouts import open_dataset
from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.adapted_folder import private_folder
from client.records.declared import has_foreign
from client.records.journal import begun_trainings
from client.records.patient_deal import Slots, load_slots, save_slots, spellings
from client.records.scan_patients import check_identity
from client.records.served import found_in, retired_voters
from client.records.voter_files import voter_directory
from client.site.books import deals, open_books, read_books, site_directories, slots_file, warn_unreadable
from common.config import Study
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.site_deals import seats_digest
from common.privacy.mechanism import Unit


def deal_for_training(
    config: SiteConfig, patients: Collection[str], *, identity: PatientIdentity | None = None
) -> frozenset[str]:
    """Update the study's slots file from the pool's ledger, and return the given patients who were withdrawn.

    It is called before new patients are assigned to voters; the caller holds the lock of the teachers. If the pool has
    no ledger yet, the file is not updated.

    Args:
        config: The site's policy.
        patients: Names of the patients in the dataset.
        identity: How the dataset tells which cases are of one patient; None if that is not to be checked.

    Returns:
        Names of those who were withdrawn.

    Raises:
        InvalidInput: If a slots file that identifies a withdrawn patient is missing, if the dataset lost its table or
            folders of patients, or if the ledger cannot be opened.
    """
    if not config.ledger_file.exists():
        return withdrawn(config.books_dir, None, patients)
    with open_books(config) as ledger:
        _check_identity(config, ledger, identity)
        reenter_withdrawals(config.books_dir, ledger)
        left = withdrawn(config.books_dir, ledger, patients)
        path = slots_file(config)
        if path.exists():
            stored = load_slots(path)
            if (slots := as_on_record(stored, ledger, names=patients)) != stored:
                save_slots(path, slots)
    return left


def _check_identity(config: SiteConfig, ledger: SiteLedger, identity: PatientIdentity | None) -> None:
    """Refuse a dataset that lost its table or folders of patients, if a patient was withdrawn or has a slot.

    In such a dataset each file counts as a patient, so a known patient would not be recognised.
    """
    known, gone = ledger.books.teachers.identity, ledger.books.teachers.patients
    if known is not None and identity is not None and (gone or slots_file(config).exists()):
        check_identity(known, identity, recognised=True)
    if known is None and identity is PatientIdentity.FILE and gone and ledger.books.restored_at:
        raise InvalidInput(
            "withdrawn patients may not be recognised in this dataset",
            value=identity.sentence,
            limit="patients named as at the withdrawal; the restored ledger does not say how that was",
            remedy="put the table of patients, or the folders, back into the dataset. If it never had any, add a table "
            "in which every file is a patient of its own",
        )


def read_withdrawn(
    config: SiteConfig, patients: Collection[str]
) -> tuple[frozenset[str], frozenset[tuple[str | None, str]]]:
    """Read who was withdrawn from the pool. Nothing is written.

    Every command that reads patients' cases without training calls it, so that a withdrawn patient is in no result.

    Args:
        config: The site's policy.
        patients: Names of the patients in the dataset.

    Returns:
        Names of those who were withdrawn, and every withdrawal (:func:`withdrawals`).

    Raises:
        InvalidInput: If the ledger may lack withdrawals, or the slots file that identifies a withdrawn patient is
            missing.
    """
    books = config.books_dir
    if not config.ledger_file.exists():
        return withdrawn(books, None, patients), withdrawals(books, None)
    with read_books(config) as ledger:
        if (lost := ledger.forgotten()) is not None:
            raise InvalidInput(
                "withdrawals of patients may be missing from this site's ledger",
                value=lost,
                remedy="run `consilium site recover --own-ledger`",
            )
        return withdrawn(books, ledger, patients), withdrawals(books, ledger)


def reenter_withdrawals(books: Path, ledger: SiteLedger) -> None:
    """Record withdrawals that the slots files contain but the ledger, restored from an older copy, lacks.

    Args:
        books: The directory that keeps the ledger.
        ledger: The ledger.
    """
    known = {row.subject for _, row in ledger.books.teachers.patients.values()}
    for slots in deals(books).values():
        for slot, subject in slots.withdrawn:
            if subject not in known:
                ledger.withdraw_patient(
                    slot=slot, voter=slot % slots.voters, subject=subject, weights=None, deal=slots.deal
                )


def as_on_record(stored: Slots, ledger: SiteLedger, *, names: Iterable[str]) -> Slots:
    """Return an assignment of patients to slots, updated from what the ledger has on record.

    ``stored`` may come from an older copy of the slots file.

    Args:
        stored: The slots.
        ledger: The ledger.
        names: Names of the patients in the dataset.

    Returns:
        The updated slots. The file is not changed.
    """
    books = ledger.books.teachers
    gone = {row.subject: row.slot for _, row in books.patients.values() if row.deal in (None, stored.deal)}
    return stored.following(books.deals.seats(stored.deal), gone=gone, names=names)


def withdrawn(books: Path, ledger: SiteLedger | None, patients: Iterable[str]) -> frozenset[str]:
    """Return those of the given patients who were withdrawn from the pool, according to its slots files or its ledger.

    Args:
        books: The directory that keeps the ledger.
        ledger: The ledger; None for a pool without one.
        patients: Names of the patients in the dataset.

    Returns:
        Names of those who were withdrawn.

    Raises:
        InvalidInput: If a patient was withdrawn from a deal whose file is missing, because only the key in that file
            identifies the patient.
    """
    files = tuple(deals(books).values())
    rows = () if ledger is None else tuple(ledger.books.teachers.patients.values())
    trainings = () if ledger is None else tuple(ledger.books.teachers.trainings.values())
    at_hand = {slots.deal for slots in files}
    in_files = {subject for slots in files for _, subject in slots.withdrawn}
    for number, row in rows:
        if row.subject in in_files:
            continue
        dealt = {row.deal} if row.deal is not None else {one.deal for at, one in trainings if at < number}
        if not files or dealt - at_hand:
            raise InvalidInput(
                "the slots file that identifies withdrawn patients is missing",
                value=str(books / "teachers"),
                limit="the file with the key under which these patients are hashed",
                remedy="put back any copy of slots*.json, even an old one: it is updated from the ledger",
            )
    gone = in_files | {row.subject for _, row in rows}
    return frozenset(
        name
        for name in patients
        if any(slots.subject(spelling) in gone for slots in files for spelling in spellings(name))
    )


def patient_named(config: SiteConfig, name: str) -> str:
    """Return the patient whom a person means by the name of a patient or of one of the patient's cases.

    An exact patient name is tried first, then an exact case name, then other spellings.

    Args:
        config: The site's policy.
        name: The name, as a person typed it.

    Returns:
        The patient's name as the slots or the dataset have it; ``name`` if no patient or several match.
    """
    dealt = deals(config.books_dir).values()
    of_case: dict[str, str] = {}
    with suppress(InvalidInput):  # a patient who has a slot may be named although the dataset cannot be read
        settings = config.dataset
        dataset = open_dataset(
            config.path(config.data), layout=settings.layout, patients=settings.patients, choice=settings.choice
        )
        of_case = {case: dataset.patient_of(case) for case in (*dataset.listed, *(one.id for one in dataset.cases))}

    def is_patient(spelling: str) -> bool:
        return spelling in of_case.values() or any(slots.has_placed(spelling) for slots in dealt)

    if is_patient(name):
        return name
    if name in of_case:
        return of_case[name]
    alike = [one for one in spellings(name) if is_patient(one)] or [
        patient for case, patient in of_case.items() if not spellings(name).isdisjoint(spellings(case))
    ]
    return alike[0] if len(set(alike)) == 1 else name


def patients_seen(books: Path, patients: Collection[str]) -> dict[str, list[str]]:
    """Return, for each slots file of the pool, the hashes of patients' names under that file's key.

    The hashes are stored with a network that was trained on these patients. :func:`all_still_in` later tells from them
    whether one of these patients was withdrawn.

    Args:
        books: The directory that keeps the ledger.
        patients: Names of the patients.

    Returns:
        Sorted hashes, by the id that the ledger gives to the file's deal (its assignment of patients to voters).
    """
    return {slots.deal: sorted(map(slots.subject, patients)) for slots in deals(books).values()}


def trained_on(books: Path, patients: Collection[str], *, seen: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the patients on whom an adapted network was trained.

    Args:
        books: The directory that keeps the ledger.
        patients: Names of patients.
        seen: Keyed hashes by deal, as :func:`patients_seen` returned them for the network. Empty if the network does
            not state them; then every patient of the pool counts.

    Returns:
        Those of ``patients`` on whom the network was trained.
    """
    known = deals(books).values()
    if not seen:
        return frozenset(name for name in patients if any(name in slots.order for slots in known))
    return frozenset(
        name for name in patients if any(slots.subject(name) in seen.get(slots.deal, ()) for slots in known)
    )


def withdrawals(books: Path, ledger: SiteLedger | None) -> frozenset[tuple[str | None, str]]:
    """Return every withdrawal of a patient from the pool, according to its files or its ledger.

    Args:
        books: The directory that keeps the ledger.
        ledger: The ledger; None for a pool without one.

    Returns:
        The deal and the patient's keyed hash. The deal is None in rows of older versions.
    """
    in_files = {(slots.deal, subject) for slots in deals(books).values() for _, subject in slots.withdrawn}
    rows = () if ledger is None else ledger.books.teachers.patients.values()
    return frozenset(in_files | {(row.deal, row.subject) for _, row in rows})


def all_still_in(seen: Mapping[str, Collection[str]], withdrawn: Iterable[tuple[str | None, str]]) -> bool:
    """Tell whether it is certain that no patient on whom a network was trained was withdrawn.

    Args:
        seen: Keyed hashes by deal, from :func:`patients_seen`.
        withdrawn: The pool's :func:`withdrawals`.

    Returns:
        True if it is certain. False if one of these patients was withdrawn. Also False if any patient was withdrawn
        from a deal for which ``seen`` has no hashes: each deal hashes with its own key, so the patient may be one of
        them.
    """
    everybody = {subject for subjects in seen.values() for subject in subjects}
    return all((deal in seen or (deal is None and seen)) and subject not in everybody for deal, subject in withdrawn)


def record_deal(config: SiteConfig, ledger: SiteLedger) -> None:
    """Record in the ledger which patient is in which slot of which voter, before any training uses this assignment.

    Args:
        config: The site's policy.
        ledger: The ledger.

    Raises:
        InvalidInput: If the file contradicts the ledger.
    """
    slots = load_slots(slots_file(config))
    try:
        ledger.record_deal(slots.deal, slots.seats, voters=slots.voters)
    except InvalidInput as error:
        raise InvalidInput(
            "the slots file contradicts the site's ledger",
            value=slots_file(config).name,
            limit=str(error),
            remedy="run `consilium site train`, which updates the file",
        ) from error


def dealt(config: SiteConfig) -> str | None:
    """Return the digest of the study's deal, which assigns patients to slots.

    Args:
        config: The site's policy.

    Returns:
        The digest; None if no patient was assigned yet.
    """
    path = slots_file(config)
    if not path.exists():
        return None
    slots = load_slots(path)
    return seats_digest(slots.deal, slots.seats)


def check_trained(config: SiteConfig, study: Study, ledger: SiteLedger, served: Sequence[str]) -> None:
    """In a study of unit patient, refuse teachers without a recorded training on this pool's assignment of patients.

    In such a study, one patient may influence one voter only. This holds because patients are assigned to voters before
    any training. Weights put in by hand, or trained on another assignment, may have seen every patient.

    Args:
        config: The site's policy.
        study: The study.
        ledger: The ledger.
        served: Hash of each voter's teacher; empty for a voter without one.

    Raises:
        InvalidInput: If a teacher has no such training.
    """
    if study.privacy.unit is not Unit.PATIENT:
        return
    deal = _deal_of(config)
    strange = [voter for voter, hash_ in enumerate(served) if hash_ and not ledger.was_trained(voter, hash_, deal=deal)]
    if strange:
        raise InvalidInput(
            "the site's ledger has no training on record for these teachers",
            value=", ".join(f"voter {voter}" for voter in strange),
            limit="in a study of unit patient, teachers that `consilium site train` trained on the deal of patients "
            "in the ledger",
            remedy="run `consilium site train`, which trains only the voters whose patients changed; a teacher from "
            "elsewhere can take part in a study of unit hospital",
        )


def _deal_of(config: SiteConfig) -> str:
    """Return the name in the ledger of the study's assignment of patients; empty if no patient was assigned yet."""
    return load_slots(path).deal if (path := slots_file(config)).exists() else ""


def silent_voters(config: SiteConfig, ledger: SiteLedger, served: Sequence[str]) -> frozenset[int]:
    """Return the voters whose teacher may have been trained on a withdrawn patient.

    Args:
        config: The site's policy.
        ledger: The ledger.
        served: Hash of each voter's teacher; empty for a voter without one.

    Returns:
        Numbers of the voters.
    """
    deal, may_vote = _deal_of(config), ledger.books.teachers.may_vote
    return frozenset(voter for voter, hash_ in enumerate(served) if hash_ and not may_vote(voter, hash_, deal=deal))


def present_teachers(config: SiteConfig, ledger: SiteLedger) -> list[tuple[str, ...]]:
    """Return the teachers that workers would use if they started now, for every directory of the pool.

    A missing directory has no teachers. Two things count as a teacher without a training on record: a private training
    that was started but whose row the ledger has lost, and another study's directory that cannot be read.

    Args:
        config: The site's policy.
        ledger: The ledger.

    Returns:
        For each directory the hash of every voter's teacher; empty for a voter that would not vote. In addition one
        tuple with the training's id for each private training whose row is lost. For a directory that cannot be read,
        one tuple with a placeholder that equals no teacher's hash.

    Raises:
        InvalidInput: If a file of this site's own directory cannot be read.
    """
    found = list[tuple[str, ...]]()
    for directory in site_directories(config.books_dir, absent_ok=True):
        try:
            found += _present_in(directory, ledger)
        except InvalidInput as error:
            if directory.resolve() == config.root.resolve():
                raise
            warn_unreadable(directory, error)
            found.append((f"unreadable: {directory}",))
    return found


def _present_in(directory: Path, ledger: SiteLedger) -> list[tuple[str, ...]]:
    own = load_site(directory)
    teachers, voters = directory / "teachers", own.load_study().privacy.voters_per_site
    served = found_in(teachers, voters=voters)
    brought = {voter for voter in range(voters) if has_foreign(teachers, voter)}
    trained = ["" if voter in brought else hash_ for voter, hash_ in enumerate(served)]
    silent = (silent_voters(own, ledger, trained) | retired_voters(teachers)) - brought
    lost = (
        training for voter in range(voters) for training in _lost_trainings(voter_directory(teachers, voter), ledger)
    )
    return [tuple("" if voter in silent else hash_ for voter, hash_ in enumerate(served)), *((one,) for one in lost)]


def lost_adaptation(config: SiteConfig, ledger: SiteLedger) -> bool:
    """Tell whether the ledger has lost a private training whose network is allowed to leave the hospital.

    Args:
        config: The site's policy.
        ledger: The ledger.

    Returns:
        True if a directory of the pool has the journal of such a training, and the ledger has no row of it.
    """
    directories = site_directories(config.books_dir, absent_ok=True)
    folders = (folder for directory in directories for folder in private_folder(directory).glob("*"))
    return any(_lost_trainings(folder, ledger) for folder in folders)


def _lost_trainings(folder: Path, ledger: SiteLedger) -> list[str]:
    return [training for training in begun_trainings(folder) if training not in ledger.books.teachers.trainings]
