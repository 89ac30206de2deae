"""Lists every place of the product that prints an ε, odds or a share of a study with a ledger, and how to read it.

A place gives text or a document; :mod:`tests.server.printed.rules` says what each figure in it means. Places that print
none, or only what is planned, are listed too, so that the test knows every command, route and source.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.errors import LedgerCorrupt
from common.measured_gain import Score
from common.models.bundle_configs import readme
from common.models.bundle_facts import BundlePrivacy
from consilium.cli.ledger import verify_app
from consilium.cli.study import study_app
from consilium.reports.certificate import certificate_facts
from consilium.reports.certificate_paper import certificate_paper
from consilium.reports.report_facts import CONTROLS, ReportFacts, SiteFact
from consilium.reports.study_report import render_html, report_json
from server.dashboard.app import Options
from server.ledger.server_ledger import Ledger
from server.postprocess.bundle import privacy_of
from server.study.consent_text import rosters
from server.study.workspace import Workspace
from tests.commands import ended
from tests.server.dashboard.conftest import TestClient, glance
from tests.server.printed.lives import Life
from tests.server.printed.rules import PLAN, Said, lines_of, of_document, of_text

GROUPS = {r"(.*\.)?groups\.\d+\.epsilon": "group:{group}"}
SEALED = {
    r"(.*\.)?sealed_sum\.knowing_no_share\.epsilon": "sealed:none",
    r"(.*\.)?sealed_sum\.knowing_the_colluders_shares\.epsilon": "sealed:t",
    r"(.*\.)?sealed_sum\.knowing_one_more\.epsilon": "sealed:more",
}
BUDGET = {
    r"{at}epsilon": "spent:gate",
    r"{at}budget": "budget",
    r"{at}budget_text": "budget",
    r"{at}guaranteed": "guaranteed",
    r"{at}share": "share",
    r"{at}readings\.\d+\.epsilon": "spent:{accountant}",
}
SITE = {
    r"{at}budget\.epsilon": "pool:gate:{pool}",
    r"{at}budget\.budget": "cap:{pool}",
    r"{at}budget\.budget_text": "cap:{pool}",
    r"{at}budget\.share": "pool-share:{pool}",
    r"{at}budget\.guaranteed": "",  # it equals the larger of two figures in this table
    r"{at}budget\.readings\.\d+\.epsilon": "pool:{accountant}:{pool}",
    r"{at}study_epsilon": "in-study:{pool}",
}
# A check below compares its last point with what was spent.
CURVE = {r"curve\.\d+\.(?P<by>exact|rdp|paper)(_text)?": ""}


def at(roles: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {path.replace("{at}", prefix): role for path, role in roles.items()}


@dataclass
class View:
    """Holds one study of a life, and reads pages and commands about it."""

    life: Life
    workspace: Workspace
    client: TestClient
    other: str = ""

    def text(self, path: str) -> str:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text[:500]
        return answer.text

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def csv(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.text(f"/api/tables/{name}.csv"))))


def view(life: Life, workspace: Workspace, state: Path) -> View:
    """Return the study with a dashboard that has read all its files, and somebody signed in."""
    return View(life, workspace, glance(Options(study=workspace.root, state=state, metrics_token="m" * 20)))


def command(app: Any, *arguments: object) -> str:
    return ended(app, *arguments).stdout


# --- one function for each place


def status_text(seen: View) -> Iterator[Said]:
    yield from of_text(command(study_app, "status", seen.workspace.root), "study status")


def status_json(seen: View) -> Iterator[Said]:
    roles = {
        r"epsilon\.(?P<by>\w+)": "spent:{by}",
        "budget_epsilon": "budget",
        "guaranteed_epsilon": "guaranteed",
        r"guess_right_at_most\.(?P<of>\w+)": "odds:{of}",
    }
    yield from of_document(
        json.loads(command(study_app, "status", seen.workspace.root, "--json")), "status.json", roles
    )


def show(seen: View) -> Iterator[Said]:
    yield from of_text(command(study_app, "show", seen.workspace.root), "study show")


def show_for_site(seen: View) -> Iterator[Said]:
    told = command(study_app, "show", seen.workspace.root, "--for-site")  # cut into lines for a terminal
    yield from of_text(" ".join(told.split()), "study show --for-site")


def show_json(seen: View) -> Iterator[Said]:
    roles = {
        "epsilon": "budget",
        r"epsilon_of_plan\.\w+": "",
        "pool_epsilon_for_life": "budget",  # no study of a life states more
        "guaranteed_epsilon": "guaranteed",
        "guess_right_at_most": "odds:guaranteed",
        **GROUPS,
        **SEALED,
    }
    found = json.loads(command(study_app, "show", seen.workspace.root, "--json"))
    yield from of_document(grouped(found), "show.json", roles)


def grouped(document: dict[str, Any]) -> dict[str, Any]:
    """Number the groups; a group of one site states no size."""
    document["groups"] = [{"group": 1, **one} for one in document["groups"]]
    return document


CERTIFICATE = {
    r"study\.budget_epsilon": "budget",
    r"study\.terms\..*": "",
    r"guarantee\.epsilon": "guaranteed",
    r"spent\.epsilon": "spent:gate",
    r"spent_by\.\d+\.epsilon": "spent:{accountant}",
    r"guess_right_at_most\.(?P<of>\w+)": "odds:{of}",
    r"pools\.\d+\.study\.epsilon": "in-study:{pool}",
    r"pools\.\d+\.lifetime\.epsilon": "pool:gate:{pool}",
    r"pools\.\d+\.cap_epsilon": "cap:{pool}",
    **GROUPS,
    **SEALED,
}


def certificate(seen: View) -> Iterator[Said]:
    """Yield the figures of the certificate's JSON and of every text of its PDF."""
    facts = certificate_facts(seen.workspace)
    yield from of_document(grouped({**facts}), "certificate.json", CERTIFICATE)
    paper = certificate_paper(facts, document_sha256="0" * 64)
    written = [*paper.lead, paper.foot]
    for section in paper.sections:
        written += [str(text) for text in (*section.paragraphs, *section.points, *section.notes, *section.code)]
        written += map(row_of, section.rows)
    assert any("Guaranteed" in text for text in written)
    yield from of_text("\n".join(written), "certificate.pdf")


def row_of(cells: Any) -> str:
    """Return a row's cells; a row of the table of pools has the pool's name in front."""
    first, *rest = map(str, cells)
    pool = first.rpartition(" / ")[2]
    return f"pool's row {pool}: {'; '.join(rest)}" if pool.endswith("-mri") else "; ".join((first, *rest))


def verified(seen: View) -> Iterator[Said]:
    path = seen.workspace.ledger_file
    yield from of_text(command(verify_app, path), "verify")
    roles = {
        r"pools\.\d+\.share_spent": "pool-share:{pool}",
        r"pools\.\d+\.spent\.\d+\.epsilon": "pool:{accountant}:{pool}",
    }
    yield from of_document(json.loads(command(verify_app, path, "--json")), "verify.json", roles)


def recovered(seen: View) -> Iterator[Said]:
    """Yield what `ledger recover` printed, if a recovery was the last act."""
    if seen.life.acts[-1] == "restore":
        for text in seen.life.printed:
            yield from of_text(text, "ledger recover")


def overview_page(seen: View) -> Iterator[Said]:
    yield from of_text(lines_of(seen.text("/")), "/")


def study_page(seen: View) -> Iterator[Said]:
    yield from of_text(lines_of(seen.text("/study")), "/study")


def sites_page(seen: View) -> Iterator[Said]:
    """Return the lines of each site's section, with the site's name in front."""
    _, *sections = re.split(r'<section class="panel w6" id="site-', seen.text("/sites"))
    for section in sections:
        name = section.partition('"')[0]
        lines = lines_of(f"<body>{section.partition('>')[2]}")
        yield from of_text("\n".join(f"{name} {line}" for line in lines.splitlines()), "/sites")


def studies_page(seen: View) -> Iterator[Said]:
    yield from of_text(lines_of(seen.text("/studies")), "/studies")


def other_pages(seen: View) -> Iterator[Said]:
    """Yield figures of pages that only show the ledger's rows, and of the blocks for clients without streams."""
    for path in ("/ledger", "/ledger/2", "/labels", "/student"):
        yield from of_text(lines_of(seen.text(path)), path)
    for page in ("overview", "study", "studies"):
        for name, block in seen.json(f"/api/blocks/{page}")["blocks"].items():
            yield from of_text(lines_of(f"<body>{block}"), f"/api/blocks/{page} {name}")


def overview_json(seen: View) -> Iterator[Said]:
    roles = {**at(BUDGET, r"budget\."), **at(SITE, r"sites\.\d+\.")}
    yield from of_document(seen.json("/api/overview"), "/api/overview", roles)


def study_json(seen: View) -> Iterator[Said]:
    found = seen.json("/api/study")
    yield from of_document(found, "/api/study", {**at(BUDGET, r"budget\."), **CURVE})
    yield from last_point(found["curve"], "/api/study")


def last_point(curve: list[dict[str, Any]], where: str) -> Iterator[Said]:
    """Return the last point of the curve, which is the present spending."""
    if curve:
        for by in ("exact", "rdp", "paper"):
            for name in (by, f"{by}_text"):
                yield Said(f"spent:{by}", float(curve[-1][name]), name.endswith("_text"), f"{where} curve.{name}")
    else:
        yield Said("spent:gate", 0.0, False, f"{where}: an empty curve")


def sites_json(seen: View) -> Iterator[Said]:
    yield from of_document(seen.json("/api/sites"), "/api/sites", at(SITE, r"\d+\.standing\."))


STUDY_ROW = {
    r"\d+\.epsilon": "@{name} spent:gate",
    r"\d+\.guaranteed": "@{name} guaranteed",
    r"\d+\.budget": "@{name} budget",
    r"\d+\.share": "@{name} share",
}


def studies_json(seen: View) -> Iterator[Said]:
    yield from of_document(seen.json("/api/studies"), "/api/studies", STUDY_ROW)


def tables(seen: View) -> Iterator[Said]:
    sites = {
        r"\d+\.epsilon_spent": "pool:gate:{pool}",
        r"\d+\.epsilon_budget": "cap:{pool}",
        r"\d+\.study_epsilon": "in-study:{pool}",
    }
    yield from of_document(seen.csv("sites"), "sites.csv", sites)
    yield from of_document(seen.csv("studies"), "studies.csv", STUDY_ROW)
    curve = seen.csv("curve")
    yield from of_document({"curve": curve}, "curve.csv", CURVE)
    yield from last_point(curve, "curve.csv")
    for name in ("batches", "refusals", "labels", "decisions"):
        yield from of_document(seen.csv(name), f"{name}.csv", {})


METRICS = {
    "pate_privacy_epsilon_spent": "pool:gate:{site}-mri",
    "pate_privacy_epsilon_budget": "cap:{site}-mri",
    "pate_privacy_budget_spent_ratio": "pool-share:{site}-mri",
    "pate_study_privacy_epsilon_spent": "spent:{accountant}",
    "pate_study_privacy_epsilon_budget": "budget",
    "pate_study_privacy_epsilon_guaranteed": "guaranteed",
    "pate_stage_progress_ratio": "",
}


def metrics(seen: View) -> Iterator[Said]:
    text = seen.client.get("/metrics", headers={"authorization": f"Bearer {'m' * 20}"}).text
    doubted = re.search(r"^pate_ledger_in_doubt ([01])\.0$", text, re.M)
    assert doubted is not None
    assert (doubted[1] == "1") is seen.life.doubt
    for name, labels, value in re.findall(r"^(pate_\w+)(?:\{(.*?)\})? (\S+)$", text, re.M):
        if re.search("epsilon|ratio", name):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            role = METRICS[name].format(**named)
            if role:
                yield Said(role, float(value), False, f"/metrics {name}")
    told = re.findall(r"^# HELP (pate_\w*spent\w*) (.*)$", text, re.M)
    assert len(told) == 3
    assert all("pate_ledger_in_doubt" in words for _, words in told)


def bundle_facts(seen: View) -> BundlePrivacy | None:
    """Return the facts that a bundle would state, or None if no answer exists to train on."""
    study = seen.workspace.study()
    with Ledger.open(seen.workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
        return privacy_of(study, ledger.study_facts(study), answers, head=ledger.head().hash) if answers else None


def bundle(seen: View) -> Iterator[Said]:
    """Yield the figures of the privacy facts and the model card, if an answer exists to train on."""
    facts = bundle_facts(seen)
    if facts is None:
        return
    roles = {
        "budget_epsilon": "budget",
        "epsilon": "spent:gate",
        r"epsilon_(?P<by>\w+)": "spent:{by}",
    }
    stated = facts.to_json()
    yield from of_text(f"Guaranteed by the study: {stated.pop('guarantee')}", "privacy.json")
    yield from of_text(f"Spent of it when this was exported: {stated.pop('spent')}", "privacy.json")
    yield from of_document(stated, "privacy.json", roles)
    card = readme(seen.workspace.study(), facts, {})
    yield from of_text(card.replace("\nledger's", " ledger's"), "MODEL_CARD.md")


NO_DICE: Mapping[str, tuple[float, ...]] = {}


def report_facts(
    seen: View, *, student: tuple[float, ...] = (0.5,), controls: Mapping[str, tuple[float, ...]] = NO_DICE
) -> ReportFacts:
    """Return the facts of a report of the study with these Dice by case."""

    def scored(cases: tuple[float, ...]) -> Score:
        mean = sum(cases) / len(cases)
        return Score((mean,), mean, cases)

    study, score = seen.workspace.study(), Score((0.5,), 0.5)
    with Ledger.open(seen.workspace.ledger_file) as ledger:
        answers, found = ledger.answers(study.id), ledger.study_facts(study)
    return ReportFacts(
        study=study,
        spending=found.spending,
        queries=found.answers,
        voters=max((answer.voters for answer in answers), default=0),
        teachers=(),
        ensemble=score,
        mean_shape=score,
        student=scored(student),
        controls={name: scored(controls[name]) if name in controls else None for name in CONTROLS},
        decoded_labels=None,
        daemons=(),
        refused_node="",
        sites=tuple(
            SiteFact(
                name=one.name,
                pool=one.pool,
                patients=1,
                codes_sent=1,
                epsilon_spent=found.pools[one.pool].for_life.spent.epsilon,
            )
            for one in seen.workspace.sites()
        ),
        releases=rosters(answers),
        seconds={},
        run_seconds={},
        pictures=(),
        ledger_head="0" * 64,
        ledger_rows=1,
        version="0",
        seeds={},
    )


def report(seen: View) -> Iterator[Said]:
    facts = report_facts(seen)
    roles = {
        r"privacy\.planned_epsilon": "budget",
        r"privacy\.guaranteed_epsilon": "guaranteed",
        r"privacy\.epsilon_(?P<by>\w+)": "spent:{by}",
        r"sites\.\d+\.epsilon_spent": "pool:gate:{pool}",
        **SEALED,
    }
    yield from of_document(report_json(facts), "report.json", roles)
    page = lines_of(render_html(facts))
    yield from of_text(page.replace("The guarantee\nε", "The guarantee ε"), "report.html")


PLACES: dict[str, Callable[[View], Iterator[Said]]] = {
    "consilium study status": status_text,
    "consilium study status --json": status_json,
    "consilium study show DIRECTORY": show,
    "consilium study show DIRECTORY --for-site": show_for_site,
    "consilium study show DIRECTORY --json": show_json,
    "consilium certificate: JSON and PDF": certificate,
    "consilium verify, with --json": verified,
    "consilium ledger recover": recovered,
    "/": overview_page,
    "/study": study_page,
    "/sites": sites_page,
    "/studies": studies_page,
    "/ledger, /ledger/N, /labels, /student, /api/blocks/NAME": other_pages,
    "/api/overview": overview_json,
    "/api/study": study_json,
    "/api/sites": sites_json,
    "/api/studies": studies_json,
    "/api/tables/NAME.csv": tables,
    "/metrics": metrics,
    "bundle: privacy.json and model card": bundle,
    "report.json and report.html": report,
}

NEEDED: dict[str, tuple[str, ...]] = {
    "consilium study status": ("guaranteed", "spent:exact", "spent:rdp", "spent:paper"),
    "consilium study status --json": ("spent:exact", "spent:rdp", "spent:paper", "budget", "odds:spent"),
    "consilium study show DIRECTORY": ("budget", "odds:guaranteed"),
    "consilium study show DIRECTORY --for-site": ("budget", "odds:guaranteed", "group:2"),
    "consilium study show DIRECTORY --json": ("odds:guaranteed", "group:1", "group:3"),
    "consilium certificate: JSON and PDF": ("guaranteed", "spent:gate", "odds:guaranteed", "odds:spent", "group:2"),
    "consilium verify, with --json": ("pool:exact:aachen-mri", "pool-share:bergen-mri"),
    "/": ("spent:gate", "budget", "pool:gate:aachen-mri"),
    "/study": ("spent:exact", "spent:rdp", "spent:paper", "odds:guaranteed", "group:2"),
    "/sites": ("pool:gate:cadiz-mri", "in-study:cadiz-mri"),
    "/studies": ("@first spent:gate", "@second spent:gate"),
    "/api/overview": ("spent:gate", "spent:rdp", "share", "pool:gate:aachen-mri"),
    "/api/study": ("spent:gate", "spent:exact"),
    "/api/sites": ("pool:gate:aachen-mri", "in-study:aachen-mri"),
    "/api/studies": ("@first spent:gate", "@second spent:gate"),
    "/api/tables/NAME.csv": ("pool:gate:aachen-mri", "@second spent:gate"),
    "/metrics": ("spent:exact", "spent:rdp", "spent:paper", "budget", "pool:gate:aachen-mri"),
    "report.json and report.html": ("guaranteed", "spent:exact", "odds:guaranteed", "odds:spent"),
}
"""Figures that a place must state in every life; other figures are checked wherever they are stated."""

SEALED_PLACES = (
    "consilium study show DIRECTORY",
    "consilium study show DIRECTORY --for-site",
    "consilium study show DIRECTORY --json",
    "consilium certificate: JSON and PDF",
    "/study",
    "report.json and report.html",
)
REFUSED_IN_DOUBT = ("consilium certificate: JSON and PDF",)


def stated(name: str, seen: View) -> list[Said]:
    """Return what a place states. A certificate that is refused because of a doubt states nothing."""
    if seen.life.doubt and name in REFUSED_IN_DOUBT:
        with pytest.raises(LedgerCorrupt, match="may have been spent"):
            list(PLACES[name](seen))
        return []
    return [one for one in PLACES[name](seen) if one.role != PLAN]
