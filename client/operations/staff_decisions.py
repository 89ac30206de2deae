"""What a hospital's staff decide, whatever the server says: vetoes, a patient's withdrawal, alarms, comparing heads.

Every decision is a row of the site's own ledger and holds at once for a worker that is running. A withdrawn patient's
name is in no row: the ledger has the slot, the voter and a hash whose key lies with the teachers. Refuses a study the
site never consented to and a case that never had a slot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.site.books import deals, open_books, read_books, site_directories, slots_file, writing_teachers
from client.training.patient_deal import Place, save_slots
from common.canonical import sha256_file
from common.config import load_study
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import Spend
from common.ledger.receipts import Receipt, first_fork
from common.ledger.rollback_guard import Standing, standing_path
from common.objects import write_atomically
from common.sealing_rotation import SealingNotice

RETIRED = "withdrawn"
"""What stands for a training's identity in ``train.json`` once a patient of that voter was withdrawn."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What :func:`withdraw_patient` did: every deal's place is empty and its voter silent, in each of ``directories``,
    until it is retrained there; ``releases`` can not be recalled."""

    places: tuple[Place, ...]
    directories: tuple[Path, ...]
    releases: int
    repeated: bool


def decide(directory: Path, study: str, decision: str) -> str:
    """``pause``, ``resume`` or ``withdraw`` (for good) a study named by id, beginning of its id, or name; its id."""
    with _ledger(directory) as (_, ledger):
        terms = ledger.study_named(study)
        ledger.decide(terms.id, decision)
    return terms.id


def withdraw_patient(directory: Path, case: str) -> Withdrawal:
    """Take a patient out of every study of the pool: on record, out of the slot, and the voter silent until
    ``consilium site train`` ran again there.

    Only that voter is retrained. Interrupted, it is finished by running it again; done already, it changes nothing.
    A directory that joined the pool's books and is not there stops it before anything is done, and so does a training
    that goes on in any of them.
    """
    books = load_site(directory).books_dir
    directories = site_directories(books)
    if not deals(books):  # where nobody was dealt there is nothing to lock
        raise InvalidInput("deal of the patients", value=str(books), remedy="run `consilium site train` first")
    with writing_teachers(directories):
        return _withdraw(directory, case, directories=directories)


def _withdraw(directory: Path, case: str, *, directories: tuple[Path, ...]) -> Withdrawal:
    known = deals(directories[0])
    found = {path: slots for path, slots in known.items() if slots.has_placed(case)} or known
    places = {path: slots.place(case) for path, slots in found.items()}
    for path, slots in found.items():
        save_slots(path, slots)  # a key that was made just now must outlive the row that uses it
    repeated = all(case not in slots.order for slots in found.values())
    with _ledger(directory) as (_, ledger):
        for path, place in places.items():
            found_weights = (_weights(teachers, place.voter) for teachers in _teachers(directories, path))
            weights = next((each for each in found_weights if each is not None), None)
            ledger.withdraw_patient(slot=place.slot, voter=place.voter, subject=place.subject, weights=weights)
        releases = ledger.spent().releases
    for path, slots in found.items():
        if case in slots.order:
            for teachers in _teachers(directories, path):
                _retire(teachers, places[path].voter)
            save_slots(path, slots.without(case))
    return Withdrawal(places=tuple(places.values()), directories=directories, releases=releases, repeated=repeated)


def _teachers(directories: Sequence[Path], deal: Path) -> list[Path]:
    """The teachers of those directories whose patients this file deals."""
    return [
        directory / "teachers"
        for directory in directories
        if slots_file(load_site(directory)).resolve() == deal.resolve()
    ]


def _retire(teachers: Path, voter: int) -> None:
    """Mark a voter's training as one with a withdrawn patient, and drop what would let it go on."""
    folder = teachers / f"voter-{voter:03d}"
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    record = _training(teachers, voter)
    if record:
        marked = {**record, "identity": RETIRED}
        write_atomically(folder / "train.json", (json.dumps(marked, indent=1) + "\n").encode(), mode=0o600)


def retired_voters(teachers: Path) -> frozenset[int]:
    """Voters whose teacher was trained on a patient since withdrawn, by what lies beside their weights."""
    found = (int(path.name.removeprefix("voter-")) for path in teachers.glob("voter-[0-9][0-9][0-9]"))
    return frozenset(voter for voter in found if (_training(teachers, voter) or {}).get("identity") == RETIRED)


def end_alarm(directory: Path) -> tuple[str, ...]:
    """End every alarm after a person has looked into it; the ids of the server ledgers concerned."""
    with _ledger(directory) as (_, ledger):
        stopped = tuple(ledger.alarmed_ledgers())
        for ledger_id in stopped:
            ledger.recover(ledger_id)
    return stopped


def recover_own(directory: Path, *, standing: Path | None, charge_all: bool) -> Spend:
    """After this site's own ledger was restored from an older copy: charge what it lost; that sum.

    ``standing`` defaults to the file beside the ledger. Where it is lost, or was rolled back too, ``charge_all`` counts
    everything that caps and budgets have left as spent; it is refused where a standing tells the exact sum.
    """
    config = load_site(directory)
    kept = standing or standing_path(config.ledger_file)
    with open_books(config, restored=True) as ledger:
        for each in map(load_site, site_directories(config.books_dir)):  # the copy may not know every study yet
            ledger.consent(load_study(each.path(each.study)))
        known = kept.exists() and (standing is not None or ledger.forgotten() is not None)
        if known and charge_all:
            raise InvalidInput("--charge-all", limit=f"only without a standing; {kept} tells the exact sum")
        if not known and not charge_all:
            raise InvalidInput(
                "standing of the lost ledger",
                value=str(kept),
                limit="one that this copy is older than",
                remedy="give the lost file's with --standing; if it is lost too, --charge-all counts all that is left",
            )
        return ledger.charge_lost(Standing.load(kept) if known else None)


def take_sealing_key(directory: Path, notice: SealingNotice) -> bool:
    """Put the server's new sealing key into site.toml; whether it changed anything. The worker reads it at its start.

    It goes on the site's record first: codes of queries accepted for the old key are sealed to the new one from then
    on, and to no key that came into site.toml in any other way.
    InvalidInput unless a signing key in site.toml signed the notice and it names the key that stands there now.
    """
    server = load_site(directory).server
    if not any(notice.is_genuine(key) for key in server.signing_public_keys):
        raise InvalidInput("notice of a sealing key", limit="signed by a key in site.toml", remedy="ask the consortium")
    if server.sealing_key == notice.sealing_key:
        return False
    if server.sealing_key not in notice.replaces:
        raise InvalidInput(
            "notice of a sealing key",
            value=notice.sealing_key,
            limit=f"in place of the key in site.toml, {server.sealing_key}",
            remedy="ask the consortium for the newest notice",
        )
    if load_site(directory).ledger_file.exists():
        with _ledger(directory) as (_, ledger):
            ledger.take_sealing_key(notice.sealing_key, replaces=server.sealing_key)
    path = directory / "site.toml"
    line = rf'(?m)^(\s*sealing_key\s*=\s*"){server.sealing_key}"'
    text, found = re.subn(line, rf'\g<1>{notice.sealing_key}"', path.read_text(encoding="utf-8"))
    if found != 1:
        raise InvalidInput("sealing_key in site.toml", limit="one line of its own", remedy="change it by hand")
    write_atomically(path, text.encode(), mode=path.stat().st_mode & 0o777)
    return True


def heads(directory: Path) -> dict[str, object]:
    """The newest head of every server ledger this site holds receipts of, and of its own ledger; JSON-ready."""
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
    """This site's receipts, one a line, contradicting ones too: for another site to compare, or a recovery."""
    with read_books(load_site(directory)) as ledger:
        for receipt in ledger.receipts(evidence=True):
            yield receipt.render()


def compare_heads(directory: Path, theirs: tuple[Receipt, ...]) -> int:
    """Compare every row this site and another were shown of a server's ledger; how many receipts of theirs it were.

    LedgerCorrupt for a fork, naming the first row, and for a receipt that no key in site.toml signed.
    """
    keys = load_site(directory).server.signing_public_keys
    for receipt in theirs:
        if not any(receipt.is_genuine(key) for key in keys):
            raise LedgerCorrupt(f"a receipt of site {receipt.site} is not signed by a key in site.toml")
    with read_books(load_site(directory)) as ledger:
        fork = first_fork(ledger.receipts(), theirs)
    if fork is not None:
        raise LedgerCorrupt(
            f"the server showed the two sites different ledgers under the id {fork[0]}; keep both files as evidence, "
            "pause the study, and talk to each other before the server's operator",
            row=fork[1],
        )
    return len(theirs)


@contextmanager
def _ledger(directory: Path) -> Iterator[tuple[SiteConfig, SiteLedger]]:
    config = load_site(directory)
    if not config.ledger_file.exists():
        raise InvalidInput(
            "site ledger", value=str(config.ledger_file), remedy="start the site once: `consilium site serve`"
        )
    with open_books(config) as ledger:
        yield config, ledger


def _weights(teachers: Path, voter: int) -> str | None:
    """SHA-256 of a voter's weights as they lie there, whatever its record says; None if there are none to read."""
    try:
        return sha256_file(teachers / f"voter-{voter:03d}" / "weights.pt")
    except OSError:
        return None


def _training(teachers: Path, voter: int) -> dict[str, Any] | None:
    """A voter's training record; None where there is none or it cannot be read, since then nothing loads it either."""
    path = teachers / f"voter-{voter:03d}" / "train.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = record["report"]["weights"], record["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record
