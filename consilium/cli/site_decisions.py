"""Defines ``consilium site consent``, ``pause``, ``withdraw``, ``disclose`` and other decisions of a hospital."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.config import load_study
from common.errors import InvalidInput
from common.plain import plain
from common.wording import many
from consilium.cli.options import AsJson, SiteDir, new_file
from consilium.cli.say import ask_yes_no, json_text, say

if TYPE_CHECKING:
    from client.operations.staff_decisions import Withdrawal
    from client.policy import SiteConfig
    from common.config import Study

StudyName = Annotated[str, typer.Argument(help="The study's name, id or the beginning of its id.")]


OnlyStudy = Annotated[
    str,
    typer.Argument(help="The study's name, id or the beginning of its id; may be left out if there is only one study."),
]


def consent(
    site_dir: SiteDir,
    by: Annotated[
        str, typer.Option(help="Name of the person who consents for the hospital; it stays in the site's own ledger.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Record consent without asking, because the sheet was read before.")
    ] = False,
) -> None:
    """Show the consent sheet, ask for consent, and record who consented and when.

    Before consent is recorded nothing is trained, no daemon starts, and nothing is answered or charged. `site pause`
    suspends consent later.
    Example: consilium site consent --site-dir /srv/consilium --by "A. Noether, data protection"
    """
    from client.operations import staff_decisions as control
    from client.policy import load_site
    from client.site.books import joined_study

    control.check_name(by)
    config = load_site(site_dir)
    study = joined_study(config)
    sheet = consent_sheet(study, patients=patients_of(config, study))
    say(sheet)
    if not yes and (not sys.stdin.isatty() or not typer.confirm(plain(f"{by} consents to study {study.name}"))):
        raise InvalidInput(
            "consent was not given, so nothing was recorded and nothing is charged",
            remedy="to decline, tell the consortium; to consent later, run `consilium site consent` again at a "
            "terminal, or with --yes once the sheet was read",
        )
    control.consent(site_dir, by=by, sheet=sheet)
    say(f"recorded: {by} consented to study {study.name}; next: `consilium site train`, `consilium site up`")


def pause(site_dir: SiteDir, study: OnlyStudy = "") -> None:
    """Pause a study: nothing leaves this site for it until it is resumed. Takes effect at once.

    Example: consilium site pause trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "pause")


def resume(site_dir: SiteDir, study: OnlyStudy = "") -> None:
    """End a pause: offers of the study are accepted again, within the site's caps.

    Example: consilium site resume trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "resume")


ForGood = Annotated[bool, typer.Option("--yes", help="Withdraw without asking, although it cannot be undone.")]


def withdraw(
    study: StudyName,
    site_dir: SiteDir,
    yes: ForGood = False,
) -> None:
    """Leave a study permanently: this site never answers it again. Past releases stay released and charged.

    The command asks for confirmation, because leaving cannot be undone; without a terminal --yes is required.
    Example: consilium site withdraw trial --site-dir /srv/consilium
    """
    if not yes:
        _ask_for_good(study)
    _decide(site_dir, study, "withdraw")


def withdraw_patient(
    case: Annotated[
        str, typer.Argument(help="Name of the patient, or of one of the patient's cases; no ledger holds it.")
    ],
    site_dir: SiteDir,
    yes: ForGood = False,
) -> None:
    """Withdraw a patient from all studies permanently. The patient's voter answers again once it is retrained.

    The command shows what it will do and asks for confirmation, because a withdrawal cannot be undone; without a
    terminal --yes is required.
    Example: consilium site withdraw-patient case_017 --site-dir /srv/consilium
    """
    from client.operations import staff_decisions as control
    from client.policy import load_site
    from client.site.deals import patient_named

    given, case = case, patient_named(load_site(site_dir), case)
    if case != given:
        say(plain(f"{given} is of patient {case}"))
    if not yes:
        _ask_about_patient(case, control.foresee_withdrawal(site_dir, case))
    done = control.withdraw_patient(site_dir, case)
    for place in done.places:
        if done.repeated:
            say(f"slot {place.slot} of voter {place.voter} was emptied before; nothing changed")
        else:
            say(f"slot {place.slot} of voter {place.voter} is empty; the voter does not answer from now on")
    if len(done.directories) > 1:
        say(plain(f"done for every study of the pool: {_studies(done.directories)}"))
    for bundle in done.adapted:
        say(
            f"{bundle} may have been trained on the patient: delete it and its copies; `consilium site adapt` makes "
            "another without the patient"
        )
    say("next: `consilium site train`, which trains this voter alone, then restart the worker")
    say(
        "kept: the voter's weights, until that training replaces them; evaluations made before, which may name the "
        "patient, until you delete their folders in evaluation/"
    )
    say(
        f"not undone: {many(done.releases, 'release')} that this site accepted; such releases and models trained on "
        "them cannot be recalled. They stay protected by the study's guarantee. The site's ledger records the "
        "withdrawal; remove the patient's files from the dataset yourself"
    )


def recover(
    site_dir: SiteDir,
    own_ledger: Annotated[
        bool, typer.Option("--own-ledger", help="The restored ledger is this site's own, not the server's.")
    ] = False,
    standing: Annotated[
        Path | None,
        typer.Option(help="The lost ledger's standing file, site-ledger.standing, if it is not beside the copy."),
    ] = None,
    study: Annotated[
        list[Path] | None,
        typer.Option(help="The file of a study whose directory was deleted, if the copy lacks the study; repeatable."),
    ] = None,
    charge_all: Annotated[
        bool,
        typer.Option(
            "--charge-all",
            help="If the standing file is lost too: count all that remains of caps and budgets as spent.",
        ),
    ] = False,
    server_restored: Annotated[
        bool,
        typer.Option(
            "--server-restored",
            help="The server's ledger was restored from a backup and recovered; accept it also without an alarm.",
        ),
    ] = False,
) -> None:
    """End the alarm that follows when the server's ledger or this site's own was restored from a backup.

    Run it after a person has examined the cause.
    If the server's ledger was restored, run this after the server has entered this site's receipts again. If this
    site's own ledger was restored (--own-ledger), the charges that the older copy lacks are made again, and every study
    is paused until `consilium site resume`; the server then sends the lost receipts again.

    Example: consilium site recover --site-dir /srv/consilium --own-ledger
    """
    from client.operations import staff_decisions as control

    if own_ledger and server_restored:
        raise InvalidInput("--own-ledger and --server-restored", limit="one of them, then the other")
    if own_ledger:
        studies = [load_study(path) for path in study or ()]
        lost = control.recover_own(site_dir, standing=standing, charge_all=charge_all, studies=studies)
        charged = "all that was left" if charge_all else many(lost.releases, "query", "queries")
        say(f"charged for the copy's missing rows: {charged}")
        if charge_all:
            say(
                "every study is paused: repeat the pauses and the withdrawals of patients and from studies that were "
                "decided after the copy was made, then resume"
            )
        else:
            say(
                "withdrawals in the standing file are recorded again; every study is paused: repeat pauses, then resume"
            )
        return
    if standing is not None or study or charge_all:
        raise InvalidInput("--standing, --study and --charge-all", limit="only together with --own-ledger")
    ended = control.end_alarm(site_dir, server_restored=server_restored)
    for ledger in ended:
        then = "its next receipt must cover all of this site's receipts"
        if "/" in ledger:  # the ledger's name in heads, of which two histories were signed
            then = "two histories of it were signed; this site countersigns it anew"
        say(f"alarm ended for {'' if '/' in ledger else 'the server ledger '}{ledger}; {then}")
    if not ended:
        say("there is no alarm; if the server's ledger was restored and recovered, add --server-restored")


def take_sealing_key(
    notice: Annotated[Path, typer.Argument(help="The server's notice, from `consilium ledger rotate-sealing-key`.")],
    site_dir: SiteDir,
) -> None:
    """Accept the server's new key for encrypting codes. The notice must be signed by a signing key in site.toml.

    Example: consilium site take-sealing-key notice.json --site-dir /srv/consilium
    """
    from client.operations import staff_decisions as control
    from common.sealing_rotation import SealingNotice

    if control.take_sealing_key(site_dir, SealingNotice.load(notice)):
        say("site.toml names the new sealing key; restart the worker to use it")
    else:
        say("site.toml names that key already; nothing changed")


def heads(
    site_dir: SiteDir,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Another site's receipts, written with --out; checks whether the server showed both the same ledger."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New file for this site's receipts, for another site.", callback=new_file)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest row of each server ledger in this site's receipts, or compare the receipts with another site's.

    Exit code 5: the server showed the two sites different ledgers, or a receipt is not genuine.
    Example: consilium site heads --site-dir /srv/consilium --compare south.jsonl
    """
    from client.operations import staff_decisions as control
    from common.ledger.receipts import read_receipts
    from common.objects import write_atomically

    facts = control.heads(site_dir)
    if as_json:
        say(json_text(facts))
    else:
        server = facts["server"]
        assert isinstance(server, list)
        for head in server:
            say(f"server ledger {head['ledger_id']}: row {head['row']}, {head['hash']}")
        say(f"{many(sum(head['receipts'] for head in server), 'receipt')} held")
    if out is not None:
        write_atomically(out, "".join(f"{line}\n" for line in control.receipt_lines(site_dir)).encode())
        say(f"{out}: this site's receipts", err=True)
    if compare is not None:
        count = control.compare_heads(site_dir, read_receipts(compare))
        say(f"OK: no fork between this site's receipts and the other's {count}", err=as_json)


def _ask_for_good(study: str) -> None:
    """Ask at a terminal whether to withdraw from a study permanently; raise InvalidInput unless the answer is yes."""
    asked = (
        f"withdraw from {study} for good? This site can never answer it again. (`consilium site pause` can be ended)"
    )
    if not sys.stdin.isatty() or not typer.confirm(plain(asked)):
        raise InvalidInput(
            "withdrawal was not confirmed",
            limit="the answer y, because withdrawing cannot be undone",
            remedy="answer y, give --yes, or use `consilium site pause`",
        )


def _studies(directories: tuple[Path, ...]) -> str:
    """Return the study's name with each directory, or the directory alone if its study cannot be read."""
    from client.policy import load_site

    def name(directory: Path) -> str:
        config = load_site(directory)
        try:
            return f"{config.load_study().name} (in {directory})"
        except InvalidInput:
            return str(directory)

    return ", ".join(map(name, directories))


def _ask_about_patient(case: str, foreseen: Withdrawal) -> None:
    """Show what the withdrawal of a patient will do, and ask; raise InvalidInput unless the answer is yes.

    A patient who was withdrawn before is not asked about, because nothing would change.
    """
    if foreseen.repeated:
        return
    say(plain(f"withdrawing {case} does this:"))
    for place in foreseen.places:
        say(
            f"  slot {place.slot} of voter {place.voter} becomes empty; the voter does not answer until "
            "`consilium site train` has trained it again"
        )
    say(plain(f"  it holds in every study of the pool: {_studies(foreseen.directories)}"))
    say("  all codes that this site has stored are deleted, and so are unfinished trainings of `consilium site adapt`")
    for bundle in foreseen.adapted:
        say(f"  {bundle} may have been trained on the patient; you must delete it yourself")
    say(f"  the {many(foreseen.releases, 'release')} that this site accepted cannot be recalled")
    if not sys.stdin.isatty() or not typer.confirm(plain(f"withdraw {case} for good?")):
        raise InvalidInput(
            "the patient's withdrawal was not confirmed",
            limit="the answer y, because withdrawing a patient cannot be undone",
            remedy="answer y, or give --yes",
        )


def _decide(site_dir: Path, study: str, decision: str) -> None:
    from client.operations import staff_decisions as control

    study_id = control.decide(site_dir, study, decision)
    say(f"{decision} recorded for study {study_id[:16]}…; it takes effect at once")


def disclose(
    draw: Annotated[str, typer.Argument(help="The draw: at least the first twelve digits of its id.")],
    site_dir: SiteDir,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="The auditor's key: 64 hex digits, or the file auditor.json that the auditor sent you."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The new file for the auditor; disclosure-SITE-DRAW.json by default.", callback=new_file),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Ask no question. Compare the fingerprint of the auditor's key, and read the cost, before you use it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Disclose one draw (attempt at a sealed sum) to an auditor, who determines which hospital spoiled or distorted it.

    The auditor learns this site's code with its own noise share for every query of that draw, and nothing else. The
    file is encrypted to the auditor's key. The site's ledger records the auditor's key, and the cost to the patient
    pool if the auditor published the code. Compare the key's fingerprint with the auditor first.
    Example: consilium site disclose 3f9a1c04b7d2 --to auditor.json --site-dir /srv/consilium
    """
    from client.policy import load_site
    from client.site.disclose import disclose as disclose_draw
    from client.site.disclose import disclosure_cost
    from common.disclosure import auditor_fingerprint

    auditor = _auditor_key(to)
    shown = disclosure_cost(site_dir, draw)
    target = out or Path(f"disclosure-{load_site(site_dir).site.replace('/', '-')}-{shown.roster[:12]}.json")
    say(
        f"draw {shown.roster[:16]}: your code with your share of the noise, of "
        f"{many(shown.queries, 'query', 'queries')}, to the auditor with the key "
        f"{auditor_fingerprint(auditor)}. While the auditor keeps it secret, nothing more is released. If "
        f"the auditor published it, your patient pool would have spent {shown.if_told} at most",
        err=as_json,
    )
    question = "Have you compared this fingerprint with the auditor, and may they have the code?"
    if not yes and not ask_yes_no(question, err=as_json):
        raise InvalidInput(
            "the disclosure was not confirmed, so nothing was disclosed",
            limit="the answer y",
            remedy="compare the fingerprint with the auditor; then answer y at a terminal, or give --yes",
        )
    disclose_draw(site_dir, shown.roster, auditor=auditor, out=target, now=datetime.now(UTC))
    if as_json:
        facts = {"draw": shown.roster, "auditor": auditor, "queries": shown.queries, "file": str(target)}
        say(json_text({**facts, "if_told": shown.if_told.to_json()}))
        return
    say(f"{target}: send it to the auditor; the site's ledger records the disclosure")


def _auditor_key(given: str) -> str:
    """Return an auditor's disclosure key as 64 hex digits; accept the digits or the path of ``auditor.json``."""
    if len(given) == 64 and not set(given) - set("0123456789abcdef"):
        return given
    from consilium.audit.auditor import read_auditor

    path = Path(given)
    if not path.is_file():
        raise InvalidInput(
            "--to",
            value=given[:80],
            limit="64 hex digits, or an existing file auditor.json of the auditor",
            remedy="check the path; the auditor makes the file with `consilium dispute keys`",
        )
    return read_auditor(path).sealing_key


def consent_sheet(study: Study, *, patients: int | None) -> str:
    """Return the consent sheet for a hospital whose patients were counted from its dataset.

    Args:
        study: The study.
        patients: Number of the hospital's patients; None if it is unknown.

    Returns:
        The text.
    """
    from server.study import consent_text

    counted = "not known: the dataset cannot be read now" if patients is None else "by your dataset"
    return consent_text.consent_sheet(study, patients=patients, counted=counted)


def patients_of(config: SiteConfig, study: Study) -> int | None:
    """Count the site's patients from the dataset's index, without withdrawn ones; None if that cannot be known."""
    from client.data.layouts import indexed
    from client.site.deals import read_withdrawn

    try:
        dataset = indexed(config.path(config.data), study.data, config.dataset)
        patients = {dataset.patient_of(case.id) for case in dataset.labelled}
        gone, _ = read_withdrawn(config, patients)
    except (InvalidInput, OSError):
        return None
    return len(patients - gone)
