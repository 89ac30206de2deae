"""Types the documents' commands (README, docs/deployment.md, docs/start) as a script, over real daemons.

Every command is taken from the documents, with the words of :data:`EXCHANGED` replaced. :data:`ELSEWHERE` lists the
documented commands that are not typed here, with the tests that type them. Common mistakes are typed, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from client.ledger.site_ledger import SiteLedger
from client.operations.daemons import SiteNode, expect_refused
from client.site.status import facts_of
from common.admission import read_request
from common.data.dataset import Case, Dataset
from common.data.msd import write_dataset
from common.data.synthetic import write_phantoms
from common.errors import ConsiliumError
from common.pki import create_node_keys
from common.privacy.mechanism import AccountantName
from common.privacy.patient_guarantee import SMALLER
from common.process import ProcessGroup
from common.sockets import free_port, free_ports
from consilium.cli.main import app
from server.study.workspace import Workspace
from tests import waiting
from tests.e2e.road import OfStudy, files_now, found_in, known_codes
from tests.shown import hold, output_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ("north", "south", "west")
QUERIES, PATIENTS = 4, 2
MAIN = (sys.executable, "-c", "from consilium.cli.main import main; main()")
EXCHANGED = (
    (
        "--grid 32,48,32 --joint --queries 4 --quorum 5",
        f"--grid 16,16,16 --spacing 2,2,2 --queries {QUERIES} --quorum 3",
    ),
    ("--sites 8", "--sites 3"),
    ("--host pate.example.org --port 443", "--host 127.0.0.1 --port {port} --internal-port {internal}"),
)
ELSEWHERE = {
    "consilium site join": "tests/e2e/test_second_study.py",
    "consilium study init second": "tests/e2e/test_second_study.py",
    "consilium provision server second": "tests/e2e/test_second_study.py",
    "consilium provision approve second": "tests/e2e/test_second_study.py",
    "consilium site consent --site-dir site/studies/second": "tests/e2e/test_second_study.py",
    "consilium site train --site-dir site/studies/second": "tests/e2e/test_second_study.py",
    "consilium site up --site-dir site/studies/second": "tests/e2e/test_second_study.py",
    "consilium site teacher add": "tests/client/teachers",
    "consilium student verdict": "tests/e2e/test_dispute.py",
    "consilium study evaluate": "tests/server/study/test_evaluated.py",
    "consilium dashboard": "tests/server/dashboard",
    "consilium demo": "tests/e2e/test_demo.py",
    "consilium simulate": "tests/consilium/test_simulate.py",
}
PRIVATE = " --epsilon 4 --delta 1e-5 --relation replace-one --rate 1/2 --steps 3 --strategy "
STRATEGY = {"north": "dp-sgd", "south": "dp-bbb", "west": "dp-sgd --per-layer"}
SMALL = (
    "[teacher]\nchannels = [4, 8]\nsteps = 4\n\n[student]\nchannels = [4, 8]\nsteps = 4\n\n",
    "augmentations = 20\nmax_dimension = 8\n",
)


def documented() -> list[str]:
    """Return every command of the documents' sequences in their order, each once."""
    found: list[str] = []
    for path in (ROOT / "README.md", ROOT / "docs" / "deployment.md", *sorted((ROOT / "docs" / "start").glob("*.md"))):
        for block in re.findall(r"^ *```console\n(.*?)^ *```", path.read_text(), re.S | re.M):
            text = block.replace("\\\n", " ")
            found += [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("$ consilium ")]
    return list(dict.fromkeys(found))


COMMANDS = documented()


def plain(command: str) -> str:
    """Return a command without the parts that differ between hospitals."""
    return re.sub(r"SHA256:\S+", "SHA256:…", command).replace(" /data/", " data/").strip()


def of_the_docs(beginning: str) -> str:
    """Return the only documented command that equals ``beginning`` or begins with it."""
    words = f"consilium {beginning}"
    found = {plain(one): one for one in COMMANDS if one.startswith(words)}
    assert words in found or len(found) == 1, (beginning, found)
    return found.get(words) or next(iter(found.values()))


@dataclass
class Party:
    """Acts as a person who types commands; holds the current folder and the daemons that the person started."""

    folder: Path
    typed: set[str]
    daemons: list[subprocess.Popen] = field(default_factory=list)

    def type(self, beginning: str, *exchanged: tuple[str, str], answer: str = "", more: str = "") -> str:
        """Type a documented command, with the words in ``exchanged`` replaced; return what it printed."""
        return self.other(self._words(beginning, exchanged) + more, answer=answer)

    def other(self, command: str, *, answer: str = "") -> str:
        """Type any command; return what it printed."""
        os.chdir(self.folder)
        done = CliRunner().invoke(app, shlex.split(command)[1:], input=answer)
        assert done.exit_code == 0, (command, done.output, done.exception)
        return str(done.stdout)

    def wrong(self, command: str) -> str:
        """Type a command that fails; return its error message."""
        os.chdir(self.folder)
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert isinstance(done.exception, ConsiliumError), (command, done.output, done.exception)
        return str(done.exception)

    def start(self, beginning: str, *, until: str) -> Path:
        """Start a documented command that keeps running; return its log once the log says that it is ready."""
        command = self._words(beginning, ())
        log = self.folder / f"{'-'.join(shlex.split(command)[1:3])}.log"
        with log.open("w") as out:
            words = [*MAIN, *shlex.split(command)[1:]]
            self.daemons.append(subprocess.Popen(words, cwd=self.folder, stdout=out, stderr=out))
        self.until(lambda: until in log.read_text(), log)
        return log

    def until(self, true, log: Path) -> None:
        waiting.until(true, lambda: log.read_text()[-3000:], alive=lambda: self.daemons[-1].poll() is None)

    def _words(self, beginning: str, exchanged: tuple[tuple[str, str], ...]) -> str:
        command = of_the_docs(beginning)
        self.typed.add(plain(command))
        for old, new in (*EXCHANGED, *exchanged):
            command = command.replace(old, new)
        return command

    def end(self) -> None:
        for daemon in self.daemons:
            daemon.send_signal(signal.SIGTERM)
        while self.daemons:
            self.daemons.pop().wait(600)


@dataclass
class Road(OfStudy):
    root: Path
    office: Party
    hospitals: dict[str, Party]
    typed: set[str]

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.office.folder / "trial")

    def site(self, name: str) -> Path:
        return self.hospitals[name].folder / "site"

    def wait(self, kind: str, *, more_than: int = 0) -> None:
        waiting.until(lambda: len(self.events(kind)) > more_than, f"a {kind} event")


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    """Connect three hospitals and a consortium that has not asked any query yet."""
    root, typed, here = tmp_path_factory.mktemp("road"), set[str](), Path.cwd()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(root / "state"))
        made = Road(root, Party(root / "office", typed), {name: Party(root / name, typed) for name in NAMES}, typed)
        try:
            data(made)
            consortium(made)
            for name in NAMES:
                hospital(made, name)
            confirm_each_other(made)
            yield made
        finally:
            for party in (*made.hospitals.values(), made.office):
                party.end()
            os.chdir(here)


def data(road: Road) -> None:
    """Distribute phantoms by hand to hospitals, public images, public label maps, and labelled public cases."""
    phantoms = write_phantoms(road.root / "all", cases=3 * PATIENTS + QUERIES + 8 + 2, seed=1)
    cases = list(phantoms.cases)
    for name in NAMES:
        folder = road.root / name / "data" / name
        dataset(folder, phantoms, [cases.pop() for _ in range(PATIENTS)])
    office = road.root / "office"
    dataset(office / "validation", phantoms, [cases.pop() for _ in range(2)])
    for folder, count, which in (("images", QUERIES, "image"), ("label-maps", 8, "label")):
        (office / "public" / folder).mkdir(parents=True)
        for case in [cases.pop() for _ in range(count)]:
            shutil.copy(getattr(case, which), office / "public" / folder)


def dataset(folder: Path, of: Dataset, cases: list[Case]) -> None:
    write_dataset(folder, name=folder.name, labels=of.labels, channels=of.channels, cases=cases, synthetic=True)


def consortium(road: Road) -> None:
    office = road.office
    port, internal = free_ports(2)
    assert "`consilium study init`" in office.wrong("consilium study status trial")
    office.type("study init trial", ("trial --name", "draft --name"))
    study = (office.folder / "draft" / "study.toml").read_text()  # the operator's own file, with a smaller recipe
    study = re.sub(r"(?ms)^\[(teacher|student|gate)\]\n.*?(?=^\[|\Z)", "", study) + SMALL[0] + "[gate]\nverdicts = 0\n"
    study = re.sub(r"(?m)^(augmentations|max_dimension) = .*\n", "", study).replace("[codec]\n", "[codec]\n" + SMALL[1])
    (office.folder / "study.toml").write_text(study)
    shutil.rmtree(office.folder / "draft")
    assert "plan: " in office.type("study create trial")
    joint = "consilium study init joint --name joint --labels background,one --joint --queries 4 --quorum 3 --grid "
    assert "joint" in office.wrong(joint + "16,16,16 --codec ball-ae")  # no study is created that could not run
    office.other(joint + "16,16,16")
    assert "`consilium study publish`" in office.wrong(
        "consilium codec fit joint --label-maps public/label-maps --sites 3"
    )
    assert "public volumes: got" in office.wrong("consilium study publish trial --images nowhere")
    office.type("study publish trial")
    said = office.wrong("consilium codec fit trial --label-maps public/images --sites 3")
    assert "take it out of the folder" in said
    office.type("codec fit trial")
    office.type("study show trial")
    assert "--port: got 99999" in office.wrong("consilium provision server trial --host 127.0.0.1 --port 99999")
    assert "`consilium provision server`" in office.wrong("consilium study run trial")
    office.type("provision server trial --host", ("{port}", str(port)), ("{internal}", str(internal)))
    assert "'hospital-4'" in office.wrong('consilium provision kit trial "hospital 4" --out kits/4')
    with socket.create_server(("", port)):
        log = office.start("server up trial", until="another program")
    office.until(lambda: "server is up" in log.read_text(), log)  # starts by itself once the port is free
    assert "already" in office.wrong("consilium server up trial")
    assert "`consilium study status`" in office.wrong("consilium study stop trial")


def hospital(road: Road, name: str) -> None:
    party, office = road.hospitals[name], road.office
    office.type("provision kit trial", ("north", name))
    shutil.copytree(office.folder / "kits" / name, party.folder / "kit")
    where = ("/data/north", f"data/{name}"), ("data/north", f"data/{name}")
    if name == "north":
        said = party.wrong("consilium site init --kit kit --data nowhere --site-dir site")
        assert "dataset: got" in said
        assert not (party.folder / "site").exists()
    said = party.type("site init", *where)
    if name == "north":
        assert re.search("daemons: `consilium site up` .*none", party.type("site status --site-dir site"))
    fingerprint = re.findall(r"SHA256:\S+", said)[-1]
    if name == "north":
        assert re.findall(r"SHA256:\S+", party.type("site init", *where))[-1] == fingerprint
        again = "consilium site init --kit kit --data data/north --site-dir another"
        assert "to fix: use that directory" in party.wrong(again)
        assert "# [dataset]" in (party.folder / "site" / "site.toml").read_text()
        assert "`consilium site consent`" in party.wrong("consilium site up --site-dir site")
    party.type("site consent --site-dir site --by", more=" --yes")
    if name == "north":
        assert "`consilium site train`" in party.wrong("consilium site up --site-dir site")
    party.type("site train --site-dir site", more=PRIVATE + STRATEGY[name])
    if name == "north":
        party.start("site up --site-dir site", until="FAIL admission")
        party.end()
    if name == "north":
        for beginning in ("site doctor --site-dir site", "site doctor --site-dir site --data data/north"):
            doctor = CliRunner().invoke(app, shlex.split(party._words(beginning, ()))[1:])
            assert re.search("FAIL admission: .*not know", doctor.stdout)
        assert "send it request.json" in party.wrong("consilium site student pull --site-dir site")
    shutil.copy(party.folder / "site" / "request.json", office.folder / "request.json")
    printed = re.findall(r"SHA256:\S+", of_the_docs("provision approve trial"))[0]
    if name == "north":  # the document's fingerprint is of another key
        assert "fingerprint" in office.wrong(office._words("provision approve trial", ()))
    office.type("provision approve trial", ("north", name), (printed, fingerprint))
    log = party.start("site up --site-dir site", until="connected: ")
    if name == "north":
        said = log.read_text().replace(f"127.0.0.1:{road.workspace.endpoint().port}", "pate.example.org:443")
        hold(output_of("docs/deployment.md", "consilium site up"), said)


def confirm_each_other(road: Road) -> None:
    """Let all hospitals confirm each other, as by telephone: each one reads its own fingerprint out to the others."""
    own = {}
    for name, party in road.hospitals.items():
        table = party.type("site peers --site-dir site --fetch")
        assert "NOT CONFIRMED" in table
        own[name] = re.findall(rf"(?m)^{name} +(SHA256:\S+)  this site", table)[0]
    for name, party in road.hospitals.items():
        for other in (one for one in NAMES if one != name):
            party.type("site peers --site-dir site --confirm south", ("south", other), answer=own[other] + "\n")
    assert "no student yet" in road.hospitals["north"].wrong("consilium site student pull --site-dir site")


def test_a_run_that_is_killed_between_commit_and_decode_is_submitted_again_and_nothing_is_charged_twice(
    road: Road,
) -> None:
    road.office.type("study run trial --detach")
    road.wait("released")
    os.kill(road.events("run-started")[-1]["pid"], signal.SIGKILL)
    stored = road.answers()
    with road.ledger() as ledger:
        spent = {name: ledger.spent(name) for name in NAMES}
        rows = ledger.row_count
    assert len(stored) == QUERIES
    assert road.events("label-decoded") == []

    command = [*MAIN, *shlex.split(road.office._words("study watch trial", ()))[1:]]
    with subprocess.Popen(command, cwd=road.office.folder, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stderr is not None
        first = watching.stderr.readline()
        watching.send_signal(signal.SIGINT)
        said = first + watching.stderr.read()
    assert watching.returncode == 130
    assert re.search("goes on .*`consilium study watch trial`", said)
    road.office.type("study watch trial")
    assert json.loads(road.office.type("study status trial", more=" --json"))["answers"] == QUERIES
    assert road.answers() == stored
    with road.ledger() as ledger:
        assert {pool: ledger.spent(pool) for pool in spent} == spent
        assert ledger.row_count == rows
        exact = ledger.study_spending(road.workspace.study().id).readings()[AccountantName.EXACT].epsilon
    assert 8 * 0.999 <= exact <= 8
    assert [event["resumed"] for event in road.events("run-started")] == [False, True]
    assert len(road.events("label-decoded")) == QUERIES
    assert (road.workspace.bundle_dir / "configs" / "metadata.json").exists()


def test_a_run_whose_operator_s_terminal_was_closed_is_attached_to_from_another_and_nothing_is_charged_again(
    road: Road,
) -> None:
    stored, runs, office = road.answers(), len(road.events("run-started")), road.office
    with road.ledger() as ledger:
        rows = ledger.row_count
    for folder in (road.workspace.student_dir, road.workspace.bundle_dir):
        shutil.rmtree(folder)  # so that there is something left to do
    command = [*MAIN, *shlex.split(office._words("study run trial", ()))[1:]]
    with subprocess.Popen(command, cwd=office.folder, start_new_session=True) as terminal:
        road.wait("run-started", more_than=runs)
        terminal.send_signal(signal.SIGHUP)
        assert terminal.wait(600) != 0
    attached = office.type("study watch trial")
    assert "Dice on the validation set: student" in attached
    assert (road.workspace.bundle_dir / "configs" / "metadata.json").exists()
    assert len(road.events("run-finished")) == 2
    assert road.answers() == stored
    with road.ledger() as ledger:
        assert ledger.row_count == rows


def test_teachers_with_a_guarantee_give_each_patient_the_smaller_of_training_and_releases(road: Road) -> None:
    trained = set()
    for name in NAMES:
        trainings = facts_of(road.site(name)).trainings
        trained.update(trainings.strategies)
        with road.ledger() as ledger:
            released = ledger.pool_spending(name).readings()[AccountantName.EXACT]
        *_, both = trainings.lines(released)
        assert both.endswith(f"unit patient, relation replace-one ({SMALLER})")
        epsilon = float(both.split("ε = ")[1].split(" ")[0])
        assert 3.9 < epsilon <= 4.0 < released.epsilon
    assert trained == {"dp-sgd", "dp-bbb"}


def test_a_stranger_with_an_unregistered_key_is_turned_away(road: Road, tmp_path: Path) -> None:
    node = SiteNode(
        site="stranger",
        folder=tmp_path,
        superlink=road.workspace.endpoint().superlink,
        root_certificates=road.hospitals["north"].folder / "kit" / "ca.crt",
        keys=create_node_keys(tmp_path / "keys"),
        socket=tmp_path / "none.sock",
        port=free_port(),
    )
    with ProcessGroup() as group:
        assert expect_refused(group, node).startswith("[code: 2004]")


def test_every_daemon_is_a_process_of_its_own(road: Road) -> None:
    logs = {path: path.read_text().splitlines() for path in road.root.glob("**/daemons.jsonl")}
    facts = [(path, json.loads(line)) for path, lines in logs.items() for line in lines]
    started = [(path, fact["daemon"], fact["pid"]) for path, fact in facts if fact["event"] == "daemon-started"]
    assert len({(path, daemon) for path, daemon, _ in started}) == 5 + 3 * len(NAMES)
    assert len({pid for *_, pid in started}) == len(started)


def test_a_known_code_is_in_no_byte_of_superlinks_database_log_or_node_files(road: Road) -> None:
    sites = [road.site(name) for name in NAMES]
    codes = known_codes(sites, road.answers())
    assert all(known_codes([directory], road.answers()) for directory in sites)
    folders = (road.workspace.root, *(site / "node" for site in sites))
    sizes = {}
    for path, content in files_now(folders):
        assert not found_in(content, codes), path
        sizes[path.name] = len(content)
    assert sizes["superlink.db"] > 50_000


def test_sites_hold_receipts_for_all_that_was_released(road: Road) -> None:
    for name in NAMES:
        with SiteLedger.read(road.site(name) / "site-ledger.sqlite") as ledger:
            assert {q for receipt in ledger.receipts() for q in receipt.query_ids} == set(road.answers())
            assert ledger.alarms() == ()


def test_the_student_comes_home_predicts_and_is_published(road: Road) -> None:
    north, office = road.hospitals["north"], road.office
    assert "ready" in north.type("site status --site-dir site")
    north.type("site student pull --site-dir site --to-evaluate")
    assert "signed; send it" in north.type("site evaluate --site-dir site --verdict")
    north.type("site student pull --site-dir site")
    for folder, of in (("scans", "imagesTr"), ("drawn", "labelsTr")):
        shutil.copytree(office.folder / "validation" / of, office.folder / folder)
    assert "images: got" in office.wrong("consilium predict nowhere --model trial/bundle --out predictions")
    assert "Dice" in office.type("predict scans")
    far = sorted((office.folder / "scans").iterdir())[0]
    image = nib.load(far)
    nib.save(nib.Nifti1Image(np.random.default_rng(0).normal(size=image.shape), image.affine), far)
    done = CliRunner().invoke(app, ["predict", "scans", "--model", "trial/bundle", "--out", "others"])
    assert "unlike" in done.output
    assert done.exit_code == 12
    office.type("verify trial")
    office.type("student publish trial")
    office.type("study archive trial")
    hold(output_of("docs/deployment.md", "consilium provision list"), office.type("provision list trial"))
    office.other("consilium provision revoke trial west")
    request = office._words("provision approve trial", (("north", "west"),))
    doctor = CliRunner().invoke(app, ["site", "doctor", "--site-dir", str(road.site("west"))])
    assert re.search("FAIL admission: .*revoked", doctor.stdout)
    assert "was revoked" in office.wrong(re.sub(r"SHA256:\S+", fingerprint_of(road, "west"), request))


def fingerprint_of(road: Road, name: str) -> str:
    """Return the fingerprint that a hospital reads out from its join request."""
    shutil.copy(road.site(name) / "request.json", road.office.folder / "request.json")
    return read_request(road.site(name) / "request.json").fingerprint


def test_every_command_of_readme_and_deployment_was_typed_or_has_a_test_of_its_own(road: Road) -> None:
    left = {plain(command) for command in COMMANDS} - road.typed
    assert {one for one in left if not any(one.startswith(beginning) for beginning in ELSEWHERE)} == set()
    assert all((ROOT / where).exists() for where in ELSEWHERE.values())
