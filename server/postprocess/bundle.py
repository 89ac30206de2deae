"""Exports the student as a MONAI bundle with its privacy cost, and publishes a signed statement about the bundle.

``pipeline.finish`` and `consilium student export` call it. A study without a stored answer is refused, and so is a
ledger that may be an older copy. If bundle and ledger are unchanged, the published statement is not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.bundle_archive import to_archive
from common.clock import utc_now
from common.config import DataConfig, Study
from common.data.input_ranges import InputRanges, input_ranges
from common.data.volume import volume_from_bytes
from common.errors import InvalidInput
from common.events import EventLog
from common.ledger.rows import Link, body_digest, format_time
from common.models.bundle_facts import BundlePrivacy
from common.models.student_bundle import export_bundle
from common.objects import write_json
from common.privacy.calibration import noise_multiplier
from common.privacy.mechanism import AccountantName
from common.student_statement import StudentStatement
from common.study_facts import StudyFacts
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.postprocess.labels import labels_in
from server.postprocess.networks import load_student
from server.postprocess.scores import figures, score_networks
from server.protocols.stored_labels import StoredLabels
from server.study.gate import publish_statement, verdicts_on
from server.study.read_facts import facts_in
from server.study.workspace import Workspace


def export_student(
    workspace: Workspace, *, events: EventLog, on_case: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Export the student to ``bundle/`` with its privacy cost and its scores, and publish it.

    The bundle's archive is stored in the object store, which hospitals read. A signed statement about the bundle is
    stored beside the objects. The scores of the student and its controls on the validation set are also written to
    ``report.json``.

    Args:
        workspace: The study.
        events: The event log.
        on_case: Called with the number of cases scored so far and the total.

    Raises:
        InvalidInput: If there is no stored answer or no student.
        LedgerCorrupt: If the ledger may be an older copy.
    """
    study, model = workspace.study(), load_student(workspace.study(), workspace.student_dir)
    scores, record = score_networks(workspace, on_case=on_case)
    for name, one in scores.items():
        if math.isfinite(one.mean):
            events.emit("network-scored", name=name, dice=one.mean, cases=len(one.cases))
    with Ledger.open(workspace.ledger_file) as ledger:
        ledger.check_newest()
        answers = ledger.answers(study.id)
        if not answers:
            raise InvalidInput(
                "number of stored answers", value=0, limit="at least one", remedy="run `consilium study run` first"
            )
        found, head = facts_in(ledger, workspace), ledger.head()
        facts = privacy_of(study, found, answers, head=head.hash)
        links = tuple(
            Link(time_utc=row.time_utc, kind=row.kind, body_sha256=body_digest(row.body))
            for row in ledger.rows()
            if row.seq <= head.seq
        )
    files = export_bundle(
        workspace.bundle_dir,
        study=study,
        model=model,
        privacy=facts,
        dice=figures(scores) if scores else None,
        inputs=ranges_seen(workspace),
    )
    archive = to_archive({name: (workspace.bundle_dir / name).read_bytes() for name in files})
    bundle = workspace.objects.put(archive)
    statement = StudentStatement(
        study_id=study.id,
        bundle=bundle,
        size=len(archive),
        queries=found.answers,
        mu_squared=found.spending.mu_squared,
        head=head,
        links=links,
        created_utc=format_time(utc_now()),
        verdicts=verdicts_on(workspace, bundle),
    )
    publish_statement(workspace, statement)
    if record:  # last, so that an export that is killed leaves no scores of another student beside the bundle
        write_json(workspace.scores_file, record)
    events.emit("bundle-exported", sha256=statement.bundle)


def ranges_seen(workspace: Workspace) -> InputRanges:
    """Return the ranges of the public volumes that the student is trained on, and the mean size of each structure.

    Args:
        workspace: The study.

    Returns:
        The ranges of intensity and extent over the public volumes of the queries and the images of the public pairs.
        The size of a structure, in mm³, is its mean over the released labels.
    """
    volumes = (*workspace.volumes(), *(files.image for files in workspace.paired()))
    data = workspace.study().data
    found = input_ranges(volume_from_bytes(workspace.objects.get(volume), data) for volume in volumes)
    return replace(found, structures_mm3=_sizes(labels_in(workspace), data))


def _sizes(labels: StoredLabels, data: DataConfig) -> tuple[float, ...]:
    """Return the mean volume in mm³ of each structure over the labels; empty if there are none."""
    box_mm3 = math.prod(n * spacing for n, spacing in zip(data.grid, data.spacing_mm, strict=True))
    shares = []
    for probabilities in labels.values():
        found = probabilities.argmax(axis=0)
        shares.append([float((found == value).mean()) for value in range(1, len(data.labels))])
    if not shares:
        return ()
    return tuple(round(box_mm3 * sum(column) / len(shares), 1) for column in zip(*shares, strict=True))


def privacy_of(study: Study, facts: StudyFacts, answers: Sequence[StoredAnswer], *, head: str) -> BundlePrivacy:
    """Return the privacy cost of the student's labels, as the bundle states it.

    Args:
        study: The study.
        facts: The study's spending and number of answers.
        answers: Its stored answers, at least one.
        head: Hash of the ledger's signed head.

    Returns:
        The bundle's figures: ε by accountant, δ, unit and relation.
    """
    protection, paper, spending = study.privacy.protection, AccountantName.PAPER, facts.spending
    return BundlePrivacy(
        budget_epsilon=study.privacy.epsilon,
        epsilon_exact=spending.by(AccountantName.EXACT).epsilon,
        epsilon_rdp=spending.by(AccountantName.RDP).epsilon,
        delta=study.privacy.delta,
        protection=protection,
        accountant=study.privacy.accountant,
        queries=facts.answers,
        noise_multiplier=min(noise_multiplier(answer.query.mechanism, protection) for answer in answers),
        sites=spending.largest_roster,
        voters_per_site=study.privacy.voters_per_site,
        ledger_head=head,
        study=study.id,
        codec=answers[0].query.codec,
        epsilon_paper=spending.by(paper).epsilon if study.privacy.accountant is paper else None,
    )
