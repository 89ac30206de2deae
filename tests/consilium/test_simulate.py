"""Tests `consilium simulate`: it accepts any site's data, runs the demo's steps without daemons, gives no
certificate.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from common.config import load_study
from common.data.msd import read_dataset
from common.data.split import read_left_out
from common.data.synthetic_tumours import write_tumours
from common.data.volume import load_label
from common.errors import InvalidInput
from common.events import read_events
from consilium.cli.simulate import app
from consilium.cli.study import study_app
from consilium.demo import run
from consilium.demo import terms as demo_terms
from consilium.demo.evaluate import _public_truths
from consilium.demo.options import DemoFolders, DemoOptions, dataset_of
from consilium.reports.certificate import certificate_facts
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.planning import public_shapes
from server.planning.public_shapes import PublicShapes
from server.planning.recommend import recommend, training_for
from server.study.create_study import open_ledger
from server.study.workspace import Workspace
from tests.commands import refusal_of, typed
from tests.consilium.balls import balls
from tests.studies import made_study
from tests.worlds import STUDY

pytestmark = pytest.mark.slow

CASES = 24


def lay(root: Path, layout: str) -> None:
    """Write one dataset in a layout; its core has the number 1, or 3 if the layout can state numbers."""
    images, labels = balls(CASES)
    number = 3 if layout in ("bids", "table") else 1
    rows = []
    for i in range(CASES):
        name = f"case{i:02d}"
        image = nib.Nifti1Image(images[i, 0], np.eye(4))
        label = nib.Nifti1Image((labels[i] * number).astype(np.uint8), np.eye(4))
        places = {
            "msd": (f"imagesTr/{name}.nii.gz", f"labelsTr/{name}.nii.gz"),
            "nnunet": (f"imagesTr/{name}_0000.nii.gz", f"labelsTr/{name}.nii.gz"),
            "table": (f"{name}.nii.gz", f"l/{name}.nii.gz"),
            "bids": (
                f"sub-{name}/anat/sub-{name}_T1w.nii.gz",
                f"derivatives/drawn/sub-{name}/anat/sub-{name}_dseg.nii.gz",
            ),
        }[layout]
        for place, volume in zip(places, (image, label), strict=True):
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            nib.save(volume, root / place)
        rows.append((name, *places))
    names = {"labels": {"background": 0, "core": 1}, "numTraining": CASES, "file_ending": ".nii.gz"}
    if layout == "msd":
        training = [{"image": image, "label": label} for _, image, label in rows]
        document = {"name": "set", "modality": {"0": "T1"}, "labels": {"0": "background", "1": "core"}}
        (root / "dataset.json").write_text(json.dumps({**document, "training": training, "test": []}))
    elif layout == "nnunet":
        (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T1"}, **names}))
    elif layout == "table":
        with (root / "cases.csv").open("w") as file:
            csv.writer(file).writerows([("image", "label", "patient_id"), *((i, m, n) for n, i, m in rows)])
        (root / "labels.tsv").write_text("index\tname\n0\tbackground\n3\tcore\n")
    else:
        (root / "dataset_description.json").write_text(json.dumps({"Name": "set", "BIDSVersion": "1.9.0"}))
        (root / "dseg.tsv").write_text("index\tname\n0\tbackground\n3\tcore\n")


def test_a_number_of_public_images_is_refused_by_the_option_that_the_help_names(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--phantoms", "--out", str(tmp_path / "out"), "--public-images", "0"])
    assert str(done.exception) == "--public-images: got 0; allowed: 1 to 1000"


@pytest.mark.parametrize("name", ["--queries", "--public-images"])
def test_the_number_of_queries_has_the_demos_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Asked(Exception):
        pass

    def stop(out: Path, asked: DemoOptions, **_: object) -> Path:
        raise Asked(asked.queries)

    monkeypatch.setattr("consilium.demo.run.run_demo", stop)
    done = CliRunner().invoke(app, ["--phantoms", "--out", str(tmp_path / "out"), name, "7"])
    assert isinstance(done.exception, Asked), done.output
    assert done.exception.args == (7,)


@pytest.mark.parametrize(("named", "asked"), [(2, None), (2, 2), (2, 3), (1, 3)])
def test_hospitals_that_the_data_name_are_used_unless_another_number_is_asked_for(
    tmp_path: Path, named: int, asked: int | None
) -> None:
    lay(tmp_path / "set", "msd")
    rows = [f"case{i:02d},clinic-{i % named}" for i in range(CASES)]
    (tmp_path / "set" / "sites.csv").write_text("\n".join(["case_id,site", *rows]))
    options = DemoOptions(data=str(tmp_path / "set"), hospitals=asked, queries=4, label_maps=4, simulated=True)
    places, told = DemoFolders(tmp_path / "out"), list[str]()
    if named == 2 and asked == 3:
        with pytest.raises(InvalidInput, match="clinic-0, clinic-1"):
            run._data(places, options, tell=told.append)
        return
    run._data(places, options, tell=told.append)
    sites = sorted(path.name for path in (places.split / "sites").iterdir())
    assert sites == (["clinic-0", "clinic-1"] if named == 2 else ["hospital-01", "hospital-02", "hospital-03"])
    assert any("sites.csv is not used" in line for line in told) == (named == 1)


@pytest.mark.parametrize("layout", ["msd", "nnunet", "table", "bids"])
def test_every_layout_that_a_site_may_have_is_dealt_with_its_truths(tmp_path: Path, layout: str) -> None:
    lay(tmp_path / "set", layout)
    options = DemoOptions(
        data=str(tmp_path / "set"),
        hospitals=3,
        queries=4,
        label_maps=4,
        rounds=True,
        simulated=True,
        channels="" if layout in ("msd", "nnunet") else "T1w" if layout == "bids" else "image",
    )
    places = DemoFolders(tmp_path / "out")
    source = run._data(places, options)
    sites = [read_dataset(folder) for folder in sorted((places.split / "sites").iterdir())]
    assert len(sites) == 3
    assert sum(len(site.labelled) for site in sites) == CASES - 4 - 4 - 4 - 2
    maps = sorted((places.split / "public" / "label-maps").glob("*.nii.gz"))
    study = run.terms(options, places, maps, [4, 4, 4])
    assert study.data.labels == ("background", "core")
    truths = _public_truths(places, study, dataset_of(source, options))
    assert len(truths) == 4
    assert all(0 < truth.mean() < 1 for truth in truths.values())
    for site in sites:
        assert all(load_label(case.label, study.data).max() == 1 for case in site.labelled if case.label)


@pytest.mark.parametrize("layout", ["msd", "nnunet", "table", "bids"])
def test_no_case_vanishes_capitals_are_read_and_what_is_left_out_is_named_and_kept(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "set"
    lay(root, layout)
    for path in sorted(root.rglob("*case0[1-9]*.nii.gz")):  # a scanner that writes capitals
        path.rename(path.with_name(path.name.removesuffix(".nii.gz") + ".NII.GZ"))
    for index in ("dataset.json", "cases.csv"):
        if (root / index).exists():
            text = (root / index).read_text()
            (root / index).write_text(re.sub(r"(case0[1-9])\.nii\.gz", r"\1.NII.GZ", text))
    broken = next(path for path in sorted(root.rglob("*case20*")) if path.is_file() and "dseg" not in path.name)
    broken.write_bytes(broken.read_bytes()[:100])  # cut short; the seed gives it to a site or to the public cases
    options = DemoOptions(
        data=str(root),
        hospitals=3,
        queries=4,
        label_maps=4,
        simulated=True,
        channels="" if layout in ("msd", "nnunet") else "T1w" if layout == "bids" else "image",
    )
    said: list[str] = []
    places = DemoFolders(tmp_path / "out")
    run._data(places, options, tell=said.append)
    used, left_out = read_left_out(places.split / "split.json")
    assert (used, len(left_out)) == (CASES - 1, 1)
    assert said[0] == f"cases: {CASES - 1} used, 1 left out"
    assert "case20" in said[1]
    assert "case20" in left_out[0].case


def test_a_remedy_names_no_option_that_the_command_lacks(tmp_path: Path) -> None:
    lay(tmp_path / "set", "msd")
    asked = ["--data", str(tmp_path / "set"), "--labels", "background,other,third", "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, asked).exception
    assert isinstance(refused, InvalidInput)
    named = set(re.findall(r"--[a-z-]+", str(refused)))
    assert named <= {option for one in typer.main.get_command(app).params for option in one.opts}, refused
    assert "site.toml" not in str(refused)


def test_uncompressed_data_are_published_too(tmp_path: Path) -> None:
    lay(tmp_path / "set", "msd")
    index = tmp_path / "set" / "dataset.json"
    for path in (tmp_path / "set").rglob("*.nii.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    index.write_text(index.read_text().replace(".nii.gz", ".nii"))
    options = DemoOptions(
        data=str(tmp_path / "set"), hospitals=3, queries=4, label_maps=4, rounds=False, simulated=True
    )
    places = DemoFolders(tmp_path / "out")
    run._data(places, options)
    run._create(places, options)
    run._publish(places, options, 3, run.DemoProgress(*[lambda *_: None] * 5))
    assert len(places.workspace.volumes()) == 4


def test_public_maps_without_a_rare_label_are_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    lay(tmp_path / "set", "msd")
    index, rare = tmp_path / "set" / "dataset.json", tmp_path / "set" / "labelsTr" / "case07.nii.gz"
    index.write_text(index.read_text().replace('"1": "core"', '"1": "core", "2": "rare"'))
    label = nib.load(rare)
    nib.save(nib.Nifti1Image((np.asarray(label.dataobj) * 2).astype(np.uint8), label.affine), rare)
    fits = set()
    for seed in range(6):  # the remedy: --seed with another --out
        options = DemoOptions(data=str(tmp_path / "set"), hospitals=3, queries=4, label_maps=4, seed=seed, rounds=False)
        places = DemoFolders(tmp_path / f"out{seed}")
        run._data(places, options)
        run._create(places, options)
        try:
            run._publish(places, options, 3, run.DemoProgress(*[lambda *_: None] * 5))
            fits.add(True)
        except InvalidInput as error:
            assert re.search(r"got 'rare'.*consilium demo.*another --seed and another --out", str(error))  # noqa: PT017
            fits.add(False)
        if len(fits) == 2:
            return
    pytest.fail("every seed had the same outcome")


def test_a_hospital_of_one_patient_lowers_nobodys_voters(tmp_path: Path) -> None:
    """That hospital has one teacher, and its other voters send the zero code."""
    terms = [run.terms(DemoOptions(), DemoFolders(tmp_path), [], patients) for patients in ([10] * 5, [1, *[10] * 4])]
    assert terms[0].privacy.voters_per_site == terms[1].privacy.voters_per_site > 1


@pytest.mark.parametrize(
    ("found", "protocol", "augmentation"),
    [(0.5, "joint", "smooth"), (0.3, "appearance", "wider"), (0.05, "appearance", "wide-mirror")],
)
def test_one_rule_about_public_label_maps_chooses_protocol_and_training_in_plan_demo_and_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: float, protocol: str, augmentation: str
) -> None:
    """The rule alone decides here; other tests measure the maps."""
    for module in (public_shapes, demo_terms):
        monkeypatch.setattr(module, "mean_shape_dice", lambda _maps, labels: found)
    lay(tmp_path / "set", "msd")
    options, places = DemoOptions(data=str(tmp_path / "set"), hospitals=3, queries=4), DemoFolders(tmp_path / "out")
    run._data(places, options)
    folder = places.split / "public" / "label-maps"
    maps = sorted(folder.glob("*.nii.gz"))
    study = run.terms(options, places, maps, [4, 4, 4])
    asked = recommend(
        budget=study.privacy.budget,
        accountant=study.privacy.accountant,
        protection=study.privacy.protection,
        hospitals=3,
        shapes=PublicShapes(0.9, found),
    )
    said = ["study", "init", str(tmp_path / "trial"), "--name", "trial", "--labels", "background,core"]
    said += ["--grid", "16,16,16", "--queries", "4", "--quorum", "3", "--label-maps", str(folder)]
    typed(study_app, *said[1:])
    started = load_study(tmp_path / "trial" / "study.toml")
    assert study.codec.protocol_name == started.codec.protocol_name == asked.protocol == protocol
    measured = training_for(protocol, mean_shape=found)  # as the benchmark trains
    assert measured[1].augmentation == augmentation
    assert (study.teacher, study.student) == (started.teacher, started.student) == measured
    assert run.terms(replace(options, rounds=False), places, maps, [4, 4, 4]).codec.protocol_name == "per-volume"
    assert run.terms(replace(options, paired=2), places, maps, [4, 4, 4]).codec.protocol_name == "joint"


def test_an_unknown_codec_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--codec: got 'mirorr'; allowed: .*pca") as error:
        run._claim(tmp_path / "out", replace(DemoOptions(), codec="mirorr"))
    assert "volumes" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--phantoms", "--out", "sim"], ["--out", "../sim", "--data", "."]])
def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder = tmp_path / "bad\udcff"
    folder.mkdir()
    monkeypatch.chdir(folder)
    refused = refusal_of(app, *words)
    assert re.search(r"folder of --(out|data).*UTF-8.*rename the folder", str(refused))
    assert not list(folder.iterdir())


def test_a_run_that_was_refused_at_once_does_not_hold_its_folder(tmp_path: Path) -> None:
    """A run that has begun does hold its folder, and the refusal names the differing options."""
    out = tmp_path / "out"
    run._claim(out, replace(DemoOptions(), hospitals=40))
    run._claim(out, replace(DemoOptions(), hospitals=8))
    (out / "split").mkdir()
    run._claim(out, replace(DemoOptions(), hospitals=8))
    with pytest.raises(InvalidInput, match=r"got '.*\(hospitals: 8 "):
        run._claim(out, replace(DemoOptions(), hospitals=4))


def test_no_certificate_is_made_of_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace('"trial"', '"simulation"'))
    workspace = made_study(tmp_path / "server", load_study(tmp_path / "study.toml"))
    with pytest.raises(InvalidInput, match="simulation"):
        certificate_facts(workspace)


def test_it_asks_for_data_or_for_phantoms(tmp_path: Path) -> None:
    for words in ([], ["--data", str(tmp_path), "--phantoms"]):
        refusal_of(app, *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def start(out: Path, data: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from consilium.cli.main import main; main()", "simulate", "--data", str(data)]
    command += ["--out", str(out), "--hospitals", "2", "--voters", "1", "--public-images", "4", "--label-maps", "6"]
    command += ["--teacher-steps", "1", "--student-steps", "8", "--no-joint", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.slow
def test_a_simulation_that_was_killed_goes_on_and_its_report_says_what_it_is(tmp_path: Path) -> None:
    lay(tmp_path / "set", "nnunet")
    out = tmp_path / "out"
    first = start(out, tmp_path / "set")
    until = time.monotonic() + 600
    while time.monotonic() < until and first.poll() is None:
        events = list(read_events(out / "server" / "events.jsonl"))
        if any(event["event"] == "stage-finished" and event["stage"] == "collect" for event in events):
            break
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    workspace = Workspace(out / "server")
    with open_ledger(workspace) as ledger:
        before = {a.query.id: a.noisy_sum.tobytes() for a in ledger.answers(workspace.study().id)}
    again = start(out, tmp_path / "set")
    stdout, stderr = again.communicate(timeout=600)
    assert again.returncode == 0, stderr[-2000:]
    report = json.loads(stdout)
    with Ledger.open(workspace.ledger_file) as ledger:
        after = {a.query.id: a.noisy_sum.tobytes() for a in ledger.answers(workspace.study().id)}
    assert len(before) == 4
    assert before == after
    verify(workspace.ledger_file).raise_for_problems()
    assert report["simulation"] is True
    assert report["privacy"]["queries"] == 4
    assert report["daemons"] == []
    page = (out / "report.html").read_text()
    assert "not a certificate" in page


@pytest.mark.slow
def test_four_contrasts_are_scored_by_region_and_a_hospital_without_t1ce_takes_part(tmp_path: Path) -> None:
    write_tumours(tmp_path / "raw", cases=24, seed=1)
    words = ["--data", tmp_path / "raw", "--channels", "FLAIR,T1,T1ce,T2", "--absent", "hospital-02=T1ce"]
    words += ["--hospitals", "2", "--voters", "1", "--public-images", "4", "--label-maps", "6", "--no-joint"]
    words += ["--teacher-steps", "4", "--student-steps", "8", "--json", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    report = json.loads(done.stdout)
    for who in (report["student"], report["ensemble"], report["mean_shape"]):
        assert list(who["dice"]["per_class"]) == list(who["dice"]["hd95_mm"]) == ["WT", "TC", "ET"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "HD95 in mm" in page
    assert 'absent = "T1ce"' in (tmp_path / "out" / "sites" / "hospital-02" / "site.toml").read_text()
    codes = {site["name"]: site["codes_sent"] for site in report["sites"]}
    assert codes["hospital-01"] == codes["hospital-02"] == 4
