"""A second and a third study of the same hospitals over real daemons: one pool, one sum, books that refuse alone."""

from __future__ import annotations

import pytest

from common.errors import InvalidInput
from consilium.demo.federation import write_sites
from consilium.demo.training import train_all
from server.ledger.verify import verify
from server.operations.supervisor import RunFailed
from server.study import create_study as setup
from tests.e2e.consortium import POOL_EPSILON, SITES, Consortium, collect, consortium_of, costs, events
from tests.e2e.daemons import running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    root = tmp_path_factory.mktemp("studies")
    made = consortium_of(root)
    made.study("first", epsilon=8.0, ledger=None)
    made.sites = write_sites(made.first, root / "sites", names=SITES, data=root / "data")
    train_all(made.sites, seed=0, processes=1, on_steps=lambda done, total: None)
    with running(made.first, made.sites, pool_epsilon=POOL_EPSILON):
        collect(made.first)
    return made


def test_both_books_show_the_sum_of_two_studies_and_each_refuses_a_third_by_itself(consortium: Consortium) -> None:
    first = costs(consortium.first)
    assert consortium.spent() == dict.fromkeys(SITES, (first, first))

    second = consortium.study("second", epsilon=4.0, ledger=consortium.first.root)
    joined = consortium.join(second)
    consortium.set_caps(POOL_EPSILON)
    with running(second, joined):
        collect(second)
    total = first + costs(second)
    assert consortium.spent() == dict.fromkeys(SITES, (total, total))

    with pytest.raises(InvalidInput, match="budget for life"):
        consortium.study("refused", epsilon=8.0, ledger=second.root)
    # Made while there was room, and the hospitals' books raised out of the way: the consortium's ledger refuses.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "check_shared", lambda _ledger, _study: None)
        third = consortium.study("third", epsilon=8.0, ledger=second.root)
    joined = consortium.join(third)
    consortium.set_caps(1000.0)
    with running(third, joined):
        collect(third)
    assert events(third, "budget-refused")
    assert events(third, "offer-answered") == events(third, "released") == []

    # A server that knows nothing of these pools, so its ledger has room: the hospitals' books refuse.
    fourth = consortium.study("fourth", epsilon=8.0, ledger=None)
    joined = consortium.join(fourth)
    consortium.set_caps(POOL_EPSILON)
    with running(fourth, joined), pytest.raises(RunFailed, match="quorum"):
        collect(fourth)
    assert {(event["site"], event["reason"]) for event in events(fourth, "offer-answered")} == {
        (name, "budget") for name in SITES
    }
    assert events(fourth, "released") == []

    assert consortium.spent() == dict.fromkeys(SITES, (total, total)), "nothing was charged by either refusal"
    for path in (consortium.first.ledger_file, *(d / "site-ledger.sqlite" for d in consortium.sites.values())):
        assert verify(path).ok
