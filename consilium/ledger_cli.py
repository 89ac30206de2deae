"""``consilium verify`` and ``consilium ledger …``: read and check a privacy ledger, a server's or a site's, offline.

Exit codes: 0 everything holds, 2 there is no such file or a wrong argument, 5 the ledger is damaged or contradicts a
head or receipt somebody kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.chain import SignedHead, connect
from common.ledger.keys import read_public_key
from common.ledger.receipts import Receipt, first_fork
from common.ledger.site import SiteLedger
from common.ledger.verify import VerifyReport, verify

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Verify and read a privacy ledger.")
verify_app = typer.Typer(add_completion=False, help="Check a ledger offline: chain, signatures, sums, budget.")

LedgerPath = Annotated[Path, typer.Argument(help="The ledger file: ledger.sqlite or a site's site-ledger.sqlite.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@verify_app.command("verify")
@app.command("verify")
def verify_command(
    ledger: LedgerPath,
    public_key: Annotated[
        str | None, typer.Option(help="The ledger's public key as you know it: 64 hex digits or a PEM file.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(help="For a site's ledger: the server's public key, to check the receipts in it.")
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(help="A head or receipt (JSON) that somebody kept; the ledger must contain it. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a whole ledger offline and name the first bad row.

    Exit code 0: everything holds. 2: no such file, wrong argument. 5: damaged, or contradicts a kept head.

    Example: consilium verify study/ledger.sqlite --public-key 3f1c…e9 --head receipt.json
    """
    report = verify(
        ledger,
        public_key=None if public_key is None else read_public_key(public_key),
        server_key=None if server_key is None else read_public_key(server_key),
        witnesses=[_read_head(path) for path in head or ()],
    )
    typer.echo(json.dumps(report.to_json(), indent=1) if as_json else _describe(report))
    if not report.ok:
        raise typer.Exit(5)


@app.command("head")
def head_command(ledger: LedgerPath) -> None:
    """Print the newest signed head as JSON: keep it elsewhere, and a cut or rewritten ledger will be noticed.

    Example: consilium ledger head study/ledger.sqlite > head.json
    """
    report = verify(ledger)
    report.raise_for_problems()
    assert report.head is not None
    typer.echo(json.dumps(report.head.to_json(), indent=1))


@app.command("log")
def log_command(
    ledger: LedgerPath,
    last: Annotated[int, typer.Option(min=1, help="How many of the newest rows.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest rows: number, time, kind and what they concern.

    Example: consilium ledger log study/ledger.sqlite --last 50
    """
    connection = connect(ledger, read_only=True)
    try:
        sql = "SELECT seq, time_utc, kind, body, hash FROM rows ORDER BY seq DESC LIMIT ?"
        rows = connection.execute(sql, (last,)).fetchall()[::-1]
    finally:
        connection.close()
    for seq, time_utc, kind, body, row_hash in rows:
        if as_json:
            fact = {"seq": seq, "time_utc": time_utc, "kind": kind, "body": json.loads(body), "hash": row_hash}
            typer.echo(json.dumps(fact))
        else:
            typer.echo(f"{seq:>7}  {time_utc[:19]}Z  {kind:<12} {_subject(kind, json.loads(body))}")


@app.command("receipts")
def receipts_command(ledger: LedgerPath) -> None:
    """Print the receipts in a site's ledger, one a line: fit to be shown to others, unlike the ledger with its codes.

    Example: consilium ledger receipts site-ledger.sqlite > receipts.jsonl
    """
    with SiteLedger.read(ledger) as site:
        for receipt in site.receipts():
            typer.echo(receipt.render())


@app.command("compare")
def compare_command(
    ours: Annotated[Path, typer.Argument(help="One site's receipts, as `consilium ledger receipts` prints them.")],
    theirs: Annotated[Path, typer.Argument(help="Another site's receipts.")],
    server_key: Annotated[str, typer.Option(help="The server's public key: 64 hex digits or a PEM file.")],
) -> None:
    """Find out whether the server showed two sites two different ledgers, and from which row on.

    Exit code 0: their views agree wherever both have one. 5: a fork, or a receipt that is not genuine.

    Example: consilium ledger compare ours.jsonl theirs.jsonl --server-key 3f1c…e9
    """
    key = read_public_key(server_key)
    first, second = _read_receipts(ours), _read_receipts(theirs)
    for receipt in (*first, *second):
        if not receipt.is_genuine(key):
            raise LedgerCorrupt(f"a receipt of site {receipt.site} is not signed by the server's key")
    fork = first_fork(first, second)
    if fork is not None:
        raise LedgerCorrupt(f"the two sites were shown different ledgers under the id {fork[0]}", row=fork[1])
    typer.echo(f"OK: {len(first)} and {len(second)} receipts show the same ledger wherever both cover it")


def _describe(report: VerifyReport) -> str:
    lines = [
        f"{report.path}: {report.role or 'unknown'} ledger {report.ledger_id}",
        f"  {report.rows} rows ({', '.join(f'{count} {kind}' for kind, count in report.kinds.items())})",
        f"  {report.payloads} stored values match their charges, {report.signatures} signatures hold, "
        f"{report.witnesses} kept heads found",
    ]
    for total in report.pools:
        spent = "; ".join(str(item) for item in total.guarantees)
        lines.append(
            f"  pool {total.pool}: {total.releases} releases, {100 * total.share_spent:.2f} % of its budget: {spent}"
        )
    if not report.anchored:
        lines.append("  not anchored: give --public-key to check that the signatures are by the key you expect")
    if report.ok:
        lines.append("OK: everything stored follows from what was stored before it")
    else:
        lines += [f"BAD: {problem}" for problem in report.problems]
    return "\n".join(lines)


def _subject(kind: str, body: dict[str, object]) -> str:
    if kind in ("release", "reservation", "code"):
        roster = body.get("roster")
        sites = f" sites {len(roster)}" if isinstance(roster, list) else ""
        return f"query {str(body['query_id'])[:12]}{sites}"
    if kind == "refusal":
        refused = body["query_ids"]
        return f"{len(refused) if isinstance(refused, list) else 0} queries, {body['reason']}"
    names = ("pool", "study_id", "study", "public_key", "text", "ledger_id", "problem")
    return next((f"{name} {str(body[name])[:40]}" for name in names if isinstance(body.get(name), str)), "")


def _read_receipts(path: Path) -> tuple[Receipt, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("receipts", value=str(path), limit="a file with one receipt a line") from error
    return tuple(Receipt.parse(line) for line in lines if line)


def _read_head(path: Path) -> SignedHead:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("kept head", value=str(path), limit="a JSON file with a head or a receipt") from error
    if isinstance(data, dict) and "releases" in data:
        return Receipt.from_json(data).head
    return SignedHead.from_json(data)
