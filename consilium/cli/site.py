"""Defines ``consilium site …``: the commands of a hospital."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import Study, load_study
from common.errors import ALARM_REMEDY, ALARM_STOPS, InvalidInput
from common.plain import joined, plain
from common.privacy.figures import delta_text, epsilon_text
from common.wording import many
from consilium.cli.options import LOG_TO, AsJson, SiteDir, check_port, counting, folder_to_write
from consilium.cli.say import json_text, say
from consilium.cli.security_log import site_log
from consilium.cli.site_adapt import adapt
from consilium.cli.site_decisions import (
    consent,
    consent_sheet,
    disclose,
    heads,
    pause,
    recover,
    resume,
    take_sealing_key,
    withdraw,
    withdraw_patient,
)
from consilium.cli.site_peers import peers
from consilium.cli.site_student import evaluate, student_app
from consilium.cli.site_teacher import teacher_app
from consilium.cli.train import train

if TYPE_CHECKING:
    from client.site.enrolment import SiteKit
    from common.admission import JoinRequest
    from common.site_facts import SiteFacts


site_app = typer.Typer(no_args_is_help=True, add_completion=False)
site_app.command("train")(train)


@site_app.command("dashboard")
def dashboard(
    site_dir: SiteDir,
    data: Annotated[
        Path | None, typer.Option(help="Labelled cases to show, in any layout; by default all of this site's own.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 8051,
) -> None:
    """Serve this hospital's own page: consent, budget, peers, answers, alarms, and its networks side by side.

    Only browsers on this machine can open it, at the printed address, which contains a key that is new at each start.
    The page changes nothing; it shows the command that pauses the study. Ctrl-C ends it.
    Example: consilium site dashboard --site-dir /srv/consilium
    """
    from client.operations.own_page import SitesOwnPage
    from server.dashboard.hospital import create_hospital_app
    from server.dashboard.serve import run_app

    check_port("127.0.0.1", port)
    page = SitesOwnPage(site_dir, sheet=lambda study, patients: consent_sheet(study, patients=patients), data=data)
    key = secrets.token_urlsafe(24)
    say(f"this site's page: http://localhost:{port}/?key={key}")
    sys.stdout.flush()
    run_app(create_hospital_app(page, key=key), host="127.0.0.1", port=port)


@site_app.command("init")
def init(
    kit: Annotated[Path, typer.Option(help="The startup kit that the consortium sent.")],
    data: Annotated[Path, typer.Option(help="The folder of the site's own dataset, in any layout.")],
    site_dir: SiteDir,
    pool: Annotated[
        str | None, typer.Option(help="Stable name of the patient pool; the site's name by default.")
    ] = None,
    forget_charges_of: Annotated[
        Path | None,
        typer.Option(
            help="Only if an earlier site init was refused because these patients' ledger was deleted: the directory "
            "that the refusal names. The deleted ledger's charges are then no longer counted, so the patients may be "
            "charged a whole budget again."
        ),
    ] = None,
) -> None:
    """Create a site's directory: its node key, its policy (site.toml), its copy of the study and its join request.

    It also creates the patient pool's ledger, which serves all its studies. For another study of these patients use
    `site join`.
    Example: consilium site init --kit kit --data /data/north --site-dir /srv/consilium
    """
    from client.site.enrolment import SiteKit, create_site

    opened = SiteKit.load(kit)
    request = create_site(site_dir, pool=pool or opened.facts.site, data=data, kit=opened, forget=forget_charges_of)
    say(f"{site_dir}: created for {opened.facts.site}")
    say(
        f"if {opened.facts.site} is not your hospital's name, this is another hospital's kit: send nothing, and ask "
        "the consortium for yours"
    )
    _ask_to_be_admitted(site_dir, request, opened)


@site_app.command("join")
def join(
    kit: Annotated[Path, typer.Option(help="The startup kit of the other study.")],
    existing: Annotated[
        Path,
        typer.Option("--from", help="A directory of this site whose patient pool and ledger the new study shares."),
    ],
    site_dir: Annotated[
        Path | None, typer.Option("--site-dir", help="The new directory; by default studies/NAME beside the ledger.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the same patients labelled for this study; by default the folder used before."),
    ] = None,
) -> None:
    """Take part in another study with the same patients: all studies of a patient pool share one ledger.

    The new directory has its own node key, teachers and daemons; ledger, caps and withdrawals belong to the pool.
    Example: consilium site join --from /srv/consilium --kit kit
    """
    from client.site.enrolment import SiteKit, join_site

    opened = SiteKit.load(kit)
    directory, request = join_site(site_dir, kit=opened, existing=existing, data=data)
    say(f"{directory}: created for {opened.facts.site}, patient pool {request.pool}, ledger in {existing}")
    _ask_to_be_admitted(directory, request, opened)


@site_app.command("request")
def request(site_dir: SiteDir) -> None:
    """Write the site's join request again, for a consortium that admitted the site with an earlier version.

    Example: consilium site request --site-dir /srv/consilium
    """
    from client.site.enrolment import new_request

    _say_request(site_dir, new_request(site_dir))


def _ask_to_be_admitted(site_dir: Path, request: JoinRequest, kit: SiteKit) -> None:
    from client.data.cases import check_index
    from client.policy import load_site

    study = load_study(kit.study_file)
    try:
        check_index(load_site(site_dir), study.data)
    except InvalidInput as error:  # can be fixed later; the request does not change
        say(f"warning: {error}", err=True)
        say(f"if this is the wrong folder, correct data in {site_dir / 'site.toml'}", err=True)
    say(_joining_text(study, file=site_dir / "study.toml"))
    _say_request(site_dir, request)


def _say_request(site_dir: Path, request: JoinRequest) -> None:
    say(f"send {site_dir / 'request.json'} to the consortium, and read the request's fingerprint to them by telephone:")
    say(request.fingerprint)


@site_app.command("cases")
def cases(
    site_dir: SiteDir,
    for_server: Annotated[
        bool,
        typer.Option("--for-server", help="Print only counts, for the server's operator; site.toml must allow it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the cases that the last training did not use, and why. Only for staff of this site.

    Exit code 6: --for-server was given, but `case_counts` in the table `share` of site.toml is not true.
    Example: consilium site cases --site-dir /srv/consilium
    """
    from client.data.cases import counts_for_server, load_cases
    from common.data.dataset import unlabelled_lines

    if for_server:
        say(json.dumps(counts_for_server(site_dir)))
        return
    record = load_cases(site_dir)
    if as_json:
        problems, doubled = ([one.to_json() for one in found] for found in (record.problems, record.doubled))
        facts = {"listed": record.listed, "patients": record.patients, "patient_identity": record.patient_identity}
        say(json.dumps({**facts, "left_out": problems, "doubled": doubled, "unlabelled": record.unlabelled}))
        return
    say(f"{record.listed - record.left_out} of {record.listed} cases used, {many(record.patients, 'patient')}")
    say(record.patient_identity.sentence)
    for problem in record.problems:
        say(plain(f"left out {problem.case}: {problem.reason}"))
    for line in unlabelled_lines(record.unlabelled):
        say(plain(line))
    for pair in record.doubled:
        say(f"warning: {pair.sentence}")


@site_app.command("doctor")
def doctor(
    site_dir: Annotated[
        Path | None, typer.Option("--site-dir", help="The site's directory, to check whether the site can take part.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A dataset in any layout, to check whether every case can be used.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="The study file to check the data for; by default the site's copy.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Layout of --data, such as msd; by default it is recognised.")
    ] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(help="TOML file with tables labels, channels and bids that replace those of site.toml."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory for doctor.html, doctor.json and pictures of suspicious cases.", callback=folder_to_write
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, without cases' names.")] = False,
) -> None:
    """Check what could stop this site from taking part, and print what to do about it. Changes nothing.

    --site-dir checks keys, network, proxy, certificate, clock, admission, disk and GPU memory. --data checks the
    layout, how patients are identified, and every case. The terminal names cases; the report and the JSON number them.
    Exit code 8: at least one check failed; its line says what to do.
    Example: consilium site doctor --site-dir /srv/consilium --data /data/north --report doctor
    """
    from client.operations import findings as findings_of
    from client.operations.doctor import diagnose

    with counting("cases", show=data is not None) as on_case:
        findings = diagnose(
            site_dir, data, study=study, layout=layout, label_map=label_map, report=report, on_case=on_case
        )
    if report is not None:
        paths = findings_of.write_report(report, findings)
        say(f"report: {paths[1]}", err=True)
    say(findings_of.to_json(findings) if as_json else findings_of.to_text(findings))
    raise typer.Exit(findings_of.exit_code(findings))


@site_app.command("serve")
def serve(
    site_dir: SiteDir,
    socket: Annotated[
        Path | None, typer.Option(help="Path of the Unix socket; by default worker.sock in the site's directory.")
    ] = None,
) -> None:
    """Run the teacher worker, which answers requests for codes on a Unix socket, until it is stopped.

    Example: consilium site serve --site-dir /srv/consilium
    """
    from client.operations.serve import run_worker

    run_worker(site_dir, socket=socket or site_dir / "worker.sock")


@site_app.command("up")
def up(
    site_dir: SiteDir,
    only: Annotated[
        str | None,
        typer.Option(
            help="Run one part only: worker (data and models) or node (the network), to give each its own "
            "user or container."
        ),
    ] = None,
    every_study: Annotated[
        bool, typer.Option("--all", help="Also run the daemons of every other study that shares this pool's ledger.")
    ] = False,
    log_to: Annotated[list[str] | None, LOG_TO] = None,
) -> None:
    """Run the site's daemons in the foreground: the teacher worker and the SuperNode. One that dies is restarted.

    It first runs the checks of `site doctor` and prints what is wrong and what to do.
    Example: consilium site up --site-dir /srv/consilium
    """
    from client.operations.daemons import PARTS, site_up
    from client.operations.findings import to_text
    from client.operations.readiness import check_newest, check_site, check_teachers
    from client.operations.staff_decisions import check_consent
    from client.policy import load_site
    from client.site.books import site_directories

    if only is not None and only not in PARTS:
        raise InvalidInput("--only", value=only, limit=" or ".join(PARTS))
    config = load_site(site_dir) if only != "node" else None
    others: tuple[Path, ...] = ()
    if every_study:
        if config is None or only is not None:
            raise InvalidInput(
                "--all", limit="not together with --only", remedy="run the parts of each directory separately"
            )
        others = tuple(one for one in site_directories(config.books_dir) if one.resolve() != site_dir.resolve())
    if config is not None:
        for directory in (site_dir, *others):
            check_newest(directory)
            check_consent(directory)
            check_teachers(load_site(directory))

    def check() -> None:
        if wrong := [finding for finding in check_site(site_dir, starting=True) if not finding.ok]:
            say(to_text(wrong), err=True)

    def ready() -> None:
        say(f"connected: {config.site} to {config.server.superlink}" if config and not only else "up", err=True)

    if config is not None:
        threading.Thread(target=check, daemon=True).start()  # an unreachable server must not delay the start
    parts = PARTS if only is None else (only,)
    site_up(site_dir, parts=parts, others=others, on_ready=ready, log_to=log_to or ())


@site_app.command("status")
def status(
    site_dir: SiteDir,
    as_json: AsJson = False,
) -> None:
    """Show the state of the site's daemons, and the spent part of the patient pool's budget by its own ledger.

    Example: consilium site status --site-dir /srv/consilium
    """
    from client.data.cases import delta_warning, has_trained, load_cases
    from client.operations.daemons import daemon_standings, no_daemons
    from client.policy import load_site
    from client.site.status import facts_of, signed_status, site_status

    facts, daemons = facts_of(site_dir), daemon_standings(site_dir)
    said = site_status(site_dir, facts)
    if as_json:  # may leave the site, so it omits patients and withdrawals
        said["daemons"] = {one.daemon: one.state for one in daemons}
        say(json_text(signed_status(site_dir, said)))
        return
    say(status_text(facts, peers=said.get("peers")))
    say(
        joined(["daemons:", *(f"  {one.line}" for one in daemons)] if daemons else [f"daemons: {no_daemons(site_dir)}"])
    )
    if has_trained(site_dir):
        cases = load_cases(site_dir)
        used = f"{cases.listed - cases.left_out} of {many(cases.listed, 'case')}"
        say(f"newest training: {used} used, {many(cases.patients, 'patient')}")
        warning = delta_warning(load_site(site_dir).caps, patients=cases.patients)
        if warning is not None:
            say(f"warning: {warning}")
    for text, remedy in facts.zero_votes:
        say(f"warning: {text}; to fix: {remedy}", err=True)
    for voter in facts.silent:
        say(f"warning: voter {voter} has no teacher and votes zero; to fix: `consilium site train`", err=True)


def _joining_text(study: Study, *, file: Path) -> str:
    """Return a text that tells a person what a study guarantees to a hospital that joins it."""
    from common.privacy.accounting import max_mu_squared
    from common.privacy.consent import guess_sentence
    from common.study_mechanism import pool_sentence

    privacy = study.privacy
    limit = max_mu_squared(privacy.accountant, privacy.budget)
    return joined(
        [
            f"study {study.name} guarantees ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant}), "
            f"δ = {delta_text(privacy.delta)}, {privacy.protection}",
            guess_sentence(privacy.protection, limit, colluders=privacy.sealed_colluders, yours=True),
            pool_sentence(study, yours=True),
            "read the whole consent sheet (who sees what, how long it lasts, how to withdraw) before you send the "
            f"request: `consilium study show {shlex.quote(str(file))} --for-site`",
        ]
    )


def status_text(facts: SiteFacts, *, peers: dict[str, Any] | None = None) -> str:
    """Return a site's figures as text. Every ε stands with its accountant, δ, unit and relation."""
    least, trainings = facts.least, facts.trainings
    studies = [
        line
        for one in facts.studies
        for line in (f"  {one.name} ({one.id[:16]}…): {one.words}", *(f"    {consent}" for consent in one.consents))
    ]
    return joined(
        [
            f"site {facts.site}, patient pool {facts.pool}",
            f"the pool's cap: {facts.cap}; spent of it{', at least' if facts.doubt else ''}:",
            *(f"  {one}" for one in facts.by.values()),
            f"  which is {least}{facts.share:.2%} of the cap's Σμ²: that share adds up query by query, ε does not",
            *facts.identity_lines,
            *(["trainings on record, of all voters:"] if trainings.count else []),
            *(f"  {line}" for line in trainings.each if trainings.count),
            *(f"  each patient: {line}" for line in facts.patient_lines),
            f"queries accepted: {facts.accepted}, charged today {facts.today} of {facts.per_day}; "
            f"codes stored {facts.codes}, receipted {facts.receipted}, refusals {facts.refused}",
            f"patients withdrawn: {least}{facts.withdrawn}"
            f"{', counted once for each assignment to voters they were in' if facts.withdrawn else ''}",
            "studies, as far as this ledger knows:" if facts.doubt else "studies:",
            *(studies or ["  none"]),
            *([f"peers confirmed: {peers['confirmed']}"] if peers else []),
            *(f"warning: {problem}" for problem in (peers or {}).get("problems", ())),
            *([f"restored from an older copy: {many(facts.restored, 'time')}"] if facts.restored else []),
            *(f"ALARM: {alarm}" for alarm in facts.alarms),
            *([ALARM_STOPS] if facts.doubt else []),
            *([f"to fix: {ALARM_REMEDY}"] if facts.alarms else []),
        ]
    )


site_app.command("log")(site_log)
site_app.command("consent")(consent)
site_app.command("pause")(pause)
site_app.command("resume")(resume)
site_app.command("withdraw")(withdraw)
site_app.command("withdraw-patient")(withdraw_patient)
site_app.command("recover")(recover)
site_app.command("take-sealing-key")(take_sealing_key)
site_app.command("heads")(heads)
site_app.command("evaluate")(evaluate)
site_app.command("adapt")(adapt)
site_app.command("peers")(peers)
site_app.command("disclose")(disclose)
site_app.add_typer(student_app, name="student")
site_app.add_typer(teacher_app, name="teacher")
