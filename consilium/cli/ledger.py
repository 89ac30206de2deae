"""Defines ``consilium verify`` and ``consilium ledger …``: check, read, back up and recover a privacy ledger, offline.

Exit codes: 0 everything holds, 2 the file does not exist or an argument is wrong, 5 the ledger is damaged or
contradicts a kept head or receipt.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.canonical import check_hash
from common.config import load_study
from common.errors import InvalidInput, LedgerCorrupt
from common.plain import joined, plain
from common.privacy.figures import spent_text
from common.reading import parse_json, parsing
from common.wording import many
from consilium.cli.options import AsJson, PublicKey, file_to_write, new_file, read_file
from consilium.cli.say import json_text, say
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from common.ledger.rows import SignedHead
    from common.witness.verify import Countersigned
    from server.ledger.verify import VerifyReport


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Read, back up and recover a privacy ledger; `consilium verify` checks one.",
)
verify_app = typer.Typer(add_completion=False)


def _ledger_file(path: Path) -> Path:
    """Return a ledger's file; the argument may also be the directory of a study or a site."""
    from client.policy import load_site

    if not path.is_dir():
        return path
    if (path / "site.toml").exists():  # tested first, because a site also has a study.toml
        return load_site(path).ledger_file
    if (path / "study.toml").exists():
        return Workspace(path).ledger_file
    raise InvalidInput("ledger", value=str(path), limit="a ledger's file, or the directory of a study or of a site")


LedgerPath = Annotated[
    Path,
    typer.Argument(
        callback=_ledger_file,
        help="The ledger: ledger.sqlite, a site's site-ledger.sqlite, or the directory of the study or the site.",
    ),
]


@verify_app.command("verify")
def verify_command(
    ledger: LedgerPath,
    public_key: PublicKey = None,
    server_key: Annotated[
        list[str] | None,
        typer.Option(help="For a site's ledger: the server's public key, to check its receipts. Repeatable."),
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(
            help="A signed head, receipt or certificate (JSON) that was kept elsewhere. The ledger must contain the "
            "head in it and, for a certificate, the study with the guarantee that it states. Repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a whole ledger offline; name the first bad row, or the evidence that the file is an older copy.

    Exit code 0: everything holds. 2: the file does not exist, or an argument is wrong. 5: the ledger is damaged, older
    than its standing file, or contradicts a head (hash of a newest row) that was kept
    or that a witness countersigned.

    Example: consilium verify study/ledger.sqlite --public-key 3f1c…e9 --head receipt.json
    """
    from common.ledger.keys import read_public_key
    from consilium.audit.witnesses import witnesses_of
    from server.ledger.verify import LedgerProblem, verify

    report = verify(
        ledger,
        public_key=None if public_key is None else read_public_key(public_key),
        server_key=[read_public_key(key) for key in server_key or ()],
        witnesses=[_read_head(path) for path in head or ()],
    )
    found = witnesses_of(ledger, role=report.role) if report.ok else None
    if report.ok and report.role == "server":
        wrong = [LedgerProblem(None, problem) for path in head or () for problem in _misstated(path, ledger)]
        report = replace(report, problems=(*report.problems, *wrong))
    if as_json:
        more = {} if found is None else {"countersigned": found.to_json()}
        say(json_text({**report.to_json(), **more}))
    else:
        say(_describe(report, found))
    if not report.ok or (found is not None and found.problems):
        raise typer.Exit(5)


@app.command("head")
def head_command(ledger: LedgerPath) -> None:
    """Print the newest signed head (number and hash of the newest row) as JSON.

    Keep it on another machine: `consilium verify --head` then finds whether rows were cut off or rewritten.

    Example: consilium ledger head study/ledger.sqlite > head.json
    """
    from server.ledger.verify import verify

    report = verify(ledger)
    report.raise_for_problems()
    assert report.head is not None
    say(json_text(report.head.to_json()))


@app.command("log")
def log_command(
    ledger: LedgerPath,
    last: Annotated[int, typer.Option(min=1, help="Number of rows to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print each row in full, as a line of JSON.")] = False,
) -> None:
    """List the newest rows: number, time, kind and subject.

    Example: consilium ledger log study/ledger.sqlite --last 50
    """
    from common.ledger.row_text import row_text
    from common.ledger.sqlite_file import connect

    connection = connect(ledger, read_only=True)
    try:
        sql = "SELECT seq, time_utc, kind, body, hash FROM rows ORDER BY seq DESC LIMIT ?"
        rows = connection.execute(sql, (last,)).fetchall()[::-1]
    finally:
        connection.close()
    for seq, time_utc, kind, body, row_hash in rows:
        with parsing("row of a ledger", value=seq, limit="a record", remedy="`consilium verify` says what is wrong"):
            if as_json:
                fact = {"seq": seq, "time_utc": time_utc, "kind": kind, "body": json.loads(body), "hash": row_hash}
                told = json.dumps(fact)
            else:
                told = plain(f"{seq:>7}  {time_utc[:19]}Z  {kind:<12} {row_text(kind, json.loads(body))}")
        say(told)


@app.command("receipts")
def receipts_command(ledger: LedgerPath) -> None:
    """Print the receipts in a site's ledger, one on each line.

    Unlike the ledger, receipts contain no codes, so others may see them.

    Example: consilium ledger receipts site-ledger.sqlite > receipts.jsonl
    """
    from client.ledger.site_ledger import SiteLedger

    with SiteLedger.read(ledger) as site:
        for receipt in site.receipts(evidence=True):
            say(receipt.render())


@app.command("compare")
def compare_command(
    ours: Annotated[Path, typer.Argument(help="One site's receipts, as `consilium ledger receipts` prints them.")],
    theirs: Annotated[Path, typer.Argument(help="Another site's receipts.")],
    server_key: Annotated[
        list[str],
        typer.Option(
            help="The server's public key: 64 hex digits or a PEM file. Repeat the option for each key that the server "
            "has had."
        ),
    ],
) -> None:
    """Find out whether the server showed two sites different ledgers, and from which row on.

    Exit code 0: the receipts agree on every row that both cover. 5: the ledgers differ, or a receipt is not genuine.

    Example: consilium ledger compare ours.jsonl theirs.jsonl --server-key 3f1c…e9
    """
    from common.ledger.keys import read_public_key
    from common.ledger.receipts import check_same_ledger, read_receipts

    keys = [read_public_key(key) for key in server_key]
    first, second = read_receipts(ours), read_receipts(theirs)
    for receipt in (*first, *second):
        if not any(receipt.is_genuine(key) for key in keys):
            raise LedgerCorrupt(
                f"a receipt of site {receipt.site} is not signed by a key of --server-key; to fix: give every "
                "key that the server ever had"
            )
    check_same_ledger(first, second)
    say(f"OK: {len(first)} and {many(len(second), 'receipt')} show the same ledger wherever both cover it")


@app.command("backup")
def backup_command(
    ledger: LedgerPath,
    out: Annotated[Path, typer.Argument(help="The copy's file; an existing file is refused.", callback=file_to_write)],
) -> None:
    """Copy a ledger while it is in use, check the copy, and print its head (hash of the newest row).

    The copy contains no private keys.

    A site's ledger contains codes, which are sensitive, and so does its copy. Keep the printed head elsewhere.

    Example: consilium ledger backup study/ledger.sqlite backups/ledger-2025-03-01.sqlite
    """
    from server.ledger.backup import backup

    report = backup(ledger, out)
    assert report.head is not None
    say(f"{out}: {report.rows} rows, checked", err=True)
    say(json_text(report.head.to_json()))


@app.command("recover")
def recover_command(
    ledger: LedgerPath,
    key: Annotated[
        Path,
        typer.Option(
            help="The ledger's newest signing key (PEM). If the copy was made before a change of the key, the retired "
            "key files in the same folder are used, too."
        ),
    ],
    receipts: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of receipts that `consilium site heads --out` wrote; repeat the option for every site."
        ),
    ] = None,
    standing: Annotated[
        Path | None,
        typer.Option(help="The lost ledger's standing file, ledger.standing, if it is not beside the copy."),
    ] = None,
    study: Annotated[
        list[Path] | None,
        typer.Option(help="A study file that is registered again before the charges are entered; repeatable."),
    ] = None,
    charge_all: Annotated[
        bool,
        typer.Option(
            "--charge-all",
            help="If the ledger's newest standing file is lost as well: count the whole remaining budget of pools "
            "and studies as spent. This ledger then admits no new pool.",
        ),
    ] = False,
) -> None:
    """Recover a ledger restored from an older copy: enter every charge that receipts or the standing file show.

    Give every site's receipts. The standing file is a small file beside a ledger. It shows all that the ledger had
    charged, even charges without a receipt. Pools that the copy does not contain are declared again. Lost answers
    cannot be recovered; asking a query again whose answer is lost costs again. Afterwards each site runs
    `consilium site recover --server-restored`.

    Example: consilium ledger recover study/ledger.sqlite --key study/keys/ledger.key --receipts north.jsonl
    """
    from common.ledger.keys import load_signing_key, retired_keys
    from consilium.audit.witnesses import forget_head
    from server.ledger.recovery import recover_charges

    done = recover_charges(
        ledger,
        signing_key=load_signing_key(key),
        receipts=receipts or (),
        standing=standing,
        studies=[load_study(path) for path in study or ()],
        charge_all=charge_all,
        retired=retired_keys(key),
    )
    forget_head(ledger)
    given = f"{many(done.receipts, 'receipt')} of {many(len(receipts or ()), 'file')}"
    say(f"{many(done.entered, 'lost charge')} entered as spent, from {given}")
    if charge_all:
        say(
            f"without a standing file: everything that {many(len(done.pools), 'pool')} and their studies had left "
            "counts as spent, and this ledger admits no new pool. To ask further queries, set up a new study with "
            "`consilium study init`, without --ledger: each hospital's own ledger still counts all that its pool has "
            "spent"
        )
    if done.standing_is_older:
        say(
            "a receipt names a later row than the standing file, so answers whose receipts reached no site may "
            "be missing; if a newer standing file exists, run this command again with --standing FILE",
            err=True,
        )
    for name, releases in () if charge_all else done.by_standing.items():
        say(f"pool {name}: {many(releases, 'release')} without a receipt charged, from the standing file")
    for pool in done.pools:
        say(f"pool {pool.pool}: {many(pool.releases, 'release')}, {pool.spent}")
    if done.charged_again and not charge_all:
        say("sites' receipts of these lost rows, if they are given in a later recovery, are charged once more")
    after = "" if charge_all else ", then resume the study"
    say(f"next: `consilium site recover --server-restored` at every site{after}")


@app.command("new-key")
def new_key_command(
    path: Annotated[Path, typer.Argument(help="The new private key's file (PEM, mode 0600); never overwritten.")],
) -> None:
    """Make the next signing key and print its public key, which every site adds to site.toml before the change.

    Example: consilium ledger new-key study/keys/next.key
    """
    from common.ledger.keys import create_signing_key, public_hex

    say(public_hex(create_signing_key(path)))


@app.command("rotate-key")
def rotate_key_command(
    ledger: LedgerPath,
    key: Annotated[Path, typer.Option(help="File of the current signing key; afterwards it holds the new key.")],
    new_key: Annotated[Path, typer.Option(help="The next key, from `consilium ledger new-key`.")],
) -> None:
    """Rotate the signing key: a ledger row names the next key, and the old key file is kept under another name.

    Stop the study first. A site refuses receipts until it lists the new key under `more_signing_keys`; no receipt is
    lost. Run the command again to complete an interrupted rotation.

    Example: consilium ledger rotate-key study/ledger.sqlite --key study/keys/ledger.key --new-key study/keys/next.key
    """
    from server.ledger.recovery import rotate_signing_key

    done = rotate_signing_key(ledger, key=key, new_key=new_key)
    say(f"the ledger is signed by {done.now} from now on; sites may drop {done.before[:16]}… later")


@app.command("rotate-sealing-key")
def rotate_sealing_key_command(
    study_dir: Annotated[Path, typer.Argument(help="The study's directory at the server.")],
    out: Annotated[Path, typer.Option(help="New file for the signed notice to the sites.", callback=new_file)],
    again: Annotated[
        bool, typer.Option("--again", help="Change no key; write the notice of the last change again.")
    ] = False,
    lost: Annotated[
        str | None, typer.Option(help="If the old key's file is lost: its public key, as in a site's site.toml.")
    ] = None,
) -> None:
    """Rotate the key to which sites encrypt their codes. The old key still decrypts codes until its file is deleted.

    Stop the study first, because the server reads its keys when a run starts. Every site accepts the notice with
    `consilium site take-sealing-key`. When all sites have, delete the old key, keys/sealing.key.retired-….

    Example: consilium ledger rotate-sealing-key study --out notice.json
    """
    from common.ledger.keys import create_sealing_key, load_signing_key
    from common.objects import write_atomically
    from common.sealing_rotation import rotate_sealing_key, sealing_notice

    workspace = Workspace(study_dir)
    path, signing_key = workspace.sealing_key_file, load_signing_key(workspace.signing_key_file)
    earlier = () if lost is None else (check_hash(lost),)
    if lost is not None or not again:
        with workspace.locked():  # a run cannot decrypt codes that sites encrypt to a key made after the run began
            if lost is None:
                rotate_sealing_key(path)
            else:
                create_sealing_key(path)
    notice = sealing_notice(path, signing_key=signing_key, lost=earlier)
    write_atomically(out, notice.render().encode())
    say(f"codes are sealed to {notice.sealing_key} from now on; {out}: the notice for every site")


def _describe(report: VerifyReport, found: Countersigned | None) -> str:
    lines = [
        f"{report.path}: {report.role or 'unknown'} ledger {report.ledger_id}",
        f"  {report.rows} rows ({', '.join(f'{count} {kind}' for kind, count in report.kinds.items())})",
        f"  {report.payloads} stored values match their charges, {report.signatures} signatures hold, "
        f"{report.witnesses} kept heads found",
    ]
    if report.draws:
        lines.append(
            f"  {report.draws} draws of sealed sums; in each, the noise shares of the sites that do not collude add up "
            "to the noise that was charged"
        )
    for total in report.pools:
        spent = "; ".join(str(item) for item in total.guarantees)
        lines.append(
            f"  pool {total.pool}: {many(total.releases, 'release')}, {spent_text(total.share_spent)} of the Σμ² "
            f"that its budget admits: {spent}"
        )
    if not report.anchored:
        lines.append("  not anchored: give --public-key to check that the expected key made the signatures")
    if report.first_bad_row is not None:
        lines.append(f"  first bad row: {report.first_bad_row}; the figures above cover the valid rows")
    if found is not None:
        lines.append(f"  {found.line}")
        lines += [f"BAD: {problem}" for problem in found.problems]
    if report.ok and not (found is not None and found.problems):
        lines.append("OK: every row follows from the rows before it")
    else:
        lines += [f"BAD: {problem}" for problem in report.problems]
    return joined(lines)


def _misstated(path: Path, ledger: Path) -> list[str]:
    """Describe each value of a certificate's guarantee that differs from what the ledger guarantees for its study now.

    The list is empty if none differs, or if the file is no certificate. The spending that a certificate states is not
    compared, because the ledger may have grown since.
    """
    from server.ledger.server_ledger import Ledger

    limit = "a certificate as `consilium certificate` wrote it"
    with parsing("certificate", value=str(path), limit=limit):
        data = parse_json(read_file(path), what="certificate", value=str(path), limit=limit)
        if not isinstance(data, dict) or "certificate" not in data:
            return []
        study, stated = data["study"]["id"], data["guarantee"]
    with Ledger.open(ledger) as opened:
        if study not in opened.books.studies:
            return [f"{path} is a certificate of study {study}, which this ledger does not contain"]
        right = opened.study_spending(study).guaranteed
    return [
        f"{path} states {name} {stated.get(name)!r}, but the study in this ledger has {value!r}"
        for name, value in right.to_json().items()
        if stated.get(name) != value
    ]


def _read_head(path: Path) -> SignedHead:
    from common.ledger.receipts import Receipt
    from common.ledger.rows import SignedHead

    limit = "a JSON file with a head or a receipt"
    with parsing("kept head", value=str(path), limit=limit):
        data = parse_json(read_file(path), what="kept head", value=str(path), limit=limit)
        if isinstance(data, dict) and "certificate" in data:
            return SignedHead.from_json(data["ledger"]["head"])
    if isinstance(data, dict) and "releases" in data:
        return Receipt.from_json(data).head
    return SignedHead.from_json(data)
