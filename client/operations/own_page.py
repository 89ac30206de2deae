"""Reads what a hospital's own page shows from the site's directory: budget, peers, alarms, networks, cases.

It only reads: nothing is written, charged, sent or fetched. A case is predicted in memory when somebody opens it on the
page (:mod:`client.operations.own_cases`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from client.data.layouts import indexed
from client.ledger.site_ledger import SiteLedger
from client.operations.daemons import daemon_standings, trouble
from client.operations.evaluated import adapted_verdict, newest_evaluation, student_verdict
from client.operations.own_cases import ADAPTED, OWN, STUDENT, CaseList, OwnCases
from client.policy import load_site
from client.records.adapted_folder import FOLDER, REPORT
from client.site.books import joined_study, read_books
from client.site.peers import PeersView, PeerTrust, peers_view
from client.site.status import facts_in
from common.config import Study
from common.errors import ALARM_REMEDY, ALARM_STOPS
from common.hospital_page import (
    HospitalFacts,
    OfferedCase,
    OwnAlarm,
    OwnAnswer,
    OwnNetwork,
    OwnPage,
    OwnPeer,
    ShownCase,
)
from common.ledger.records import RefusalRecord, ReservationRecord, parse_record
from common.peers import fingerprint
from common.security_log.program import ROLE
from common.site_facts import STOPPED, SiteStudy

MOST_ANSWERS = 50
"""Largest number of batches on the page; the ledger contains all of them."""

Sheet = Callable[[Study, int | None], str]
"""Function that returns a study's consent sheet, from the study and the site's number of patients (None if unknown)."""

_SAID = {
    STUDENT: "the study's student, as it was pulled",
    OWN: "the mean of this site's own teachers, without those that may have seen a withdrawn patient",
    ADAPTED: "adapted at this site: this network has seen patients and must not leave the hospital",
}
_OUTDATED = (
    "adapted at this site, and not shown: it may have been trained on a patient who was withdrawn since. Make "
    "`{folder}` anew with `consilium site adapt --replace`"
)
_STOPPED = f"{ALARM_REMEDY}; {ALARM_STOPS}"


class SitesOwnPage(OwnPage):
    """The content of a hospital's own page, read from the site's directory.

    Args:
        site_dir: The site's directory.
        sheet: Returns the consent sheet's text.
        data: Folder of the cases; None for the site's own dataset.

    Raises:
        InvalidInput: If the site's policy cannot be read, or ``data`` is not a dataset of the study.
    """

    def __init__(self, site_dir: Path, *, sheet: Sheet, data: Path | None = None) -> None:
        self._directory, self._sheet, self._data = site_dir, sheet, data
        self._config = load_site(site_dir)
        self._study = joined_study(self._config)
        if data is not None:
            indexed(data, self._study.data, self._config.dataset)
        self._cases = OwnCases(site_dir, self._config, self._study, data=data)

    def facts(self) -> HospitalFacts:
        self._read_policy()
        config, study = self._config, self._study
        view, listed, networks = peers_view(self._directory), self._cases.listed(), self._cases.networks()
        outdated, away = self._cases.outdated(), _away(self._directory)
        own = newest_evaluation(self._directory) if self._data is None else None
        site_dir = shlex.quote(str(self._directory.resolve()))
        verdicts = {ADAPTED: adapted_verdict(self._directory / FOLDER / REPORT)}
        if self._data is None:
            verdicts[STUDENT] = student_verdict(own, withdrawn=listed.withdrawn)
        with read_books(config) as ledger:
            site = facts_in(ledger, config)
            here = site.study(study.id)
            return HospitalFacts(
                site=site,
                here=here,
                study=study.name,
                state=_state(here, stopped=site.stopped, away=any(one.stops for one in away)),
                sheet=self._sheet(study, listed.patients if self._data is None else None),
                answers=_answers(ledger),
                sealed=view.sealed,
                own_fingerprint=fingerprint(view.own.key),
                peers=tuple(
                    OwnPeer(one.peer.site, one.fingerprint, one.trust.value, one.trust is PeerTrust.CONFIRMED)
                    for one in view.peers
                ),
                alarms=(
                    *_alarms(site.alarms, view, stopped=site.stopped),
                    *away,
                    *(OwnAlarm(*said, stops=False) for said in site.zero_votes),
                ),
                networks=(
                    *(OwnNetwork(name, _SAID[name], verdicts.get(name, "")) for name in networks),
                    *((OwnNetwork(ADAPTED, _OUTDATED.format(folder=outdated)),) if outdated else ()),
                ),
                pause=_command(site_dir, study, ended=here is not None and here.state == "pause"),
                site_dir=site_dir,
                cases=_offered(listed, {} if own is None else own.dice) if networks else (),
                withdrawn=listed.withdrawn,
                left_out=listed.left_out,
                not_shown=listed.problem,
                adapted_on=self._cases.adapted_on() if ADAPTED in networks else None,
                evaluated="" if own is None else own.day,
                elsewhere=self._data is not None,
            )

    def case(self, number: int) -> ShownCase:
        return self._cases.shown(number)

    def _read_policy(self) -> None:
        """Read ``site.toml`` and the study anew. If one of them changed, discard cases and predictions in memory."""
        config = load_site(self._directory)
        study = joined_study(config)
        if (config, study) != (self._config, self._study):
            self._config, self._study = config, study
            self._cases = OwnCases(self._directory, config, study, data=self._data)


def _offered(listed: CaseList, dice: Mapping[str, float]) -> tuple[OfferedCase, ...]:
    """Return the cases that may be shown, sorted by Dice from low to high; cases without Dice come last."""
    cases = (OfferedCase(number + 1, name := listed.cases[number].id, dice.get(name)) for number in listed.numbers)
    return tuple(sorted(cases, key=lambda case: (case.dice is None, case.dice or 0.0, case.number)))


def _state(here: SiteStudy | None, *, stopped: bool, away: bool) -> str:
    """Return the state of the study of this directory: ``alarm`` if an alarm stops every answer, ``away`` if a daemon
    is not ready.

    ``here`` is None if nobody consented to the study.
    """
    if stopped:
        return "alarm"
    if here is None or not (here.consents or here.spending.spend.releases):
        return "unconsented"
    if away and here.state not in STOPPED:
        return "away"
    return (STOPPED | {"spent": "spent"}).get(here.state, "answering" if here.spending.spend.releases else "joined")


def _alarms(contradictions: Sequence[str], view: PeersView, *, stopped: bool) -> tuple[OwnAlarm, ...]:
    """Return the alarms: contradictions with the ledger first, then problems with other hospitals' keys.

    Each has its remedy. ``stopped`` says whether the contradictions stop all answers. Two contradictions do not stop
    answers: two histories of another hospital's ledger, and a query that the server asked for again.
    """
    found = [OwnAlarm(*_remedied(text, stopped=stopped), stops=stopped) for text in contradictions]
    return (*found, *view.problems())


def _away(directory: Path) -> tuple[OwnAlarm, ...]:
    """Return an alarm for each daemon that is neither ready nor starting.

    Each of them stops this site's answers, except the log process.
    """
    away = (one for one in daemon_standings(directory) if one.state not in ("ready", "starting"))
    return tuple(OwnAlarm(*trouble(one, directory), stops=one.daemon.partition(" ")[0] != ROLE) for one in away)


def _remedied(text: str, *, stopped: bool) -> tuple[str, str]:
    said, _, remedy = text.partition("; to fix: ")
    return said, remedy or (_STOPPED if stopped else ALARM_REMEDY)


def _answers(ledger: SiteLedger) -> tuple[OwnAnswer, ...]:
    """Return the newest accepted and refused batches. Queries accepted in the same second count as one batch."""
    found: list[OwnAnswer] = []
    for row in ledger.rows():
        if row.kind not in ("reservation", "refusal"):
            continue
        record = parse_record("site", row.kind, row.body)
        if isinstance(record, ReservationRecord):
            queries, reason = 1, ""
        elif isinstance(record, RefusalRecord):
            queries, reason = len(record.query_ids), record.reason
        else:
            continue
        time = f"{row.time_utc[:19]}Z"
        if found and not reason and (found[-1].time, found[-1].reason) == (time, ""):
            found[-1] = OwnAnswer(time, found[-1].queries + queries, "")
        else:
            found.append(OwnAnswer(time, queries, reason))
    return tuple(reversed(found[-MOST_ANSWERS:]))


def _command(site_dir: str, study: Study, *, ended: bool) -> str:
    word = "resume" if ended else "pause"
    return f"consilium site {word} {shlex.quote(study.name)} --site-dir {site_dir}"
