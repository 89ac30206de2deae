"""Tests that output shown by a document is what the command above it prints: line by line, number by number.

The commands of one consortium and its hospitals are typed here, in one process. Commands that need daemons are compared
by the tests in :data:`ELSEWHERE`, with the same :func:`~tests.shown.hold`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import AbstractContextManager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from client.foreign import bring
from client.foreign.watch import ResourceUsage
from client.records.declared import ForeignKind
from common.admission import read_request
from common.sockets import free_port
from consilium import epsilon_exact, epsilon_rdp
from consilium.cli.demo import _say
from consilium.cli.main import app
from server.operations import provision
from server.study.workspace import Workspace
from tests.shown import hold, normal, output_of, shown
from tests.small_servers import http_server, serving, tls_of

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    ("docs/deployment.md", "consilium site up"): "tests/e2e/test_readme_road.py",
    ("docs/deployment.md", "consilium provision list"): "tests/e2e/test_readme_road.py",
    ("docs/tutorial.md", "consilium"): "tests/e2e/test_tutorial.py",
}


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("12 cases: 11 good", "12 cases: 12 good"),
        ("right at most 85.2 % of the time", "right at most 79.8 % of the time"),
        ("ε = 8 (exact), δ = 0.001", "ε = 8 (exact), δ = 1e-05"),
        ("site: created for north", "site: was created for north"),
    ],
)
def test_one_wrong_number_or_word_is_found(line: str, printed: str) -> None:
    hold([printed], f"before\n{printed}\nafter")
    with pytest.raises(AssertionError, match="was not printed"):
        hold([line], f"before\n{printed}\nafter")


def test_dates_keys_and_durations_may_differ_and_nothing_else_in_their_line() -> None:
    hold(["valid until 2027-11-21"], "valid until 2031-01-01")
    with pytest.raises(AssertionError):
        hold(["valid until 2027-11-21, 3 sites"], "valid until 2031-01-01, 4 sites")
    with pytest.raises(AssertionError, match="was not printed"):
        hold(["second", "first"], "first\nsecond")


def gateway(workspace: Workspace, port: int) -> AbstractContextManager[object]:
    """Serve the study's own certificate on its own port, and answer every request as from an unknown key."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"unknown-key\n")

    tls = tls_of(workspace.gateway_dir / "server.crt", workspace.gateway_dir / "server.key")
    return serving(http_server(Answer, port), tls=tls)


def spoil(data: Path) -> None:
    """Give the second of three cases an empty label map, and cut off the third one's image."""
    labels, images = (sorted((data / name).glob("*.nii.gz")) for name in ("labelsTr", "imagesTr"))
    empty = nib.load(labels[1])
    nib.save(nib.Nifti1Image(np.zeros(empty.shape, np.uint8), empty.affine), labels[1])
    images[2].write_bytes(images[2].read_bytes()[:2000])


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each command printed, typed in this order by a consortium and its hospitals."""
    root, port = tmp_path_factory.mktemp("shown"), free_port()
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        patched.setenv("CONSILIUM_STATE_DIR", str(root / "state"))
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        for name in ("HTTPS_PROXY", "https_proxy"):
            patched.delenv(name, raising=False)

        def type_(command: str, *, code: int = 0, answer: str = "") -> str:
            done = CliRunner().invoke(app, shlex.split(command)[1:], input=answer)
            assert done.exit_code == code, (command, done.output, done.exception)
            said = done.output.replace(f"127.0.0.1:{port}", "pate.example.org:443").replace(f"{root}/data", "/data")
            found[command] = said.replace(str(root), "/home/ada")
            return found[command]

        recipe = "--labels background,anterior,posterior --grid 32,48,32 --queries 16 --quorum 5"
        for study in ("trial", "second --ledger trial"):
            name = study.split()[0]
            type_(f"consilium study init {study} --name {name} {recipe}")
            type_(f"consilium provision server {name} --host 127.0.0.1 --port {port} --internal-port {free_port()}")
        office = Workspace(root / "trial")
        for number, name in enumerate(("north", "south", "west")):
            site, kit = ("site", "kit") if name == "north" else (f"sites/{name}", f"kits/{name}")
            type_(f"consilium provision kit trial {name} --out {kit}")
            type_(f"consilium data synth --out data/{name} --cases {1 if number else 3} --seed {number}")
            type_(f"consilium site init --kit {kit} --data data/{name} --site-dir {site}")
            if name == "north":
                with gateway(office, port):
                    type_("consilium site doctor --site-dir site", code=8)
                    spoil(root / "data" / name)
                    type_("consilium site doctor --site-dir site --data data/north", code=8)
            request = read_request(root / site / "request.json")
            register = lambda _key, _name, node=number: node  # noqa: E731
            provision.approve(office, request, site=name, pool=name, fingerprint=request.fingerprint, register=register)
        (root / "peers.json").write_text(json.dumps(provision.publish_peers(office).to_json()))
        type_("consilium site peers --site-dir site --take peers.json")
        table = type_("consilium site peers --site-dir sites/south")
        (own,) = re.findall(r"SHA256:\S+(?=  this site)", table)
        type_("consilium site consent --site-dir site --by 'A. Noether' --yes")
        type_("consilium site peers --site-dir site --confirm south", answer=own + "\n")
        type_("consilium provision kit second north --out kit-second")
        type_("consilium site join --from site --kit kit-second")
        shutil.rmtree(root)
    return found


TYPED = {
    (
        "docs/deployment.md",
        "consilium site init --kit kit",
    ): "consilium site init --kit kit --data data/north --site-dir site",
    ("docs/deployment.md", "consilium site doctor"): "consilium site doctor --site-dir site",
    (
        "docs/deployment.md",
        "consilium site peers --site-dir site --fetch",
    ): "consilium site peers --site-dir site --take peers.json",
    (
        "docs/deployment.md",
        "consilium site peers --site-dir site --confirm",
    ): "consilium site peers --site-dir site --confirm south",
    ("docs/deployment.md", "consilium site join"): "consilium site join --from site --kit kit-second",
    ("docs/data.md", "consilium site doctor"): "consilium site doctor --site-dir site --data data/north",
}
"""Document and beginning of a command with output → the command as typed in :func:`printed`."""


@pytest.mark.parametrize(("path", "command"), TYPED)
def test_a_shown_line_was_printed(printed: dict[str, str], path: str, command: str) -> None:
    hold(output_of(path, command), printed[TYPED[path, command]])


@pytest.mark.parametrize("command", ["consilium site init --kit kit", "consilium site doctor"])
def test_the_hospitals_first_two_steps_show_every_printed_line(printed: dict[str, str], command: str) -> None:
    held = {normal(line).rstrip("…} ") for line in output_of("docs/deployment.md", command)}
    lines = filter(None, map(normal, printed[TYPED["docs/deployment.md", command]].splitlines()))
    assert [line for line in lines if not any(line.startswith(one) for one in held)] == []


def test_a_teacher_that_was_added_is_told_of_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in model gives the answer that the document shows."""
    lines = output_of("docs/deployment.md", "consilium site teacher add bundle.zip")
    shares = {name: float(share) / 100 for name, share in re.findall(r"(\w+) ([\d.]+)%", lines[1])}
    assert sum(shares.values()) == pytest.approx(1, abs=0.001)
    used = ResourceUsage(processes=1, memory_bytes=412 << 20)
    added = SimpleNamespace(
        declared=SimpleNamespace(kind=ForeignKind.BUNDLE, served="0" * 64), shares=shares, used=used
    )
    monkeypatch.setattr(bring, "add", lambda *_, **__: added)
    words = "site teacher add bundle.zip --site-dir site --labels background,anterior,posterior"
    hold(lines, CliRunner().invoke(app, shlex.split(words)).output)


DEMO = json.loads((ROOT / "benchmarks" / "results" / "demo" / "seed-0.json").read_text(encoding="utf-8"))


def test_the_readme_s_run_is_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    at_home = Path("demo-out/sites/hospital-01/evaluation/1/evaluation.json")
    at_home.parent.mkdir(parents=True)
    at_home.write_text(json.dumps(DEMO["evaluation"]))
    Path("demo-out/report.json").write_text(json.dumps(DEMO["report"]))
    _say(Path("demo-out"), Path("demo-out/report.html"), dashboard=True)
    (shown,) = re.findall(r"```text\n(The student .*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert shown == capsys.readouterr().out


def test_the_readme_s_figures_follow_from_the_run_s_cases_and_its_noise() -> None:
    """By SciPy's own paired test and by the accountants, from the noise that was drawn."""
    report, privacy = DEMO["report"], DEMO["report"]["privacy"]
    student = report["student"]["dice"]
    control = max((one["dice"] for one in report["controls"].values()), key=lambda dice: float(dice["mean"]))
    assert np.mean(student["cases"]) == pytest.approx(student["mean"], abs=1e-4)
    low, high = ttest_rel(student["cases"], control["cases"]).confidence_interval(0.95)
    assert f"95 % interval {low:+.3f} to {high:+.3f}, paired over {len(student['cases'])} cases" in report["bought"]
    mu_squared = privacy["queries"] / Fraction(privacy["noise_multiplier"]) ** 2
    assert epsilon_exact(mu_squared, privacy["delta"]) == pytest.approx(privacy["epsilon_exact"], rel=1e-6)
    assert epsilon_rdp(mu_squared, privacy["delta"]) == pytest.approx(privacy["epsilon_rdp"], rel=1e-6)


def test_every_output_that_a_document_shows_is_held() -> None:
    known = [*TYPED, *ELSEWHERE, ("docs/deployment.md", "consilium site teacher add bundle.zip")]
    for document in (*ROOT.glob("[!C]*.md"), *(ROOT / "docs").rglob("*.md")):
        path = document.relative_to(ROOT).as_posix()
        for command, _ in shown(path):
            assert any(path == where and command.startswith(beginning) for where, beginning in known), (path, command)
    for test in ELSEWHERE.values():
        assert "import hold" in (ROOT / test).read_text(encoding="utf-8")
