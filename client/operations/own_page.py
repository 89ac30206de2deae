"""Reads what a hospital's own page shows from the site's directory: books, peers, alarms, networks, cases.

Reads only: nothing is written, charged, sent or fetched. A case is predicted in memory when somebody asks for it.
Refuses a case that is not there or cannot be used.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from client.adapting.folder import FOLDER, NAME
from client.data.layouts import indexed
from client.ledger.site_ledger import SiteLedger
from client.policy import load_site
from client.site.books import joined_study, read_books
from client.site.deals import present_teachers
from client.site.peers import PeersView, PeerTrust
from client.site.peers import look as look_at_peers
from client.teachers.pulled_student import STUDENT_DIR
from common.config import Study
from common.data.dataset import Case, Dataset
from common.errors import InvalidInput
from common.hospital_page import (
    HospitalFacts,
    OwnAlarm,
    OwnAnswer,
    OwnNetwork,
    OwnPage,
    OwnPeer,
    OwnStudy,
    ShownCase,
)
from common.ledger.records import ConsentRecord, NoteRecord, RefusalRecord, ReservationRecord, parse_record
from common.peers import fingerprint
from common.privacy.accounting import guarantee, max_mu_squared
from common.witness.memory import FOLDER as WITNESSES
from common.witness.memory import HeadMemory

MOST_ANSWERS = 50
"""Batches on the page; the ledger has them all."""

MOST_CASES = 200

KEPT_CASES = 4
"""Number of cases, those shown last, whose predictions stay in memory. A large case takes tens of megabytes."""

Sheet = Callable[[Study, int | None], str]
"""Returns the consent sheet of a study; the number is that of the site's patients, None if it is not known."""

TrainingLines = Callable[[dict[str, object]], list[str]]
"""Returns sentences about private trainings, from a summary of the site's ledger."""

STUDENT, OWN, ADAPTED = "student", "own", "adapted"
_SAID = {
    STUDENT: "the study's student, as it was pulled",
    OWN: "the mean of this site's own teachers",
    ADAPTED: "adapted at this site: it has seen patients and must not leave",
}
_READ = "`consilium site status`, then docs/ledger.md; nothing is answered until a person has looked into it"


class SitesOwnPage(OwnPage):
    """The page of the site in one directory.

    The dataset's index and the predictions that are in memory are not read again: start the page anew after the data or
    a network changed.

    Args:
        site_dir: The site's directory.
        sheet: Gives the consent sheet's text.
        trainings: Says what private trainings cost patients beside the releases.
    """

    def __init__(self, site_dir: Path, *, sheet: Sheet, trainings: TrainingLines) -> None:
        self._directory, self._sheet, self._patients_lines = site_dir, sheet, trainings
        self._config = load_site(site_dir)
        self._study = joined_study(self._config)

    def facts(self) -> HospitalFacts:
        config, study = self._config, self._study
        view = look_at_peers(self._directory)
        with read_books(config) as ledger:
            caps = config.caps
            spent = ledger.guarantees()[caps.accountant]
            limit = max_mu_squared(caps.accountant, caps.budget)
            summary = ledger.summary(present=present_teachers(config, ledger))
            studies = tuple(
                OwnStudy(
                    name=one["name"],
                    state=one["state"],
                    releases=(used := ledger.spent(one["id"])).releases,
                    epsilon=guarantee(used.mu_squared, caps.budget, caps.protection, caps.accountant).epsilon,
                    share=float(used.mu_squared / limit),
                    here=one["id"] == study.id,
                )
                for one in summary["studies"]  # type: ignore[attr-defined]
            )
            accepted, refused = int(str(summary["queries_accepted"])), int(str(summary["refusals"]))
            contradictions = (*ledger.alarms(), *HeadMemory(config.books_dir / WITNESSES).conflicts())
            alarms = _alarms(contradictions, view)
            state = next((one.state for one in studies if one.here), "")
            return HospitalFacts(
                site=config.site,
                pool=ledger.pool,
                study=study.name,
                state=_state(state, accepted, stopped=bool(contradictions)),
                sheet=self._sheet(study, self._patients),
                consented=_consents(ledger, study),
                epsilon=spent.epsilon,
                cap=caps.budget.epsilon,
                share=float(ledger.spent().mu_squared / limit),
                accountant=str(caps.accountant),
                delta=caps.budget.delta,
                unit=str(caps.protection.unit),
                relation=str(caps.protection.relation),
                doubt=ledger.doubt() or "",
                today=int(str(summary["queries_today"])),
                per_day=int(str(summary["queries_per_day"])),
                studies=studies,
                trainings=tuple(self._patients_lines(summary)),
                answers=_answers(ledger),
                accepted=accepted,
                refused=refused,
                sealed=view.sealed,
                own_fingerprint=fingerprint(view.own.key),
                peers=tuple(
                    OwnPeer(one.peer.site, one.fingerprint, one.standing.value, one.standing is PeerTrust.CONFIRMED)
                    for one in view.peers
                ),
                alarms=alarms,
                networks=tuple(OwnNetwork(name, _SAID[name]) for name in self._networks()),
                pause=_command(self._directory, study, ended=state == "pause"),
                cases=len(self._cases) if self._networks() else 0,
            )

    def case(self, number: int) -> ShownCase:
        if not 0 <= number < len(self._cases):
            limit = f"1 to {len(self._cases)}"
            raise InvalidInput("case", value=number + 1, limit=limit, remedy="`consilium site doctor --data`")
        return self._shown(number)

    @cached_property
    def _dataset(self) -> Dataset | None:
        """The site's dataset by its index; None if it cannot be read."""
        try:
            return indexed(self._config.path(self._config.data), self._study.data, self._config.dataset)
        except (InvalidInput, OSError):
            return None

    @property
    def _cases(self) -> tuple[Case, ...]:
        """The labelled cases that can be shown: at most :data:`MOST_CASES`."""
        return () if self._dataset is None else self._dataset.labelled[:MOST_CASES]

    @property
    def _patients(self) -> int | None:
        """Number of patients with a labelled case; None if the dataset cannot be read."""
        found = self._dataset
        return None if found is None else len({found.patient_of(case.id) for case in found.labelled})

    def _networks(self) -> dict[str, Path]:
        """Where networks that can be shown side by side lie."""
        places = {
            STUDENT: self._directory / STUDENT_DIR / "bundle",
            OWN: self._directory / "teachers",
            ADAPTED: self._directory / FOLDER / f"{NAME}-{self._config.site}",
        }
        there = {name: path for name, path in places.items() if path.is_dir()}
        return there if {STUDENT, ADAPTED} & there.keys() else {}

    @lru_cache(maxsize=KEPT_CASES)  # noqa: B019  the page lives as long as its process
    def _shown(self, number: int) -> ShownCase:
        from client.teachers.teacher import Teachers  # torch
        from common.data.volume import load_example
        from common.metrics import dice_per_class, mean_present
        from common.models.bundle import open_bundle
        from common.models.fit import predict

        data = self._study.data.student
        example = load_example(self._cases[number], data)
        image = example.volume.image
        arrays = {"image": _grey(image[0]), "label": example.label}
        for name, path in self._networks().items():
            if name != OWN:
                bundle = open_bundle(path)
                arrays[name] = predict(bundle.network, image, patch=bundle.patch).argmax(axis=0).astype(np.uint8)
            elif self._study.data.finer == 1:  # teachers see the coarser grid else
                votes = [one for one in Teachers.load(path, data=self._study.data).predict(image) if one is not None]
                if votes:
                    arrays[name] = np.mean(votes, axis=0).argmax(axis=0).astype(np.uint8)
        found = {
            name: mean_present(dice_per_class(drawn, example.label, data.members))
            for name, drawn in arrays.items()
            if name in _SAID
        }
        dice = {name: None if np.isnan(value) else float(value) for name, value in found.items()}
        return ShownCase(arrays, data.labels, data.spacing_mm, dice)


def _state(state: str, accepted: int, *, stopped: bool) -> str:
    if stopped:
        return "alarm"
    named = {"pause": "paused", "withdraw": "withdrawn", "spent": "spent"}
    return named.get(state, "answering" if accepted else "joined")


def _alarms(contradictions: Sequence[str], view: PeersView) -> tuple[OwnAlarm, ...]:
    """Contradictions first, then what is wrong with peers; each with its remedy."""
    found = [OwnAlarm(*_remedied(text), stops=True) for text in contradictions]
    return (*found, *(OwnAlarm(one.text, one.remedy, one.stops) for one in view.problems()))


def _remedied(text: str) -> tuple[str, str]:
    said, _, remedy = text.partition("; to fix: ")
    return said, remedy or _READ


def _consents(ledger: SiteLedger, study: Study) -> tuple[str, ...]:
    found = []
    for row in ledger.rows():
        if row.kind not in ("consent", "note"):
            continue
        record = parse_record("site", row.kind, row.body)
        if isinstance(record, NoteRecord) and f"consented to study {study.id}" in record.text:
            found.append(f"{row.time_utc[:16].replace('T', ' ')} UTC: {record.text.partition(' consented')[0]}")
        elif isinstance(record, ConsentRecord) and record.study_id == study.id:
            found.append(f"{row.time_utc[:16].replace('T', ' ')} UTC: the study is on record")
    return tuple(found)


def _answers(ledger: SiteLedger) -> tuple[OwnAnswer, ...]:
    """The newest batches: rows of one second and one reason together."""
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


def _command(directory: Path, study: Study, *, ended: bool) -> str:
    word = "resume" if ended else "pause"
    return f"consilium site {word} {shlex.quote(study.name)} --site-dir {shlex.quote(str(directory.resolve()))}"


def _grey(image: np.ndarray) -> np.ndarray:
    """A channel as bytes: its central 99 % over the range."""
    low, high = np.percentile(image, (0.5, 99.5))
    scaled = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    result: np.ndarray = np.round(255 * scaled).astype(np.uint8)
    return result
