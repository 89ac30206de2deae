from dataclasses import replace

import pytest

from common.config import (
    CodecConfig,
    CollectionConfig,
    DataConfig,
    GateConfig,
    StartConfig,
    Study,
    TrainingConfig,
    load_study,
    parse_study,
    render_study,
)
from common.errors import InvalidInput
from tests.federation import make_study

TEXT = """
schema = 1
name = "demo"
[data]
labels = ["background", "anterior", "posterior"]
spacing_mm = [1, 1, 1]
grid = [32, 48, 32]
[privacy]
epsilon = 8
delta = 1e-3
planned_queries = 16
quorum = 3
"""


@pytest.fixture
def study() -> Study:
    return parse_study(TEXT)


def test_a_rendered_study_reads_back_equal(study):
    assert parse_study(render_study(study)) == study


def test_a_study_is_read_by_its_file_or_its_directory(study, tmp_path):
    (tmp_path / "study.toml").write_text(render_study(study), encoding="utf-8")
    assert load_study(tmp_path) == load_study(tmp_path / "study.toml") == study
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match=r"got '.*empty/study\.toml'; to fix: check the path"):
        load_study(tmp_path / "empty")


def test_a_study_file_that_an_editor_began_with_a_byte_order_mark_is_the_same_study(study, tmp_path):
    (tmp_path / "study.toml").write_bytes(b"\xef\xbb\xbf" + render_study(study).replace("\n", "\r\n").encode())
    assert load_study(tmp_path) == study


def test_whole_and_decimal_spacings_are_one_study(study):
    whole = replace(study, data=replace(study.data, spacing_mm=(1, 1, 1)))
    assert whole.id == study.id == parse_study(render_study(whole)).id


def test_defaults_are_the_exact_accountant_replace_one_and_hospital(study):
    privacy = study.privacy
    assert (privacy.accountant, privacy.relation, privacy.unit) == ("exact", "replace-one", "hospital")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("epsilon = 8", "epsilon = nan", "epsilon"),
        ("epsilon = 8", "epsilon = inf", "epsilon"),
        ("epsilon = 8", "epsilon = 0", "epsilon"),
        ("epsilon = 8", "epsilon = true", "epsilon"),
        ("epsilon = 8", 'epsilon = "8"', "epsilon"),
        ("delta = 1e-3", "delta = 0.0", "delta"),
        ("delta = 1e-3", "delta = 1.0", "delta"),
        ("delta = 1e-3", "delta = nan", "delta"),
        ("planned_queries = 16", "planned_queries = 0", "planned_queries"),
        ("planned_queries = 16", "planned_queries = 16.0", "planned_queries"),
        ("quorum = 3", "quorum = -1", "quorum"),
        ("quorum = 3", 'quorum = 3\naccountant = "moments"', "accountant"),
        ("quorum = 3", 'quorum = 3\nunit = "patient"\nrelation = "zero-out"', "zero-out"),
        ("quorum = 3", "quorum = 3\nsigma = 1", "sigma"),
        ("grid = [32, 48, 32]", "grid = [32, 48]", "grid"),
        ("grid = [32, 48, 32]", "grid = [33, 48, 32]", "grid"),
        ("grid = [32, 48, 32]", "grid = [512, 512, 512]", "grid"),
        ("spacing_mm = [1, 1, 1]", "spacing_mm = [1, 0, 1]", "spacing_mm"),
        ("spacing_mm = [1, 1, 1]", "spacing_mm = [1, nan, 1]", "spacing_mm"),
        ('"anterior", "posterior"', '"anterior", "anterior"', "labels"),
        ('name = "demo"', 'name = "a b"', "name"),
        ('name = "demo"', 'name = "demo"\nextra = 1', "extra"),
        ("schema = 1", "schema = 2", "schema"),
        ("[data]", "[dta]", "dta"),
        ("[data]", "[data", "TOML"),
    ],
)
def test_a_wrong_study_is_refused_by_name(old, new, names):
    assert old in TEXT
    with pytest.raises(InvalidInput, match=names):
        parse_study(TEXT.replace(old, new))


@pytest.mark.parametrize("change", [{"epsilon": 8.5}, {"edition": 2}, {"quorum": 2}, {"planned_queries": 17}])
def test_editing_any_privacy_setting_makes_another_study(study, change):
    assert replace(study, privacy=replace(study.privacy, **change)).id != study.id


def test_a_training_recipe_changes_no_guarantee_and_no_id(study):
    assert replace(study, student=replace(study.student, steps=7)).id == study.id


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CodecConfig, {"name": None}),
        (CodecConfig, {"radius": "1"}),
        (CodecConfig, {"radius": 10**400}),
        (CodecConfig, {"radius": float("nan")}),
        (CodecConfig, {"joint": 1}),
        (CodecConfig, {"augmentations": 2.0}),
        (TrainingConfig, {"steps": True}),
        (TrainingConfig, {"steps": 1.5}),
        (TrainingConfig, {"channels": 4}),
        (TrainingConfig, {"channels": {4, 8}}),
        (TrainingConfig, {"channels": (True, 8)}),
        (TrainingConfig, {"learning_rate": "0.1"}),
        (TrainingConfig, {"amp": "yes"}),
        (TrainingConfig, {"augmentation": ["smooth"]}),
        (CollectionConfig, {"patience_s": None}),
        (CollectionConfig, {"batch_size": True}),
        (GateConfig, {"verdicts": True}),
        (StartConfig, {"name": 3}),
    ],
    ids=str,
)
def test_a_section_made_in_python_refuses_a_value_of_another_type_as_a_file_does(
    kind: type, wrong: dict[str, object]
) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize("name", ["labels", "channels", "regions"])
def test_names_that_are_numbered_by_their_order_are_not_taken_from_a_set(name: str) -> None:
    terms = {"labels": ["background", "ball"], "spacing_mm": (1.0, 1.0, 1.0), "grid": (8, 8, 8)}
    with pytest.raises(InvalidInput, match=f"data.{name}.*a list"):
        DataConfig(**terms | {name: {"background", "ball"}})  # type: ignore[arg-type]


def test_a_study_has_at_most_as_many_labels_as_a_voxel_of_a_label_map_can_hold() -> None:
    def data(labels: int) -> DataConfig:
        names = tuple(f"label {number}" for number in range(labels))
        return DataConfig(labels=names, spacing_mm=(1.0, 1.0, 1.0), grid=(8, 8, 8))

    assert len(data(256).labels) == 256
    with pytest.raises(InvalidInput, match="got 257; allowed: at most 256"):
        data(257)


def test_a_study_made_with_whole_numbers_is_the_one_that_its_file_gives() -> None:
    study = make_study()
    whole = replace(study, privacy=replace(study.privacy, epsilon=8), codec=replace(study.codec, radius=1))
    assert parse_study(render_study(whole)).id == whole.id


@pytest.mark.parametrize("section", ["data", "privacy", "codec", "student", "gate", "name"])
def test_a_study_refuses_a_section_of_another_class(section: str) -> None:
    with pytest.raises(InvalidInput, match=section):
        replace(make_study(), **{section: None})  # type: ignore[arg-type]
