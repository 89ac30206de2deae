import re
from dataclasses import replace
from fractions import Fraction

import pytest

from client.operations.readiness import check_site
from client.policy import Consent, load_site, review
from common.errors import InvalidInput
from common.messages import Offer
from server.protocols.per_volume import plan_queries
from server.public.material import CodecRecord
from tests.federation import make_study
from tests.worlds import site_toml

STUDY = make_study()
CONSENT = Consent.of(STUDY)
QUERIES = plan_queries(STUDY, codec=CodecRecord(sha256="c" * 64, dimension=4), volumes=["a" * 64, "b" * 64])


def offer(*queries, study=STUDY.id):
    return Offer(study=study, ledger="l", batch="d" * 64, queries=queries)


def altered(**change):
    return replace(QUERIES[0], mechanism=replace(QUERIES[0].mechanism, **change))


def test_the_plan_of_the_consented_study_is_accepted():
    assert review(offer(*QUERIES), CONSENT) == "accepted"


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (offer(*QUERIES, study="e" * 64), "unknown-study"),
        (offer(), "malformed"),
        (offer(QUERIES[0], QUERIES[0]), "malformed"),
        (offer(replace(QUERIES[0], edition=2)), "wrong-edition"),
        (offer(replace(QUERIES[0], centre="f" * 64)), "wrong-codec"),
        (offer(replace(QUERIES[0], weights="f" * 64)), "wrong-codec"),
        (offer(altered(dimension=7)), "wrong-codec"),
        (offer(altered(noise_std=CONSENT.noise_std - Fraction(1, 2**20))), "wrong-mechanism"),
        (offer(altered(noise_std=CONSENT.noise_std * 2)), "wrong-mechanism"),  # it would be charged a quarter
        (offer(altered(noise_std=Fraction(2**60))), "wrong-mechanism"),
        (offer(altered(radius_int=CONSENT.radius_int + 1)), "wrong-mechanism"),
        (offer(altered(voters_per_site=2)), "wrong-mechanism"),
        (offer(QUERIES[0], altered(noise_std=Fraction(1))), "wrong-mechanism"),
    ],
)
def test_anything_but_the_consented_study_is_declined_with_an_allowed_word(asked, word):
    assert review(asked, CONSENT) == word


@pytest.mark.parametrize(("colluders", "word"), [(1, "accepted"), (0, "wrong-mechanism"), (2, "wrong-mechanism")])
def test_a_sealed_sum_for_another_number_of_colluders_than_was_consented_is_declined(colluders, word):
    """The number of colluders sets each site's share of the noise: for fewer colluders the site would draw less."""
    study = make_study(quorum=4, aggregation="sealed-sum", colluders=1)
    planned = plan_queries(study, codec=CodecRecord(sha256="c" * 64, dimension=4), volumes=["a" * 64])
    asked = [replace(query, mechanism=replace(query.mechanism, colluders=colluders)) for query in planned]
    assert review(replace(offer(*asked, study=study.id), draw=1), Consent.of(study)) == word


def write(tmp_path, old="", new=""):
    text = site_toml(data="data")
    assert old in text
    (tmp_path / "site.toml").write_text(text.replace(old, new, 1))
    return tmp_path


def test_a_site_file_reads(tmp_path):
    config = load_site(write(tmp_path))
    assert (config.site, config.caps.epsilon, config.caps.queries_per_day) == ("north", 8.0, 1000)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("schema = 1", "schema = 9"),
        ('data = "data"', 'data = "data"\nextra = 1'),
        ('site = "north"', 'site = "no rth"'),
        ("https://", "http://"),
        ("epsilon = 8.0", "epsilon = nan"),
        ("delta = 0.001", "delta = 2.0"),
        ("delta = 0.001", 'delta = 0.001\nunit = "patient"\nrelation = "zero-out"'),
        ("delta = 0.001", 'delta = 0.001\naccountant = "guess"'),
        ('sealing_key = "1', 'sealing_key = "x'),
        ("[caps]", "[cups]"),
    ],
)
def test_a_wrong_site_file_is_refused(tmp_path, old, new):
    with pytest.raises(InvalidInput):
        load_site(write(tmp_path, old, new))


def test_a_missing_site_file_says_what_to_do(tmp_path):
    with pytest.raises(InvalidInput, match="site init"):
        load_site(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epsilon", "epslion", "'epsilon'"),
        ("root_certificates", "root_certificate", "'root_certificates'"),
        ('pool = "', 'poool = "', "'pool'"),
        ('superlink = "', 'superlink = "no-port', "allowed: HOST:PORT"),
        ('data = "data"', "data = 5", "data: got 5; allowed: a text in quotes"),
    ],
)
def test_a_mistake_in_site_toml_is_told_with_the_file_and_the_remedy(tmp_path, old, new, said):
    write(tmp_path)
    text = (tmp_path / "site.toml").read_text()
    changed = text.replace(old, new, 1)
    if "superlink" in old:
        changed = re.sub(r'superlink = ".*"', 'superlink = "no-port"', text)
    assert changed != text
    (tmp_path / "site.toml").write_text(changed)
    with pytest.raises(InvalidInput) as refused:
        load_site(tmp_path)
    assert said in str(refused.value)
    assert "site.toml" in str(refused.value)
    assert "to fix: " in str(refused.value)
    (finding,) = check_site(tmp_path)
    assert (finding.check, finding.ok) == ("site.toml", False)
