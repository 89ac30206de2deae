"""Tests the errors for common mistakes: each states what is wrong and what to do, before anything is written."""

from __future__ import annotations

import errno
import gzip
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.data.synthetic import write_phantoms
from common.errors import ConsiliumError, LedgerCorrupt
from consilium.cli.main import app, main
from consilium.cli.options import counting
from consilium.cli.site import _joining_text
from server.aggregation.progress import bar_a_stage, stage_bars
from server.operations import provision
from tests.commands import typed
from tests.federation import make_study
from tests.studies import made_study, served_study


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    made_study(root / "trial")
    provision.make_kit(served_study(root / "other"), "north", root / "kit")
    (root / "empty").mkdir()
    (root / "bundle").mkdir()
    case = write_phantoms(root / "phantoms", cases=2, seed=1).cases[0]
    whole = nib.load(case.label)
    seven = nib.Nifti1Image(np.where(whole.get_fdata() > 0, 7, 0).astype(np.uint8), whole.affine)
    for folder, content in (("cut", case.label.read_bytes()[:-200]), ("seven", gzip.compress(seven.to_bytes()))):
        (root / folder).mkdir()
        (root / folder / "map-1.nii.gz").write_bytes(content)
        for number in range(2, 6):
            shutil.copyfile(case.label, root / folder / f"map-{number}.nii.gz")
    return root


def said(world: Path, command: str) -> str:
    """Return the error of a command; its paths are inside the world."""
    words = [word.replace("@", f"{world}/") for word in command.split(" ")]
    result = CliRunner().invoke(app, [word.replace("+", " ") for word in words])
    assert isinstance(result.exception, ConsiliumError), (result.output, result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("study publish @trial --images @nowhere", "public volumes: got"),
        ("study publish @trial --images @empty", ".nii or .nii.gz"),
        ("codec fit @trial --label-maps @nowhere --sites 2", "public label maps: got"),
        (
            "codec fit @trial --label-maps @phantoms/imagesTr --sites 2",
            "phantom_0000.nii.gz is no label map|to fix: |take it out of the folder",
        ),
        ("codec fit @trial --label-maps @cut --sites 2", "map-1.nii.gz|damaged|copy or export it again"),
        (
            "codec fit @trial --label-maps @seven --sites 2",
            "map-1.nii.gz|does not define|got [7.0]|correct the label map",
        ),
        ("plan --label-maps @cut", "map-1.nii.gz|is damaged|copy or export it again"),
        (
            "study init @new --name new --labels background,one --grid 8,8,8 --queries 4 --quorum 2 --label-maps @cut",
            "map-1.nii.gz|is damaged|copy or export it again",
        ),
        (
            "data split --data @phantoms --sites 2 --seed 1 --out @split",
            "table of sites: got '2'|columns case_id and site|to state a number of hospitals use --hospitals",
        ),
        ("codec fit @trial --label-maps @phantoms/labelsTr --sites 1", "--sites: got 1; allowed: at least"),
        ("study create @new --study @empty", "study file|(Is a directory): got|to fix"),
        (
            "site status --site-dir @empty",
            "site.toml|(No such file or directory): got|`consilium site init`",
        ),
        ("verify @empty", "ledger: got|allowed: "),
        ("provision server @trial --host pate.example.org --port 99999", "--port: got 99999; allowed: 1 to 65535"),
        ("provision server @trial --host pate.example.org --port 0", "--port: got 0; allowed: 1 to 65535"),
        ("provision server @trial --host pate.example.org --internal-port 8443", "--internal-port: got 8443|--port"),
        ("provision server @trial --host https://pate.example.org:443", "--host: got|leave out https://"),
        (
            "provision kit @trial hospital+4 --out @kit",
            "site: got 'hospital 4'|to fix|'hospital-4'",
        ),
        ("provision list @trial", "`consilium provision server`"),
        ("provision list @nowhere", "study: got|allowed: "),
        ("server up @nowhere", "study: got|allowed: "),
        ("study run @nowhere", "study: got|allowed: "),
        ("study watch @nowhere", "study: got|allowed: "),
        ("study stop @trial", "no run|`consilium study status`"),
        ("study watch @trial", "no run|`consilium study run`"),
        ("site init --kit @nowhere --data @empty --site-dir @site", "startup kit: got|to fix: "),
        ("site init --kit @kit --data @nowhere --site-dir @site", "dataset: got|to fix: "),
        ("predict @nowhere --model @bundle --out @out", "images: got|allowed: "),
        ("predict @phantoms --model @nowhere --out @out", "--model: got|allowed: "),
        (
            "predict @phantoms --model @bundle --out @out --labels @nowhere",
            "--labels: got|allowed: ",
        ),
    ],
)
def test_a_mistake_is_told_with_what_to_do(world: Path, command: str, words: str) -> None:
    before = sorted(world.rglob("*"))
    message = said(world, command)
    for word in words.split("|"):
        assert word in message
    assert sorted(world.rglob("*")) == before


def test_setting_up_over_a_folder_without_a_dataset_warns_and_goes_on(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ["site", "init", "--kit", f"{world}/kit", "--data", f"{world}/empty", "--site-dir", str(tmp_path / "site")]
    done = typed(app, *words)
    assert re.search("warning: .*layout", done.stderr)
    assert (tmp_path / "site" / "request.json").exists()


def test_a_bar_is_not_drawn_above_an_error(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for bars in (counting("predicting"), bar_a_stage(Console(stderr=True)), stage_bars(Console(stderr=True))):
        with bars:
            pass
    assert capfd.readouterr().err == ""
    with counting("predicting") as on_done:
        on_done(1, 2)
    assert "1/2" in capfd.readouterr().err


def test_a_ledger_is_found_by_the_directory_that_keeps_it(world: Path) -> None:
    for command in ("verify", "ledger log", "ledger head"):
        typed(app, *command.split(), world / "trial")


def test_a_file_that_is_no_ledger_is_reported_as_no_ledger(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = str(world / "trial/study.toml")
    for words in (("log", study), ("backup", study, str(world / "copy"))):
        monkeypatch.setattr(sys, "argv", ["consilium", "ledger", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == LedgerCorrupt.exit_code
        assert "to fix: " in capsys.readouterr().err


def test_a_wrong_path_to_predict_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from consilium.cli.main import main\n"
        f"sys.argv = ['consilium', 'predict', {str(tmp_path / 'nowhere')!r}, '--model', 'x', '--out', 'y']\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.split() == ["2", "False"]


@pytest.mark.parametrize("command", ["revoke", "forget"])
def test_a_folder_that_is_no_study_is_not_said_to_lack_a_site(tmp_path: Path, command: str) -> None:
    told = CliRunner().invoke(app, ["provision", command, str(tmp_path), "north"])
    assert "study file cannot be read" in str(told.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_path_that_the_system_cannot_use_is_one_to_check(number: int) -> None:
    """A new folder whose name is a link to a missing file fails with EEXIST."""
    from common.system_errors import explain

    assert explain(OSError(number, "said", "/x")) == ("/x: said", "check the path")


def test_a_command_that_is_printed_quotes_a_folder_with_a_space(tmp_path: Path) -> None:
    file = tmp_path / "Söder Klinik" / "study.toml"
    command = _joining_text(make_study(), file=file).rsplit("`", 2)[1]
    assert shlex.split(command) == ["consilium", "study", "show", str(file), "--for-site"]
    sources = [
        path.read_text()
        for name in ("consilium", "server")
        for path in (Path(__file__).parents[3] / name).rglob("*.py")
    ]
    unquoted = re.compile(r"`consilium [^`]*\{(?:directory|file|[a-z]+\.root)\}")
    assert [found for text in sources for found in unquoted.findall(text)] == []
