"""Tests that the exported student is a bundle that MONAI accepts, runs and loads, with its privacy facts
inside.

``verify_metadata`` reads the schema from ``filepath`` when that file exists and its hash is as given, and downloads it
otherwise; it is called as a function and as ``python -m monai.bundle verify_metadata``. Tests have no network, so the
schema here is our own: the fields and types that MONAI's bundle specification requires, nothing more.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle.properties import InferProperties, MetaProperties
from monai.utils import BundleProperty, BundlePropertyConfig
from scipy.ndimage import gaussian_filter

from common.canonical import sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.volume import load_volume, to_native
from common.errors import InvalidInput
from common.models.fit import predict
from common.models.student_bundle import export_bundle
from common.models.unet import build_unet
from common.privacy.mechanism import AccountantName
from tests.client.adapting.written import facts_of
from tests.worlds import make_study

torch.set_num_threads(1)

TENSOR = {
    "type": "object",
    "required": ["type", "format", "num_channels", "spatial_shape", "dtype", "value_range"],
    "properties": {
        "num_channels": {"type": "integer"},
        "spatial_shape": {"type": "array", "items": {"type": ["integer", "string"]}},
        "value_range": {"type": "array", "items": {"type": "number"}},
        "is_patch_data": {"type": "boolean"},
        "channel_def": {"type": "object"},
    },
}
TEXTS = ["schema", "version", "monai_version", "pytorch_version", "numpy_version", "task", "description"]
TEXTS += ["authors", "copyright"]
DOCUMENTED_SCHEMA = {
    "type": "object",
    "required": [*TEXTS, "required_packages_version", "network_data_format"],
    "properties": {
        **{name: {"type": "string"} for name in TEXTS},
        "changelog": {"type": "object"},
        "required_packages_version": {"type": "object"},
        "eval_metrics": {"type": "object"},
        "references": {"type": "array"},
        "network_data_format": {
            "type": "object",
            "required": ["inputs", "outputs"],
            "properties": {
                "inputs": {"type": "object", "required": ["image"], "properties": {"image": TENSOR}},
                "outputs": {"type": "object", "required": ["pred"], "properties": {"pred": TENSOR}},
            },
        },
    },
}

STUDY = make_study(
    name="trial",
    data=DataConfig(
        labels=("background", "front", "back"), spacing_mm=(1.0, 1.0, 1.5), grid=(16, 24, 16), channels=("T1",)
    ),
    planned_queries=4,
    student=TrainingConfig(channels=(4, 8)),
)
FACTS = facts_of(STUDY)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_unet((4, 8), in_channels=1, out_channels=3, seed=1)


@pytest.fixture(scope="module")
def bundle(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "trial"
    export_bundle(directory, study=STUDY, model=model, privacy=FACTS, dice={"test_mean_dice": 0.8})
    return directory


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """Write a volume that is reversed left to right, off centre and on other voxels than the study's."""
    affine = np.diag([-1.4, 1.2, 1.0, 1.0])
    affine[:3, 3] = (10, 20, -30)
    values = gaussian_filter(np.random.default_rng(0).normal(size=(13, 18, 25)), 1.5).astype(np.float32)
    path = tmp_path / "images" / "scan.nii.gz"
    path.parent.mkdir()
    nib.save(nib.Nifti1Image(values, affine), path)
    return path


@pytest.fixture
def workflow(bundle: Path, scan: Path, tmp_path: Path) -> monai.bundle.ConfigWorkflow:
    return monai.bundle.ConfigWorkflow(
        config_file=str(bundle / "configs" / "inference.json"),
        meta_file=str(bundle / "configs" / "metadata.json"),
        logging_file=False,
        workflow_type="inference",
        bundle_root=str(bundle),
        dataset_dir=str(scan.parent),
        output_dir=str(tmp_path / "predictions"),
    )


def verify(bundle: Path, schema: Path) -> None:
    schema.write_text(json.dumps(DOCUMENTED_SCHEMA))
    monai.bundle.verify_metadata(
        meta_file=str(bundle / "configs" / "metadata.json"),
        filepath=str(schema),
        hash_val=sha256_file(schema),
        hash_type="sha256",
    )


def test_monai_verifies_the_metadata(bundle: Path, tmp_path: Path) -> None:
    verify(bundle, tmp_path / "schema.json")


def test_the_check_refuses_incomplete_metadata(model: torch.nn.Module, tmp_path: Path) -> None:
    export_bundle(tmp_path / "b", study=STUDY, model=model, privacy=FACTS)
    path = tmp_path / "b" / "configs" / "metadata.json"
    whole = json.loads(path.read_text())
    del whole["network_data_format"]["outputs"]["pred"]["value_range"]
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="Failed validating"):
        verify(tmp_path / "b", tmp_path / "schema.json")


def monai_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run MONAI's own command line in a separate process; it needs the package fire, which is in the dev extra."""
    pytest.importorskip("fire", reason="MONAI's command line needs fire; it is in the dev extra")
    command = [sys.executable, "-W", "ignore", "-m", "monai.bundle", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def verify_command(bundle: Path, schema: Path) -> subprocess.CompletedProcess[str]:
    schema.write_text(json.dumps(DOCUMENTED_SCHEMA))
    given = {
        "meta_file": bundle / "configs" / "metadata.json",
        "filepath": schema,
        "hash_val": sha256_file(schema),
        "hash_type": "sha256",
    }
    return monai_command("verify_metadata", *(f"--{k}={v}" for k, v in given.items()), cwd=schema.parent)


@pytest.mark.slow
def test_monais_command_line_verifies_the_metadata_without_a_network(bundle: Path, tmp_path: Path) -> None:
    done = verify_command(bundle, tmp_path / "schema.json")
    assert done.returncode == 0, done.stderr
    assert "metadata is verified with no error" in done.stdout + done.stderr


@pytest.mark.slow
def test_monais_command_line_explains_itself_and_refuses_spoiled_metadata(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    shown = monai_command("verify_metadata", "--", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "meta_file" in shown.stdout + shown.stderr
    export_bundle(tmp_path / "b", study=STUDY, model=model, privacy=FACTS)
    path = tmp_path / "b" / "configs" / "metadata.json"
    whole = json.loads(path.read_text())
    del whole["network_data_format"]["inputs"]["image"]
    path.write_text(json.dumps(whole))
    refused = verify_command(tmp_path / "b", tmp_path / "schema.json")
    assert refused.returncode != 0
    assert "Failed validating" in refused.stderr


def test_metadata_describes_the_studys_tensors(bundle: Path) -> None:
    formats = json.loads((bundle / "configs" / "metadata.json").read_text())["network_data_format"]
    image, pred = formats["inputs"]["image"], formats["outputs"]["pred"]
    assert (image["num_channels"], image["spatial_shape"], image["channel_def"]) == (1, [16, 24, 16], {"0": "T1"})
    assert pred["channel_def"] == {"0": "background", "1": "front", "2": "back"}


def test_privacy_facts_travel_with_the_weights(bundle: Path) -> None:
    facts = json.loads((bundle / "configs" / "privacy.json").read_text())
    assert (facts["epsilon_exact"], facts["epsilon_rdp"], facts["delta"]) == (7.99, 8.87, 1e-3)
    assert (facts["unit"], facts["relation"], facts["accountant"]) == ("hospital", "replace-one", "exact")
    assert (facts["ledger_head"], facts["study"], facts["queries"]) == ("a" * 64, STUDY.id, 16)
    for text in (
        (bundle / "docs" / "README.md").read_text(),
        json.loads((bundle / "configs" / "metadata.json").read_text())["description"],
    ):
        for word in ("7.99", "0.001", "exact", "hospital", "replace-one"):
            assert word in text


def test_the_bundle_states_the_budget_as_its_guarantee_and_the_spend_as_spend(bundle: Path) -> None:
    facts = json.loads((bundle / "configs" / "privacy.json").read_text())
    terms = "0.001) by the exact accountant, unit hospital, relation replace-one"
    assert facts["guarantee"] == f"(ε, δ) = (8, {terms}"
    assert facts["spent"] == f"(ε, δ) = (7.99, {terms}, with 16 answers"
    readme = (bundle / "docs" / "README.md").read_text()
    assert f"Guaranteed by the study: {facts['guarantee']}." in readme
    assert re.search(rf"Spent .*: {re.escape(facts['spent'])}\.", readme)
    assert "(8.5, 0.001)" in dataclasses.replace(FACTS, epsilon_exact=8.5).guarantee()  # never less than was spent


def test_the_epsilon_shown_is_that_of_the_accountant_that_kept_the_budget() -> None:
    assert FACTS.epsilon == 7.99
    assert dataclasses.replace(FACTS, accountant=AccountantName.RDP).epsilon == 8.87
    for field, value in (("epsilon_exact", float("nan")), ("delta", 0.0), ("ledger_head", "abc")):
        with pytest.raises(InvalidInput):
            dataclasses.replace(FACTS, **{field: value})


def test_the_workflow_has_what_monais_tools_ask_of_an_inference_bundle(
    workflow: monai.bundle.ConfigWorkflow,
) -> None:
    required = [p[BundlePropertyConfig.ID] for p in InferProperties.values() if p[BundleProperty.REQUIRED]]
    required += [p[BundlePropertyConfig.ID] for p in MetaProperties.values()]
    assert [name for name in required if name not in workflow.parser] == []


def test_preprocessing_is_the_studys_own(workflow: monai.bundle.ConfigWorkflow, scan: Path) -> None:
    workflow.initialize()
    image = workflow.parser.get_parsed_content("preprocessing")({"image": str(scan)})["image"]
    np.testing.assert_allclose(np.asarray(image), load_volume(scan, STUDY.data).image, atol=1e-4)


def test_inference_writes_our_own_prediction_on_the_files_own_voxels(
    workflow: monai.bundle.ConfigWorkflow, scan: Path, tmp_path: Path, model: torch.nn.Module
) -> None:
    workflow.initialize()
    workflow.run()
    written, original = nib.load(tmp_path / "predictions" / "scan_seg.nii.gz"), nib.load(scan)
    assert written.shape == original.shape
    np.testing.assert_allclose(written.affine, original.affine, atol=1e-5)
    volume = load_volume(scan, STUDY.data)
    ours = to_native(predict(model, volume.image), volume).argmax(axis=0)
    labels = np.asarray(written.dataobj)
    assert set(np.unique(labels)) > {0}
    assert (labels == ours).mean() > 0.99  # they interpolate differently at the rim of the grid


@pytest.mark.parametrize("way", ["run", "workflow", "evaluator", pytest.param("command line", marks=pytest.mark.slow)])
def test_every_way_in_which_monai_runs_a_bundle_has_the_weights_and_gives_the_same(
    way: str, bundle: Path, scan: Path, tmp_path: Path, model: torch.nn.Module, workflow: monai.bundle.ConfigWorkflow
) -> None:
    """The evaluator needs ignite, which makes every import of MONAI slower and is in no extra here."""
    given = {"config_file": bundle / "configs" / "inference.json", "meta_file": bundle / "configs" / "metadata.json"}
    given |= {"bundle_root": bundle, "dataset_dir": scan.parent, "output_dir": tmp_path / "predictions"}
    words = {name: str(value) for name, value in given.items()} | {"workflow_type": "inference"}
    if way == "run":
        with pytest.warns(UserWarning, match="a source you trust"):  # MONAI warns so about every bundle
            monai.bundle.run(**words)
    elif way == "workflow":
        workflow.initialize()
        workflow.run()
    elif way == "evaluator":
        pytest.importorskip("ignite", reason="the evaluator needs pytorch-ignite")
        workflow.initialize()
        assert workflow.check_properties() == []
        workflow.evaluator.run()
    else:
        done = monai_command("run", *(f"--{name}={value}" for name, value in words.items()), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    volume = load_volume(scan, STUDY.data)
    ours = to_native(predict(model, volume.image), volume).argmax(axis=0)
    written = np.asarray(nib.load(tmp_path / "predictions" / "scan_seg.nii.gz").dataobj)
    assert (written == ours).mean() > 0.99


def test_the_metadata_lists_what_monais_own_tools_need(bundle: Path) -> None:
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert metadata["required_packages_version"].keys() == {"nibabel", "fire", "pytorch-ignite"}


def test_monai_loads_the_students_weights_by_the_bundles_name(bundle: Path, model: torch.nn.Module) -> None:
    with pytest.warns(UserWarning, match="a source you trust"):  # MONAI warns so about every bundle
        loaded = monai.bundle.load(
            name=bundle.name, bundle_dir=str(bundle.parent), source="github", workflow_type="inference", device="cpu"
        )
    image = torch.zeros(1, 1, *STUDY.data.grid)
    torch.testing.assert_close(loaded.eval()(image), model.eval()(image))


def test_it_returns_the_hash_of_every_file_and_replaces_only_a_bundle(model: torch.nn.Module, tmp_path: Path) -> None:
    target = tmp_path / "b"
    first = export_bundle(target, study=STUDY, model=model, privacy=FACTS)
    assert export_bundle(target, study=STUDY, model=model, privacy=FACTS) == first
    assert set(first) == {
        "LICENSE",
        "configs/inference.json",
        "configs/metadata.json",
        "configs/privacy.json",
        "docs/README.md",
        "models/model.pt",
    }
    assert all(first[name] == sha256_file(target / name) for name in first)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInput, match=str(other)):
        export_bundle(other, study=STUDY, model=model, privacy=FACTS)
    assert (other / "thesis.tex").exists()
