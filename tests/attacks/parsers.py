"""Lists every parser of foreign files, each with a valid file, and changes these files by a seed."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from client.data.layouts import load_names, open_dataset
from client.foreign import bring
from client.operations.daemons import site_node
from client.policy import load_site
from client.records.declared import DECLARED, ForeignKind, LabelOf, TeacherDeclaration
from client.records.patient_deal import deal, load_slots, save_slots
from client.site.enrolment import SiteKit
from client.teachers.bundle_values import read_values
from common import site_account
from common.admission import read_request, write_request
from common.bundle_archive import from_archive, to_archive
from common.canonical import canonical_bytes, parse_canonical
from common.codecs.codec import load_codec
from common.config import load_study, render_study
from common.data.patients import read_table
from common.data.split import private_label_hashes
from common.data.volume import example_from_bytes, volume_from_bytes
from common.ledger.keys import public_hex
from common.models.bundle import open_bundle
from common.models.unet import build_unet, weights_from_bytes, weights_to_bytes
from common.node_auth import AdmittedNode, read_admitted, write_admitted
from common.peers import Peer, Peers, read_peers
from common.pki import create_node_keys, expires, parse_node_key, read_node_public_key
from common.protocols.frame import Frame, plan_frame
from common.reading import parse_json
from common.sealing_rotation import SealingNotice
from common.site_account import signed_account
from common.site_figures import SiteFigures, StructureFigure
from common.site_verdict import BETTER, SiteVerdict
from common.student_statement import StudentStatement
from common.witness.notes import CheckpointNote, origin_of
from consilium.cli import ledger as ledger_commands
from consilium.cli import privacy as privacy_commands
from server.dashboard import auth, oidc
from server.operations import provision
from server.study.workspace import Endpoint
from tests.common.data.corpus import ONE, drawing, packed, scan
from tests.exported import exported_study, statement_file
from tests.federation import make_codec, make_study
from tests.studies import served_study
from tests.worlds import site_toml

Read = Callable[[bytes], object]

SITE_MORE = """
[allow]
studies = ["0000000000000000000000000000000000000000000000000000000000000000"]
[share]
status = true
[dataset]
layout = "msd"
[labels]
a = "front"
[bids.T1w]
acq = "mprage"
"""
OIDC = b"""issuer = "https://id.example"
client_id = "consilium"
client_secret_file = "secret"
role_claim = "groups"
[roles]
operator = ["a"]
"""
MSD = json.dumps(
    {
        "name": "set",
        "labels": {"0": "background", "1": "front"},
        "modality": {"0": "T1"},
        "training": [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
        "test": ["./imagesTs/b.nii.gz"],
        "hospitals": {"a": "north"},
    }
).encode()
NNUNET = json.dumps(
    {
        "channel_names": {"0": "T1"},
        "labels": {"background": 0, "front": 1},
        "numTraining": 1,
        "file_ending": ".nii.gz",
    }
).encode()
SPLIT = json.dumps({"validation": [{"label": "0" * 64}], "test": [], "sites": {"a": [{"label": "1" * 64}]}}).encode()
LINK = json.dumps({"site": "north", "superlink": "localhost:1"}).encode()

DEEP = "[" * 3_000 + "]" * 3_000
TOKENS = [
    *("-1", "0", "1e400", "-1e400", "nan", "inf", "-inf", "NaN", "Infinity", "9" * 400, "9" * 5_000, "1e-400", "0.5"),
    *("true", "null", "[]", "{}", '""', '"\\ud800"', '"\\u0000"', '"\u202e"', '"x"', "2026-01-01", "00:00:00"),
    *(DEEP, "{a=" * 900 + "1" + "}" * 900, '{"a":' * 3_000 + "1" + "}" * 3_000, "[[]]", '["a", 1]', "'" * 3),
    *("a." * 400 + "a = 1", '"' + "x" * 200_000 + '"', "x" * 200_000, "\0", "\r", "\n", ",", ";", "=", '"', "\ufeff"),
]
"""Replacements for a token of a text."""
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, 10**400, 1e308, -1e308, "", "\ud800", "\0", "\u202e", "x" * 100_000, "1/0"),
    *([], {}, [[]], [{}], {"": 0}, "0" * 64, "é" * 64, "0x1.8p+1", "0x1.8p+9999", "nan", "AAAA", "../x", [0] * 501),
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
]
HEADERS = [
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (3L,), }",
    b"{'descr': [('a', '<f8')] * 3, 'fortran_order': False, 'shape': (), }",
    b"{'descr': ('<f8', (1 << 40,)), 'fortran_order': 0, 'shape': (1,)}",
    b"(" * 3_000,
    b"-" * 9_000 + b"1",
    b"'''",
    b"\\\n",
    b"{'descr': '\\N{x}', 'shape': ()}",
    b"\x0c \tif",
]
"""Replacements for an array's header, which numpy reads as Python."""


@dataclass(frozen=True)
class Parser:
    """Reads ``valid`` without an error; ``kind`` names its format: json, nifti, npz, zip; otherwise text."""

    valid: bytes
    read: Read
    kind: str

    def changed(self, draw: random.Random) -> bytes:
        """Return the valid file with a change of its structure or of its bytes."""
        if draw.random() < 0.25:
            return spoilt(self.valid, draw)
        match self.kind:
            case "json":
                return changed_json(self.valid, draw)
            case "nifti":
                return changed_nifti(self.valid, draw)
            case "npz" | "zip":
                return changed_zip(self.valid, draw)
            case _:
                return changed_text(self.valid, draw)


def spoilt(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes cut, doubled, with some exchanged, or unchanged."""
    made = bytearray(data)
    match draw.randrange(5):
        case 0:
            return data[: draw.randrange(len(data))]
        case 1:
            return data + data
        case 2:
            return draw.randbytes(draw.choice((0, 1, 100)))
        case 3:
            at = draw.randrange(len(made))
            made[at:at] = draw.choice(TOKENS).encode("utf-8", "surrogatepass")
        case _:
            for _ in range(draw.choice((1, 1, 8, 64))):
                made[draw.randrange(len(made))] = draw.randrange(256)
    return bytes(made)


def changed_text(data: bytes, draw: random.Random) -> bytes:
    """Return the text with one token replaced, or one line doubled, removed or moved."""
    text = data.decode()
    if draw.random() < 0.7:
        places = [found.span() for found in re.finditer(r'"[^"\n]*"|[\w.+-]+|[^\w\s]', text)]
        start, end = draw.choice(places)
        return (text[:start] + draw.choice(TOKENS) + text[end:]).encode("utf-8", "surrogatepass")
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    line = lines.pop(at)
    lines[draw.randrange(len(lines) + 1) : 0] = [line] * draw.choice((0, 1, 2, 300))
    return "".join(lines).encode()


def changed_json(data: bytes, draw: random.Random) -> bytes:
    """Return the JSON with some values replaced, removed, doubled or moved."""
    document = json.loads(data)
    for _ in range(draw.choice((1, 1, 3))):
        holder, last, inner = None, None, document
        while isinstance(inner, dict | list) and inner and (holder is None or draw.random() < 0.8):
            holder, last = inner, draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            inner = holder[last]
        if holder is None:
            return json.dumps(draw.choice(VALUES)).encode()
        match draw.randrange(5):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.extend([inner] * draw.choice((1, 2, 600)))
            case 1:
                holder[draw.choice(("", "x", "schema"))] = draw.choice(VALUES)
            case _:
                holder[last] = copy.deepcopy(draw.choice(VALUES))
    text = json.dumps(document, ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.2:
        text = text.replace('"', draw.choice(TOKENS), 1) if draw.random() < 0.5 else text.replace("0", DEEP, 1)
    return text.encode("utf-8", "surrogatepass")


FIELDS = ((40, 16), (70, 4), (76, 32), (108, 12), (123, 1), (252, 4), (256, 24), (280, 48), (0, 4))
"""Fields of a NIfTI header: the offset of each, and its number of bytes."""


def changed_nifti(data: bytes, draw: random.Random) -> bytes:
    """Return the volume with changed header fields or another packing."""
    raw = bytearray(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    for _ in range(draw.choice((1, 2, 6))):
        at, size = draw.choice(FIELDS)
        field = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size), b"\x7f\xc0\0\0" * 12, b"\xff\x7f" * 24))
        where = at + draw.randrange(size)
        raw[where : at + size] = field[: at + size - where]
    if draw.random() < 0.3:
        del raw[draw.randrange(len(raw)) :]
    return gzip.compress(bytes(raw), 1, mtime=0) if draw.random() < 0.6 else bytes(raw)


def changed_zip(data: bytes, draw: random.Random) -> bytes:
    """Return the archive with one changed member, packed correctly."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = draw.choice(list(members))
    content = members[name]
    match draw.randrange(5):
        case 0 if content[:6] == b"\x93NUMPY":
            members[name] = headed(content, draw.choice(HEADERS))
        case 1:
            members[draw.choice(("../x", "/x", "", "a" * 300, "x.npy", "data.pkl"))] = members.pop(name)
        case 2:
            members[name] = content[: draw.randrange(len(content) + 1)]
        case 3:
            members[name] = changed_json(content, draw) if content[:1] in b"{[" and content else b"[" * 9_000
        case _:
            members[name] = spoilt(content, draw) if content else b"\0"
    stream = io.BytesIO()
    how = zipfile.ZIP_STORED if draw.random() < 0.9 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(stream, "w", how) as archive:
        for member in sorted(members):
            archive.writestr(zipfile.ZipInfo(member), members[member])
    return stream.getvalue()


def headed(content: bytes, header: bytes) -> bytes:
    """Return the file of an array with another header."""
    size = int.from_bytes(content[8:10], "little")
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + size :]


def with_array_header(data: bytes, header: bytes) -> bytes:
    """Return an archive of arrays whose first array has another header."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = min(members)
    members[name] = headed(members[name], header)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return stream.getvalue()


def from_file(path: Path, read: Callable[[Path], object]) -> Read:
    """Convert a parser of files to a parser of bytes."""

    def parse(data: bytes) -> object:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return parse


def parsers(root: Path) -> dict[str, Parser]:
    """Return all parsers by the kind of file that they read; the files are below ``root``."""
    found: dict[str, Parser] = {}

    def file(kind: str, path: str, read: Callable[[Path], object], valid: bytes | None = None) -> None:
        at = root / path
        found[path.rpartition("/")[2]] = Parser(at.read_bytes() if valid is None else valid, from_file(at, read), kind)

    study = make_study()
    workspace = served_study(root / "server", study, endpoint=Endpoint(host="localhost", port=1, internal_port=2))
    provision.make_kit(workspace, "north", root / "kit")
    file("toml", "study/study.toml", load_study, render_study(study).encode())
    file("toml", "site/site.toml", lambda path: load_site(path.parent), site_toml(more=SITE_MORE).encode())
    file("toml", "names.toml", load_names, b'[labels]\n"front" = "a"\n[channels]\nT1 = "t1"\n[bids.T1]\nacq = "x"\n')
    file("toml", "oidc.toml", oidc.load_settings, OIDC)
    file("table", "patients.csv", read_table, b'case_id,patient_id\na,"p, 1"\nb,p2\n')
    (root / "cases").mkdir()
    for name in ("a.nii", "b.nii"):
        (root / "cases" / name).touch()
    cases = b"image,label,patient_id\na.nii,b.nii,p1\n"
    file("table", "cases/cases.csv", lambda path: open_dataset(path.parent), cases)
    for name in ("imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz"):
        (root / "nnunet" / name).parent.mkdir(parents=True)
        (root / "nnunet" / name).touch()
    file("json", "nnunet/dataset.json", lambda path: open_dataset(path.parent, layout="nnunet"), NNUNET)
    found["nnunet"] = found.pop("dataset.json")
    file("json", "msd/dataset.json", lambda path: open_dataset(path.parent, layout="msd"), MSD)
    file("json", "split.json", private_label_hashes, SPLIT)
    file("json", "kit/kit.json", lambda path: SiteKit.load(path.parent))
    file("text", "kit/ca.crt", expires)
    peers = Peers.of(study.id, [Peer(name, public_hex(Ed25519PrivateKey.generate().public_key())) for name in "ab"])
    file("json", "peers.json", read_peers, peers.render())
    node = create_node_keys(root / "node-keys")
    write_request(root / "request.json", study=study.id, site="north", pool="north", node_key=node.private)
    file("json", "request.json", read_request)
    line = read_node_public_key(node.public)
    found["node-key"] = Parser(line.encode(), lambda data: parse_node_key(data.decode("utf-8", "replace")), "text")
    write_admitted(root / "nodes.json", (AdmittedNode(site="north", key=line),))
    file("json", "nodes.json", read_admitted)
    for name in ("ca.crt", "keys/node", "keys/node.pub"):
        (root / "link" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "link" / name).touch()
    file("json", "link/link.json", lambda path: site_node(path.parent, socket=root / "socket"), LINK)
    declared = TeacherDeclaration(ForeignKind.TORCHSCRIPT, (LabelOf(0, "background"),), ("T1",), {}, 60, 1)
    file("json", f"declared/{DECLARED}", TeacherDeclaration.read, json.dumps(declared.to_json()).encode())
    save_slots(root / "slots.json", deal(["p1", "p2"], voters=2, seed=1))
    file("json", "slots.json", load_slots)
    key, sealing = Ed25519PrivateKey.generate(), public_hex(X25519PrivateKey.generate().public_key())
    (root / "notice.json").write_text(SealingNotice(sealing, ()).signed(key).render())
    file("json", "notice.json", SealingNotice.load)
    federation = exported_study(root / "exported")
    said = statement_file(federation).read_bytes()
    found["statement"] = Parser(said, StudentStatement.parse, "json")
    archive = federation.objects.get(StudentStatement.parse(said).bundle)
    found["archive"] = Parser(archive, lambda data: read_values(from_archive(data)), "zip")
    bundle = root / "bundle"
    for name, content in from_archive(archive).items():
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_bytes(content)
    file("json", "bundle/configs/metadata.json", lambda path: open_bundle(bundle))
    network = build_unet((4, 8), in_channels=1, out_channels=2, seed=5)
    found["weights"] = Parser(weights_to_bytes(network), lambda data: weights_from_bytes(data, network), "zip")
    found["codec"] = Parser(make_codec(study).to_bytes(), load_codec, "npz")
    found["frame"] = Parser(made_frame().to_bytes(), Frame.from_bytes, "npz")
    found["volume"] = Parser(packed(scan()), lambda data: volume_from_bytes(data, ONE), "nifti")
    found["volume-gz"] = Parser(gzip.compress(packed(scan()), 1), found["volume"].read, "nifti")
    image = packed(scan())
    found["label"] = Parser(packed(drawing()), lambda data: example_from_bytes(image, data, ONE), "nifti")
    found["canonical"] = Parser(canonical_bytes({"a": [1, "x", None], "b": {"c": True}}), parse_canonical, "json")
    found["written"] = Parser(b'{"a": [1, "x", {"b": null}]}', rewritten, "json")
    file("json", "spectrum.json", lambda path: privacy_commands._read_spectrum(path, length=None), b"[1.5, 2, 3e-5]")
    head = federation.ledger.head().to_json()
    file("json", "head.json", ledger_commands._read_head, json.dumps(head).encode())
    users = json.dumps(auth._Users((auth._NOBODY,)).to_json()).encode()
    found["users"] = Parser(users, auth._parse, "json")
    of_student = {"study_id": study.id, "bundle": "b" * 64, "site": "north", "time_utc": "2026-11-25T00:00:00.000000Z"}
    verdict = SiteVerdict(**of_student, word=BETTER).signed(key)
    found["verdict"] = Parser(verdict.render(), SiteVerdict.parse, "json")
    figures = SiteFigures(**of_student, dice=(StructureFigure("a", 71),)).signed(key)
    found["figures"] = Parser(figures.render(), SiteFigures.parse, "json")
    note = CheckpointNote(origin_of("site", "north"), 7, bytes(32)).signed(key.sign, key=public_hex(key.public_key()))
    found["head-note"] = Parser(
        note.render().encode(), lambda data: CheckpointNote.parse(data.decode("utf-8", "replace")), "text"
    )
    facts = federation.site_ledgers["site-0"].facts("site-0", present=[]).to_json()
    account = json.dumps(signed_account(facts, sign=key.sign, now=datetime.now(UTC))).encode()
    found["account"] = Parser(account, lambda data: signed_anew(data, key), "json")
    model = to_archive({"configs/inference.json": b"{}", "configs/metadata.json": b"{}", "models/model.pt": b"x"})
    file("zip", "model.zip", lambda path: bring._copied(path, fresh(root / "copied")), model)
    return found


def signed_anew(data: bytes, key: Ed25519PrivateKey) -> object:
    """Read, as the consortium does, a status report that a dishonest site signed."""
    said = parse_json(data, what="status report")
    if isinstance(said, dict):
        said.pop("signature", None)
        said["signature"] = key.sign(site_account._statement(said)).hex()
    return site_account.read_account(said, keys={"site-0": public_hex(key.public_key())})


def made_frame() -> Frame:
    """Return a frame of two volumes."""
    factors = np.random.default_rng(0).normal(size=(4, 4))
    return plan_frame(
        kernel=factors @ factors.T,
        centre=np.zeros((2, 3)),
        variances=np.array([0.5, 0.25, 0.1]),
        residual=0.5,
        temperature=0.5,
        noise_std=0.01,
        radius=1.0,
        codec="0" * 64,
    )


def rewritten(data: bytes) -> object:
    """Read JSON, and return its canonical form."""
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return canonical_bytes(value)


def fresh(path: Path) -> Path:
    """Return a path that does not exist."""
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    return path
