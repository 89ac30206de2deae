"""Reads from a site ledger how a pool's patients were dealt to voters, and checks slots files against it.

Patients are keyed hashes (``subject``); the key lies with the slots file. Refuses to seat a patient in a second slot,
in another's, and after a withdrawal: so two voters of one deal never share a patient, whichever copy of a slots file
is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from common.canonical import digest
from common.errors import InvalidInput
from common.ledger.teacher_records import DealRecord


def seats_digest(deal: str, seats: Mapping[int, str]) -> str:
    """Names who sits where: a hash over the deal and (slot, subject) of everybody who has not been withdrawn."""
    return digest("deal-seats", {"deal": deal, "seats": [[slot, seats[slot]] for slot in sorted(seats)]})


class DealBooks:
    """Every deal's seats. ``withdrawn`` are the subjects of patients who left, kept by the caller."""

    def __init__(self, withdrawn: Collection[str]) -> None:
        self._withdrawn = withdrawn
        self._seats: dict[str, dict[int, str]] = {}
        self._slot_of: dict[str, dict[str, int]] = {}
        self._voters: dict[str, int] = {}

    def __contains__(self, deal: str) -> bool:
        return deal in self._seats

    def seats(self, deal: str) -> Mapping[int, str]:
        """The newest subject in each slot, also one that was withdrawn and not replaced; empty for an unknown deal."""
        return MappingProxyType(self._seats.get(deal, {}))

    def taken(self, deal: str) -> dict[int, str]:
        """The slots of those who have not been withdrawn."""
        return {slot: subject for slot, subject in self.seats(deal).items() if subject not in self._withdrawn}

    def missing(self, record: DealRecord) -> tuple[tuple[int, str], ...]:
        """What of a deal has no row yet. InvalidInput where it contradicts the rows there are."""
        if self._voters.get(record.deal, record.voters) != record.voters:
            raise InvalidInput("voters of a deal", value=record.voters, limit=str(self._voters[record.deal]))
        seats, slot_of = self._seats.get(record.deal, {}), self._slot_of.get(record.deal, {})
        new = tuple((slot, subject) for slot, subject in record.seats if seats.get(slot) != subject)
        for slot, subject in new:
            if subject in slot_of or subject in self._withdrawn:
                raise InvalidInput(
                    "slot of a patient", value=slot, limit="the slot this patient was dealt, which is kept for life"
                )
            if slot in seats and seats[slot] not in self._withdrawn:
                raise InvalidInput("slot of a patient", value=slot, limit="a free slot")
        if len({slot for slot, _ in new}) != len(new) or len({subject for _, subject in new}) != len(new):
            raise InvalidInput("seats of a deal", limit="each slot and each patient once")
        return new

    def enter(self, record: DealRecord) -> None:
        """Take a row in, all of which must be new."""
        if len(self.missing(record)) != len(record.seats):
            raise InvalidInput("seats of a deal", limit="each in one row")
        self._voters[record.deal] = record.voters
        self._seats.setdefault(record.deal, {}).update(record.seats)
        self._slot_of.setdefault(record.deal, {}).update((subject, slot) for slot, subject in record.seats)
