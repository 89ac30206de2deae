"""Defines ``consilium dispute …``: an auditor finds which hospital spoiled or distorted a sealed sum."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidInput
from common.plain import joined
from common.reading import naming_file
from common.wording import many
from consilium.cli.options import AsJson, StudyDir, new_file, read_file
from consilium.cli.say import json_text, say

if TYPE_CHECKING:
    from consilium.audit.dispute import Judgement

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Find out, through an auditor that the hospitals choose, who spoiled or distorted a draw of a sealed sum.",
)

BLAMED = 11
"""Exit code if a finding is against a hospital."""

Keys = Annotated[Path, typer.Option("--keys", help="Folder with the auditor's keys, from `consilium dispute keys`.")]


@app.command("keys")
def keys(folder: Annotated[Path, typer.Argument(help="New folder for the auditor's keys.")]) -> None:
    """Make an auditor's keys. auditor.json is for the hospitals; all other files stay with the auditor.

    Example: consilium dispute keys auditor
    """
    from common.disclosure import auditor_fingerprint
    from consilium.audit.auditor import PUBLIC, create_auditor

    made = create_auditor(folder)
    say(f"{folder / PUBLIC}: send it to every hospital")
    say(f"read out to each of them by telephone: {auditor_fingerprint(made.sealing_key)}")


@app.command("evidence")
def evidence(
    directory: StudyDir,
    draw: Annotated[
        str | None,
        typer.Argument(
            help="The draw (attempt at a sealed sum): at least twelve digits of its id. Without it all draws "
            "are listed."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New file for the auditor; evidence-ID.json by default, with the draw's id.", callback=new_file
        ),
    ] = None,
) -> None:
    """List a study's draws (attempts at a sealed sum), or write one draw's signed masked codes and its sites' keys.

    Both files are for the auditor. The list of keys, with -peers in its name, has revoked sites too.

    Example: consilium dispute evidence trial 3f9a1c04b7d2 --out draw.json
    """
    from common.objects import check_new, write_atomically
    from common.peers import write_peers
    from server.study.evidence import draws, evidence_of, peers_of
    from server.study.workspace import Workspace

    workspace = Workspace(directory)
    if draw is None:
        say(joined(draws(workspace)) or "no draw of a sealed sum was made in this study")
        return
    found = evidence_of(workspace, draw)
    target = out or Path(f"evidence-{found.roster.id[:12]}.json")
    keys = target.with_name(f"{target.stem}-peers.json")
    for path in (target, keys):
        check_new(path)
    write_peers(keys, peers_of(workspace, found))
    write_atomically(target, found.render(), mode=0o600)
    say(
        f"{target}: draw {found.roster.id[:16]} of {many(len(found.queries), 'query', 'queries')}, signed masked codes "
        f"of {len(found.sites)} of {len(found.roster.members)} sites"
    )
    say(f"{keys}: the identity keys of these sites; the auditor gets both files")
    say(
        f"next: each of {', '.join(found.roster.sites)} decides on `consilium site disclose {found.roster.id[:12]} "
        "--to auditor.json`"
    )


@app.command("judge")
def judge(
    evidence: Annotated[Path, typer.Argument(help="The evidence of the draw, from the consortium.")],
    disclosures: Annotated[list[Path], typer.Argument(help="The hospitals' disclosures, one file each.")],
    folder: Keys,
    peers: Annotated[
        Path, typer.Option(help="The hospitals' identity keys: the list that `consilium dispute evidence` wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The new file for the signed judgement.", callback=new_file)],
    as_json: AsJson = False,
) -> None:
    """Judge for each hospital of a draw whether its noisy code could be an honest hospital's, and sign the judgement.

    A draw is one attempt at a sealed sum. Compare the printed fingerprints with the hospitals: the judgement is about
    the owners of these keys.
    Exit code 11: a finding is against a hospital.
    Example: consilium dispute judge draw.json disclosure-* --keys auditor --peers draw-peers.json --out judged.json
    """
    from common.disclosure import SealedDisclosure
    from common.evidence import DrawEvidence
    from common.ledger.keys import public_hex
    from common.ledger.rows import format_time
    from common.objects import write_atomically
    from common.peers import fingerprint, read_peers
    from consilium.audit.auditor import load_auditor
    from consilium.audit.dispute import judge as judge_draw

    signing, sealing = load_auditor(folder)
    with naming_file(evidence, remedy="give the file that `consilium dispute evidence` wrote"):
        found = DrawEvidence.parse(read_file(evidence))
    listed = read_peers(peers)
    if listed.study != found.roster.study:
        raise InvalidInput(
            "study of the list of peers",
            value=listed.study[:16],
            limit=f"{found.roster.study[:16]}, the study of the evidence",
            remedy="give the list that `consilium dispute evidence` wrote beside the evidence",
        )
    identities = {peer.site: peer.key for peer in listed.peers}
    sealed = []
    for path in disclosures:
        with naming_file(path, remedy="give the file that the hospital wrote with `consilium site disclose`"):
            sealed.append(SealedDisclosure.parse(read_file(path)))
    judged, doubts = judge_draw(
        found, sealed, identities=identities, auditor=sealing, now=format_time(datetime.now(UTC))
    )
    signed = judged.signed(signing)
    write_atomically(out, signed.render(), mode=0o644)
    if as_json:
        say(json_text({**signed.to_json(), "doubts": list(doubts)}))
    else:
        say(joined(_lines(signed)))
        for finding in signed.findings:
            say(f"{finding.site}: {fingerprint(identities[finding.site])}")
        for doubt in doubts:
            say(f"doubt: {doubt}; compare fingerprints before this judgement is used")
        say(f"{out}: signed by {public_hex(signing)}")
    if signed.blamed:
        raise typer.Exit(BLAMED)


@app.command("show")
def show(
    judgement: Annotated[Path, typer.Argument(help="A signed judgement.")],
    auditor: Annotated[Path, typer.Option(help="The auditor.json of the auditor that the hospitals chose.")],
    as_json: AsJson = False,
) -> None:
    """Check an auditor's judgement and show it. Exit code 11: a finding is against a hospital.

    Example: consilium dispute show judged.json --auditor auditor.json
    """
    from common.ledger.keys import signing_public_key
    from consilium.audit.auditor import read_auditor
    from consilium.audit.dispute import Judgement

    with naming_file(judgement, remedy="give the file that `consilium dispute judge` wrote"):
        found = Judgement.parse(read_file(judgement))
    chosen = read_auditor(auditor)
    if not found.is_genuine(signing_public_key(chosen.signing_key)) or found.auditor != chosen.sealing_key:
        raise InvalidInput("judgement", value=str(judgement), limit="an unchanged judgement that this auditor signed")
    say(json_text(found.to_json()) if as_json else joined(_lines(found)))
    if found.blamed:
        raise typer.Exit(BLAMED)


def _lines(found: Judgement) -> list[str]:
    """Return a judgement as lines of text: whether the sum was spoiled, and the finding about each hospital."""
    said = {
        "within": "its noisy code is within the bound for honest hospitals",
        "outside": "ITS NOISY CODE IS BEYOND THE BOUND FOR HONEST HOSPITALS",
        "unknown": "its code could not be unmasked: neither it nor all the others disclosed their keys",
    }
    disclosed = {"true": "", "false": "; ITS DISCLOSURE IS FALSE", "none": "; it disclosed nothing"}
    lines = [
        f"draw {found.roster[:16]}: the sum was {'' if found.spoiled else 'not '}beyond the bound for honest hospitals"
    ]
    for one in found.findings:
        part = said[one.part] if one.word == "signed" else "it sent nothing"
        lines.append(f"{one.site}: {part}{disclosed[one.disclosure]}")
    lines.append(
        f"against: {', '.join(found.blamed)}"
        if found.blamed
        else "no finding is against a hospital; noise hides a change of its own size"
    )
    return lines
