"""Tests the network that may leave a hospital: it is charged before its first step, starts at the proven student and
counts in every total.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.adapting import private
from client.policy import load_site
from client.site.books import open_books, read_books
from client.training.command import PrivateOptions
from client.training.task import VoterTask
from common.data.msd import Case, write_dataset
from common.ledger.rollback_guard import standing_path
from common.models.bundle import open_bundle
from common.privacy.training import Neighbours, TrainingEvent, epsilon_of
from consilium.cli.site import site_app
from server.study.workspace import Workspace
from tests.client.adapting.written import privacy_of
from tests.commands import refusal_of, typed
from tests.exported import exported_study, statement_file
from tests.federation import Federation, ball

pytestmark = pytest.mark.slow

RUN = CliRunner()


class Planned(Exception):
    """Carries a training out of the place where it would be charged."""

    def __init__(self, task: VoterTask) -> None:
        super().__init__()
        self.task = task


DP = ("--strategy", "dp-sgd", "--epsilon", "1", "--steps", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a site whose study was run, with the student pulled and five patients."""
    root = tmp_path_factory.mktemp("private")
    federation: Federation = exported_study(root)
    site = root / "site-0"
    federation.write_site_files()
    shutil.copytree(Workspace(root).bundle_dir, site / "student" / "bundle")
    (site / "student" / "statement.json").write_bytes(statement_file(federation).read_bytes())
    cases = []
    for i in range(5):
        label = ball((4, 4, 3 + i % 2), 2.0)
        image = np.random.default_rng(i).normal(label * 2.0, 0.3).astype(np.float32)
        (site / "raw").mkdir(exist_ok=True)
        paths = [site / "raw" / f"c{i}.nii.gz", site / "raw" / f"c{i}-label.nii.gz"]
        for path, array in zip(paths, (image, label), strict=True):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(f"c{i}", *paths))
    write_dataset(site / "data", name="own", labels=("background", "body"), channels=("MRI",), cases=cases)
    federation.close()
    return site


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "site")
    return tmp_path / "site"


def adapted(site: Path, *words: str) -> dict[str, object]:
    done = typed(site_app, "adapt", "--site-dir", site, "--json", *words)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def refused(site: Path, *words: str) -> str:
    done = refusal_of(site_app, "adapt", "--site-dir", site, *words)
    return str(done)


def events(site: Path) -> list[TrainingEvent]:
    with read_books(load_site(site)) as ledger:
        return [one.event for one in ledger.trainings().private if one.event is not None]


def test_the_network_says_what_it_cost_and_the_ledger_has_the_charge(site: Path) -> None:
    """Bundle and status must state the ε that the accountant computes from the recorded event."""
    result = adapted(site, *DP)
    bundle = Path(str(result["bundle"]))
    assert bundle.name == "dp-sgd-may-leave-site-0"
    (event,) = events(site)
    epsilon = epsilon_of(event, delta=1e-5, neighbours=Neighbours.REPLACE_ONE)
    facts = privacy_of(bundle)
    assert facts["may_leave"] is True
    assert f"ε = {np.ceil(epsilon * 100) / 100:.4g}"[:7] in str(facts["guarantees"][1])
    assert "guaranteed" in str(facts["statement"])
    status = json.loads(RUN.invoke(site_app, ["status", "--site-dir", str(site), "--json"]).stdout)
    assert status["trainings"]["adapted"]["epsilon"] >= epsilon_of(
        event, delta=status["trainings"]["adapted"]["delta"], neighbours=Neighbours.REPLACE_ONE
    )
    text = RUN.invoke(site_app, ["status", "--site-dir", str(site)]).stdout
    assert "networks adapted here" in text
    assert re.search(r"dp-sgd, 1 training: ε = [\d.]+ at δ = \S+, unit patient, relation replace-one", text)
    assert open_bundle(bundle).data.labels == ("background", "body")


def test_the_network_says_what_counts_as_one_patient_of_its_guarantee(site: Path) -> None:
    """A person with two files counts as two patients if no table names them, and is then protected less."""
    done = typed(site_app, "adapt", "--site-dir", site, *DP)
    sentence = "no table says which patient a file belongs to, so every file counts as a patient of its own"
    assert sentence in done.stdout
    assert f"Here, {sentence}." in privacy_of(site / "adapted" / "dp-sgd-may-leave-site-0")["statement"]
    assert adapted(site, *DP)["patient_identity"] == "file"


def test_a_weak_guarantee_of_a_network_that_may_leave_is_warned_about_before_its_charge(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(site / "raw" / "c0.nii.gz", site / "data" / "imagesTr" / "c3.nii.gz")
    warned: list[str] = []

    def charge(_site: Path, task: VoterTask, **_of: object) -> None:
        raise Planned(task)

    monkeypatch.setattr(private, "charge_adapted", charge)
    weak = PrivateOptions("dp-sgd", epsilon=1.0, delta=0.2, steps=2)
    with pytest.raises(Planned):
        private.adapt_privately(
            site, weak, again=False, out=None, progress=lambda _steps: nullcontext(print), on_warning=warned.append
        )
    assert [text.split(":")[0] for text in warned] == ["warning"] * 2
    assert "δ = 0.2 is above 1/(10 · 4 patients)" in warned[0]
    assert "c3 has the same scan or label map as c0, of another patient" in warned[1]


def test_the_training_begins_at_the_student_that_was_signed(site: Path) -> None:
    """With a learning rate near zero the training returns the student's own weights, with noise or without."""
    result = adapted(site, *DP, "--learning-rate", "1e-12")
    ours = open_bundle(Path(str(result["bundle"]))).network.state_dict()
    begun = open_bundle(site / "student" / "bundle").network.state_dict()
    for name, weights in begun.items():
        torch.testing.assert_close(ours[name], weights, atol=1e-6, rtol=0)


def test_a_student_that_is_not_the_signed_one_is_refused_before_anything_is_charged(site: Path) -> None:
    """If the start had seen patients without a guarantee, the training's guarantee would be false."""
    weights = site / "student" / "bundle" / "models" / "model.pt"
    other = open_bundle(site / "student" / "bundle").network
    from common.models.unet import save_weights

    with torch.no_grad():
        next(iter(other.parameters())).add_(1.0)
    save_weights(weights, other)
    words = refused(site, *DP)
    assert "signed" in words
    assert "student pull" in words
    assert "same version" in words  # another version of torch writes other bytes for the same weights
    (site / "student" / "statement.json").unlink()
    assert "student pull" in refused(site, *DP)
    assert events(site) == []


def test_repeating_a_private_adaptation_is_charged_once_and_a_second_one_requires_again(site: Path) -> None:
    adapted(site, *DP)
    adapted(site, *DP)
    assert len(events(site)) == 1
    before, other = set(site.rglob("journal-*")), ("--strategy", "dp-sgd", "--epsilon", "0.5", "--steps", "3")
    for words in (other, (*other, "--out", str(site / "elsewhere"))):
        assert "--again" in refused(site, *words)
    assert len(events(site)) == 1
    assert set(site.rglob("journal-*")) == before  # a refused training leaves none


def test_a_private_network_that_patients_paid_for_is_never_overwritten(site: Path, tmp_path: Path) -> None:
    first = Path(str(adapted(site, *DP)["bundle"]))
    weights = (first / "models" / "model.pt").read_bytes()
    other = ("--strategy", "dp-sgd", "--epsilon", "0.5", "--steps", "3", "--again")
    words = refused(site, *other)
    assert str(first) in words
    assert "--out" in words
    assert len(events(site)) == 1  # refused before any charge
    second = Path(str(adapted(site, *other, "--out", str(tmp_path / "second"))["bundle"]))
    assert len(events(site)) == 2
    assert (first / "models" / "model.pt").read_bytes() == weights != (second / "models" / "model.pt").read_bytes()


def test_an_interrupted_training_goes_on_and_is_charged_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from client.training.private import engine

    real, calls = engine.noised, []

    def failing(*given, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(engine, "noised", failing)
    done = RUN.invoke(site_app, ["adapt", "--site-dir", str(site), *DP])
    assert done.exit_code == 130
    assert len(events(site)) == 1  # charged before the first step
    adapted(site, *DP)
    assert len(events(site)) == 1


def test_nothing_that_is_chosen_on_patients_goes_with_a_strategy(site: Path) -> None:
    for words in (["--way", "own"], ["--data", str(site / "data")], ["--student", str(site / "student" / "bundle")]):
        assert "not with --strategy" in refused(site, *DP, *words)
    assert "not with --strategy" in refused(site, *DP, "--lambda", "2")
    for words in (
        *(["--epsilon", "8"], ["--epsilon", "0"], ["--again"], ["--noise-multiplier", "2"], ["--noise-multiplier", ""]),
        *(["--delta", "0.1"], ["--relation", "replace-one"]),
    ):
        assert "with --strategy" in refused(site, *words)
    assert "without an epsilon" in refused(site, "--strategy", "dp-sgd")
    words = refused(site, "--strategy", "standard")
    assert all(name in words for name in ("'standard'", "dp-sgd", "dp-mac", "dp-bbb"))
    assert events(site) == []


@pytest.mark.parametrize(
    "words",
    [
        *(["--epsilon", value] for value in ("0", "nan", "65")),
        *(["--epsilon", "1", option, "0"] for option in ("--delta", "--learning-rate", "--noise-multiplier")),
        *(["--epsilon", "1", option, "2"] for option in ("--delta", "--learning-rate", "--relation")),
        ["--noise-multiplier", "1e999999999"],
    ],
)
def test_a_wrong_number_of_a_private_adaptation_is_refused_before_any_charge(site: Path, words: list[str]) -> None:
    assert "allowed: " in refused(site, "--strategy", "dp-sgd", *words)
    assert events(site) == []


def test_a_withdrawn_patient_is_not_in_the_next_training(site: Path) -> None:
    from client.adapting.material import own_patients
    from client.records.patient_deal import load_or_deal
    from common.config import load_study

    load_or_deal(site / "teachers" / "slots.json", [f"c{i}" for i in range(5)], voters=1)
    config = load_site(site)
    open_books(config).close()
    assert RUN.invoke(site_app, ["withdraw-patient", "c1", "--site-dir", str(site), "--yes"]).exit_code == 0
    assert set(own_patients(config, load_study(site / "study.toml")).scans) == {"c0", "c2", "c3", "c4"}


def test_a_withdrawal_lists_every_network_that_may_know_the_patient(site: Path) -> None:
    from client.records.patient_deal import load_or_deal

    names = ("dp-sgd-may-leave-site-0", "has-seen-patients-must-not-leave-site-0")
    for name in names:
        (site / "adapted" / name).mkdir(parents=True)
    load_or_deal(site / "teachers" / "slots.json", [f"c{i}" for i in range(5)], voters=1)
    done = typed(site_app, "withdraw-patient", "c1", "--site-dir", site, "--yes")
    listed = [line.split()[0] for line in done.stdout.splitlines() if "delete it and its copies" in line]
    assert listed == [str(site / "adapted" / name) for name in names]


def test_a_patient_who_comes_or_goes_moves_no_other_patient_of_a_network_that_may_leave(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patient's vector depends on the slot, so the slots must not follow the order of the names."""

    options, whole = PrivateOptions("dp-sgd", epsilon=1.0, steps=2), lambda _steps: nullcontext(print)

    def slots() -> dict[str, int]:
        with pytest.raises(Planned) as caught:
            private.adapt_privately(site, options, again=False, out=None, progress=whole, on_warning=print)
        return {name: slot for slot, (name, _) in enumerate(caught.value.task.patients)}

    def plan(_site: Path, task: VoterTask, **_of: object) -> None:
        raise Planned(task)

    monkeypatch.setattr(private, "charge_adapted", plan)
    before = slots()
    files = {"a0": "c1", "c0": "c0", "c2": "c2", "c3": "c3", "c4": "c4"}
    copied = [
        Case(name, site / f"raw/{file}.nii.gz", site / f"raw/{file}-label.nii.gz") for name, file in files.items()
    ]
    write_dataset(site / "data", name="own", labels=("background", "body"), channels=("MRI",), cases=copied)
    assert sorted(before.values()) == [0, 1, 2, 3, 4]
    assert slots() == {**before, "a0": 5}


def test_a_network_that_may_leave_stays_in_the_total_after_ledger_and_standing_were_put_back(
    site: Path, tmp_path: Path
) -> None:
    config = load_site(site)
    open_books(config).close()
    books = [config.ledger_file, standing_path(config.ledger_file)]
    for path in books:
        shutil.copy(path, tmp_path)
    adapted(site, *DP)
    for path in books:
        shutil.copy(tmp_path / path.name, path)
    assert events(site) == []
    assert "no patient-level ε" in typed(site_app, "status", "--site-dir", site).stdout
    adapted(site, *DP)  # finds its journal, and enters the lost charge
    assert (
        "networks adapted here that may leave the hospital: ε" in typed(site_app, "status", "--site-dir", site).stdout
    )
