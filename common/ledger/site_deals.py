"""Tracks, in a site's ledger, which patient is assigned to which voter, and checks slots files against it.

A *deal* is one assignment of a pool's patients to the voters. It gives each patient a *slot*, which belongs to one
voter; slot and patient together are a *seat*. The site stores the deal with the patients' names in its slots file. The
ledger contains keyed hashes of the names (``subject``), whose key is stored with the slots file. This module is part of
a site's totals (:mod:`common.ledger.site_teachers`). It refuses to give a patient a second slot, the slot of another
patient, or a slot after a withdrawal. Two voters of one deal therefore never share a patient, even if an older copy of
the slots file is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from common.canonical import digest
from common.errors import InvalidInput
from common.ledger.teacher_records import DealRecord


def seats_digest(deal: str, seats: Mapping[int, str]) -> str:
    """Return the hash of a deal (an assignment of patients to voters) with the given seats.

    Args:
        deal: Id of the deal.
        seats: The patient (subject, a keyed hash) in each slot, by slot.

    Returns:
        The hash.
    """
    return digest("deal-seats", {"deal": deal, "seats": [[slot, seats[slot]] for slot in sorted(seats)]})


class DealBooks:
    """The recorded seats of every deal (a seat is a slot together with the patient who has it).

    Args:
        withdrawn: Subjects (keyed hashes) of the withdrawn patients. It is not copied: a patient who is added later
            counts as withdrawn from then on.
    """

    def __init__(self, withdrawn: Collection[str]) -> None:
        self._withdrawn = withdrawn
        self._seats: dict[str, dict[int, str]] = {}
        self._slot_of: dict[str, dict[str, int]] = {}
        self._voters: dict[str, int] = {}

    def __contains__(self, deal: str) -> bool:
        return deal in self._seats

    def seats(self, deal: str) -> Mapping[int, str]:
        """Return the patient in each slot of a deal, by slot. A withdrawn patient stays in the result until another
        patient gets the slot.

        Args:
            deal: Id of the deal.

        Returns:
            The patient (subject, a keyed hash) by slot; empty for an unknown deal.
        """
        return MappingProxyType(self._seats.get(deal, {}))

    def taken(self, deal: str) -> dict[int, str]:
        """Return the slots of a deal with their patients, without the patients who were withdrawn.

        Args:
            deal: Id of the deal.

        Returns:
            The patient (subject, a keyed hash) by slot.
        """
        return {slot: subject for slot, subject in self.seats(deal).items() if subject not in self._withdrawn}

    def missing(self, record: DealRecord) -> tuple[tuple[int, str], ...]:
        """Compare a slots file's assignment of patients to slots (a deal) with the ledger, and return the assignments
        that the ledger does not contain yet.

        Args:
            record: The deal as a slots file states it.

        Returns:
            Pairs (slot, subject).

        Raises:
            InvalidInput: If the deal contradicts earlier rows.
        """
        if self._voters.get(record.deal, record.voters) != record.voters:
            raise InvalidInput(
                "voters of a deal",
                value=record.voters,
                limit=f"{self._voters[record.deal]}, the number that the ledger records for this deal",
            )
        seats, slot_of = self._seats.get(record.deal, {}), self._slot_of.get(record.deal, {})
        new = tuple((slot, subject) for slot, subject in record.seats if seats.get(slot) != subject)
        for slot, subject in new:
            if subject in slot_of or subject in self._withdrawn:
                raise InvalidInput(
                    "slot of a patient", value=slot, limit="the slot that this patient got first and keeps for life"
                )
            if slot in seats and seats[slot] not in self._withdrawn:
                raise InvalidInput(
                    "slot of a patient", value=slot, limit="a slot that the ledger records for no other patient"
                )
        if len({slot for slot, _ in new}) != len(new) or len({subject for _, subject in new}) != len(new):
            raise InvalidInput("assignments of a deal", limit="each slot and each patient at most once")
        return new

    def enter(self, record: DealRecord) -> None:
        """Enter a row with assignments of patients to slots, all of which must be new.

        Args:
            record: The row.

        Raises:
            InvalidInput: If an earlier row contains or contradicts one of the assignments.
        """
        if len(self.missing(record)) != len(record.seats):
            raise InvalidInput("assignments of a deal", limit="assignments that no earlier row contains")
        self._voters[record.deal] = record.voters
        self._seats.setdefault(record.deal, {}).update(record.seats)
        self._slot_of.setdefault(record.deal, {}).update((subject, slot) for slot, subject in record.seats)
