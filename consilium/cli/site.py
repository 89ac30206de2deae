"""``consilium site …``: what a hospital runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import Study, load_study
from common.errors import InvalidInput
from common.privacy.figures import delta_text, epsilon_text
from consilium.cli.options import AsJson, SiteDir, counting
from consilium.cli.site_decisions import heads, pause, recover, resume, take_sealing_key, withdraw, withdraw_patient
from consilium.cli.site_peers import peers
from consilium.cli.site_student import evaluate, student_app
from consilium.cli.site_teacher import teacher_app
from consilium.cli.train import train

if TYPE_CHECKING:
    from client.site.enrolment import SiteKit
    from common.admission import JoinRequest


site_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A hospital's side: train teachers, serve codes."
)
site_app.command("train")(train)


@site_app.command("init")
def init(
    kit: Annotated[Path, typer.Option(help="The startup kit the consortium sent.")],
    data: Annotated[Path, typer.Option(help="The folder of the site's own dataset, in any layout.")],
    site_dir: SiteDir,
    pool: Annotated[
        str | None, typer.Option(help="Stable name of the patient pool; the site's name by default.")
    ] = None,
) -> None:
    """Create a site's directory: its node key, its policy (site.toml), its copy of the study and its join request.

    It begins the books of a patient pool, once for its whole life: for another study of these patients, `site join`.
    Example: consilium site init --kit kit --data /data/north --site-dir /srv/consilium
    """
    from client.site.enrolment import SiteKit, create_site

    opened = SiteKit.load(kit)
    request = create_site(site_dir, pool=pool or opened.facts.site, data=data, kit=opened)
    typer.echo(f"{site_dir}: created for {opened.facts.site}")
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
    from client.site.enrolment import SiteKit, join_site

    opened = SiteKit.load(kit)
    directory, request = join_site(site_dir, kit=opened, existing=existing, data=data)
    typer.echo(f"{directory}: created for {opened.facts.site}, patient pool {request.pool}, books in {existing}")
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
    from client.data.cases import check_index
    from client.policy import load_site

    study = load_study(kit.study_file)
    try:
        check_index(load_site(site_dir), study.data)
    except InvalidInput as error:  # may be put right later: the request is the same
        typer.echo(f"warning: {error}", err=True)
    typer.echo(joining_text(study, file=site_dir / "study.toml"))
    typer.echo(f"send {site_dir / 'request.json'} to the consortium, and read them this over the telephone:")
    typer.echo(request.fingerprint)


@site_app.command("cases")
def cases(
    site_dir: SiteDir,
    for_server: Annotated[
        bool, typer.Option("--for-server", help="Numbers alone, for the server's operator; site.toml must allow it.")
    ] = False,
    as_json: AsJson = False,
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
        problems, doubled = ([one.to_json() for one in found] for found in (record.problems, record.doubled))
        facts = {"listed": record.listed, "patients": record.patients, "patient_identity": record.patient_identity}
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
    layout: Annotated[str | None, typer.Option(help="msd, nnunet, bids, table or brats; found by itself.")] = None,
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
    from client.operations import findings as findings_of
    from client.operations.doctor import DoctorOptions, look

    options = DoctorOptions(site_dir, data, study, layout, label_map, report)
    with counting("cases", show=data is not None) as on_case:
        findings = look(options, on_case=on_case)
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

    The doctor's first look comes with it: what it finds wrong is said at once, with what to do.
    Example: consilium site up --site-dir /srv/consilium
    """
    from client.operations.daemons import PARTS, site_up
    from client.operations.findings import to_text
    from client.operations.readiness import check_site
    from client.policy import load_site

    if only is not None and only not in PARTS:
        raise InvalidInput("--only", value=only, limit=" or ".join(PARTS))
    config = load_site(site_dir) if only != "node" else None

    def look() -> None:
        if wrong := [finding for finding in check_site(site_dir, starting=True) if not finding.ok]:
            typer.echo(to_text(wrong), err=True)

    def ready() -> None:
        typer.echo(f"connected: {config.site} to {config.server.superlink}" if config and not only else "up", err=True)

    if config is not None:
        threading.Thread(target=look, daemon=True).start()  # an absent server takes its time, and keeps nobody waiting
    site_up(site_dir, parts=PARTS if only is None else (only,), on_ready=ready)


@site_app.command("status")
def status(
    site_dir: SiteDir,
    as_json: AsJson = False,
) -> None:
    """How the site's daemons stand, and what it has spent of its patient pool's budget, by its own ledger.

    Example: consilium site status --site-dir /srv/consilium
    """
    from client.data.cases import delta_warning, has_trained, load_cases
    from client.operations.daemons import daemon_standings
    from client.policy import load_site
    from client.site.books import empty_slots
    from client.site.enrolment import signed_status, site_status

    facts, daemons = site_status(site_dir), daemon_standings(site_dir)
    if as_json:  # fit to be handed over, so it does not tell how many patients the site has
        said = {**facts, "daemons": {one.daemon: one.state for one in daemons}}
        typer.echo(json.dumps(signed_status(site_dir, said), indent=1))
        return
    typer.echo(status_text(facts))
    typer.echo(
        "\n".join(["daemons:", *(f"  {one.line}" for one in daemons)] if daemons else ["daemons: never started"])
    )
    if has_trained(site_dir):
        warning = delta_warning(load_site(site_dir).caps, patients=load_cases(site_dir).patients)
        if warning is not None:
            typer.echo(f"warning: {warning}")
    for voter in empty_slots(load_site(site_dir)):
        typer.echo(f"warning: voter {voter} has no teacher and votes zero; to fix: `consilium site train`", err=True)


def joining_text(study: Study, *, file: Path) -> str:
    """What a hospital is promised by the study it is about to ask to join, in lines for a person; ``file`` holds it."""
    from common.privacy.accounting import max_mu_squared
    from common.privacy.consent import guess_sentence

    privacy = study.privacy
    limit = max_mu_squared(privacy.accountant, privacy.budget)
    return "\n".join(
        [
            f"study {study.name} guarantees ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant}), "
            f"δ = {delta_text(privacy.delta)}, {privacy.protection}",
            guess_sentence(privacy.protection, limit, colluders=privacy.sealed_colluders, yours=True),
            f"all of it, before you send the request: `consilium study show {file} --for-site`",
        ]
    )


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
            *([f"peers confirmed: {facts['peers']['confirmed']}"] if "peers" in facts else []),
            *(f"warning: {problem}" for problem in facts.get("peers", {}).get("problems", ())),
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


site_app.command("pause")(pause)
site_app.command("resume")(resume)
site_app.command("withdraw")(withdraw)
site_app.command("withdraw-patient")(withdraw_patient)
site_app.command("recover")(recover)
site_app.command("take-sealing-key")(take_sealing_key)
site_app.command("heads")(heads)
site_app.command("evaluate")(evaluate)
site_app.command("peers")(peers)
site_app.add_typer(student_app, name="student")
site_app.add_typer(teacher_app, name="teacher")
