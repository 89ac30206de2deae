"""``consilium site …``: what a hospital runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from client.policy import load_site
from client.site.enrolment import SiteKit, create_site, join_site
from common.admission import JoinRequest
from common.config import Study, load_study
from common.errors import InvalidInput
from common.privacy.accounting import max_mu_squared
from common.privacy.consent import guess_sentence
from common.privacy.figures import delta_text, epsilon_text
from consilium.cli.train import train

site_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A hospital's side: train teachers, serve codes."
)
site_app.command("train")(train)

student_app = typer.Typer(no_args_is_help=True, help="The study's student at this site.")
site_app.add_typer(student_app, name="student")

SiteDir = Annotated[Path, typer.Option("--site-dir", help="The site's directory.")]


@site_app.command("init")
def init(
    kit: Annotated[Path, typer.Option(help="The startup kit the consortium sent.")],
    data: Annotated[Path, typer.Option(help="The site's own dataset, in MSD layout.")],
    site_dir: SiteDir,
    pool: Annotated[
        str | None, typer.Option(help="Stable name of the patient pool; the site's name by default.")
    ] = None,
) -> None:
    """Create a site's directory: its node key, its policy (site.toml), its copy of the study and its join request.

    It begins the books of a patient pool, once for its whole life: for another study of these patients, `site join`.
    Example: consilium site init --kit kit --data /data/north --site-dir /srv/consilium
    """
    opened = SiteKit.load(kit)
    request = create_site(site_dir, pool=pool or opened.site, data=data, kit=opened)
    typer.echo(f"{site_dir}: created for {opened.site}")
    _ask_to_be_admitted(site_dir, request, opened)


@site_app.command("join")
def join(
    kit: Annotated[Path, typer.Option(help="The startup kit of the other study.")],
    existing: Annotated[Path, typer.Option("--from", help="A directory of this site's: its pool, its books.")],
    site_dir: Annotated[
        Path | None, typer.Option("--site-dir", help="The new directory; studies/NAME beside the books by default.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the same patients lie labelled for this study; as before by default.")
    ] = None,
) -> None:
    """Take part in another study with the patients of a site that is here: one pool, one book for all of them.

    The new directory has its own node key, teachers and daemons; ledger, caps and withdrawals stay the pool's.
    Example: consilium site join --from /srv/consilium --kit kit
    """
    opened = SiteKit.load(kit)
    directory, request = join_site(site_dir, kit=opened, existing=existing, data=data)
    typer.echo(f"{directory}: created for {opened.site}, patient pool {request.pool}, books in {existing}")
    _ask_to_be_admitted(directory, request, opened)


@site_app.command("request")
def request(site_dir: SiteDir) -> None:
    """Write the site's join request anew: for a consortium that admitted it before its replies were signed.

    Example: consilium site request --site-dir /srv/consilium
    """
    from client.site.enrolment import new_request

    written = new_request(site_dir)
    typer.echo(f"send {site_dir / 'request.json'} to the consortium, and read them this over the telephone:")
    typer.echo(written.fingerprint)


def _ask_to_be_admitted(site_dir: Path, request: JoinRequest, kit: SiteKit) -> None:
    typer.echo(joining_text(load_study(kit.study_file), file=site_dir / "study.toml"))
    typer.echo(f"send {site_dir / 'request.json'} to the consortium, and read them this over the telephone:")
    typer.echo(request.fingerprint)


@site_app.command("cases")
def cases(
    site_dir: SiteDir,
    for_server: Annotated[
        bool, typer.Option("--for-server", help="Numbers alone, for the server's operator; site.toml must allow it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Which cases the last training left out, and why: for this site's own eyes.

    Exit code 6: --for-server, and `case_counts` of the table share in site.toml is not true.
    Example: consilium site cases --site-dir /srv/consilium
    """
    from client.data.cases import counts_for_server, load_cases

    if for_server:
        typer.echo(json.dumps(counts_for_server(site_dir)))
        return
    record = load_cases(site_dir)
    if as_json:
        problems = [{"case": problem.case, "reason": problem.reason} for problem in record.problems]
        facts = {"listed": record.listed, "patients": record.patients, "patient_identity": record.patient_identity}
        doubled = [{"case": pair.case, "same_as": pair.same_as} for pair in record.doubled]
        typer.echo(json.dumps({**facts, "left_out": problems, "doubled": doubled}))
        return
    typer.echo(f"{record.listed - record.left_out} of {record.listed} cases used, {record.patients} patients")
    typer.echo(record.patient_identity.sentence)
    for problem in record.problems:
        typer.echo(f"left out {problem.case}: {problem.reason}")
    for pair in record.doubled:
        typer.echo(f"warning: {pair.sentence}")


@site_app.command("doctor")
def doctor(
    site_dir: Annotated[
        Path | None, typer.Option("--site-dir", help="The site's directory: whether it can take part.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A dataset, in any layout: whether every case can be used.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="The study the data is for; else the site's copy.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="msd, nnunet, bids or table; found by itself.")] = None,
    label_map: Annotated[
        Path | None, typer.Option(help="TOML with the tables labels, channels and bids; else as in site.toml.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Directory for doctor.html, doctor.json and pictures of suspicious cases.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, without cases' names.")] = False,
) -> None:
    """Check what could stop this site, and say what to do about it. Changes nothing.

    With --site-dir: keys, network, proxy, certificate, clock, admission, disk, GPU memory. With --data: the layout, who
    counts as a patient, every case. The terminal names cases; the report and the JSON number them. Exit code 8: at
    least one check failed; each such line says what to do.
    Example: consilium site doctor --site-dir /srv/consilium --data /data/north --report doctor
    """
    from client.operations import doctor as findings_of
    from consilium.cli.doctor import look

    findings = look(site_dir, data=data, study=study, layout=layout, label_map=label_map, report=report)
    if report is not None:
        paths = findings_of.write_report(report, findings)
        typer.echo(f"report: {paths[1]}", err=True)
    typer.echo(findings_of.to_json(findings) if as_json else findings_of.to_text(findings))
    raise typer.Exit(findings_of.exit_code(findings))


@site_app.command("serve")
def serve(
    site_dir: SiteDir,
    socket: Annotated[Path | None, typer.Option(help="Unix socket; worker.sock in the site's directory.")] = None,
) -> None:
    """Serve codes until stopped: the long-lived teacher worker behind a Unix socket.

    Example: consilium site serve --site-dir /srv/consilium
    """
    from client.operations.serve import run_worker

    run_worker(site_dir, socket=socket or site_dir / "worker.sock")


@site_app.command("up")
def up(
    site_dir: SiteDir,
    only: Annotated[
        str | None, typer.Option(help="worker (data and models) or node (the network), for two users or containers.")
    ] = None,
) -> None:
    """Run the site's daemons in the foreground: the teacher worker and the SuperNode. What dies is started again.

    Example: consilium site up --site-dir /srv/consilium
    """
    from client.operations.daemons import PARTS, site_up

    if only is not None and only not in PARTS:
        raise InvalidInput("--only", value=only, limit=" or ".join(PARTS))
    config = load_site(site_dir) if only != "node" else None

    def ready() -> None:
        typer.echo(f"connected: {config.site} to {config.server.superlink}" if config and not only else "up", err=True)

    site_up(site_dir, parts=PARTS if only is None else (only,), on_ready=ready)


@site_app.command("status")
def status(
    site_dir: SiteDir,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """What this site has spent of its patient pool's budget, by its own ledger.

    Example: consilium site status --site-dir /srv/consilium
    """
    from client.data.cases import delta_warning, has_trained, load_cases
    from client.site.enrolment import site_status

    facts = site_status(site_dir)
    if as_json:  # fit to be handed over, so it does not tell how many patients the site has
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(status_text(facts))
    if has_trained(site_dir):
        warning = delta_warning(load_site(site_dir).caps, patients=load_cases(site_dir).patients)
        if warning is not None:
            typer.echo(f"warning: {warning}")
    for voter in empty_slots(site_dir):
        typer.echo(f"warning: voter {voter} has no teacher and votes zero; to fix: `consilium site train`", err=True)


def joining_text(study: Study, *, file: Path) -> str:
    """What a hospital is promised by the study it is about to ask to join, in lines for a person; ``file`` holds it."""
    privacy = study.privacy
    return "\n".join(
        [
            f"study {study.name} guarantees ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant}), "
            f"δ = {delta_text(privacy.delta)}, {privacy.protection}",
            guess_sentence(privacy.protection, max_mu_squared(privacy.accountant, privacy.budget), yours=True),
            f"all of it, before you send the request: `consilium study show {file} --for-site`",
        ]
    )


def empty_slots(site_dir: Path) -> tuple[int, ...]:
    """The voters for which the worker that started last found no teacher to load."""
    from client.site.books import read_books

    with read_books(load_site(site_dir)) as ledger:
        loaded = ledger.teachers()
    return () if loaded is None else tuple(voter for voter, (served, _) in enumerate(loaded.voters) if not served)


def status_text(facts: dict[str, Any]) -> str:
    """The site's standing in lines for a person; every ε with its accountant, δ, unit and relation."""
    spent = [
        f"  ε = {epsilon_text(found['epsilon'])} ({name}), δ = {delta_text(found['delta'])}, unit {found['unit']}, "
        f"relation {found['relation']}"
        for name, found in facts["spent"].items()
    ]
    studies = [f"  {study['name']} ({study['id'][:16]}…): {study['state']}" for study in facts["studies"]]
    return "\n".join(
        [
            f"site {facts['site']}, patient pool {facts['pool']}",
            f"spent of the pool's cap: {facts['share_spent']:.2%} of ε = {epsilon_text(facts['cap']['epsilon'])} "
            f"({facts['cap']['accountant']}), δ = {delta_text(facts['cap']['delta'])}",
            *spent,
            *(f"from row {stated['row']} on, {stated['sentence']}" for stated in facts["patient_identity"]),
            *training_lines(facts["trainings"]),
            f"queries accepted: {facts['queries_accepted']}, today {facts['queries_today']} of "
            f"{facts['queries_per_day']}; codes stored {facts['codes_stored']}, receipted {facts['receipted']}, "
            f"refusals {facts['refusals']}",
            "studies:",
            *(studies or ["  none"]),
            *([f"restored from an older copy: {facts['restored']} times"] if facts["restored"] else []),
            *(f"ALARM: {alarm}" for alarm in facts["alarms"]),
        ]
    )


def training_lines(trainings: dict[str, Any]) -> list[str]:
    """What the site's private trainings cost each patient, all composed; nothing where there is none."""
    if not trainings["count"]:
        return []
    head = f"trainings on record: {trainings['count']} ({', '.join(trainings['strategies'])})"
    guarantees = [found for found in trainings["guarantees"] if found is not None]
    if not guarantees:
        return [head, "  no patient-level ε: a teacher was trained without a guarantee"]
    return [head] + [
        f"  each patient: ε = {epsilon_text(found['epsilon'])} at δ = {delta_text(found['delta'])}, "
        f"unit {found['unit']}, relation {found['relation']} (all trainings composed)"
        for found in guarantees
    ]


StudyName = Annotated[str, typer.Argument(help="The study's name, id or the beginning of its id.")]


@site_app.command("pause")
def pause(study: StudyName, site_dir: SiteDir) -> None:
    """Veto: nothing leaves this site for a study until it is resumed. Holds at once, also for a running worker.

    Example: consilium site pause trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "pause")


@site_app.command("resume")
def resume(study: StudyName, site_dir: SiteDir) -> None:
    """End a pause: offers of the study are accepted again, within the site's caps.

    Example: consilium site resume trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "resume")


@site_app.command("withdraw")
def withdraw(study: StudyName, site_dir: SiteDir) -> None:
    """Veto for good: this site never answers the study again. What was released stays released and charged.

    Example: consilium site withdraw trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "withdraw")


@site_app.command("withdraw-patient")
def withdraw_patient(
    case: Annotated[str, typer.Argument(help="The case's name as the dataset lists it; it enters no ledger.")],
    site_dir: SiteDir,
) -> None:
    """Take a patient out: the slot is empty until a newcomer takes it, its voter silent until it is trained again.

    Example: consilium site withdraw-patient case_017 --site-dir /srv/consilium
    """
    from client.operations import staff_decisions as control

    done = control.withdraw_patient(site_dir, case)
    for place in done.places:
        if done.repeated:
            typer.echo(f"slot {place.slot} of voter {place.voter} was emptied before; nothing changed")
        else:
            typer.echo(f"slot {place.slot} of voter {place.voter} is empty; the voter is silent from now on")
    if len(done.directories) > 1:
        typer.echo(f"done for every study of the pool: {', '.join(map(str, done.directories))}")
    typer.echo("next: `consilium site train`, which trains this voter alone, then restart the worker")
    typer.echo(
        f"not undone: {done.releases} releases this site has accepted; they and models trained on them cannot be "
        "recalled. They stay protected by the study's guarantee. Both facts are in the site's ledger; remove the "
        "patient's files from the dataset yourself"
    )


@site_app.command("recover")
def recover(
    site_dir: SiteDir,
    own_ledger: Annotated[
        bool, typer.Option("--own-ledger", help="It is this site's ledger that was restored from an older copy.")
    ] = False,
    standing: Annotated[
        Path | None, typer.Option(help="The lost ledger's site-ledger.standing, where it is not beside the copy.")
    ] = None,
    charge_all: Annotated[
        bool, typer.Option("--charge-all", help="The standing is lost too: all that caps and budgets left is spent.")
    ] = False,
) -> None:
    """End an alarm, once a person has looked into it: the server's ledger was restored, or this site's own was.

    The server's: after it has re-entered this site's receipts. The site's own: what the copy forgot is charged, and
    every study is paused until `consilium site resume`; the server sends the lost receipts again by itself.

    Example: consilium site recover --site-dir /srv/consilium --own-ledger
    """
    from client.operations import staff_decisions as control

    if own_ledger:
        lost = control.recover_own(site_dir, standing=standing, charge_all=charge_all)
        typer.echo(f"charged for what the copy forgot: {lost.releases or 'an unknown number of'} queries")
        typer.echo("every study is paused: repeat vetoes and patients' withdrawals made since the copy, then resume")
        return
    if standing is not None or charge_all:
        raise InvalidInput("--standing and --charge-all", limit="together with --own-ledger")
    ended = control.end_alarm(site_dir)
    for ledger_id in ended:
        typer.echo(f"alarm ended for the server's ledger {ledger_id}; its next receipt must not fall short of yours")
    if not ended:
        typer.echo("no alarm stands")


@site_app.command("take-sealing-key")
def take_sealing_key(
    notice: Annotated[Path, typer.Argument(help="The server's notice, from `consilium ledger rotate-sealing-key`.")],
    site_dir: SiteDir,
) -> None:
    """Seal codes to the server's new key, if a signing key this site knows signed the notice.

    Example: consilium site take-sealing-key notice.json --site-dir /srv/consilium
    """
    from client.operations import staff_decisions as control
    from common.sealing_rotation import SealingNotice

    if control.take_sealing_key(site_dir, SealingNotice.load(notice)):
        typer.echo("site.toml names the new sealing key; restart the worker to use it")
    else:
        typer.echo("site.toml names that key already; nothing changed")


@site_app.command("heads")
def heads(
    site_dir: SiteDir,
    compare: Annotated[
        Path | None, typer.Option(help="Another site's receipts, as it wrote them with --out: is there a fork?")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write this site's receipts here, for another site.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """The newest heads of the server's ledger this site holds; compared with another site's, a fork shows.

    Exit code 5: the server showed the two sites different ledgers, or a receipt is not genuine.
    Example: consilium site heads --site-dir /srv/consilium --compare south.jsonl
    """
    from client.operations import staff_decisions as control
    from common.ledger.receipts import read_receipts
    from common.objects import write_atomically

    facts = control.heads(site_dir)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        server = facts["server"]
        assert isinstance(server, list)
        for head in server:
            typer.echo(f"server ledger {head['ledger_id']}: row {head['row']}, {head['hash']}")
        typer.echo(f"{sum(head['receipts'] for head in server)} receipts held")
    if out is not None:
        write_atomically(out, "".join(f"{line}\n" for line in control.receipt_lines(site_dir)).encode())
        typer.echo(f"{out}: this site's receipts", err=True)
    if compare is not None:
        count = control.compare_heads(site_dir, read_receipts(compare))
        typer.echo(f"OK: no fork between this site's receipts and the other's {count}", err=as_json)


@student_app.callback()
def _student() -> None:
    """The study's student at this site."""


@student_app.command("pull")
def pull(
    site_dir: SiteDir,
    out: Annotated[Path | None, typer.Option(help="Where to put it; student in the site's directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Fetch the study's student and prove it: signed, by hash, of this study, and true to this site's receipts.

    Exit code 5: the server signed what contradicts this site's receipts. Interrupted, run it again.
    Example: consilium site student pull --site-dir /srv/consilium
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from client.teachers.student import pull as pull_student

    columns = (TextColumn("student"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("student", total=None)
        pulled = pull_student(site_dir, out=out, on_bytes=lambda count: bars.update(task, completed=count))
    statement = pulled.statement
    if as_json:
        facts = {
            "bundle": str(pulled.bundle),
            "sha256": statement.bundle,
            "study": statement.study_id,
            "ledger_row": statement.head.seq,
            "ledger_hash": statement.head.hash,
            "queries": statement.queries,
            "receipts": pulled.receipts,
            "guarantee": pulled.guarantee.to_json(),
        }
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(f"{pulled.bundle}: student {statement.bundle[:16]}…, {pulled.guarantee}, {statement.queries} queries")
    typer.echo(
        f"signed by the server at row {statement.head.seq} of its ledger; it continues the {pulled.receipts} receipts "
        "this site holds of the study"
        if pulled.receipts
        else "signed by the server; this site holds no receipt of the study to check it against"
    )
    typer.echo("next: `consilium site evaluate`")


@site_app.command("evaluate")
def evaluate(
    site_dir: SiteDir,
    data: Annotated[
        Path | None, typer.Option(help="Labelled cases, in any layout; by default all of this site's own.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A bundle; by default the student that was pulled.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Score each file's own voxels instead of the study's grid.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 10 where something speaks against using the student.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Score the student on this site's own labelled cases. Figures and pictures stay here; nothing is sent.

    Beside it stand the public start (or the codec's mean shape) and this site's teachers on the same cases: a student
    below public data, or one that lost a structure, is said plainly.
    Exit code 10: --strict, and the student is worse than what public data alone gives, or a structure is gone.
    Example: consilium site evaluate --site-dir /srv/consilium --data /data/unseen
    """
    from datetime import UTC, datetime

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from client.teachers.evaluation import PARTS, WORSE, table
    from client.teachers.evaluation import evaluate as evaluate_student

    torch.set_num_threads(1)
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("cases", total=None)
        result, folder = evaluate_student(
            site_dir,
            now=datetime.now(UTC),
            data=data,
            model=model,
            native=native,
            on_case=lambda done, total: bars.update(task, completed=done, total=total),
        )
    if as_json:
        typer.echo(json.dumps({**result.to_json(), "folder": str(folder)}, indent=1))
    else:
        typer.echo(table(result))
        if any(score.part == PARTS[0] for score in result.scores):
            typer.echo(
                f"cases '{PARTS[0]}' trained this site's teachers. The student saw none of them, only what was "
                "released of all teachers' votes; for cases nobody used, give --data"
            )
        typer.echo(
            f"{folder}: evaluation.html, evaluation.json, cases.csv, best.png, worst.png; they stay at this site"
        )
    if strict and result.alarms:
        raise typer.Exit(WORSE)


def _decide(site_dir: Path, study: str, decision: str) -> None:
    from client.operations import staff_decisions as control

    study_id = control.decide(site_dir, study, decision)
    typer.echo(f"{decision} recorded for study {study_id[:16]}…; it holds at once")
