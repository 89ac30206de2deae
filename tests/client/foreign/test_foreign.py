"""Tests teachers that a hospital already has (bundle, TorchScript file or command), and what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from monai.bundle import init_bundle
from monai.networks.nets import UNet
from typer.testing import CliRunner

from client.foreign import bring, model
from client.foreign.bring import AddTeacherOptions
from client.foreign.confined import can_confine
from client.foreign.model import answer
from client.foreign.teacher import ForeignTeacher, on_grid
from client.ledger.site_ledger import SiteLedger
from client.operations.readiness import _teachers
from client.operations.serve import TeacherVoters, open_worker
from client.operations.staff_decisions import consent
from client.policy import load_site
from client.records.declared import DECLARED, Activation, ForeignKind, LabelOf, TeacherDeclaration
from client.records.voter_files import voter_directory
from client.site.books import open_books
from client.teachers.teacher import Teachers
from client.worker import Worker
from common.config import DataConfig
from common.data.nifti import Scan
from common.data.volume import volume_from_bytes
from common.errors import ConsiliumError, DaemonFailed, InvalidInput
from common.ledger.records import parse_body
from common.messages import encode
from common.objects import write_json
from common.pki import create_authority, create_node_keys
from consilium.cli.site import site_app
from tests.commands import typed
from tests.federation import Federation, ball, make_study
from tests.worlds import DATA, STUDY, site_toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_confine(), reason="needs Landlock and seccomp"),
    pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning"),
]

LABELS = tuple(LabelOf(number, name) for number, name in enumerate(DATA.labels))


def nifti(array: np.ndarray, affine: np.ndarray | None = None) -> bytes:
    return nib.Nifti1Image(array, np.eye(4) if affine is None else affine).to_bytes()


def noise(shape: tuple[int, ...] = (16, 16, 16)) -> np.ndarray:
    return np.random.default_rng(3).normal(100, 10, shape).astype(np.float32)


def write_torchscript(network: torch.nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(network).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what hospitals bring: ``bundle/`` (made by monai's own tool), ``model.ts``, ``weights.pt``,
    ``label.nii.gz``.
    """
    root = tmp_path_factory.mktemp("brought")
    torch.manual_seed(0)
    network = UNet(3, 1, 3, (4, 8), (2,)).eval()
    init_bundle(root / "bundle", network=network)
    workflow = json.loads((root / "bundle/configs/inference.json").read_text())
    workflow["network_def"] = {"_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 3}
    workflow["network_def"] |= {"channels": [4, 8], "strides": [2]}
    (root / "bundle/configs/inference.json").write_text(json.dumps(workflow))
    write_torchscript(network, root / "model.ts")
    torch.save(network, root / "whole.pt")
    torch.save(network.state_dict(), root / "weights.pt")
    label = np.zeros((16, 16, 16), np.uint8)
    label[4:9, 4:9, 4:9], label[4:9, 9:13, 4:9] = 1, 7
    (root / "label.nii").write_bytes(nifti(label))
    return root


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Set up a hospital without teachers in a study of unit hospital."""
    directory = tmp_path / "site"
    directory.mkdir()
    (directory / "study.toml").write_text(STUDY)
    keys = {"sealing_key": "1b" * 32, "signing_key": "ab" * 32}
    (directory / "site.toml").write_text(site_toml(**keys, more='unit = "hospital"\n'))
    shutil.copy(create_authority(tmp_path / "authority").certificate, directory / "ca.crt")
    create_node_keys(directory / "node" / "keys")
    consent(directory, by="Ada", sheet="")
    return directory


def copying(made: Path, name: str = "label.nii") -> AddTeacherOptions:
    """Return a command that writes the same label map for every volume."""
    words = f"dd status=none if={made / name} of={{output_dir}}/a.nii"
    return AddTeacherOptions(
        command=f"sh -c '{words} # {{input}}'", models=(made / name,), labels="0=background,1=front,7=back"
    )


def test_a_command_answers_with_its_label_map_and_its_hash_is_on_record(site: Path, made: Path) -> None:
    added = bring.add(site, copying(made))
    teacher = ForeignTeacher.load(voter_directory(site / "teachers", 0), DATA)
    found = teacher.ask(nifti(noise()))
    truth = nib.load(made / "label.nii").get_fdata()
    assert found.shape == (3, 16, 16, 16)
    assert np.array_equal(found.argmax(axis=0), np.select([truth == 1, truth == 7], [1, 2], 0))
    worker = open_worker(site)
    with open_books(load_site(site)) as ledger:
        assert (0, added.declared.served) in ledger.books.teachers.foreign
        assert [served for served, _ in ledger.books.teachers.newest.voters] == [added.declared.served]
        assert not ledger.trainings().every_code_traced
    assert isinstance(worker, Worker)
    assert _teachers(load_site(site), load=True).ok


@pytest.mark.parametrize("kind", ["bundle", "zip", "torchscript"])
def test_a_model_votes_with_what_its_network_says(site: Path, made: Path, tmp_path: Path, kind: str) -> None:
    """The oracle calls the same network here, on the same normalised voxels."""
    source = {"bundle": made / "bundle", "torchscript": made / "model.ts"}.get(kind, tmp_path / "b.zip")
    if kind == "zip":
        shutil.make_archive(str(tmp_path / "b"), "zip", made, "bundle")
    declared = TeacherDeclaration(
        ForeignKind.TORCHSCRIPT if kind == "torchscript" else ForeignKind.BUNDLE,
        LABELS,
        ("image",),
        {},
        60,
        4,
        spacing_mm=(1, 1, 1),
    )
    if kind == "zip":
        bring._copied(source, tmp_path / "model")
        source = tmp_path / "model"
    image = noise((32, 32, 32))
    (tmp_path / "case.nii").write_bytes(nifti(image))
    data = replace(DATA, channels=("image",))
    found = answer(replace(declared, channels=data.channels), source, tmp_path / "case.nii")
    network = torch.jit.load(made / "model.ts").eval()
    if kind == "torchscript":
        given = (image - image.mean()) / image.std()
    else:
        given = (image - image.min()) / (image.max() - image.min())
    with torch.inference_mode():
        expected = torch.softmax(network(torch.tensor(given)[None, None])[0], dim=0)
    assert np.allclose(found.numpy(), expected.numpy(), atol=1e-4)


@pytest.mark.slow
def test_a_bundle_made_by_monai_is_added_by_the_command_line_and_runs_confined(site: Path, made: Path) -> None:
    words = ["teacher", "add", str(made / "bundle"), "--site-dir", str(site), "--json"]
    refused = CliRunner().invoke(site_app, words)
    assert "--labels background,front,back" in str(refused.exception)
    result = typed(site_app, *words, "--labels", "background,front,back")
    facts = json.loads(result.stdout)
    assert facts["kind"] == "bundle"
    assert sum(facts["tried"].values()) == pytest.approx(1, abs=1e-3)
    open_worker(site)
    CliRunner().invoke(site_app, ["teacher", "remove", "--site-dir", str(site)])
    assert not list((site / "teachers" / "voter-000").iterdir())


def patient(site: Path) -> None:
    text = STUDY.replace("quorum = 2", 'quorum = 2\nunit = "patient"')
    (site / "study.toml").write_text(text)
    policy = (site / "site.toml").read_text().replace('unit = "hospital"', 'unit = "patient"')
    (site / "site.toml").write_text(policy)


def test_unit_patient_takes_no_teacher_that_was_not_trained_by_slots(site: Path, made: Path) -> None:
    patient(site)
    with pytest.raises(InvalidInput, match=r"'patient'; allowed: hospital;.*site train"):
        bring.add(site, copying(made))
    assert not (site / "teachers" / "voter-000").exists()


def test_files_laid_by_hand_are_refused_by_the_worker_of_a_study_of_unit_patient(site: Path, made: Path) -> None:
    bring.add(site, copying(made))
    other = site.parent / "other"
    shutil.copytree(site, other, ignore=shutil.ignore_patterns("site-ledger*"))
    patient(other)
    consent(other, by="Ada", sheet="")
    with pytest.raises(InvalidInput, match=r"'patient'; allowed: hospital;.*site train"):
        open_worker(other)


def test_no_row_of_a_ledger_has_a_code_for_unit_patient_by_a_brought_teacher(tmp_path: Path) -> None:
    """The site's ledger and its verification refuse the code even if the worker is changed."""
    federation = Federation(tmp_path, study=make_study(unit="patient"))
    ledger, (query, *_) = federation.site_ledgers["site-0"], federation.planned()
    ledger.record_foreign(0, "a" * 64, brought="command")
    digest = ledger.state_teachers(["a" * 64])
    federation.workers[100].handle(encode(federation.offer([query])))
    code = np.zeros(query.mechanism.dimension, np.int64)
    with pytest.raises(ConsiliumError, match="unit patient"):
        ledger.store_code(query.id, code, teachers=digest)
    assert ledger.code(query.id) is None
    federation.close()


@pytest.mark.parametrize("change", ["declaration", "model", "unrecorded"])
def test_a_teacher_that_is_not_the_one_on_record_does_not_vote(site: Path, made: Path, change: str) -> None:
    mine = site.parent / "mine"
    mine.mkdir()
    shutil.copy(made / "label.nii", mine)
    bring.add(site, copying(mine))
    declared = voter_directory(site / "teachers", 0) / DECLARED
    if change == "declaration":
        declared.write_text(declared.read_text().replace('"timeout_s": 600', '"timeout_s": 601'))
    if change == "model":
        (mine / "label.nii").write_bytes((mine / "label.nii").read_bytes() + b"\0")
    if change == "unrecorded":
        for path in site.glob("site-ledger*"):
            path.unlink()
    with pytest.raises(InvalidInput, match="on record"):
        open_worker(site)


def test_a_model_changed_while_the_worker_runs_is_a_zero_vote(site: Path, made: Path) -> None:
    mine = site.parent / "mine"
    mine.mkdir()
    shutil.copy(made / "label.nii", mine)
    bring.add(site, copying(mine))
    teacher = ForeignTeacher.load(voter_directory(site / "teachers", 0), DATA)
    (mine / "label.nii").write_bytes(b"another")
    with pytest.raises(InvalidInput, match=r"label\.nii.*site teacher add"):
        teacher.ask(nifti(noise()))


def test_a_state_dict_a_pickle_and_onnx_are_refused_unread(site: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    before = (site / "site-ledger.sqlite").read_bytes()
    for source, remedy in (
        (made / "weights.pt", "torch.jit.script"),
        (made / "whole.pt", "torch.jit.script"),
        (tmp_path / "model.onnx", "run-onnx"),
        (tmp_path / "nowhere.ts", "check the path"),
        (tmp_path, "MONAI bundle"),
    ):
        with pytest.raises(InvalidInput, match=remedy):
            bring.add(site, AddTeacherOptions(source=source, labels="background,front,back"))
    assert (site / "site-ledger.sqlite").read_bytes() == before


def test_a_bundle_s_zip_file_writes_nowhere_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("configs/inference.json", "{}")
        archive.writestr("../outside", "x")
    with pytest.raises(InvalidInput, match="outside"):
        bring._copied(tmp_path / "b.zip", tmp_path / "model")
    assert not (tmp_path / "outside").exists()


def test_a_bundle_s_pickled_weights_are_not_unpickled(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "bundle", tmp_path / "b")
    torch.save(UNet(3, 1, 3, (4, 8), (2,)), tmp_path / "b/models/model.pt")
    (tmp_path / "case.nii").write_bytes(nifti(noise()))
    declared = TeacherDeclaration(ForeignKind.BUNDLE, LABELS, ("image",), {}, 60, 4)
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        answer(declared, tmp_path / "b", tmp_path / "case.nii")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(DATA.labels),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from("0123"), inner, max_size=4),
)
METADATA = {"network_data_format": {"outputs": {"pred": {"channel_def": dict(enumerate(DATA.labels))}}}}


def with_any(document: object) -> st.SearchStrategy[object]:
    """Put any JSON in one of the document's places, or in place of the whole document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    parts = [with_any(part).map(lambda new, key=key: _put(document, key, new)) for key, part in items]
    return st.one_of(ANY_JSON, *parts)


def _put(document: dict | list, key: object, new: object) -> dict | list:
    changed = document.copy()
    changed[key] = new
    return changed


@hypothesis.given(with_any(METADATA))
def test_a_bundle_s_metadata_names_its_labels_or_is_refused_whatever_it_says(
    tmp_path_factory: pytest.TempPathFactory, metadata: object
) -> None:
    bundle = tmp_path_factory.getbasetemp()
    (bundle / "configs").mkdir(exist_ok=True)
    (bundle / "configs/metadata.json").write_text(json.dumps(metadata))
    with contextlib.suppress(InvalidInput):
        assert {one.label for one in bring._own_labels(ForeignKind.BUNDLE, bundle, DATA)} <= set(DATA.labels)


@hypothesis.given(
    with_any(
        TeacherDeclaration(
            ForeignKind.BUNDLE, LABELS, ("image",), {"model": "a" * 64}, 60, 4, spacing_mm=(1, 1, 1)
        ).to_json()
    )
)
def test_a_declaration_is_read_or_refused_whatever_it_says(
    tmp_path_factory: pytest.TempPathFactory, declaration: object
) -> None:
    path = tmp_path_factory.getbasetemp() / DECLARED
    path.write_text(json.dumps(declaration))
    with contextlib.suppress(InvalidInput):
        TeacherDeclaration.read(path).label_numbers(DATA)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"1" * 6000, b"", b'{"network_data_format": '])
def test_invalid_json_is_refused_as_metadata_and_as_a_declaration(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "configs").mkdir()
    for path in (tmp_path / DECLARED, tmp_path / "configs/metadata.json"):
        path.write_bytes(text)
    with pytest.raises(InvalidInput, match="--labels"):
        bring._own_labels(ForeignKind.BUNDLE, tmp_path, DATA)
    with pytest.raises(InvalidInput, match="site teacher add"):
        TeacherDeclaration.read(tmp_path / DECLARED)


def test_any_error_of_a_model_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_json(
        tmp_path / bring.DECLARED, TeacherDeclaration(ForeignKind.BUNDLE, LABELS, ("image",), {}, 60, 4).to_json()
    )
    monkeypatch.setattr(model, "answer", lambda *given: {}["preprocessing"])
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / DECLARED), "", "", ""])
    with pytest.raises(SystemExit, match=r"^KeyError: 'preprocessing'$"):
        model.main()


def test_a_bundle_whose_link_leads_out_of_its_folder_copies_nothing_of_this_users(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    (tmp_path / "bundle/configs").mkdir(parents=True)
    (tmp_path / "bundle/models").mkdir()
    (tmp_path / "bundle/configs/inference.json").write_text("{}")
    (tmp_path / "bundle/models/latest.pt").symlink_to("../configs/inference.json")
    bring._copied(tmp_path / "bundle", tmp_path / "model")
    assert (tmp_path / "model/models/latest.pt").read_text() == "{}"
    for target in (tmp_path / "private", tmp_path, "../../private"):
        (tmp_path / "bundle/models/model.pt").symlink_to(target)
        with pytest.raises(InvalidInput, match=r"models/model\.pt.*cp -rL"):
            bring._copied(tmp_path / "bundle", tmp_path / "again")
        assert not (tmp_path / "again").exists()
        (tmp_path / "bundle/models/model.pt").unlink()


def test_a_bundle_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop/configs").mkdir(parents=True)
    (tmp_path / "loop/configs/again").symlink_to(tmp_path / "loop/configs", target_is_directory=True)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("configs/inference.json", "{}" * 900)
    whole = (tmp_path / "b.zip").read_bytes()
    locked = bytearray(whole)
    locked[6] |= 1
    locked[whole.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(locked)
    (tmp_path / "cut.zip").write_bytes(whole[:54] + b"\xff" * 8 + whole[62:])
    for name in ("loop", "locked.zip", "cut.zip"):
        with pytest.raises(InvalidInput, match="of a teacher"):
            bring._copied(tmp_path / name, tmp_path / f"model-{name}")


GRID_VOLUME = volume_from_bytes(nifti(noise()), DATA)
MAPPING = {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize(
    ("array", "affine", "word"),
    [
        (np.full((1, 16, 16, 16), 3.0), np.eye(4), "label map"),
        (np.full((1, 16, 16, 16), 0.5), np.eye(4), "label map"),
        (np.full((3, 16, 16, 16), np.nan), np.eye(4), "NaN or infinite"),
        (np.full((3, 16, 16, 16), 0.5), np.eye(4), "sum to 1"),
        (np.stack([np.full((16, 16, 16), v) for v in (-1.0, 1.0, 1.0)]), np.eye(4), "sum to 1"),
        (np.full((2, 16, 16, 16), 0.5), np.eye(4), "channels"),
        (np.full((4, 16, 16, 16), 0.25), np.eye(4), "channels"),
        (np.zeros((1, 16, 16, 16)), np.array([[1, 0, 0, 500], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]]), "affine"),
    ],
)
def test_an_output_out_of_range_shape_or_place_is_no_vote(array: np.ndarray, affine: np.ndarray, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        on_grid(Scan(array.astype(np.float32), affine), GRID_VOLUME, MAPPING, classes=3)


def test_an_output_on_voxels_of_its_own_comes_back_on_the_study_s_grid() -> None:
    """The output has half the size and another axis order; in millimetres its box and its label stay where they are."""
    whole = np.zeros((16, 16, 16), np.float32)
    whole[4:10, 2:8, 6:12] = 1
    coarse = whole[::2, ::2, ::2][::-1]
    affine = np.diag([-2.0, 2, 2, 1])
    affine[:3, 3] = 14.5, 0.5, 0.5
    found = on_grid(Scan(coarse[None].copy(), affine), GRID_VOLUME, MAPPING, classes=3)
    assert np.allclose(found.sum(axis=0), 1, atol=1e-5)
    ours, truth = found.argmax(axis=0) == 1, whole == 1
    assert 2 * (ours & truth).sum() / (ours.sum() + truth.sum()) > 0.95


def test_labels_and_channels_are_the_study_s_or_refused(site: Path, made: Path) -> None:
    for changed, word in (
        ({"labels": "background,front"}, "labels of a teacher"),
        ({"labels": "background,front,tail"}, "label of a teacher"),
        ({"channels": "flair"}, "channel of a teacher"),
        ({"labels": "a=b"}, "--labels"),
        ({"command": "no-such-program {input} {output}"}, "program of --command"),
        ({"command": "cp {input} /tmp/x"}, "{output}"),
        ({"voter": 1}, "--voter"),
    ):
        with pytest.raises(InvalidInput, match=word):
            bring.add(site, replace(copying(made), **changed))
    assert not (site / "teachers" / "voter-000").exists()


def test_a_command_that_fails_leaves_everything_as_it_was(site: Path, made: Path) -> None:
    bring.add(site, copying(made))
    before = (voter_directory(site / "teachers", 0) / DECLARED).read_bytes()
    failing = "sh -c 'echo no such thing; false {input} {output}'"
    with pytest.raises(DaemonFailed, match="no such thing"):
        bring.add(site, replace(copying(made), command=failing))
    assert (voter_directory(site / "teachers", 0) / DECLARED).read_bytes() == before
    open_worker(site)


def test_sigmoid_channels_share_what_they_claim() -> None:
    from client.foreign.model import _activated

    found = _activated(torch.tensor([0.0, 4.0, 4.0])[:, None, None, None], Activation.SIGMOID)
    assert torch.allclose(found.sum(dim=0), torch.ones(1))
    assert found[0].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_hospitals_with_a_bundle_and_with_a_command_take_part_in_a_study(tmp_path: Path, made: Path) -> None:
    """Codes of three hospitals, one of them a stub, are checked, summed and noised like all others."""
    federation = Federation(tmp_path, study=make_study(planned_queries=1), volumes=1)
    data: DataConfig = federation.study.data
    federation.volumes = tuple(federation.objects.put(nifti(noise((8, 8, 8)) + i)) for i in range(1))
    label = tmp_path / "label.nii"
    label.write_bytes(nifti(ball((4, 4, 4), 2.0)))
    base = AddTeacherOptions(labels="background,body")
    network = UNet(3, 1, 2, (4, 8), (2,)).eval()
    write_torchscript(network, tmp_path / "model.ts")
    brought = {
        "site-0": replace(base, command=f"sh -c 'cat {label} > {{output_dir}}/a.nii # {{input}}'", models=(label,)),
        "site-1": replace(base, source=tmp_path / "model.ts"),
    }
    for name, given in brought.items():
        folder = tmp_path / "teachers" / name
        folder.mkdir(parents=True)
        declared = bring._declare(given, folder, data)
        write_json(folder / bring.DECLARED, declared.to_json())
        teacher = ForeignTeacher.load(folder, data)
        node = next(site.node_id for site in federation.sites if site.name == name)
        ledger: SiteLedger = federation.site_ledgers[name]
        ledger.record_foreign(0, declared.served, brought=str(declared.kind))
        empty = Teachers(data, (None,))
        worker = federation.workers[node]
        worker._voters, worker._teachers = (
            TeacherVoters(empty, data, {0: teacher}),
            ledger.state_teachers([declared.served]),
        )
    federation.core().run(federation.transport)
    answers = list(federation.ledger.answers(federation.study.id))
    assert len(answers) == 1
    for name in brought:
        ledger = federation.site_ledgers[name]
        assert all(ledger.code(query.id).any() for query in federation.planned())
        assert {parse_body(row.body)["outcome"] for row in ledger.rows() if row.kind == "code"} == {"stored"}
    federation.close()
