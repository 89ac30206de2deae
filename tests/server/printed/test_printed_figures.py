"""Tests, over random histories of a ledger, that every printed ε, chance and share equals what the rows add up to.

The oracle reads the rows with plain SQLite and JSON and has formulas of its own (``truth.py``). A number without
a rule fails, and so does a route, command or source that prints figures and is not listed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import click
import pytest
import typer

from common.bundle_archive import to_archive
from common.document import Document
from common.errors import InvalidInput
from common.ledger.keys import load_signing_key
from common.ledger.rows import Link, Row, body_digest
from common.ledger.spending import Spending
from common.models.student_bundle import write_bundle
from common.objects import write_atomically
from common.privacy.accounting import Guarantee
from common.student_statement import StudentStatement
from common.study_mechanism import sealed_sentences, study_mechanism
from consilium.cli.main import app
from consilium.reports.publication import publish_student
from server.dashboard import api, health, pages, sign_in
from server.dashboard.ledger_fold import LedgerFold
from server.ledger.server_ledger import Ledger
from server.public.public_files import STUDENTS, said_file
from server.study.workspace import Workspace
from tests.server.printed import places, rules
from tests.server.printed.lives import Life, begin, last_copy, live
from tests.server.printed.lives import act as happens
from tests.server.printed.places import NEEDED, PLACES, SEALED_PLACES, View, stated, view
from tests.server.printed.rules import Said
from tests.server.printed.truth import Figures, Truth

pytestmark = pytest.mark.slow

LIVES = 1
MORE_LIVES = 37


def check(said: Said, figures: Figures) -> None:
    """Raise AssertionError if a figure is below its role's true value, or above it by more than its rounding."""
    role, of = said.role, figures
    if role.startswith("@"):
        name, _, role = role[1:].partition(" ")
        study = next(one for one, terms in of.truth.studies.items() if terms.name == name)
        of = Figures(of.truth, study, of.sites, of.doubt)
    true = of.of("spent:exact" if role == "spent:pld" else role)
    value = said.value
    loose = 2e-3 if said.written or "rdp" in role or role == "spent:pld" else 2e-5
    assert value >= true * (1 - 1e-6), f"{said.role} is {true:.6g} and is stated as {value:.6g}: {said.where}"
    assert value <= true * (1 + loose) + 1e-3, f"{said.role} is {true:.6g} and is stated as {value:.6g}: {said.where}"


def hold(life: Life, folder: Path) -> int:
    """Check every place of both studies against the truth; return how many figures were compared."""
    truth, compared = Truth(life.path), 0
    for workspace in life.studies:
        study = workspace.study().id
        figures = Figures(truth, study, len(workspace.sites()), life.doubt)
        seen = view(life, workspace, folder / f"state-{workspace.root.name}")
        for name in PLACES:
            found = stated(name, seen)
            for said in found:
                check(said, figures)
            roles = {one.role for one in found}
            if not (life.doubt and name in places.REFUSED_IN_DOUBT):
                needed = [role for role in NEEDED.get(name, ()) if not life.doubt or "guaranteed" not in role]
                if life.sealed and name in SEALED_PLACES:
                    needed += ["sealed:none", "sealed:t", "sealed:more"]
                assert set(needed) <= roles, f"{name} does not state {sorted(set(needed) - roles)}"
            compared += len(found)
        if life.doubt:
            says_at_least(seen)
        if truth.worst(study) > truth.studies[study].limit and not life.doubt:
            says_more_was_spent(seen)
        says_what_is_left(seen, truth)
    return compared


def says_what_is_left(seen: View, truth: Truth) -> None:
    """Check that all places state the same number of remaining answers: planned, missing, and within the budgets."""
    study, root = seen.workspace.study(), seen.workspace.root
    status = json.loads(places.command(places.study_app, "status", root, "--json"))
    planned = study.privacy.planned_queries
    mechanism = study_mechanism(study, dimension=1)
    fields = {name: getattr(mechanism, name) for name in ("voters_per_site", "radius_int", "noise_std")}
    quorum = max(study.privacy.quorum, study.privacy.colluders + 2 if study.privacy.sealed else 0)
    pools = [site.pool for site in seen.workspace.sites()]
    most = max(0, planned - status["answers"])
    true = 0 if seen.life.doubt else truth.left(study.id, fields, pools, least=quorum, most=most)
    said = f"answers {status['answers']} of {planned} planned"
    if seen.life.doubt:
        said = f"answers at least {status['answers']} of {planned} planned, what is left is not known"
    else:
        said += f", {most} left" if true == most else f"; the budgets have room for {true} of the {most} left"
    assert said in places.command(places.study_app, "status", root)
    pages = [seen.json(f"/api/{name}")["budget"]["answers_left"] for name in ("overview", "study")]
    assert [status["answers_left"], *pages] == [true] * 3
    assert f"pate_study_answers_left {float(true)}\n" in seen.text("/metrics")


def says_at_least(seen: View) -> None:
    root = seen.workspace.root
    assert "spent at least" in places.command(places.study_app, "status", root)
    for more in ((), ("--for-site",)):
        told = " ".join(places.command(places.study_app, "show", root, *more).split())
        assert "More may have been spent" in told
        assert re.search("If no more was spent [^:]*: A guess", told)
    assert json.loads(places.command(places.study_app, "show", root, "--json"))["guess_right_at_most"] is None
    for path in ("/", "/study"):
        assert "at least" in seen.text(path)
        assert "guaranteed whatever" not in seen.text(path)
        assert "decides</strong>, guaranteed" not in seen.text(path)
    assert seen.json("/api/overview")["budget"]["guaranteed"] is None
    assert all(row["at_least"] for row in seen.csv("curve"))


def says_more_was_spent(seen: View) -> None:
    root = seen.workspace.root
    for more in ((), ("--for-site",)):
        told = " ".join(places.command(places.study_app, "show", root, *more).split())
        assert "More was spent" in told
    assert "More was spent" in places.command(places.study_app, "status", root)
    for path in ("/", "/study"):
        assert "More was spent" in seen.text(path)


def holds_over(seeds: range, folder: Path) -> tuple[int, Truth]:
    compared, last = 0, None
    for seed in seeds:
        life = live(seed, made(folder / str(seed)))
        try:
            compared += hold(life, folder / str(seed))
        except AssertionError as error:
            raise AssertionError(f"life {seed} ({', '.join(life.acts)}): {error}") from None
        last = Truth(life.path)
    assert last is not None
    return compared, last


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_every_place_prints_what_the_rows_come_to_whatever_happened_to_the_ledger(tmp_path: Path) -> None:
    compared, _ = holds_over(range(LIVES), tmp_path)
    assert compared > 150 * LIVES


@pytest.mark.slow
def test_every_place_prints_what_the_rows_come_to_over_many_more_lives(tmp_path: Path) -> None:
    holds_over(range(LIVES, LIVES + MORE_LIVES), tmp_path)
    unused = [rule.line for number, rule in enumerate(rules.RULES) if number not in rules.USED]
    assert unused == [], "rules of sentences that the product no longer says"


# --- lives in which figures were once wrong


@pytest.fixture
def reused(tmp_path: Path) -> Life:
    """Let the second study use answers of the first, and ask nothing itself."""
    for seed in range(100):
        life = begin(seed, made(tmp_path / str(seed)))
        if not life.sealed:
            happens(life, "release")
            happens(life, "reuse")
            if Truth(life.path).kinds["reuse"]:
                return life
    raise AssertionError("no such life")


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Return a study whose hospitals draw the noise, with recovered charges above its budget. Tests only read it."""
    return over_budget(tmp_path_factory.mktemp("passed"), sealed=True)


def over_budget(folder: Path, *, sealed: bool) -> Life:
    for seed in range(1 if sealed else 12, 400):  # no earlier seed gives such a life
        life = live(seed, made(folder / str(seed)))
        truth = Truth(life.path)
        over = any(truth.worst(study) > Fraction(21, 20) * terms.limit for study, terms in truth.studies.items())
        if life.sealed is sealed and over and not life.doubt:
            return life
    raise AssertionError("no such life")


@pytest.fixture(params=["older", "missing", pytest.param("damaged", marks=pytest.mark.slow)])
def doubted(tmp_path: Path, request: pytest.FixtureRequest) -> Life:
    """Replace the ledger by an older copy. Its standing is newer, missing (as beside a backup) or damaged."""
    life = begin(5, made(tmp_path / "doubted"))
    happens(life, "back up")
    happens(life, "release")
    last_copy(life)
    assert life.doubt
    kept = life.path.with_suffix(".standing")
    if request.param == "missing":
        kept.unlink()
    if request.param == "damaged":
        kept.write_text("{")
    return life


def test_a_study_that_uses_anothers_answers_prints_what_they_cost(reused: Life, tmp_path: Path) -> None:
    assert hold(reused, tmp_path / "of-the-reused") > 200


@pytest.mark.parametrize("sealed", [False, True])
def test_where_recovered_charges_pass_the_budget_every_place_says_so(
    passed: Life, tmp_path: Path, sealed: bool
) -> None:
    life = passed if sealed else over_budget(tmp_path, sealed=False)
    assert hold(life, tmp_path / "of-the-passed") > 200


def test_while_the_ledger_is_older_than_its_standing_every_place_says_at_least(doubted: Life, tmp_path: Path) -> None:
    assert hold(doubted, tmp_path / "of-the-doubted") > 100


def sign_bundle(workspace: Workspace, stated: dict[str, object]) -> None:
    """Export a bundle of one file, which states this guarantee."""
    files = {"configs/privacy.json": json.dumps(stated).encode()}
    write_bundle(workspace.bundle_dir, files)
    archive = to_archive(files)
    with Ledger.open(workspace.ledger_file) as ledger:
        head, rows = ledger.head(), list(ledger.rows())
    statement = StudentStatement(
        study_id=workspace.study().id,
        bundle=workspace.objects.put(archive),
        size=len(archive),
        queries=1,
        mu_squared=Fraction(1),
        head=head,
        links=tuple(Link(time_utc=row.time_utc, kind=row.kind, body_sha256=body_digest(row.body)) for row in rows),
        created_utc=rows[-1].time_utc,
    )
    signed = statement.signed(load_signing_key(workspace.signing_key_file))
    write_atomically(said_file(workspace.objects_dir, STUDENTS, workspace.study().id), signed.render())


def test_a_bundle_that_guarantees_more_than_still_holds_is_neither_published_nor_handed_out(tmp_path: Path) -> None:
    passed = over_budget(tmp_path, sealed=True)
    truth = Truth(passed.path)
    workspace = next(one for one in passed.studies if truth.worst(one.study().id) > truth.studies[one.study().id].limit)
    epsilon = workspace.study().privacy.epsilon
    stated = {"budget_epsilon": epsilon, "epsilon": epsilon, "guarantee": "of before", "spent": "of before"}
    sign_bundle(workspace, stated)
    with pytest.raises(InvalidInput, match="student export"):
        publish_student(workspace, tmp_path / "published")
    assert not (tmp_path / "published").exists()
    seen = view(passed, workspace, tmp_path / "state")
    assert "no longer" in seen.text("/student")
    assert seen.client.get("/api/student/bundle.zip").status_code == 409
    now = Figures(truth, workspace.study().id, 3, doubt=False).of("guaranteed")
    sign_bundle(workspace, {**stated, "epsilon": now * 1.000001})
    assert seen.client.get("/api/student/bundle.zip").status_code == 200


# --- former wrong figures


def test_a_curve_of_releases_alone_is_found(reused: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LedgerFold._charged

    def old(self: LedgerFold, row: Row, record: Document) -> tuple[int, Iterable[str]]:
        return whole(self, row, record) if row.kind == "release" else (0, ())

    monkeypatch.setattr(LedgerFold, "_charged", old)
    with pytest.raises(AssertionError, match=r"/api/study.*empty curve"):
        hold(reused, tmp_path / "found")


PUT_BACK: dict[str, tuple[str, Callable[[Spending], object]]] = {
    "the budget is guaranteed whatever was spent": (
        "guaranteed",
        lambda self: Guarantee(self.budget.epsilon, self.budget.delta, str(self.accountant), self.protection),
    ),
    "odds and groups of the budget": ("bound", lambda self: self.limit),
    "no more than the budget is spent": ("mu_squared", lambda self: min(self.spend.mu_squared, self.limit)),
    "no more than all of the budget is spent": ("share", lambda self: min(1.0, float(self.mu_squared / self.limit))),
}


@pytest.mark.parametrize("what", [*PUT_BACK])
def test_an_old_figure_that_is_put_back_is_found(
    passed: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, old = PUT_BACK[what]
    monkeypatch.setattr(Spending, name, property(old))
    with pytest.raises(AssertionError, match="is stated as"):
        hold(passed, tmp_path / "found")


@pytest.mark.parametrize("where", ["server.study.consent_text", "server.dashboard.views.promise"])
def test_a_sealed_sentence_of_the_budget_is_found(
    passed: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(
        f"{where}.sealed_sentences", lambda study, *, sites=0, spent=0: sealed_sentences(study, sites=sites)
    )
    with pytest.raises(AssertionError, match=r"sealed:\w+ is "):
        hold(passed, tmp_path / "found")


# --- nothing prints that is not named

ASKED = {
    *("/", "/study", "/sites", "/studies", "/ledger", "/ledger/{seq}", "/labels", "/student", "/metrics"),
    *("/api/overview", "/api/study", "/api/sites", "/api/studies", "/api/tables/{name}.csv", "/api/blocks/{page}"),
}
NOT_ASKED = {
    "/planner and /api/plan say what is planned": ("/planner", "/api/plan"),
    "the certificate's own files, and rows as they are stored": (
        *("/api/certificate", "/api/certificate.{ending}", "/api/ledger", "/api/ledger/head"),
        *("/api/ledger/rows.csv", "/api/ledger/rows.json", "/api/ledger/rows/{seq}", "/api/ledger/verify"),
    ),
    "the bundle's own statement, held by a test of its own": ("/api/student", "/api/student/bundle.zip"),
    "the blocks again": ("/api/live/{page}",),
    "no figure": (
        *("/api/decisions", "/api/labels", "/api/labels/{volume}", "/api/labels/{volume}/slice.png"),
        *("/api/labels/{volume}/voxels", "/api/labels/{volume}/{name}.nii.gz", "/api/me", "/api/openapi.json"),
        *("/api/study/noise", "/healthz", "/labels/{volume}", "/login", "/login/oidc", "/login/oidc/back"),
    ),
}


def test_every_route_is_asked_or_said_to_print_no_figure_of_a_ledger() -> None:
    routes = {
        route.path
        for module in (sign_in, health, api, pages)
        for route in module.routes.routes
        if "GET" in route.methods
    }
    assert routes == ASKED | {path for paths in NOT_ASKED.values() for path in paths}


COMMANDS = {
    "asked over the lives": ("study status", "study show", "certificate", "verify", "ledger recover"),
    "what stands at the end of a run: study status": ("study run", "study watch", "study resume"),
    "what the certificate says: tests/consilium/test_governance.py": ("governance",),
    "what it makes is asked over the lives: report, bundle, certificate": (
        *("demo", "simulate", "student export", "student publish", "dashboard"),
    ),
    "a plan": ("plan", "study init", "study create", "study template"),
    "an audit of what is claimed, a benchmark": (
        *("audit", "bench papers", "bench utility", "bench pate", "bench networks", "bench poison", "bench private"),
    ),
    "a hospital's own books and trainings, or what it is asked to join": (
        *(
            "site status",
            "site dashboard",
            "site init",
            "site join",
            "site consent",
            "site request",
            "site train",
            "site recover",
            "site student pull",
        ),
    ),
    "the caps of a pool": ("provision approve",),
    "no figure": (
        *(
            "codec fit",
            "data synth",
            "data split",
            "predict",
            "student train",
            "student verdict",
            "study evaluate",
            "study publish",
            "study stop",
        ),
        *("study archive", "dashboard user add", "dashboard user password", "dashboard user remove"),
        *("dashboard user list", "ledger head", "ledger log", "ledger receipts", "ledger compare", "ledger backup"),
        *("ledger new-key", "ledger rotate-key", "ledger rotate-sealing-key", "provision server", "provision kit"),
        *("provision list", "provision peers", "provision renew", "provision revoke", "provision forget"),
        *(
            "server up",
            "server status",
            "server log",
            "site log",
            "site cases",
            "site doctor",
            "site serve",
            "site up",
            "site pause",
        ),
        *("site resume", "site withdraw", "site withdraw-patient", "site take-sealing-key", "site heads"),
        *("site evaluate", "site adapt", "site peers", "site teacher add", "site teacher remove", "site disclose"),
        *("dispute keys", "dispute judge", "dispute evidence", "dispute show"),
    ),
}


def leaves_of(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    if path and command.invoke_without_command:
        yield " ".join(path)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves_of(found, (*path, name))


def test_every_command_is_asked_or_said_to_print_no_figure_of_a_ledger() -> None:
    known = {name for names in COMMANDS.values() for name in names}
    assert set(leaves_of(typer.main.get_command(app))) == known


WRITES = re.compile(r"epsilon_text\(|percent_text\(|spent_text\(|\.epsilon\b|\| epsilon|guess_|odds_")
SOURCES = {
    "held over the lives": (
        *("common/ledger/row_text.py", "common/ledger/spending.py", "common/models/bundle_facts.py"),
        "consilium/cli/ledger.py",
        *("consilium/demo/evaluate.py", "consilium/reports/certificate.py", "consilium/reports/certificate_paper.py"),
        *("consilium/reports/study_report.py", "consilium/templates/report.html", "server/dashboard/metrics.py"),
        "server/dashboard/tables.py",
        *("server/dashboard/rows.py", "server/dashboard/views/budget.py", "server/dashboard/views/promise.py"),
        *("server/dashboard/views/sites.py", "server/dashboard/views/studies.py", "server/dashboard/views/study.py"),
        *("server/postprocess/bundle.py", "server/study/consent_text.py", "server/study/spoiled.py"),
        *("server/study/status.py", "server/dashboard/templates/blocks/overview_budget.html"),
        "common/study_mechanism.py",
        *(
            "server/dashboard/templates/blocks/overview_sites.html",
            "server/dashboard/templates/blocks/sites_sites.html",
        ),
        *(
            "server/dashboard/templates/blocks/studies_table.html",
            "server/dashboard/templates/blocks/study_budget.html",
        ),
    ),
    "what the certificate says: tests/consilium/test_governance.py": ("consilium/reports/governance.py",),
    "a site's own: tests/client/site/test_printed_site.py": ("common/site_facts.py",),
    "prints what report.json says": ("consilium/cli/demo.py", "consilium/demo/terms.py"),
    "a plan": (
        *(
            "common/stated_budget.py",
            "server/dashboard/planning.py",
            "server/planning/planner.py",
        ),
        *("server/dashboard/templates/planner.html", "server/dashboard/views/verdict.py"),
    ),
    "an audit": (
        *("consilium/audit/books.py", "consilium/audit/run.py", "consilium/audit/service.py"),
        "consilium/audit/subject.py",
    ),
    "an event, as of its time": ("server/aggregation/aggregator.py", "common/event_kinds.py"),
    "a declaration, or why one is refused": (
        *("common/config.py", "consilium/in_process.py"),
        *("common/ledger/charges.py", "common/ledger/server_state.py"),
        "server/study/create_study.py",
    ),
    "a hospital's own word": ("server/dashboard/reports.py", "server/dashboard/templates/hospital.html"),
}


def test_every_source_that_writes_a_figure_is_held_or_said_to_write_no_figure_of_a_ledger() -> None:
    """The figures that hospitals print of their own ledgers have tests of their own."""
    root = Path(__file__).parents[3]
    files = [path for part in ("common", "server", "consilium") for path in (root / part).rglob("*.[ph][yt]*")]
    found = {
        name
        for path in files
        if path.suffix in (".py", ".html")
        and not (name := path.relative_to(root).as_posix()).startswith("common/privacy/")
        and name not in ("consilium/cli/site.py",)
        and WRITES.search(path.read_text(encoding="utf-8"))
    }
    assert found == {name for names in SOURCES.values() for name in names}
