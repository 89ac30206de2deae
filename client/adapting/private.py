"""Adapts the student with differential privacy for the hospital's patients; the network may leave the hospital.

`consilium site adapt --strategy` calls it. Steps:

1. Check that the pulled student is the one the server signed.
2. Charge the training in the site's ledger.
3. Train all patients together with a private strategy, beginning from the student. Patients have random slots, which
   they keep until a withdrawal, as for a teacher (:mod:`client.records.patient_deal`). If slots followed the order of
   names, exchanging one patient would move other patients to other positions in their chunks.
4. Record the network, and write its bundle.

A training's guarantee holds for any initial weights, so the privacy costs of the student and of the training compose
(:mod:`common.privacy.patient_guarantee` adds up a patient's total). No setting is chosen by scores on patients, since
that would cost privacy. It refuses a student that was not pulled or is not the signed one, and patients whose budget
was charged for a private training already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client.adapting.adapt import Progress, recipe_of, student_of
from client.adapting.material import own_patients
from client.adapting.networks import as_increments
from client.policy import SiteConfig, load_site
from client.records.adapted_folder import FOLDER, LEAVES, private_folder, private_slots
from client.site.books import writing_teachers
from client.teachers.pulled_student import STUDENT_DIR, check_pulled, signed_student
from client.training.command import PrivateOptions
from client.training.private.charge import charge_adapted, record_adapted
from client.training.private.settings import STRATEGIES, PrivateSettings
from client.training.private.teachers import check_network
from client.training.site import scans_in_slots, seated
from client.training.task import VoterReport, VoterTask
from client.training.voter import is_finished, train_voter
from common.canonical import digest
from common.config import Study
from common.data.dataset import Dataset, PatientIdentity, Problem
from common.errors import InvalidInput
from common.models.bundle_configs import inference, metadata_of
from common.models.bundle_facts import BundlePrivacy, LibraryVersions
from common.models.student_bundle import (
    INFERENCE,
    LICENCE,
    METADATA,
    PRIVACY,
    README,
    WEIGHTS,
    as_json,
    write_bundle,
)
from common.plain import RESEARCH_ONLY
from common.privacy.consent import warn_about
from common.privacy.mechanism import Unit
from common.reading import lenient_json
from common.wording import many


@dataclass(frozen=True, slots=True)
class PrivatelyAdapted:
    """A network that may leave the hospital.

    Attributes:
        bundle: The bundle's folder.
        strategy: The private strategy.
        report: The training's report, with its guarantees.
        student: The student's own privacy cost, in words.
        identity: What counts as one patient of the guarantees.
        problems: Cases left out.
    """

    bundle: Path
    strategy: str
    report: VoterReport
    student: str
    identity: PatientIdentity
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "schema": 1,
            "bundle": str(self.bundle),
            "strategy": self.strategy,
            "guarantees": list(self.report.guarantees),
            "student": self.student,
            "patients": self.report.trained_on,
            "patient_identity": str(self.identity),
            "steps": self.report.steps,
            "problems": [problem.to_json() for problem in self.problems],
        }

    def to_text(self) -> str:
        """Return the result as text."""
        lines = [f"{self.bundle}: this network may leave the hospital, with these guarantees:"]
        lines += [f"  for each patient of this training: {one}" for one in self.report.guarantees]
        lines += [f"  {self.identity.sentence}"]
        lines += [f"  of the student that it began from: {self.student}"]
        lines += [f"{many(len(self.problems), 'case')} left out"] if self.problems else []
        return "\n".join(
            [*lines, "the charge is in the site's ledger; `consilium site status` shows each patient's total"]
        )


def adapt_privately(
    site_dir: Path,
    private: PrivateOptions,
    *,
    again: bool,
    out: Path | None,
    progress: Progress,
    on_warning: Callable[[str], None],
) -> PrivatelyAdapted:
    """Train a network that may leave the hospital, beginning from the pulled student, and charge the training.

    Args:
        site_dir: The site's directory.
        private: The strategy and the budget of the training.
        again: True to train and charge again patients who were already charged for a private training.
        out: Folder into which the bundle's folder is written; by default in the site's directory.
        progress: Opens the progress display.
        on_warning: Called before the charge with each warning: δ is not small compared with 1 / patients, or one scan
            occurs under two patients.

    Returns:
        The bundle and its guarantees.

    Raises:
        InvalidInput: If the student, the patients, the strategy or the output folder is refused, or the folder holds
            the network of another training. This happens before any charge.
        Refused: If another training or a withdrawal is in progress at this site, or the verdicts of the hospitals do
            not release the student.
    """
    settings = private.settings(begun=True)
    if settings is None:
        raise InvalidInput("private strategy", value=private.strategy, limit=", ".join(STRATEGIES))
    config = load_site(site_dir)
    study = config.load_study()
    target = (out or site_dir / FOLDER) / f"{private.strategy}-{LEAVES}-{config.site}"
    if target.exists() and not _is_ours(target):
        raise InvalidInput(
            "folder of the adapted network holds something else", value=str(target), remedy="choose another --out"
        )
    folder = site_dir / STUDENT_DIR / "bundle"
    _, files = signed_student(site_dir)
    cost = BundlePrivacy.from_json(lenient_json(files[PRIVACY]))
    check_pulled(site_dir)  # this network may leave the hospital, which a student that is held back may not
    bundle = student_of(folder, study)
    recipe = recipe_of(bundle, study)
    check_network(recipe, settings, study.data.student)
    with writing_teachers({site_dir, config.books_dir}):
        found = own_patients(config, study)
        slots_file = private_slots(site_dir)
        slots_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        slots = seated(found.dataset, found.scans, slots_file, voters=1)
        task = replace(
            found.task(study, private_folder(site_dir) / private.strategy),
            patients=scans_in_slots(slots, found.scans, voter=0),
            recipe=recipe,
            trainer=private.strategy,
            deal=_deal(config),
            private=settings,
            start=folder / WEIGHTS,
            site=site_dir,
            leaves=True,
        )
        if target.exists() and not is_finished(task):
            raise InvalidInput(
                "this folder holds the finished network of another private training",
                value=str(target),
                remedy="choose another folder with --out, and add --again: patients are charged for each training",
            )
        for warning in _warnings(found.dataset, task, settings):
            on_warning(f"warning: {warning}")
        task.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        charge_adapted(site_dir, task, again=again, identity=found.dataset.patient_identity)
        with progress(task.steps) as show:
            outcome = train_voter(task, on_step=as_increments(show))
        record_adapted(site_dir, task)
        identity = found.dataset.patient_identity
        result = PrivatelyAdapted(target, private.strategy, outcome.report, cost.sentence(), identity, outcome.problems)
        _write(target, task, result, study, config.site)
    return result


def _warnings(dataset: Dataset, task: VoterTask, settings: PrivateSettings) -> list[str]:
    """Return the reasons why the training's guarantee may protect a person less than it seems."""
    large = warn_about(settings.delta, unit=Unit.PATIENT, units=task.training_slots)
    return [*([] if large is None else [large]), *(pair.sentence for pair in dataset.doubled)]


def _deal(config: SiteConfig) -> str:
    """Return the id under which the ledger records that this training uses all patients of the pool."""
    return digest("deal-of-adapted", {"pool": config.pool})


def _is_ours(directory: Path) -> bool:
    try:
        return bool(lenient_json((directory / PRIVACY).read_text(encoding="utf-8"))["may_leave"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(target: Path, task: VoterTask, result: PrivatelyAdapted, study: Study, site: str) -> None:
    guarantees = "; ".join(result.report.guarantees)
    statement = (
        f"Trained on patients of {site} with {task.trainer}, with this guarantee for each of them: {guarantees}. "
        f"Here, {result.identity.sentence}. The training began from the student of the study {study.name}, whose own "
        f"guarantee is: {result.student}. For a patient who took part in both, the two compose."
    )
    facts = {
        "may_leave": True,
        "has_seen_patients": True,
        "statement": statement,
        "site": site,
        "strategy": task.trainer,
        "guarantees": list(result.report.guarantees),
        "student": result.student,
        "study": study.id,
    }
    files = {
        METADATA: as_json(
            metadata_of(
                study,
                description=statement,
                owner=site,
                source=f"patients of {site}, and the student of the study {study.name}",
                dice={},
                libraries=LibraryVersions.here(),
                inputs=None,
            )
        ),
        INFERENCE: as_json(inference(study, task.recipe)),
        PRIVACY: as_json(facts),
        WEIGHTS: (task.directory / "weights.pt").read_bytes(),
        README: f"# {site}: adapted privately from the student of {study.name}\n\n{statement}\n\n"
        f"{RESEARCH_ONLY}\n".encode(),
        LICENCE: f"{statement}\n\nNo licence of the weights is granted here. They come without warranty of any kind.\n"
        "".encode(),
    }
    write_bundle(target, files)
