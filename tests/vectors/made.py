"""Computes the vectors of docs/vectors by the product: the values of their inputs.

``python -m tests.vectors.made`` writes the values of every case anew; the inputs are the files' own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from client.masked import masked_code
from common import envelope, masking
from common.canonical import canonical_text, parse_rational, rational, sha256_bytes
from common.ledger.keys import public_hex
from common.ledger.receipts import Receipt, row_hashes
from common.ledger.rows import NO_HASH, body_digest, head_message, possession_message, row_hash
from common.masking import DrawId, MaskedRoster, Member, mask_private_key, pair_mask, signed_mask_key
from common.privacy.gaussian import sample
from common.privacy.mechanism import Mechanism
from common.privacy.quantise import clip, quantise
from common.privacy.shares import share_std, unmasked
from common.sealing import SealContext, unseal

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"

Case = dict[str, Any]


def signing(seed: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))


def codes(given: Case) -> Case:
    code, radius = np.array([float.fromhex(x) for x in given["code"]]), given["radius_int"]
    integers = quantise(code, radius_int=radius)
    return {
        "clipped": [float(x).hex() for x in clip(code, radius=radius / 2**16)],
        "integers": integers.tolist(),
        "sum_of_squares": sum(int(q) ** 2 for q in integers),
        "bytes": integers.astype("<i8").tobytes().hex(),
    }


def mechanism(given: Case, *, dimension: int) -> Mechanism:
    return Mechanism(
        radius_int=given["radius_int"],
        noise_std=parse_rational(given["noise_std"]),
        dimension=dimension,
        voters_per_site=given["voters_per_site"],
        colluders=given["colluders"],
    )


def noise_shares(given: Case) -> Case:
    entropy = bytes.fromhex(given["entropy"])
    share = share_std(mechanism(given, dimension=len(entropy) // 8), sites=given["sites"])
    drawn = iter((entropy,))  # a sample that needs more bits raises StopIteration
    return {
        "share_std": rational(share),
        "noise": sample(len(entropy) // 8, share, entropy=lambda count: next(drawn)).tolist(),
    }


def masks(given: Case) -> Case:
    draw = DrawId(given["study"], given["ledger"], given["batch"], given["draw"])
    members, private, made = [], {}, {}
    for site in given["sites"]:
        name, key = site["site"], signing(site["ledger_key"])
        private[name] = mask_private_key(bytes.fromhex(site["secret"]), draw, nonce=site["nonce"])
        mask = signed_mask_key(private[name], draw, sign=key.sign, site=name)
        members.append(Member(name, mask))
        made[name] = {
            "mask_private": private[name].private_bytes_raw().hex(),
            "mask_public": mask.key,
            "mask_statement": masking._statement(mask.key, draw, site=name).hex(),
            "mask_signature": mask.signature.hex(),
        }
    roster = MaskedRoster(draw.study, draw.ledger, draw.batch, draw.number, tuple(members))
    dimension = len(given["sites"][0]["code"])
    terms = mechanism(given, dimension=dimension)
    query: Any = Named(given["query"], terms)
    pairs = []
    for first, one in enumerate(members):
        for other in members[first + 1 :]:
            words = pair_mask(
                roster, me=one.site, peer=other, private=private[one.site], query=query.id, dimension=dimension
            )
            info = {"pair": [one.site, other.site], "query": query.id, "roster": roster.id}
            shared = private[one.site].exchange(private[other.site].public_key()).hex()
            pairs.append({"info": canonical_text(info), "shared": shared, "stream": list(map(str, words.tolist()))})
    total = np.zeros(dimension, np.uint64)
    for site in given["sites"]:
        noise = np.array(site["noise"], np.int64)

        def drawn(size: int, std: Fraction, noise: NDArray[np.int64] = noise) -> NDArray[np.int64]:
            return noise

        own = {"roster": roster, "me": site["site"], "private": private[site["site"]], "sampler": drawn}
        words = masked_code(np.array(site["code"], np.int64), query, Fraction(1), **own)
        made[site["site"]]["words"] = list(map(str, words.tolist()))
        total += words
    return {
        "sites": made,
        "roster": roster.to_bytes().decode(),
        "roster_sha256": roster.id,
        "pairs": pairs,
        "noisy_sum": unmasked(total, terms, sites=len(members)).tolist(),
    }


@dataclass(frozen=True)
class Named:
    """Holds the parts of a query that :func:`masked_code` reads."""

    id: str
    mechanism: Mechanism


def envelopes(given: Case) -> Case:
    body, reply = bytes.fromhex(given["body"]), bytes.fromhex(given["reply"])
    server, site = signing(given["server_key"]), signing(given["site_key"])
    message = envelope.sign_request(body, sign=server.sign, site=given["site"])
    answered = envelope.sign_reply(reply, sign=site.sign, site=given["site"], request=message)
    sealed = given["sealed"]
    context = SealContext(**sealed["context"])
    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(sealed["private"]))
    content = bytes.fromhex(sealed["bytes"])
    code = unseal(content, private_key=key, context=context, dimension=(len(content) - 48) // 8)
    return {
        "question": envelope._question(body, site=given["site"]).hex(),
        "message": message.hex(),
        "answer": envelope._answer(reply, site=given["site"], request_sha256=sha256_bytes(message)).hex(),
        "answered": answered.hex(),
        "sealed": {"public": public_hex(key), "info": context.info().hex(), "code": code.tolist()},
    }


def ledger_rows(given: Case) -> Case:
    key, new, role, hashed, rows = signing(given["key"]), signing(given["new_key"]), given["role"], NO_HASH, []
    for row in given["rows"]:
        digest = body_digest(row["body"])
        fields = {"seq": row["seq"], "time_utc": row["time_utc"], "kind": row["kind"], "body_sha256": digest}
        hashed = row_hash(role, prev_hash=hashed, **fields)
        rows.append({"body_sha256": digest, "hash": hashed})
    place = {"ledger_id": given["ledger_id"], "seq": given["rows"][-1]["seq"], "row_hash": hashed}
    head, possession = head_message(role, **place), possession_message(role, **place)
    return {
        "rows": rows,
        "public_key": public_hex(key),
        "head": head.hex(),
        "head_signature": key.sign(head).hex(),
        "possession": possession.hex(),
        "possession_signature": new.sign(possession).hex(),
    }


def receipts(given: Case) -> Case:
    key = signing(given["key"])
    document = json.loads(json.dumps(given["receipt"]))
    head = document["head"]
    place = {"ledger_id": head["ledger_id"], "seq": head["seq"], "row_hash": head["hash"]}
    head |= {"public_key": public_hex(key), "signature": key.sign(head_message("server", **place)).hex()}
    receipt = Receipt.from_json(document | {"signature": ""}).signed(key)
    assert receipt.is_genuine(key.public_key())
    return {
        "signed": receipt._message().hex(),
        "text": receipt.render(),
        "rows": {str(seq): hashed for seq, hashed in row_hashes(receipt).items()},
        "releases": {str(item.seq): body_digest(canonical_text(item.release.to_json())) for item in receipt.releases},
    }


MADE: dict[str, Callable[[Case], Case]] = {
    "codes": codes,
    "noise-shares": noise_shares,
    "masks": masks,
    "envelopes": envelopes,
    "ledger-rows": ledger_rows,
    "receipts": receipts,
}


def load(name: str) -> dict[str, Any]:
    """Read a file of vectors."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def write(name: str, inputs: list[Case]) -> None:
    """Write a file of vectors with these inputs and their values."""
    cases = [{"inputs": given, "values": MADE[name](given)} for given in inputs]
    document = {"format": 1, "what": name, "cases": cases}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write the values of every file's own inputs."""
    for name in MADE:
        write(name, [case["inputs"] for case in load(name)["cases"]])


if __name__ == "__main__":
    main()
