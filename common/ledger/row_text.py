"""Describes a row of a server's or a site's ledger in a few words.

The dashboard and `consilium ledger log` use this module. An invalid body raises an error.
"""

from __future__ import annotations

from typing import Any

from common.privacy.figures import epsilon_text
from common.wording import many


def row_text(kind: str, body: dict[str, Any]) -> str:
    """Describe a row's content in a few words.

    Args:
        kind: Kind of the row, one of :data:`common.ledger.records.KINDS`.
        body: Its parsed body.

    Returns:
        The description; empty for an unknown kind.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, InvalidInput: If the body is invalid.
    """
    return _shared(kind, body) or _of_a_server(kind, body) or _of_a_site(kind, body)


def _shared(kind: str, body: dict[str, Any]) -> str:
    match kind:
        case "genesis":
            return f"ledger {body['ledger_id'][:10]}, key {body['public_key'][:10]}"
        case "study":
            return f"study {body['study']['name']}, {body['study_id'][:10]}"
        case "pool":
            declared = body.get("declaration", body)  # a site's row also states its daily cap
            epsilon = epsilon_text(float.fromhex(declared["epsilon"]))
            return f"pool {declared['pool']} of {declared['site']}, ε ≤ {epsilon}"
        case "refusal":
            refused = many(len(body["query_ids"]), "query", "queries")
            done = "declined" if body.get("batch") == "offer" else "not released"
            return f"{refused} {done}: {body['reason']}" + (f" (pool {body['pool']})" if body["pool"] else "")
        case "key":
            return f"signing key becomes {body['public_key'][:10]}"
        case "note":
            return str(body["text"])
    return ""


def _of_a_server(kind: str, body: dict[str, Any]) -> str:
    match kind:
        case "release" if "draw" in body:
            return f"draw {body['draw']} of {_query(body)}, asked of {_sites(body)}"
        case "release":
            return f"answer to {_query(body)} by {_sites(body)}, {many(body['voters'], 'voter')}"
        case "answer":
            return f"answer to {_query(body)}, the sum of draw {body['draw']}"
        case "lost-draw":
            return f"draw {body['draw']} of {many(len(body['query_ids']), 'query', 'queries')} lost: {body['reason']}"
        case "roster":
            return f"list of {many(len(body['roster']), 'site')}, to which later rows refer"
        case "recovered":
            return f"charge entered again from a receipt of {body['origin']}"
        case "lost":
            return f"charges of {many(len(body['pools']), 'pool')} entered again: an older copy was restored"
        case "books":
            return f"site ledger {body['books'][:10]} of pool {body['pool']}"
        case "reuse":
            return f"{many(len(body['query_ids']), 'answer')} of another study used again"
    return ""


def _of_a_site(kind: str, body: dict[str, Any]) -> str:
    match kind:
        case "reservation":
            return f"{_query(body)} accepted and charged{_draw(body)}"
        case "code":
            return f"code of {_query(body)}: {body['outcome']}"
        case "mask-key":
            return f"mask key for batch {body['batch'][:10]}{_draw(body)}"
        case "masked":
            return f"masked code of {_query(body)}{_draw(body)}"
        case "disclosure":
            return f"{many(body['queries'], 'code')} disclosed to auditor {body['auditor'][:10]}{_draw(body)}"
        case "decision":
            return f"decision on study {body['study'][:10]}: {body['decision']}"
        case "patient":
            return f"patient in slot {body['slot']} of voter {body['voter']} withdrawn"
        case "deal":
            return f"patients assigned to {many(body['voters'], 'voter')}"
        case "training":
            return f"training {body['training'][:10]} of voter {body['voter']} by {body['strategy']}"
        case "drawn":
            return f"training {body['training'][:10]} charged for {many(body['steps'], 'step')}"
        case "trained":
            return f"training {body['training'][:10]} of voter {body['voter']} done"
        case "foreign":
            return f"teacher of voter {body['voter']} added by the hospital, {body['brought']}"
        case "teachers":
            return f"worker loaded the teachers of {many(len(body['voters']), 'voter')}"
        case "sealing-key":
            return f"server's sealing key becomes {body['sealing_key'][:10]}"
        case "peer":
            return f"key of {body['site']} {'confirmed' if body['key'] else 'no longer confirmed'}"
        case "identity":
            return f"definition of a patient: {body['identity']}"
        case "receipt":
            return f"receipt of the server's row {body['receipt']['head']['seq']}"
        case "superseded":
            return f"receipt of row {body['receipt']['head']['seq']} from before the server's ledger was recovered"
        case "alarm":
            return f"alarm: {body['problem']}"
        case "recovery":
            return f"alarm ended by a person, for ledger {body['ledger_id'][:10]}"
        case "restored":
            return f"charges after row {body['kept_row']} entered again: an older copy of this ledger was restored"
    return ""


def _query(body: dict[str, Any]) -> str:
    return f"query {body['query_id'][:10]}"


def _draw(body: dict[str, Any]) -> str:
    return f", draw {body['draw']}" if body.get("draw") is not None else ""


def _sites(body: dict[str, Any]) -> str:
    return (
        many(len(body["roster"]), "site") if "roster" in body else f"the sites of roster {body['roster_sha256'][:10]}"
    )
