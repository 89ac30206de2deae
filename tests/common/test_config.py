from dataclasses import replace

import pytest

from common.config import Study, parse_study, render_study
from common.errors import InvalidInput

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
