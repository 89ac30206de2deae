"""``consilium site pause``, ``withdraw-patient``, ``recover`` … : what a hospital's staff decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import AsJson, SiteDir

StudyName = Annotated[str, typer.Argument(help="The study's name, id or the beginning of its id.")]


def pause(study: StudyName, site_dir: SiteDir) -> None:
    """Veto: nothing leaves this site for a study until it is resumed. Holds at once, also for a running worker.

    Example: consilium site pause trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "pause")


def resume(study: StudyName, site_dir: SiteDir) -> None:
    """End a pause: offers of the study are accepted again, within the site's caps.

    Example: consilium site resume trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "resume")


def withdraw(study: StudyName, site_dir: SiteDir) -> None:
    """Veto for good: this site never answers the study again. What was released stays released and charged.

    Example: consilium site withdraw trial --site-dir /srv/consilium
    """
    _decide(site_dir, study, "withdraw")


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


def heads(
    site_dir: SiteDir,
    compare: Annotated[
        Path | None, typer.Option(help="Another site's receipts, as it wrote them with --out: is there a fork?")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write this site's receipts here, for another site.")] = None,
    as_json: AsJson = False,
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


def _decide(site_dir: Path, study: str, decision: str) -> None:
    from client.operations import staff_decisions as control

    study_id = control.decide(site_dir, study, decision)
    typer.echo(f"{decision} recorded for study {study_id[:16]}…; it holds at once")
