"""Keeps a pool's slots files in agreement with its ledger wherever a deal is read, made or used.

A slots file has the names and the key that hides them; the ledger has every seat and every withdrawal by keyed hash.
A file from a backup is brought up to date from the ledger before it is used, so nobody moves to another voter and
nobody who was withdrawn comes back. Refuses a deal where the key is lost under which a patient was withdrawn, and in a
study of unit patient a teacher that was not made on this deal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.declared import has_foreign
from client.records.journal import begun_trainings
from client.records.patient_deal import Slots, load_slots, save_slots
from client.records.served import found_in, retired_voters
from client.records.voter_files import voter_directory
from client.site.books import deals, open_books, site_directories, slots_file
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.site_deals import seats_digest
from common.privacy.mechanism import Unit


def deal_for_training(config: SiteConfig, patients: Collection[str]) -> frozenset[str]:
    """Bring the study's slots file up to date with the pool's ledger; those of ``patients`` who were withdrawn.

    To be called before patients are dealt, under the lock of the books' teachers. A pool without a ledger has nothing
    to hold the file against. Raises what :func:`~client.site.books.open_books` and :func:`withdrawn` do.
    """
    if not config.ledger_file.exists():
        return withdrawn(config.books_dir, None, patients)
    with open_books(config) as ledger:
        reenter_withdrawals(config.books_dir, ledger)
        left = withdrawn(config.books_dir, ledger, patients)
        path = slots_file(config)
        if path.exists():
            bring_up_to_date(path, ledger, names=patients)
    return left


def reenter_withdrawals(books: Path, ledger: SiteLedger) -> None:
    """Put withdrawals on record that the slots files know and the ledger, restored from an older copy, does not."""
    known = {row.subject for _, row in ledger.withdrawn_patients()}
    for slots in deals(books).values():
        for slot, subject in slots.withdrawn:
            if subject not in known:
                ledger.withdraw_patient(
                    slot=slot, voter=slot % slots.voters, subject=subject, weights=None, deal=slots.deal
                )


def bring_up_to_date(path: Path, ledger: SiteLedger, *, names: Iterable[str]) -> Slots:
    """The slots stored at ``path`` as the ledger has them (:meth:`Slots.following`), stored if they were not."""
    stored = load_slots(path)
    slots = as_on_record(stored, ledger, names=names)
    if slots != stored:
        save_slots(path, slots)
    return slots


def as_on_record(stored: Slots, ledger: SiteLedger, *, names: Iterable[str]) -> Slots:
    """Slots from a file that may be an older copy, as the ledger has them; ``names``: patients who are listed now."""
    gone = {row.subject: row.slot for _, row in ledger.withdrawn_patients() if row.deal in (None, stored.deal)}
    return stored.following(ledger.seats(stored.deal), gone=gone, names=names)


def withdrawn(books: Path, ledger: SiteLedger | None, patients: Iterable[str]) -> frozenset[str]:
    """Those of ``patients`` who were withdrawn from any deal of the pool, by its files or by its ledger.

    InvalidInput where a patient was withdrawn from a deal whose file is gone: its key alone tells who that was.
    """
    files = tuple(deals(books).values())
    rows = () if ledger is None else ledger.withdrawn_patients()
    at_hand = {slots.deal for slots in files}
    in_files = {subject for slots in files for _, subject in slots.withdrawn}
    for number, row in rows:
        if row.subject in in_files:
            continue
        dealt = {row.deal} if row.deal is not None else _deals_before(ledger, number)
        if not files or dealt - at_hand:
            raise InvalidInput(
                "the slots file that identifies withdrawn patients is missing",
                value=str(books / "teachers"),
                limit="the file whose key tells who they are",
                remedy="put back any copy of its slots*.json, however old: it is brought up to date from the ledger",
            )
    gone = in_files | {row.subject for _, row in rows}
    return frozenset(name for name in patients if any(slots.subject(name) in gone for slots in files))


def _deals_before(ledger: SiteLedger | None, row: int) -> set[str | None]:
    """The deals that patients of trainings before a row were of: a withdrawal of an earlier version names none."""
    return set() if ledger is None else set(ledger.deals_of_trainings(before=row))


def record_deal(config: SiteConfig, ledger: SiteLedger) -> None:
    """Put on record who sits where in the study's slots file, before anybody is trained on.

    InvalidInput where the file contradicts the ledger.
    """
    slots = load_slots(slots_file(config))
    try:
        ledger.record_deal(slots.deal, slots.seats, voters=slots.voters)
    except InvalidInput as error:
        raise InvalidInput(
            "the slots file contradicts the site's ledger",
            value=slots_file(config).name,
            limit=str(error),
            remedy="`consilium site train`, which brings it up to date",
        ) from error


def dealt(config: SiteConfig) -> str | None:
    """The digest of who sits where by the study's slots file; None where nobody was dealt."""
    path = slots_file(config)
    if not path.exists():
        return None
    slots = load_slots(path)
    return seats_digest(slots.deal, slots.seats)


def check_trained(config: SiteConfig, study: Study, ledger: SiteLedger, served: Sequence[str]) -> None:
    """InvalidInput for a teacher of unit patient that no training on this pool's deal of patients made.

    There one patient moves one voter, because patients were dealt to slots before any training: weights that were laid
    in by hand, or were trained on another deal than the ledger has, may have seen every patient. ``served``: each
    voter's hash, empty for a voter without a teacher, which votes zero.
    """
    if study.privacy.unit is not Unit.PATIENT:
        return
    deal = deal_of(config)
    strange = [voter for voter, hash_ in enumerate(served) if hash_ and not ledger.was_trained(voter, hash_, deal=deal)]
    if strange:
        raise InvalidInput(
            "the site's ledger has no training on record for these teachers",
            value=", ".join(f"voter {voter}" for voter in strange),
            limit="in a study of unit patient, teachers of `consilium site train` on this pool's deal of patients, "
            "as the ledger has it",
            remedy="`consilium site train`, which keeps those whose patients are the same; a teacher from elsewhere "
            "can take part in a study of unit hospital",
        )


def deal_of(config: SiteConfig) -> str:
    """What the ledger names the study's deal by; empty where nobody was dealt yet."""
    return load_slots(path).deal if (path := slots_file(config)).exists() else ""


def silent_voters(config: SiteConfig, ledger: SiteLedger, served: Sequence[str]) -> frozenset[int]:
    """Return the voters whose trained teacher, by its hash in ``served``, may have seen a withdrawn patient."""
    deal = deal_of(config)
    return frozenset(
        voter for voter, hash_ in enumerate(served) if hash_ and not ledger.may_vote(voter, hash_, deal=deal)
    )


def present_teachers(config: SiteConfig, ledger: SiteLedger) -> list[tuple[str, ...]]:
    """For every directory of the pool, what each voter would answer with if its worker were started now.

    Empty for a voter whose trained teacher would be silent. A directory that joined the books and is not there serves
    nothing now. A private training that was begun and that the ledger does not know, having lost its row, counts as a
    teacher of no training on record.
    """
    found = []
    for directory in site_directories(config.books_dir, absent_ok=True):
        own = load_site(directory)
        teachers, voters = directory / "teachers", load_study(own.path(own.study)).privacy.voters_per_site
        served = found_in(teachers, voters=voters)
        brought = {voter for voter in range(voters) if has_foreign(teachers, voter)}
        trained = ["" if voter in brought else hash_ for voter, hash_ in enumerate(served)]
        silent = (silent_voters(own, ledger, trained) | retired_voters(teachers)) - brought
        found.append(tuple("" if voter in silent else hash_ for voter, hash_ in enumerate(served)))
        for voter in range(voters):
            begun = begun_trainings(voter_directory(teachers, voter))
            found += [(training,) for training in begun if not ledger.has_training(training)]
    return found
