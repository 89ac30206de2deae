"""Implements docs/vectors.md a second time, and checks the vectors by hashlib, numpy and cryptography alone."""

import base64
import hashlib
import itertools
import json
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

unhex, ed = bytes.fromhex, lambda seed: Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
text = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
tagged = lambda tag, value: tag.encode() + b"\0" + text(value).encode()
sha = lambda data: hashlib.sha256(data).hexdigest()
derived = lambda secret, info: HKDF(SHA256(), 32, salt=None, info=info).derive(secret)
public = lambda key: key.public_key().public_bytes_raw().hex()

def codes(given):
    code, radius = [float.fromhex(x) for x in given["code"]], given["radius_int"] / 2**16
    if math.hypot(*code) > radius:
        direction = [x / max(map(abs, code)) for x in code]
        code = [x * (radius / math.hypot(*direction)) for x in direction]
    q = np.array([math.trunc(x * 2**16) for x in code], "<i8")
    squares = sum(int(x) ** 2 for x in q)
    assert squares <= given["radius_int"] ** 2
    clipped = {"clipped": [x.hex() for x in code], "bytes": q.tobytes().hex()}
    return clipped | {"integers": q.tolist(), "sum_of_squares": squares}

def noise_shares(given, values):
    variance = Fraction(given["noise_std"]) ** 2 / (given["sites"] - given["colluders"])
    shift = 48 - (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
    share = Fraction(math.isqrt(math.ceil(variance * Fraction(4) ** shift) - 1) + 1) / Fraction(2) ** shift
    tail = lambda x: math.erfc(x / float(share) / math.sqrt(2)) / 2
    for word, value in zip(np.frombuffer(unhex(given["entropy"]), "<u8").tolist(), values["noise"], strict=True):
        k, p = abs(value), ((word >> 1) + 0.5) / 2**64  # lowest bit: the sign; the others: P after its first bit, 0
        assert all((tail(k + 0.5) < p, k == 0 or p < tail(k - 0.5), value == (-k if word & 1 else k)))
    return {"share_std": f"{share.numerator}/{share.denominator}", "noise": values["noise"]}

def masks(given):
    draw = {"batch": given["batch"], "draw": given["draw"], "study": given["study"]}
    made, members, keys, size = {}, [], {}, len(given["sites"][0]["code"])
    for site in given["sites"]:
        info = tagged("consilium/mask-key/v1", draw | {"nonce": site["nonce"]})
        key = keys[site["site"]] = X25519PrivateKey.from_private_bytes(derived(unhex(site["secret"]), info))
        said = draw | {"key": public(key), "ledger": given["ledger"], "site": site["site"]}
        statement = tagged("consilium/mask-key-of-a-site/v1", said)
        signature = ed(site["ledger_key"]).sign(statement)
        made[site["site"]] = {"mask_private": key.private_bytes_raw().hex(), "mask_public": public(key)}
        made[site["site"]] |= {"mask_statement": statement.hex(), "mask_signature": signature.hex()}
        mask = {"key": public(key), "signature": base64.b64encode(signature).decode()}
        members.append({"mask": mask, "site": site["site"]})
    roster = text(draw | {"ledger": given["ledger"], "members": members, "schema": 1})
    total = {s["site"]: np.array(s["code"]).astype("u8") + np.array(s["noise"]).astype("u8") for s in given["sites"]}
    pairs = []
    for a, b in itertools.combinations(sorted(keys), 2):
        info = text({"pair": [a, b], "query": given["query"], "roster": sha(roster.encode())})
        shared = keys[a].exchange(keys[b].public_key())
        key = derived(shared, b"consilium/mask/v1\0" + info.encode())
        stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * size))
        words = np.frombuffer(stream, "<u8")
        total[a], total[b] = total[a] + words, total[b] - words
        pairs.append({"info": info, "shared": shared.hex(), "stream": list(map(str, words.tolist()))})
    made = {name: one | {"words": list(map(str, total[name].tolist()))} for name, one in made.items()}
    noisy = sum(total.values(), np.zeros(size, "u8")).view("i8").tolist()
    return {"sites": made, "roster": roster, "roster_sha256": sha(roster.encode()), "pairs": pairs, "noisy_sum": noisy}

def envelopes(given):
    body, reply, site, sealed = unhex(given["body"]), unhex(given["reply"]), given["site"], given["sealed"]
    question = tagged("consilium/asked/v1", {"body": sha(body), "site": site})
    message = ed(given["server_key"]).sign(question) + body
    answer = tagged("consilium/answered/v1", {"body": sha(reply), "request": sha(message), "site": site})
    key = X25519PrivateKey.from_private_bytes(unhex(sealed["private"]))
    info = tagged("consilium/code/v1", sealed["context"])
    code = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305).decrypt(unhex(sealed["bytes"]), key, info=info)
    opened = {"public": public(key), "info": info.hex(), "code": np.frombuffer(code, "<i8").tolist()}
    answered = ed(given["site_key"]).sign(answer) + reply
    made = {"question": question, "message": message, "answer": answer, "answered": answered}
    return {name: data.hex() for name, data in made.items()} | {"sealed": opened}

def chained(role, links, hashed):
    for seq, time, kind, body in links:
        row = {"body_sha256": body, "kind": kind, "prev_hash": hashed, "seq": seq, "time_utc": time}
        hashed = sha(tagged(f"consilium/{role}-ledger-row/v1", row))
        yield seq, hashed

def ledger_rows(given):
    links = [(row["seq"], row["time_utc"], row["kind"], sha(row["body"].encode())) for row in given["rows"]]
    hashes = list(chained(given["role"], links, "0" * 64))
    place, key = {"hash": hashes[-1][1], "ledger_id": given["ledger_id"], "seq": hashes[-1][0]}, ed(given["key"])
    head, possession = (tagged(f"consilium/{given['role']}-ledger-{what}/v1", place) for what in ("head", "key"))
    rows = [{"body_sha256": link[3], "hash": hashed} for link, (_, hashed) in zip(links, hashes, strict=True)]
    made = {"rows": rows, "public_key": public(key), "head": head.hex(), "head_signature": key.sign(head).hex()}
    return made | {"possession": possession.hex(), "possession_signature": ed(given["new_key"]).sign(possession).hex()}

def receipts(given):
    key, receipt = ed(given["key"]), json.loads(text(given["receipt"]))
    head, previous = receipt["head"], receipt["previous"]
    place = {name: head[name] for name in ("hash", "ledger_id", "seq")}
    head |= {"public_key": public(key), "signature": key.sign(tagged("consilium/server-ledger-head/v1", place)).hex()}
    links = [(seq, *link) for seq, link in enumerate(receipt["links"], previous["seq"] + 1)]
    rows = dict(chained("server", links, previous["hash"]))
    assert rows[head["seq"]] == head["hash"]
    roster = {"roster": receipt["roster"]} if "roster" in receipt else {}
    releases = {str(item["seq"]): sha(text(item["body"] | roster).encode()) for item in receipt["releases"]}
    assert all(links[int(seq) - previous["seq"] - 1][3] == digest for seq, digest in releases.items())
    signed = tagged("consilium/receipt/v1", receipt)
    if receipt["schema"] == 3:
        own = {name: receipt[name] for name in ("after", "before", "pool", "site")}
        rest = {name: value for name, value in receipt.items() if name not in own and name != "rosters"}
        common = tagged("consilium/receipt-common/v3", rest)
        signed = tagged("consilium/receipt/v3", own | {"common": sha(common)})
    whole = text(receipt | {"signature": key.sign(signed).hex()})
    return {"signed": signed.hex(), "text": whole, "rows": {str(k): v for k, v in rows.items()}, "releases": releases}

def check(document):
    for case in document["cases"]:
        more = [case["values"]] if document["what"] == "noise-shares" else []
        made = globals()[document["what"].replace("-", "_")](case["inputs"], *more)
        assert made == case["values"], document["what"]

if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        check(json.loads(file.read_text(encoding="utf-8")))
        print(f"{file.name}: as specified")
