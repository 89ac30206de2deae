"""Tests that everything stored or sent names its format; unknown formats are refused with a remedy."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from client.policy import load_site
from client.teachers.teacher import load_teacher
from common import __version__
from common.canonical import canonical_bytes, check_schema
from common.codecs.codec import load_codec, pack
from common.config import parse_study
from common.errors import ConsiliumError, InvalidInput
from common.ledger.receipts import Receipt
from common.messages import decode
from common.student_statement import StudentStatement
from server.dashboard.auth import UserFile
from tests.worlds import study_toml

STUDY = study_toml("anterior", "posterior", grid=(32, 48, 32), name="demo", planned_queries=16, quorum=3)

RECEIPT = {
    **dict.fromkeys(("batch", "signature", "site", "study"), ""),
    **{key: {} for key in ("after", "before", "head", "pool", "previous")},
    **{key: [] for key in ("links", "releases")},
}
STATEMENT = {
    **dict.fromkeys(("bundle", "created_utc", "mu_squared", "signature", "study"), ""),
    "head": {},
    "links": [],
    "queries": 0,
    "size": 0,
}


def _site(folder: Path, schema: int) -> None:
    (folder / "site.toml").write_text(f"schema = {schema}\n")
    load_site(folder)


def _teacher(folder: Path, schema: int) -> None:
    (folder / "voter-000").mkdir()
    (folder / "voter-000" / "train.json").write_text(json.dumps({"schema": schema}))
    load_teacher(folder / "voter-000")


def _users(folder: Path, schema: int) -> None:
    (folder / "users.json").write_text(json.dumps({"schema": schema, "users": []}))
    UserFile(folder / "users.json").users()


READERS: dict[str, Callable[[Path, int], object]] = {
    "study": lambda _, schema: parse_study(STUDY.replace("schema = 1", f"schema = {schema}")),
    "site.toml": _site,
    "message": lambda _, schema: decode(canonical_bytes({"kind": "offer", "schema": schema})),
    "codec": lambda _, schema: load_codec(pack({"name": "pca", "schema": schema}, {})),
    "receipt": lambda _, schema: Receipt.from_json({**RECEIPT, "schema": schema}),
    "student's statement": lambda _, schema: StudentStatement.parse(canonical_bytes({**STATEMENT, "schema": schema})),
    "teacher": _teacher,
    "users file": _users,
}


@pytest.mark.parametrize("name", READERS)
def test_a_newer_format_is_refused_and_the_remedy_is_to_upgrade(name: str, tmp_path: Path) -> None:
    """The error states the cause, the found version, the running version and the remedy."""
    said = f"{name} schema of a newer .*: got 99; allowed: ., .*{re.escape(__version__)}.*; to fix: upgrade .*here"
    with pytest.raises(ConsiliumError, match=said):
        READERS[name](tmp_path, 99)


def test_an_older_format_is_to_be_written_anew_and_no_format_is_none_of_ours() -> None:
    with pytest.raises(InvalidInput, match=r"upgrade .*where it was written"):
        check_schema("message", 1, known=2)
    for nonsense in (None, "1", True, 1.0):
        with pytest.raises(InvalidInput, match="another program"):
            check_schema("message", nonsense, known=1)


def test_a_study_is_the_same_study_under_every_version() -> None:
    """Consents, charges and receipts name a study by this hash, so a running study would end if the hash changed.

    A field that a later version adds to the consented terms must stay out of ``Study.to_json`` at its default, or needs
    a new ``STUDY_SCHEMA``.
    """
    assert parse_study(STUDY).id == "1be79e23e10e18386166f1a7e6fbda10c9d58e9e5c3dd3593bd67057cbb94054"
