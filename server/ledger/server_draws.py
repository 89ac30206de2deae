"""Stores queries, answers and draws in the server's ledger.

A *draw* is one attempt at a sealed sum. There the hospitals add the noise, so the server knows the answer as soon as it
has all masked codes. A draw is therefore recorded and charged before any site is asked, together with its roster and
the sites' mask keys. It ends with an answer, or is recorded as lost.

A draw that exceeds a budget, has fewer sites than the study allows, or repeats a draw number is refused. So is a second
answer, and an answer to a draw that is not open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.canonical import parse_canonical, rational, sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached
from common.ledger.charges import (
    ReleaseRecord,
    Roster,
    RosterEntry,
    RosterRecord,
    StudyTerms,
    check_ledger_name,
    check_roster,
)
from common.ledger.records import RefusalRecord, ReuseRecord, parse_body
from common.ledger.releases import ChargedTotals, ExceededLimit, Release
from common.ledger.sealed_records import AnswerRecord, LostDrawRecord
from common.masking import MaskedRoster
from common.privacy.mechanism import QuerySpec
from server.ledger.server_receipts import IssuesReceipts


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A released answer as stored in the ledger.

    Attributes:
        query: The query that was asked.
        noisy_sum: Int64 array [l], read-only: the sum of all codes with noise.
        roster: The sites and pools that were charged.
        voters: Number of voters whose codes are in the sum.
        seq: Number of the ledger's row that records the answer and its SHA-256.
        row_hash: Hash of that row.
        study_id: Id of the study that asked the query first.
        batch_id: Id of the batch in which that study asked it.
    """

    query: QuerySpec
    noisy_sum: NDArray[np.int64]
    roster: Roster
    voters: int
    seq: int
    row_hash: str
    study_id: str
    batch_id: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of charging and answering a batch of queries.

    Attributes:
        answers: Stored and new answers, in the order of the queries.
        refused: Ids of the refused queries: the first query that exceeds a limit, and every later query without an
            answer that the study may use.
    """

    answers: tuple[StoredAnswer, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """One attempt at a sealed sum, which was charged to the pools of its roster.

    Attributes:
        queries: The queries it is to answer.
        roster: The sites that must all send their masked codes, with their mask keys.
    """

    queries: tuple[QuerySpec, ...]
    roster: MaskedRoster


@dataclass(frozen=True, slots=True)
class DrawResult:
    """The result of charging a draw.

    Attributes:
        draw: The charged draw; None if nothing was charged.
        refused: Ids of the refused queries, as in :class:`BatchResult`.
    """

    draw: Draw | None
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LostDraw:
    """A draw that ended without an answer.

    Attributes:
        query_ids: Ids of the draw's queries.
        reason: ``incomplete`` if a site sent no masked code; ``spoiled`` if the sum is one that honest sites cannot
            have produced.
        masks: Id of the draw's roster.
        sites: The sites whose pools were charged for the draw.
        row: Row that records the loss.
        row_hash: Hash of that row.
    """

    query_ids: tuple[str, ...]
    reason: str
    masks: str
    sites: tuple[str, ...]
    row: int
    row_hash: str


class AnswersQueries(IssuesReceipts):
    """The part of the server's ledger that stores queries, answers and draws."""

    def charge_draw(
        self, *, study_id: str, roster: tuple[RosterEntry, ...], masks: MaskedRoster, queries: Sequence[QuerySpec]
    ) -> DrawResult:
        """Charge a draw before any site is asked, in one transaction.

        It charges the longest prefix of ``queries`` that fits the budgets. A query with a stored answer is not drawn
        again.

        Args:
            study_id: The study.
            roster: Sites and pools to charge.
            masks: The same sites with the public mask keys that they gave for this draw.
            queries: The queries to answer.

        Returns:
            The charged draw, and the ids of the refused queries.

        Raises:
            QuorumNotReached: If the roster is smaller than the study allows.
            InvalidInput: If ``roster`` and ``masks`` name different sites, if ``masks`` is for another study, for an
                unknown study, for an undeclared pool, or for a query that is named twice or does not fit the study.
        """
        if masks.sites != tuple(sorted(entry.site for entry in roster)) or masks.study != study_id:
            raise InvalidInput("roster of a draw", limit="exactly the sites that gave a mask key for the draw")
        charged: list[QuerySpec] = []

        def charge(study: StudyTerms, query: QuerySpec, named: RosterRecord, planned: ChargedTotals) -> None:
            self._charge_draw(study, query, named, masks, planned)
            charged.append(query)

        result = self._charge_batch(study_id, masks.batch, roster, queries, charge)
        return DrawResult(Draw(tuple(charged), masks) if charged else None, result.refused)

    def _charge_batch(
        self,
        study_id: str,
        batch_id: str,
        roster: Roster,
        queries: Sequence[QuerySpec],
        charge: Callable[[StudyTerms, QuerySpec, RosterRecord, ChargedTotals], StoredAnswer | None],
    ) -> BatchResult:
        """Call ``charge`` for each query in the longest prefix of ``queries`` that fits the budgets, in one
        transaction.

        A query that has a stored answer is not charged; its answer is in the result.
        """
        check_ledger_name(batch_id, what="batch id")
        ordered = check_roster(tuple(roster))
        record = RosterRecord(ordered)
        if len({query.id for query in queries}) != len(queries):
            raise InvalidInput("query that is twice in a batch", limit="each query once")
        answers: list[StoredAnswer] = []
        refused: list[str] = []
        with self._writing():
            study = self._study(study_id)
            if len(ordered) < study.least_roster:
                raise QuorumNotReached(
                    f"only {len(ordered)} sites are on the roster, and the study needs at least {study.least_roster}; "
                    "nothing was charged; to fix: bring more sites online, then `consilium study resume`"
                )
            obstacle: ExceededLimit | None = None
            for query in queries:
                if self._books.releases.answered(query.id):
                    obstacle = obstacle or self._reuse(study, query.id)
                    if self._uses(study, query.id):
                        answers.append(self._stored(query.id))
                    else:
                        refused.append(query.id)
                    continue
                if obstacle is None:
                    self._books.check_release(ordered, query.mechanism, study)
                    planned = self._books.plan(query.mechanism, study_id=study_id, roster=ordered)
                    if isinstance(planned, ChargedTotals):
                        made = charge(study, query, record, planned)
                        answers += [] if made is None else [made]
                        continue
                    obstacle = planned
                refused.append(query.id)
            if obstacle is not None and (study_id, batch_id, tuple(refused)) not in self._books.refusals:
                self._refuse(study_id, batch_id, refused, obstacle)
        return BatchResult(tuple(answers), tuple(refused))

    def _named(self, roster: RosterRecord) -> str | None:
        """Return the id by which rows refer to a long roster, or None for a short one.

        A long roster is appended as a row of its own if the ledger does not contain it yet.
        """
        if not roster.is_long:
            return None
        if roster.id not in self._books.named:
            self._append(roster)
        return roster.id

    def _charge_draw(
        self, study: StudyTerms, query: QuerySpec, roster: RosterRecord, masks: MaskedRoster, charge: ChargedTotals
    ) -> None:
        masks_id = masks.id
        record = ReleaseRecord.of(
            study,
            masks.batch,
            query,
            query.id,
            roster.roster,
            "",
            draw=(masks.draw, masks_id),
            named=self._named(roster),
        )
        payload = None if masks_id in self._books.rosters else (masks_id, masks.to_bytes())
        row = self._chain.append("release", record.to_json(), payload=payload)
        self._books.enter(row, record, charge=charge)

    def store_answer(self, query_id: str, draw: int, noisy: NDArray[np.int64]) -> StoredAnswer:
        """Store the noisy sum of an open draw, one that has not ended.

        Callers store the sum before they use or show it.

        Args:
            query_id: The query.
            draw: The draw's number.
            noisy: Int64 array [l], the unmasked sum.

        Returns:
            The stored answer.

        Raises:
            InvalidInput: If the query has no draw, or the sum is not of the mechanism's dimension.
            LedgerCorrupt: If the draw is not the query's newest draw, or has ended. Nothing is stored then.
        """
        with self._writing():
            if query_id not in self._books.releases:
                raise InvalidInput("query", value=query_id, limit="id of a query with a draw that has not ended")
            answer = checked_answer(noisy, dimension=self._books.releases[query_id].mechanism.dimension)
            data = answer.astype("<i8").tobytes()
            record = AnswerRecord(query_id, draw, sha256_bytes(data))
            self._books.enter(self._chain.append("answer", record.to_json(), payload=(query_id, data)), record)
        return self._stored(query_id)

    def lose_draw(self, draw: Draw, reason: str) -> None:
        """Record that an open draw ended without an answer; its charge stays.

        Args:
            draw: The draw.
            reason: ``incomplete`` or ``spoiled``, as in :class:`LostDraw`.
        """
        with self._writing():
            self._append(LostDrawRecord(tuple(query.id for query in draw.queries), draw.roster.draw, reason))

    def ended_without_answer(self, study_id: str) -> tuple[LostDraw, ...]:
        """Return a study's lost draws, each with the sites that were charged for it.

        Args:
            study_id: The study.

        Returns:
            The draws, in the order in which they were lost.
        """
        releases, found = self.books.releases, []
        for row in self._chain.rows_of("lost-draw"):
            record = LostDrawRecord.from_json(parse_body(row.body))
            charged = next((releases.row_of(query, record.draw) for query in record.query_ids), None)
            if charged is None or (release := releases.at(charged)).study_id != study_id:
                continue
            sites = tuple(sorted(entry.site for entry in release.roster))
            found.append(LostDraw(record.query_ids, record.reason, release.masks or "", sites, row.seq, row.hash))
        return tuple(found)

    def rosters_drawn(self, study_id: str) -> dict[str, tuple[str, ...]]:
        """Return the rosters under which a study's draws were charged.

        Args:
            study_id: The study.

        Returns:
            A mapping from each roster's id to its sites in alphabetical order. The rosters are in the order of the
            ledger.
        """
        releases = (release for _, release in self.books.releases.by_row())
        return {
            release.masks: tuple(sorted(entry.site for entry in release.roster))
            for release in releases
            if release.study_id == study_id and release.masks
        }

    def drawn(self, study_id: str, masks: str) -> Draw:
        """Return the draw of a study whose roster has a given id, whether the draw is open or has ended.

        Args:
            study_id: The study.
            masks: The roster's id, or at least its first twelve digits.

        Returns:
            The draw.

        Raises:
            InvalidInput: If no draw matches, if more than one matches, or if ``masks`` is shorter than twelve digits.
        """
        found: dict[str, list[Release]] = {}
        for _, release in self.books.releases.by_row():
            if release.study_id == study_id and release.masks and release.masks.startswith(masks):
                found.setdefault(release.masks, []).append(release)
        if len(found) != 1 or len(masks) < 12:
            raise InvalidInput(
                "draw (one attempt at a sealed sum)",
                value=masks[:80],
                limit="at least the first 12 digits of the id of one draw",
                remedy="choose an id from the list that `consilium dispute evidence` prints without one",
            )
        ((of, releases),) = found.items()
        return self._draw(of, releases)

    def open_draws(self, study_id: str) -> tuple[Draw, ...]:
        """Return the open draws of a study: those that were charged and have not ended.

        A draw remains open if the process that made it was interrupted.

        Args:
            study_id: The study.

        Returns:
            The draws, in the order of the ledger.

        Raises:
            LedgerCorrupt: If a stored roster is not the one that was charged.
        """
        found: dict[str, list[Release]] = {}
        for release in self.books.releases.open_in(study_id):
            found.setdefault(release.masks or "", []).append(release)
        return tuple(self._draw(masks, releases) for masks, releases in found.items())

    def _draw(self, masks: str, releases: list[Release]) -> Draw:
        stored = self._chain.payload(masks)
        if stored is None or sha256_bytes(stored[1]) != masks:
            raise LedgerCorrupt("the stored roster of a draw differs from the roster charged", row=releases[0].seq)
        roster = MaskedRoster.from_json(parse_canonical(stored[1]))
        return Draw(tuple(map(self._query, releases)), roster)

    def _query(self, release: Release) -> QuerySpec:
        """Return the query of a release, as its row states it."""
        query = ReleaseRecord.from_json(parse_body(self._chain.row(release.seq).body)).query
        if query.id != release.query_id:
            raise LedgerCorrupt("the query in this row differs from the query charged", row=release.seq)
        return query

    def _study(self, study_id: str) -> StudyTerms:
        if study_id not in self._books.studies:
            raise InvalidInput("study", value=study_id, limit="id of a study that is registered in this ledger")
        return self._books.studies[study_id]

    def _uses(self, study: StudyTerms, query_id: str) -> bool:
        return self._books.releases[query_id].study_id == study.id or query_id in self._books.reused.get(study.id, {})

    def _reuse(self, study: StudyTerms, query_id: str) -> ExceededLimit | None:
        """Record that this study uses another study's answer, unless the ledger records it already.

        Returns:
            The budget that the answer's charge would exceed, in which case nothing is recorded; otherwise None.
        """
        if self._uses(study, query_id):
            return None
        roster = self._books.releases[query_id].roster
        if len(roster) < study.quorum:
            raise QuorumNotReached(
                f"query {query_id[:12]} was answered for another study by {len(roster)} sites, fewer than this study's "
                f"quorum of {study.quorum}, so that this study cannot use the answer; to fix: create a study with a "
                "quorum of at most as many sites, or with other public volumes, which is asked anew"
            )
        planned = self._books.plan_reuse(query_id, study_id=study.id)
        if isinstance(planned, ExceededLimit):
            return planned
        record = ReuseRecord(study.id, (query_id,))
        self._books.enter(self._chain.append("reuse", record.to_json()), record, charge=planned)
        return None

    def _refuse(self, study_id: str, batch_id: str, refused: list[str], obstacle: ExceededLimit) -> None:
        amounts = rational(obstacle.requested), rational(obstacle.remaining)
        self._append(RefusalRecord(study_id, batch_id, tuple(refused), obstacle.reason, obstacle.pool, *amounts))

    def _stored(self, query_id: str) -> StoredAnswer:
        release = self._books.releases[query_id]
        found, answer = self._chain.payload(query_id), release.answer
        if answer is None or found is None or found[0] != answer.seq or sha256_bytes(found[1]) != answer.sha256:
            raise LedgerCorrupt("the stored answer differs from the answer charged", row=release.seq)
        query = self._query(release)
        noisy = np.frombuffer(found[1], dtype="<i8").astype(np.int64)
        noisy.flags.writeable = False
        return StoredAnswer(
            query=query,
            noisy_sum=noisy,
            roster=release.roster,
            voters=release.voters,
            seq=answer.seq,
            row_hash=answer.row_hash,
            study_id=release.study_id,
            batch_id=release.batch_id,
        )


def checked_answer(noisy: object, *, dimension: int) -> NDArray[np.int64]:
    """Return a read-only copy of a noisy sum.

    Args:
        noisy: The noisy sum that a mechanism returned.
        dimension: The mechanism's dimension l.

    Returns:
        Int64 array of shape [l].

    Raises:
        InvalidInput: If ``noisy`` is not an int64 array of shape [l].
    """
    if type(noisy) is not np.ndarray or noisy.dtype != np.int64 or noisy.shape != (dimension,):
        got = f"{noisy.dtype}{list(noisy.shape)}" if isinstance(noisy, np.ndarray) else type(noisy).__name__
        raise InvalidInput("noisy answer", value=got, limit=f"int64[{dimension}], the mechanism's dimension")
    answer = noisy.copy()
    answer.flags.writeable = False
    return answer
