"""Carries out decisions of a hospital's staff: consent, pause, a patient's withdrawal, alarms, comparing receipts.

The site's commands call it. Every decision is a row of the site's own ledger and takes effect at once in a running
worker. No row contains a withdrawn patient's name: the ledger contains the slot, the voter and a keyed hash whose key
is stored with the teachers. It refuses a study the site never consented to, and a case that never had a slot.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.adapted_folder import FOLDER, TRAININGS, adapted_bundles
from client.records.patient_deal import PatientSlot, Slots, save_slots
from client.records.served import RETIRED, trained_hash, training_record
from client.records.voter_files import voter_directory
from client.site.books import (
    consent_missing,
    deals,
    ids_elsewhere,
    joined_study,
    open_books,
    read_books,
    site_directories,
    slots_file,
    writing_teachers,
)
from client.site.deals import as_on_record
from common.canonical import sha256_bytes, sha256_file
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import Spend
from common.ledger.receipts import Receipt, check_same_ledger
from common.ledger.rollback_guard import SiteLedgerStanding, kept_standing, standing_path
from common.objects import write_atomically, write_json
from common.plain import plain
from common.sealing_rotation import SealingNotice
from common.witness.memory import FOLDER as WITNESSES
from common.witness.memory import HeadMemory
from common.witness.notes import origin_of


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What withdrawing a patient does (:func:`foresee_withdrawal`) or did (:func:`withdraw_patient`).

    Attributes:
        places: The patient's slot in each assignment of patients to voters. The withdrawal empties these slots. The
            voter of an emptied slot does not vote until it is trained again.
        directories: The site's directories that share the pool's ledger, one for each study.
        releases: Number of releases already made, which cannot be undone.
        repeated: True if the patient was withdrawn before.
        adapted: Adapted bundles that may have been trained on the patient.
    """

    places: tuple[PatientSlot, ...]
    directories: tuple[Path, ...]
    releases: int
    repeated: bool
    adapted: tuple[Path, ...] = ()


def consent(directory: Path, *, by: str, sheet: str) -> Study:
    """Record a person's consent to the study of a site's directory. A repeated consent only adds a note.

    No teacher is trained, no daemon starts, and nothing is served or charged, before consent is on record.

    Args:
        directory: The site's directory.
        by: Name of the person.
        sheet: Text of the consent sheet the person read.

    Returns:
        The study.

    Raises:
        InvalidInput: If :func:`check_name` refuses the name.
    """
    check_name(by)
    config = load_site(directory)
    study = joined_study(config)
    with open_books(config) as ledger:
        ledger.consent(study)
        ledger.note(f"{by} consented to study {study.id} by the sheet {sha256_bytes(sheet.encode())}")
    return study


def check_name(by: str) -> None:
    """Refuse a text that cannot be recorded as a person's name.

    Args:
        by: The text.

    Raises:
        InvalidInput: If it is blank, longer than 200 characters, or contains control characters.
    """
    if not by.strip() or len(by) > 200 or plain(by) != by:
        raise InvalidInput("--by", value=by, limit="a name of 1 to 200 printable characters")


def has_consented(directory: Path) -> bool:
    """Tell whether consent to the study of a site's directory is on record.

    Args:
        directory: The site's directory.

    Returns:
        True if it is.
    """
    config = load_site(directory)
    if not config.ledger_file.exists():
        return False
    with read_books(config) as ledger:
        return ledger.has_consent(joined_study(config).id)


def check_consent(directory: Path) -> None:
    """Raise an error if no consent to the study of a site's directory is on record.

    Args:
        directory: The site's directory.

    Raises:
        InvalidInput: If no consent is on record.
    """
    if not has_consented(directory):
        raise consent_missing(joined_study(load_site(directory)))


def decide(directory: Path, study: str, decision: str) -> str:
    """Pause, resume, or withdraw from a study for good.

    Args:
        directory: The site's directory.
        study: The study's id, the beginning of its id, or its name.
        decision: ``pause``, ``resume`` or ``withdraw``.

    Returns:
        The study's id.

    Raises:
        InvalidInput: If no study or several match, or the site has withdrawn already.
    """
    with _ledger(load_site(directory)) as ledger:
        terms = ledger.study_named(study)
        ledger.decide(terms.id, decision)
    return terms.id


def foresee_withdrawal(directory: Path, case: str) -> Withdrawal:
    """Tell what the withdrawal of a patient would do. Changes nothing.

    Args:
        directory: The site's directory.
        case: Name of the patient or case, as the dataset lists it.

    Returns:
        What would be done.

    Raises:
        InvalidInput: If the case never had a slot, patients were not assigned to voters yet, or a directory of the pool
            is missing.
    """
    directories, stored = _dealt(directory)
    with read_books(load_site(directory)) as ledger:
        seat = _seat(case, stored, ledger)
        releases = ledger.spent().releases
    adapted = tuple(bundle for each in directories for bundle in adapted_bundles(each))
    return Withdrawal(tuple(seat.places.values()), directories, releases, repeated=not seat.sits, adapted=adapted)


def withdraw_patient(directory: Path, case: str) -> Withdrawal:
    """Take a patient out of every study of the pool.

    1. Lock all directories of the pool, so that no training runs.
    2. Record the withdrawal, which deletes every stored code.
    3. Mark the training of the patient's voter as withdrawn. The voter does not vote until `consilium site train` is
       run again.
    4. Empty the slot.
    5. Delete the trainings of adaptations, and list the adapted bundles, which a person must delete.

    Only that voter is retrained. A repeated call completes an interrupted one, and marks older trainings that the first
    call did not reach. Otherwise it changes nothing.

    Args:
        directory: The site's directory.
        case: Name of the patient or case, as the dataset lists it.

    Returns:
        What was done.

    Raises:
        InvalidInput: If the case never had a slot, patients were not assigned to voters yet, or a directory of the pool
            is missing.
        Refused: ``busy`` if a training runs in a directory of the pool.
    """
    directories, _ = _dealt(directory)
    with writing_teachers(directories):
        return _withdraw(directory, case, directories=directories)


def _dealt(directory: Path) -> tuple[tuple[Path, ...], dict[Path, Slots]]:
    """Return the directories of the pool, and its assignments of patients to voters by slots file.

    Raises InvalidInput if there is no assignment yet.
    """
    books = load_site(directory).books_dir
    directories, stored = site_directories(books), deals(books)
    if not stored:  # without a deal there is nothing to lock
        raise InvalidInput(
            "the patients have not been assigned to voters yet",
            value=str(books),
            remedy="run `consilium site train` first",
        )
    return directories, stored


@dataclass(frozen=True, slots=True)
class _Seat:
    """Where a patient is in the pool's assignments of patients to voters.

    Attributes:
        found: The assignments in which the patient has or had a slot, by the path of the slots file.
        places: The patient's slot and voter in each of these assignments, by the same path.
        sits: Paths of the slots files in which the patient's slot is not emptied yet.
    """

    found: dict[Path, Slots]
    places: dict[Path, PatientSlot]
    sits: set[Path]


def _seat(case: str, stored: dict[Path, Slots], ledger: SiteLedger) -> _Seat:
    known = {path: as_on_record(slots, ledger, names={case}) for path, slots in stored.items()}
    found = {path: slots for path, slots in known.items() if slots.has_placed(case)} or known
    places = {path: slots.place(case) for path, slots in found.items()}
    return _Seat(
        found, places, {path for path, slots in found.items() if case in stored[path].order or case in slots.order}
    )


def _withdraw(directory: Path, case: str, *, directories: tuple[Path, ...]) -> Withdrawal:
    stored = deals(directories[0])
    with _ledger(load_site(directory)) as ledger:
        seat = _seat(case, stored, ledger)
        found, places, sits = seat.found, seat.places, seat.sits
        for path in found:
            save_slots(path, stored[path])  # store a new key before a row uses it
        for path, place in places.items():
            found_weights = (_weights(teachers, place.voter) for teachers in _teachers(directories, path))
            weights = next((each for each in found_weights if each is not None), None)
            ledger.withdraw_patient(
                slot=place.slot, voter=place.voter, subject=place.subject, weights=weights, deal=found[path].deal
            )
        releases = ledger.spent().releases
        stale = {
            (teachers, place.voter)
            for path, place in places.items()
            for teachers in _teachers(directories, path)
            if path in sits or _is_older(teachers, place.voter, ledger, deal=found[path].deal)
        }
    for teachers, voter in stale:
        _retire(teachers, voter)
    for path in sits:
        save_slots(path, found[path].without(case))
    for each in directories:
        shutil.rmtree(each / FOLDER / TRAININGS, ignore_errors=True)
    return Withdrawal(
        places=tuple(places.values()),
        directories=directories,
        releases=releases,
        repeated=not sits and not stale,
        adapted=tuple(bundle for each in directories for bundle in adapted_bundles(each)),
    )


def _teachers(directories: Sequence[Path], deal: Path) -> list[Path]:
    """Return the teachers' directories of the sites that use this slots file."""
    return [
        directory / "teachers"
        for directory in directories
        if slots_file(load_site(directory)).resolve() == deal.resolve()
    ]


def _is_older(teachers: Path, voter: int, ledger: SiteLedger, *, deal: str) -> bool:
    """Return whether a voter may have been trained before one of its patients withdrew last, without being marked so.

    An earlier withdrawal can miss a training, for example if a restored list of directories lacked its study.
    """
    folder, record = voter_directory(teachers, voter), training_record(teachers, voter)
    if record is None:  # a checkpoint beside a journal belongs to charged steps, which are not drawn again
        return (folder / "checkpoint.pt").exists() and not any(folder.glob("journal-*.jsonl"))
    if record["identity"] == RETIRED or record["report"]["weights"] is None:
        return False
    return not ledger.books.teachers.may_vote(voter, trained_hash(folder), deal=deal)


def _retire(teachers: Path, voter: int) -> None:
    """Mark a voter's training as containing a withdrawn patient, and delete its checkpoint."""
    folder = voter_directory(teachers, voter)
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    record = training_record(teachers, voter)
    if record:
        marked = {**record, "identity": RETIRED}
        write_json(folder / "train.json", marked, mode=0o600)


def end_alarm(directory: Path, *, server_restored: bool = False) -> tuple[str, ...]:
    """End every alarm about a ledger, after a person has found its cause.

    A site raises an alarm about a ledger that contradicts what the site has stored about it. While an alarm stands, the
    site answers nothing.

    Args:
        directory: The site's directory.
        server_restored: True if a person knows that the ledger of the study's server was restored from a copy and then
            recovered. The site then also accepts this ledger if it has raised no alarm about it yet.

    Returns:
        Ids of the server ledgers that the site accepts again, then names of the ledgers of which two contradicting
        histories were signed.
    """
    config = load_site(directory)
    with _ledger(config) as ledger:
        servers = _servers(config, ledger) if server_restored else ()
        stopped = tuple(dict.fromkeys((*ledger.alarmed_ledgers(), *servers)))
        for ledger_id in stopped:
            ledger.recover(ledger_id)
    memory = HeadMemory(config.books_dir / WITNESSES)
    forked = memory.conflicting()
    for origin in {*forked, *(origin_of("server", ledger_id) for ledger_id in stopped)}:
        memory.forget(origin)
    return (*stopped, *forked)


def _servers(config: SiteConfig, ledger: SiteLedger) -> tuple[str, ...]:
    """Return the id of the ledger of a study's server; empty if this site has no receipt of it.

    If the site has receipts of other studies in that ledger only, the ledger is found by the server's signing keys.
    """
    if (known := ledger.books.lines.get(joined_study(config).id)) is not None:
        return (known,)
    keys, held = config.server.signing_public_keys, ledger.receipts(evidence=True)
    return tuple({one.ledger_id: None for one in held if any(one.is_genuine(key) for key in keys)})


def recover_own(directory: Path, *, standing: Path | None, charge_all: bool, studies: Sequence[Study] = ()) -> Spend:
    """Charge the pool for what the site's own ledger lost when it was restored from an older copy.

    Args:
        directory: The site's directory.
        standing: Standing of the lost ledger, a small file that records its newest row and totals; by default the one
            beside the ledger.
        charge_all: Charge everything that caps and budgets have left. It is for a standing that is lost or was rolled
            back too.
        studies: Studies that the copy lacks and that have no directory here any more.

    Returns:
        What was charged to the pool.

    Raises:
        InvalidInput: If ``charge_all`` is True although a standing shows the exact sum; if ``charge_all`` is False and
            no standing shows what was lost; or if no key of the ledger signed the standing beside it, and ``standing``
            does not name it.
    """
    config = load_site(directory)
    beside, kept = kept_standing(config.ledger_file), standing or standing_path(config.ledger_file)
    with open_books(config, restored=True) as ledger:
        for each in map(load_site, site_directories(config.books_dir)):  # the older copy may lack a study
            ledger.consent(each.load_study())
        for study in studies:
            ledger.consent(study)
        found = {} if standing is None else {standing.resolve(): SiteLedgerStanding.load(standing)}
        if beside is not None and ledger.forgotten() is not None:
            found[beside.resolve()] = SiteLedgerStanding.load(beside)
        for path, one in found.items():
            ledger.check_signer(one, named=standing is not None and path == standing.resolve())
        if found and charge_all:
            raise InvalidInput(
                "--charge-all",
                limit=f"only if the standing file is lost; here {kept} shows exactly what was spent",
                remedy="leave out --charge-all",
            )
        if not found and not charge_all:
            raise InvalidInput(
                "standing of a ledger that was restored from an older copy",
                value=str(kept),
                limit="a standing file that was written after this copy of the ledger",
                remedy="this standing is no newer than the ledger, so it cannot show what was lost. If the whole "
                "machine was restored from a backup, pass a standing file that was kept on another machine: --standing "
                "FILE. If you have no such file, --charge-all counts all remaining budget as spent"
                if beside is not None
                else "pass the lost ledger's standing file: --standing FILE. If that is lost too, --charge-all counts "
                "all remaining budget as spent",
            )
        spent = ledger.charge_lost(*(found.values() or (None,)))
        HeadMemory(config.books_dir / WITNESSES).forget(origin_of("site", ledger.ledger_id))
        return spent


def take_sealing_key(directory: Path, notice: SealingNotice) -> bool:
    """Replace the server's sealing key in ``site.toml``. The worker reads it when it starts.

    The change is recorded first. Codes of queries accepted for the old key may then be sealed to the new one. If a key
    is put into ``site.toml`` in any other way, such codes are not sealed to it.

    Args:
        directory: The site's directory.
        notice: The server's signed notice.

    Returns:
        True if the key changed.

    Raises:
        InvalidInput: If no signing key in ``site.toml`` signed the notice, if the notice does not replace the sealing
            key in ``site.toml``, or if the line with that key cannot be found there.
    """
    config = load_site(directory)
    server = config.server
    if not any(notice.is_genuine(key) for key in server.signing_public_keys):
        raise InvalidInput(
            "notice of a sealing key with a wrong signature",
            limit="a notice signed by a key in site.toml",
            remedy="ask the consortium for the notice",
        )
    if server.sealing_key == notice.sealing_key:
        return False
    if server.sealing_key not in notice.replaces:
        raise InvalidInput(
            "notice of a sealing key",
            value=notice.sealing_key,
            limit=f"a notice that replaces the key in site.toml, {server.sealing_key}",
            remedy="ask the consortium for the newest notice",
        )
    if config.ledger_file.exists():
        with _ledger(config) as ledger:
            ledger.take_sealing_key(notice.sealing_key, replaces=server.sealing_key)
    path = directory / "site.toml"
    line = rf'(?m)^(\s*sealing_key\s*=\s*"){server.sealing_key}"'
    text, found = re.subn(line, rf'\g<1>{notice.sealing_key}"', path.read_text(encoding="utf-8"))
    if found != 1:
        raise InvalidInput(
            "sealing_key in site.toml",
            limit='exactly one line of the form sealing_key = "…"',
            remedy="change the key in site.toml by hand",
        )
    write_atomically(path, text.encode(), mode=path.stat().st_mode & 0o777)
    return True


def heads(directory: Path) -> dict[str, object]:
    """Return the newest row that receipts here show of every server ledger, and the head of the site's own ledger.

    Args:
        directory: The site's directory.

    Returns:
        Plain values for JSON.
    """
    config = load_site(directory)
    with read_books(config) as ledger:
        counts: dict[str, int] = {}
        for receipt in ledger.receipts():
            counts[receipt.ledger_id] = counts.get(receipt.ledger_id, 0) + 1
        return {
            "site": config.site,
            "server": [
                {"ledger_id": ledger_id, "row": row, "hash": found, "receipts": counts.get(ledger_id, 0)}
                for ledger_id, (row, found) in sorted(ledger.server_heads().items())
            ],
            "own": ledger.head().to_json(),
        }


def receipt_lines(directory: Path) -> Iterator[str]:
    """Yield this site's receipts, including contradicting ones, for a comparison by another site or for a recovery.

    Receipts of another server's ledger are left out. This study's server and hospitals may not see them.

    Args:
        directory: The site's directory.

    Yields:
        One receipt for each line.
    """
    config = load_site(directory)
    own = joined_study(config).id
    with read_books(config) as ledger:
        elsewhere = ids_elsewhere(config, ledger.books.studies)
        held = ledger.receipts(evidence=True)
        ledgers = {receipt.ledger_id for receipt in held}
        left_out = {one for one in ledgers if ledger.belongs_elsewhere(one, study_id=own, elsewhere=elsewhere)}
        yield from (receipt.render() for receipt in held if receipt.ledger_id not in left_out)


def compare_heads(directory: Path, theirs: tuple[Receipt, ...]) -> int:
    """Compare the rows of a server's ledger in this site's receipts with those in another site's receipts.

    Args:
        directory: The site's directory.
        theirs: The other site's receipts.

    Returns:
        Number of receipts compared.

    Raises:
        LedgerCorrupt: If the ledgers differ (``row`` is the first that does), or a receipt is not signed by a key in
            ``site.toml``.
        InvalidInput: If the sites have no receipts of the same ledger or study.
    """
    keys = load_site(directory).server.signing_public_keys
    for receipt in theirs:
        if not any(receipt.is_genuine(key) for key in keys):
            raise LedgerCorrupt(
                f"a receipt of site {receipt.site} is not signed by a key in site.toml; to fix: ask that site for a "
                "new export, and compare the server's keys"
            )
    with read_books(load_site(directory)) as ledger:
        check_same_ledger(ledger.receipts(), theirs)
    return len(theirs)


@contextmanager
def _ledger(config: SiteConfig) -> Iterator[SiteLedger]:
    if not config.ledger_file.exists():
        raise InvalidInput(
            "the site ledger does not exist yet",
            value=str(config.ledger_file),
            remedy="consent to the study with `consilium site consent`",
        )
    with open_books(config) as ledger:
        yield ledger


def _weights(teachers: Path, voter: int) -> str | None:
    """Return the SHA-256 of the voter's weights file as it is now on disk; None if the file cannot be read."""
    try:
        return sha256_file(voter_directory(teachers, voter) / "weights.pt")
    except OSError:
        return None
