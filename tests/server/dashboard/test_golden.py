"""Tests the dashboard's text for the recorded study word for word: every page and every JSON document.

Names made anew each time (hashes, keys, times, durations, folders) are replaced by their kind. A failing test writes
the new texts to ``tmp_path``, for the case that the change is intended.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from server.dashboard.app import Options
from server.dashboard.screens import NAVIGATION
from tests.dashboard_study import QUERIES, Recorded, make_study_directory
from tests.server.dashboard.conftest import looked_at

GOLDEN = Path(__file__).parent / "golden.json"
PAGES = (*(path for path, _, _ in NAVIGATION), "/ledger/7", "/planner?epsilon=x")
DOCUMENTS = (
    "/api/me",
    "/api/overview",
    "/api/study",
    "/api/study/noise",
    "/api/sites",
    "/api/studies",
    "/api/labels",
    "/api/student",
    "/api/decisions",
    "/api/certificate",
    "/api/plan",
    "/api/plan?epsilon=2&queries=40&hospitals=16&dimension=12",
    "/api/plan?unit=patient&relation=zero-out",
    "/api/plan?unit=patient",
    "/api/ledger?limit=2",
    "/api/ledger/head",
    "/api/ledger/rows/999",
    "/api/student/bundle.zip",
    "/api/blocks/nowhere",
    "/metrics",
    *(f"/api/tables/{name}.csv" for name in ("sites", "batches", "refusals", "curve", "labels", "decisions")),
)
MADE_ANEW = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)?", "<time>"),
    (r"\b\d\d:\d\d:\d\d\b", "<clock>"),
    (r'"(csrf)":"[^"]*"', r'"\1":"<token>"'),
    (r'"(latency_s|median_s|slowest_s|seconds)":[\d.e-]+', r'"\1":<seconds>'),
    (r'"slowest":"\w+"', '"slowest":<site>'),
    (r"\d\.\d+,\d\.\d+,(east|north|south|west)", "<seconds>,<seconds>,<site>"),
    (r"(,0,)\d\.\d+(,\d+,0,,)", r"\1<seconds>\2"),
    (r"\b\d+(\.\d+)? s\b", "<seconds>"),
    (r"<seconds>\n(east|north|south|west)\b", "<seconds>\n<site>"),
    (r"/[^\s\"]*/(study|state\d*)\b", r"<folder>/\1"),
    (r"(timestamp_seconds\S*) [\d.e+]+", r"\1 <seconds>"),
    (r"(?<![.\d])\b(?=[a-f]*\d)[0-9a-f]{8,128}\b", "<hex>"),
)


def steady(text: str) -> str:
    """Return ``text`` with all changing names replaced, and long fractions cut to five digits, beyond which processors
    differ.
    """
    for pattern, word in MADE_ANEW:
        text = re.sub(pattern, word, text)
    text = text.replace("\r", "")
    return re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.5g}", text)


def words(page: str) -> str:
    """Return a page's text as a reader sees it, one line for each piece."""
    body = re.sub(r"(?s)<script.*?</script>", "", re.split(r"<body[^>]*>", page, maxsplit=1)[-1])
    pieces = (html.unescape(piece).strip() for piece in re.split(r"<[^>]+>", body))
    return "\n".join(re.sub(r"\s+", " ", piece) for piece in pieces if piece)


def said(client) -> dict[str, str]:
    """Return the status and the text of every page and document."""
    found = {path: client.get(path) for path in (*PAGES, *DOCUMENTS)}
    return {
        path: f"{answer.status_code} {steady(words(answer.text) if path in PAGES else answer.text)}"
        for path, answer in found.items()
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    """Return a study with all answers in one batch, because two batches within a second have no fixed order."""
    study = make_study_directory(tmp_path_factory.mktemp("golden"), batch_size=QUERIES)
    study.collect()
    return study


def test_pages_and_documents_say_what_they_said(recorded, state, tmp_path):
    with (
        recorded.workspace.locked(),  # a live run holds this lock
        looked_at(Options(study=recorded.workspace.root, state=state), user="paul") as client,
    ):
        given = said(client)
    (tmp_path / GOLDEN.name).write_text(json.dumps(given, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert given.keys() == expected.keys()
    for path, text in given.items():
        assert text == expected[path], path
