"""Tests that every page agrees with its JSON, roles are kept, tables download as CSV, and decisions reach the
training.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import html
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.records import KINDS as RECORDS
from common.ledger.row_text import row_text
from common.privacy.accounting import max_mu_squared
from common.privacy.consent import guess_sentence
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.site_facts import PRINTED
from server.dashboard import pictures
from server.dashboard.labels import _controls
from server.dashboard.reports import read_reports
from server.dashboard.rows import row_page
from server.dashboard.screens import NAVIGATION
from server.ledger.server_ledger import Ledger
from server.planning.planner import plan
from server.postprocess.decisions import DecisionStore, Verdict, read_decisions, take_over
from server.protocols.controls import CONTROLS
from server.protocols.posterior import doubt_of
from server.study.consent_text import for_site
from tests.dashboard_study import QUERIES, SITES
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
PAGES = (*(path for path, _, _ in NAVIGATION), "/ledger/7")


def token(client) -> dict[str, str]:
    return {"x-csrf-token": client.get("/api/me").json()["csrf"]}


def csv_rows(answer) -> list[dict[str, str]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_there_without_inline_script_or_style(reader, path):
    answer = reader.get(path)
    assert answer.status_code == 200
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", answer.text)
    assert not re.search(r"""(?:src|href|action)="(?:https?:)?//""", answer.text)


def test_a_sites_name_is_no_other_elements_id(reader):
    """A site may be called ``main`` or ``report``."""
    text = reader.get("/sites").text
    for site in SITES:
        assert f'id="{site}"' not in text
        assert f'id="site-{site}"' in text
        assert f'href="/sites#site-{site}"' in reader.get("/").text


def test_every_epsilon_on_a_page_has_its_terms_on_it_too(reader):
    client = reader
    for path in ("/", "/study", "/sites", "/planner"):
        text = client.get(path).text
        assert "ε" in text
        for word in ("δ", "hospital", "replace-one", "exact"):
            assert word in text.lower(), (path, word)


def test_the_first_page_says_what_is_spent_and_left_for_the_study_and_every_site(reader):
    client = reader
    facts = client.get("/api/overview").json()
    text = client.get("/").text
    assert f"<strong>{QUERIES}</strong> of {QUERIES} planned answers" in text
    assert "every planned answer" in text
    for site in facts["sites"]:
        assert site["name"] in text
        assert site["budget"]["words"].replace("ε ", "ε\N{NO-BREAK SPACE}") in text
        assert site["budget"]["epsilon"] <= site["budget"]["budget"]


def test_the_ledger_can_be_paged_through_and_every_row_comes_once(reader, collected):
    client = reader
    with Ledger.open(collected.workspace.ledger_file) as ledger:
        rows = [(row.seq, row.hash) for row in ledger.rows()]
    seen, before = [], None
    while True:
        page = client.get("/api/ledger", params={"limit": 4} | ({"before": before} if before else {})).json()
        seen += [(row["seq"], row["hash"]) for row in page["rows"]]
        before = page["older"]
        if before is None:
            break
    assert seen == rows[::-1]
    newer = client.get("/api/ledger", params={"after": 4, "limit": 3}).json()
    assert [row["seq"] for row in newer["rows"]] == [7, 6, 5]


def test_rows_are_filtered_and_go_out_as_csv_and_json(reader, collected):
    client = reader
    assert len(client.get("/api/ledger", params={"kind": "release"}).json()["rows"]) == QUERIES
    with Ledger.open(collected.workspace.ledger_file) as ledger:
        rows = list(ledger.rows())
    listed = csv_rows(client.get("/api/ledger/rows.csv"))
    assert [(int(row["seq"]), row["body"], row["hash"]) for row in listed] == [(r.seq, r.body, r.hash) for r in rows]
    found = client.get("/api/ledger/rows.json", params={"kind": "pool", "text": "north"}).json()
    assert [row["body"]["site"] for row in found] == ["north"]
    assert client.get("/api/ledger", params={"kind": "nonsense"}).status_code == 422
    assert client.get("/api/ledger/rows/999").status_code == 404
    row = client.get("/api/ledger/rows/7").json()
    assert row["body"] == json.loads(rows[6].body)
    assert row["head"]["seq"] >= 7


def test_every_table_goes_out_as_csv(reader):
    client = reader
    sites = csv_rows(client.get("/api/tables/sites.csv"))
    assert [row["name"] for row in sites] == sorted(SITES)
    assert float(sites[0]["epsilon_spent"]) == client.get("/api/overview").json()["sites"][0]["budget"]["epsilon"]
    assert len(csv_rows(client.get("/api/tables/curve.csv"))) == QUERIES
    assert sum(int(row["answers"]) for row in csv_rows(client.get("/api/tables/batches.csv"))) == QUERIES
    for name in ("refusals", "labels", "decisions"):
        assert client.get(f"/api/tables/{name}.csv").status_code == 200


def test_a_spreadsheet_takes_no_text_for_a_formula():
    from server.dashboard.tables import csv_response

    text = csv_response("x", [{"a": "=1+1", "b": -2.5, "c": "@x"}]).body.decode()
    assert text.splitlines()[1] == "'=1+1,-2.5,'@x"


def test_metrics_carry_the_documented_names_and_the_ledgers_figures(client, collected):
    answer = client.get("/metrics", headers={"authorization": "Bearer " + "m" * 20})
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    spent = {s.labels["site"]: s.value for s in families["pate_privacy_epsilon_spent"].samples}
    with Ledger.open(collected.workspace.ledger_file) as ledger:
        expected = {p.site: ledger.pool_spending(p.pool).spent.epsilon for p in ledger.pools()}
    assert spent == expected
    outcomes = {s.labels["outcome"]: s.value for s in families["pate_releases"].samples if s.name.endswith("_total")}
    assert outcomes == {"released": QUERIES, "refused": 0}
    seen = {s.labels["site"]: s.value for s in families["pate_client_last_seen_timestamp_seconds"].samples}
    assert seen.keys() == set(SITES)
    assert all(abs(time.time() - value) < 3600 for value in seen.values())
    assert not re.search("patient_id|case|voxel", answer.text)


def test_the_planner_page_says_what_the_planner_says(reader, collected):
    client = reader
    form = {"epsilon": 4, "delta": 1e-5, "queries": 20, "hospitals": 16, "dimension": 32}
    given = client.get("/api/plan", params=form).json()
    expected = plan(
        budget=Budget(epsilon=4, delta=1e-5),
        accountant=AccountantName.EXACT,
        protection=Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE),
        queries=20,
        hospitals=16,
        voters_per_site=1,
        radius=collected.workspace.study().codec.radius,
        dimension=32,
    ).to_json()
    assert {key: given[key] for key in expected} == json.loads(json.dumps(expected))
    assert expected["summary"] in html.unescape(client.get("/planner", params=form).text)
    assert client.get("/api/plan", params={"unit": "patient", "relation": "zero-out"}).status_code == 400
    assert "zero-out" in client.get("/planner", params={"unit": "patient", "relation": "zero-out"}).text


def test_without_a_student_or_labels_pages_say_what_to_do(reader):
    client = reader
    assert "consilium student train" in client.get("/labels").text
    assert "consilium student train" in client.get("/student").text
    assert client.get("/api/student/bundle.zip").status_code == 404
    volume = client.get("/api/labels").json()["labels"][0]["volume"]
    assert f'data-waits-for="/api/labels/{volume}"' in client.get(f"/labels/{volume}").text
    assert client.get(f"/api/labels/{volume}/slice.png").status_code == 404


def test_the_student_page_counts_the_labelled_cases_that_the_overview_speaks_of(reader, collected):
    assert "none are published" in reader.get("/student").text.lower()
    cases = [{"image": "a" * 64, "label": "b" * 64}, {"image": "c" * 64, "label": "d" * 64}]
    file = collected.workspace.root / "validation.json"
    file.write_text(json.dumps(cases))
    try:
        text = reader.get("/student").text
        assert "2 labelled cases" in text
        assert reader.get("/api/student").json()["validation"] == 2
    finally:
        file.unlink()


@pytest.mark.slow
def test_the_student_page_names_a_measured_gain_although_no_labelled_cases_are_published(reader, collected):
    """A report may lie in the folder above the study, as a simulation leaves it."""
    student, control = ({"dice": {"mean": mean, "cases": [mean, mean - 0.01, mean + 0.01]}} for mean in (0.7, 0.6))
    report = {"study": {"id": collected.workspace.study().id}, "student": student, "controls": {"zero_code": control}}
    file = collected.workspace.root / "report.json"
    file.write_text(json.dumps(report))
    try:
        until(lambda: "control zero code" in reader.get("/").text)  # the dashboard reads the folder every second
        text = reader.get("/student").text.lower()
        assert re.search(r"gain proven .*control zero code", text)
        assert "none are published" not in text
    finally:
        file.unlink()


def test_controls_of_one_network_are_shown_as_one():
    trained = {"zero_code": ("a" * 64, "t"), "shuffled_codes": ("b" * 64, "t"), "public_only": ("a" * 64, "t")}
    shown = [(one.name, one.weights) for one in _controls(CONTROLS, trained)]
    assert shown == [("zero_code, public_only", "a" * 64), ("shuffled_codes", "b" * 64)]
    assert [one.name for one in _controls(CONTROLS, {})] == ["zero_code", "shuffled_codes", "public_only"]


def test_only_an_operator_with_the_sessions_token_decides(signed_in, collected, state):
    client = signed_in("paul")
    volume = client.get("/api/labels").json()["labels"][0]["volume"]
    path = f"/api/labels/{volume}/decision"
    assert client.post(path, json={"verdict": "reject"}, headers=token(client)).status_code == 403
    client = signed_in("ada")
    assert client.post(path, json={"verdict": "reject"}).status_code == 403
    assert client.post(path, json={"verdict": "reject"}, headers={"x-csrf-token": "guess"}).status_code == 403
    assert client.post(path, json={"verdict": "reject"}, headers=token(client)).status_code == 404  # no label yet
    assert not (state / "decisions.jsonl").exists()


def test_deciding_about_no_label_says_what_to_do(signed_in, state):
    client = signed_in("ada")
    form = {"csrf": client.get("/api/me").json()["csrf"], "verdict": "accept"}
    answer = client.post("/labels/decisions", data=form)
    assert answer.status_code == 400
    assert "tick the labels" in answer.text
    assert not (state / "decisions.jsonl").exists()


@pytest.mark.slow
def test_the_verification_is_a_real_one(reader):
    client = reader
    assert client.get("/api/ledger/verify").json()["job"]["state"] == "never"
    assert client.post("/api/ledger/verify", headers=token(client)).status_code == 202
    until(lambda: client.get("/api/ledger/verify").json()["job"]["state"] != "running")
    facts = client.get("/api/ledger/verify").json()
    assert facts["job"]["state"] == "done", facts
    assert facts["result"]["ok"]
    assert facts["result"]["rows"] == client.get("/api/overview").json()["ledger"]["rows"]
    assert "Everything holds" in client.get("/ledger").text


def test_a_site_shares_nothing_by_default_and_what_it_shares_is_marked(tmp_path, reader):
    assert read_reports(tmp_path / "none") == {}
    assert "outside the guarantee" not in reader.get("/sites").text
    at = {"delta": 1e-5, "unit": "patient", "relation": "replace-one"}
    spent = {name: {"accountant": name, "epsilon": 1.5, **at} for name in ("exact", "rdp", "paper")}
    report = {
        "site": "north",
        "pool": "north/patients",
        "cap": {"accountant": "exact", "epsilon": 8.0, "delta": 1e-5},
        "spent": spent,
        "queries_accepted": 4,
        "codes_stored": 4,
        "receipted": 4,
        "patients_withdrawn": 3,  # as earlier versions said it
        "alarms": [],
    }
    folder = tmp_path / "site-reports"
    folder.mkdir()
    (folder / "north.json").write_text(json.dumps(report))
    (folder / "east.json").write_text("{}")
    plain = read_reports(folder)
    assert (plain["north"].shared, plain["north"].patient, plain["north"].strategy) == ((), (), "")
    assert "east.json is set aside" in plain["east"].problem
    assert plain["north"].spent_epsilon == 1.5
    guarantee = {"epsilon": 2.0, "delta": 1e-5, "relation": "replace-one"}
    report |= {"trainings": {"count": 2, "strategies": ["dp-sgd"], "guarantees": [guarantee, None]}}
    report |= {"patient_identity": [{"row": 3, "identity": "table"}, {"row": 9, "identity": "file"}]}
    report |= {"shared": {"Dice on held-out cases": 0.81}}
    (folder / "north.json").write_text(json.dumps(report))
    full = read_reports(folder)["north"]
    assert full.strategy == "dp-sgd"
    assert plain["north"].patient_is == ""
    assert PatientIdentity.FILE.sentence in full.patient_is
    for told, figures in zip(full.patient, ("ε = 2 at δ = 1e-05", "ε = 3.5 at δ = 2e-05"), strict=False):
        assert all(fact in told for fact in (figures, "unit patient", "relation replace-one"))
    assert [(one.name, one.value) for one in full.shared] == [("Dice on held-out cases", "0.81")]
    for wrong in ({**guarantee, "relation": "zero-out"}, {**guarantee, "epsilon": float("nan")}):
        trainings = {**report["trainings"], "guarantees": [wrong]}
        (folder / "north.json").write_text(json.dumps({**report, "trainings": trainings}))
        assert PRINTED in read_reports(folder)["north"].problem


@pytest.mark.slow
def test_sixty_plans_at_once_keep_nobody_waiting_for_anything_else(signed_in):
    """The planner handles one request at a time and refuses those it would never reach; health checks are answered
    meanwhile.
    """
    client = signed_in("paul")
    cookies = dict(client.cookies)

    async def ask() -> tuple[list[int], float, int]:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", cookies=cookies) as many:
            plans = [
                asyncio.create_task(many.get(f"/api/plan?epsilon={1 + number / 50}&queries=137&dimension=64"))
                for number in range(60)
            ]
            await asyncio.sleep(0.05)
            started = time.monotonic()
            assert (await many.get("/healthz")).status_code == 200
            waited = time.monotonic() - started
            unanswered = sum(not one.done() for one in plans)
            return [answer.status_code for answer in await asyncio.gather(*plans)], waited, unanswered

    statuses, waited, unanswered = asyncio.run(ask())
    assert waited < 2.0
    assert unanswered > 0, "health is answered while plans are still to be made"
    assert set(statuses) == {200, 503}


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0, 20.97, 20.999, 21.0, 21.04])
def test_the_planner_advises_nothing_that_is_so_already(epsilon):
    """Each advised value differs from the plan's, as a number and as it is printed."""
    for hospitals in (3, 8, 11, 12, 13, 50, 54):
        found = plan(
            budget=Budget(epsilon=epsilon, delta=1e-5),
            accountant=AccountantName.EXACT,
            protection=Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE),
            queries=20,
            hospitals=hospitals,
            voters_per_site=1,
            radius=1.0,
            dimension=12,
        )
        for line in found.advice:
            if pair := re.search(r"([\d.]+)(?: teachers on disjoint patients)? instead of ([\d.]+)", line):
                assert pair[1] != pair[2].rstrip("."), line


def test_the_study_page_says_who_sees_what_against_whom_in_the_words_that_were_consented_to(reader, collected):
    text = html.unescape(reader.get("/study").text)
    study = collected.workspace.study()
    said = " ".join(re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", text)).split())
    for line in for_site(study).splitlines()[2:]:
        for words in re.split(" {2,}", line[:26].strip() + "  " + line[26:].strip() if line[25:26] == " " else line):
            assert words.strip() in said or words.capitalize() in said, line
    limit = max_mu_squared(study.privacy.accountant, study.privacy.budget)
    odds = guess_sentence(study.privacy.protection, limit, colluders=study.privacy.sealed_colluders)
    assert odds in text
    assert reader.get("/api/ledger/head").json()["public_key"] in text
    assert "<code>consilium certificate</code>" in text


def test_one_query_is_no_queries_on_a_page_of_rows():
    one = {"query_ids": ["a"], "reason": "pool-budget", "pool": "north", "draw": 1, "pools": ["north"], "roster": ["n"]}
    words = [row_text(kind, one) for kind in ("refusal", "lost-draw", "reuse", "lost", "roster")]
    assert [text for text in words if re.search(r"\b1 \w+s\b", text)] == []


def test_no_link_on_a_page_of_rows_leads_past_the_newest_row(reader):
    newest = reader.get("/api/ledger/head").json()["seq"]
    assert f'href="/ledger/{newest}">After' in reader.get(f"/ledger/{newest - 1}").text
    last = reader.get(f"/ledger/{newest}").text
    assert ">Before<" in last
    assert ">After<" not in last


def test_row_pages_say_numbers_a_person_reads(reader):
    """A float64 that the ledger stores in hex is shown with its decimal value."""
    for number in (2, 3):
        text = html.unescape(reader.get(f"/ledger/{number}").text)
        for found in re.findall(r"0x[0-9a-f.]+p[+-]\d+", text):
            assert f"({found})" in text
        assert '"8 (0x1' in text


# --- pictures


def arrays() -> dict[str, np.ndarray]:
    image = np.zeros((10, 20, 30), dtype=np.uint8)
    image[2, 3, 4] = 255  # right is x = 9: this voxel is on the patient's left, posterior, inferior
    label = np.zeros_like(image)
    label[2, 3, 4] = 1
    confidence = np.full_like(image, 255)
    return {"image": image, "label": label, "confidence": confidence}


@pytest.mark.parametrize(
    ("plane", "index", "corner"),
    [("axial", 4, ("right", "bottom")), ("coronal", 3, ("right", "bottom")), ("sagittal", 2, ("right", "bottom"))],
)
def test_slices_are_shown_as_radiologists_read_them(plane, index, corner):
    """x points left, y and z point up, and sagittal slices show anterior on the left. The bright voxel lies left,
    posterior, low.
    """
    png = pictures.draw(arrays(), plane=plane, index=index, layer="none", spacing_mm=(1, 1, 1), side=300)
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("L")).astype(float)
    rows, columns = np.nonzero(picture > 0.9 * picture.max())
    assert ("right" if columns.mean() > picture.shape[1] / 2 else "left") == corner[0]
    assert ("bottom" if rows.mean() > picture.shape[0] / 2 else "top") == corner[1]


def test_a_slice_has_the_volumes_true_proportions_and_only_the_label_is_coloured():
    png = pictures.draw(arrays(), plane="coronal", index=3, layer="label", spacing_mm=(2.0, 1.0, 1.0), side=300)
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (200, 300)  # 10 · 2 mm across, 30 mm up
    pixels = np.asarray(picture).astype(int)
    coloured = pixels.max(axis=2) != pixels.min(axis=2)
    assert 0 < coloured.mean() < 0.02
    plain = pictures.draw(arrays(), plane="coronal", index=5, layer="label", spacing_mm=(2.0, 1.0, 1.0), side=300)
    pixels = np.asarray(Image.open(io.BytesIO(plain))).astype(int)
    assert (pixels.max(axis=2) == pixels.min(axis=2)).all()


def test_slices_off_the_grid_and_layers_without_a_student_are_refused():
    with pytest.raises(InvalidInput, match="slice"):
        pictures.draw(arrays(), plane="axial", index=30, layer="none", spacing_mm=(1, 1, 1))
    with pytest.raises(InvalidInput, match="no student"):
        pictures.draw(arrays(), plane="axial", index=0, layer="disagreement", spacing_mm=(1, 1, 1))


def test_the_viewer_gets_the_arrays_with_x_fastest_and_the_nifti_file_has_their_position():
    given = {
        name: np.arange(24, dtype=np.uint8).reshape(2, 3, 4) + number for number, name in enumerate(("image", "label"))
    }
    sent = np.frombuffer(pictures.voxels(given), dtype=np.uint8).reshape(2, 24)
    for row, name in zip(sent, ("image", "label"), strict=True):
        for x, y, z in np.ndindex(2, 3, 4):
            assert row[x + 2 * y + 6 * z] == given[name][x, y, z]
    image = nib.Nifti1Image.from_bytes(gzip.decompress(pictures.nifti(given["label"], (1.0, 2.0, 3.0))))
    np.testing.assert_array_equal(np.asarray(image.dataobj), given["label"])
    assert image.header.get_zooms() == (1.0, 2.0, 3.0)
    assert nib.aff2axcodes(image.affine) == ("R", "A", "S")


def test_twenty_structures_have_twenty_colours_the_same_in_pictures_viewer_and_legend():
    static = Path(pictures.__file__).parent / "static"
    script = re.search(r"const COLOURS = \[(.*?)\];", (static / "viewer.js").read_text(), re.S)
    legend = re.findall(r"\.s(\d+) \{ color: #(\w{6}); \}", (static / "dashboard.css").read_text())
    assert len(set(pictures.COLOURS)) == 20
    assert script is not None
    assert re.findall(r"\[(\d+), (\d+), (\d+)\]", script[1]) == [tuple(map(str, one)) for one in pictures.COLOURS]
    assert legend == [(str(n), bytes(one).hex()) for n, one in enumerate(pictures.COLOURS, start=1)]


def test_the_viewer_gets_the_array_of_every_layer_that_it_offers():
    assert set(pictures.LAYERS) - {"none", "disagreement"} <= set(pictures.VOXELS)


def test_a_voxels_doubt_is_the_share_of_draws_that_contradict_it():
    label = np.zeros((2, 1, 1, 2))
    label[0] = 1.0
    against = label[::-1]
    doubt = doubt_of(label, [label, against, against, label, label, label, label, label])
    np.testing.assert_allclose(doubt, 0.25)


def test_the_order_of_review_asks_no_student():
    """The order uses the noise's uncertainty and how far the answers moved the label. The student learnt that label."""
    label = np.zeros((4, 4, 4), dtype=np.uint8)
    label[:2] = 1
    moved = np.roll(label, 1, axis=0)
    common = {"image": label, "label": label, "confidence": np.full_like(label, 255)}

    def suspicion(**arrays) -> float:
        facts = pictures.summarise("v", "l", common | arrays, names=("background", "a"), spacing_mm=(1.0, 1.0, 1.0))
        return facts.suspicion

    calm = {"centre": label, "doubt": np.zeros_like(label)}
    assert suspicion(**calm) == 0
    assert suspicion(**calm, student=moved) == suspicion(**calm, student=label) == 0
    assert suspicion(centre=moved, doubt=np.zeros_like(label)) == pytest.approx(0.5)
    assert suspicion(centre=label, doubt=np.full_like(label, 51)) == pytest.approx(0.4)


def test_a_volumes_figures_are_voxel_counts():
    label = np.zeros((4, 4, 4), dtype=np.uint8)
    label[:2, 0, 0] = 1
    student = np.zeros_like(label)
    student[1:4, 0, 0] = 1
    facts = pictures.summarise(
        "v" * 64,
        "l" * 64,
        {"label": label, "confidence": np.full_like(label, 204), "student": student},
        names=("background", "a", "b"),
        spacing_mm=(10.0, 10.0, 10.0),
    )
    first, second = facts.structures
    assert (first.ml, first.student_ml) == (2.0, 3.0)
    assert first.confidence == pytest.approx(0.8)
    assert first.dice == pytest.approx(2 * 1 / 5)
    assert (second.ml, second.confidence, second.dice) == (0.0, None, None)
    assert facts.agreement == pytest.approx(0.4)


# --- decisions and training


def test_training_keeps_to_decisions_and_none_can_be_dropped_later(tmp_path):
    volume, label, study = "a" * 64, "b" * 64, "c" * 64
    store = DecisionStore(tmp_path / "dashboard" / "decisions.jsonl")
    with pytest.raises(InvalidInput, match="decisions file"):
        take_over(store.path, tmp_path / "decisions.jsonl")
    store.decide(user="ada", study=study, volume=volume, label=label, verdict=Verdict.REJECT)
    take_over(store.path, tmp_path / "decisions.jsonl")
    store.decide(user="ada", study=study, volume=volume, label=label, verdict=Verdict.ACCEPT)
    take_over(store.path, tmp_path / "decisions.jsonl")
    assert len(read_decisions(tmp_path / "decisions.jsonl")) == 2
    other = DecisionStore(tmp_path / "other.jsonl")
    other.decide(user="eve", study=study, volume=volume, label=label, verdict=Verdict.ACCEPT)
    with pytest.raises(InvalidInput, match="2 decisions"):
        take_over(other.path, tmp_path / "decisions.jsonl")


def test_nothing_in_the_dashboard_can_sign_or_release():
    """No module of the dashboard or of its server reads a private key. Another program holds the certificate."""
    text = "".join(path.read_text() for path in sorted((ROOT / "server" / "dashboard").rglob("*.py")))
    for name in (
        "load_signing_key",
        "load_sealing_key",
        "release_batch",
        "signing_key=",
        "Ledger.create",
        "Ledger.open",
    ):
        assert name not in text, name


@pytest.mark.slow
def test_serving_loads_no_torch(collected, tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom server.dashboard.app import Options, create_app\n"
        "create_app(Options(study=Path(sys.argv[1]), state=Path(sys.argv[2])))\n"
        "print([name for name in ('torch', 'monai', 'matplotlib', 'flwr') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(collected.workspace.root), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_grafana_dashboard_asks_for_metrics_that_exist(client):
    text = client.get("/metrics", headers={"authorization": "Bearer " + "m" * 20}).text
    names = set(re.findall(r"^# TYPE (\w+) ", text, flags=re.MULTILINE))
    board = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = {name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"pate_\w+", t["expr"])}
    assert len(asked) >= 10
    assert asked <= names


def test_every_kind_of_row_that_a_server_writes_can_be_listed(reader):
    for kind in RECORDS["server"]:
        assert reader.get(f"/api/ledger?kind={kind}").status_code == 200, kind
    assert row_text("lost", {"pools": {"north": {}, "south": {}}}).startswith("charges of 2 pools entered again")
    assert row_text("books", {"pool": "north", "books": "ab" * 32}) == "site ledger ababababab of pool north"


def test_a_filter_looks_through_a_few_rows_at_a_time_and_still_finds_every_match(reader, collected, monkeypatch):
    ledger = collected.workspace.ledger_file
    wanted = [row.seq for row in row_page(ledger, kind="pool", text="", before=None, after=None, limit=99).rows]
    assert len(wanted) == len(SITES)
    monkeypatch.setattr("server.dashboard.rows.SEARCHED", 2)
    for limit in (1, 2, 5):
        found, before, pages = [], None, 0
        while pages == 0 or before is not None:
            page = row_page(ledger, kind="pool", text="", before=before, after=None, limit=limit)
            found, before, pages = [*found, *(row.seq for row in page.rows)], page.older, pages + 1
            assert pages < 20
        assert found == wanted, limit
        back, after = [], 0
        while after is not None:
            page = row_page(ledger, kind="pool", text="", before=None, after=after, limit=limit)
            back, after = [*(row.seq for row in page.rows), *back], page.newer
        assert back == wanted, limit
    text = reader.get("/ledger?kind=refusal").text
    assert "searched so far" in text
    assert "Older" in text
