"""Makes facts of a hospital's own page, and a client of that page."""

from __future__ import annotations

from fractions import Fraction

from common.errors import InvalidInput
from common.hospital_page import HospitalFacts, OwnAlarm, OwnAnswer, OwnPage, OwnPeer, ShownCase
from common.ledger.charges import Spend
from common.ledger.spending import Spending
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.site_facts import SiteFacts, SiteStudy
from server.dashboard.hospital import create_hospital_app
from tests.server.dashboard.conftest import TestClient

KEY, WHO = "k" * 32, "2026-11-25 10:00 UTC: A. Noether"


def spending(spent: Fraction, *, epsilon: float = 12.0) -> Spending:
    budget, protection = Budget(epsilon, 1e-5), Protection(Unit.PATIENT, Relation.REPLACE_ONE)
    return Spending(budget, AccountantName.EXACT, protection, Spend(spent, 4))


def facts(**of: object) -> HospitalFacts:
    decided = {"paused": "pause", "withdrawn": "withdraw"}.get(str(of.get("state")), "open")
    pool, here = spending(Fraction(1)), SiteStudy("a" * 64, "trial", decided, spending(Fraction(1)), (WHO,))
    site = SiteFacts(
        site="north",
        pool="north/patients",
        cap=pool.guaranteed,
        by=pool.readings(),
        doubt=None,
        accepted=4,
        receipted=4,
        refused=1,
        alarms=(),
        share=pool.share,
        today=4,
        per_day=1000,
        studies=(here,),
    )
    given: dict[str, object] = {
        "site": site,
        "here": here,
        "study": "trial",
        "state": "answering",
        "sheet": "WHAT IS ASKED OF YOU",
        "answers": (OwnAnswer("2026-11-25T10:00:00Z", 4, ""), OwnAnswer("2026-11-25T09:00:00Z", 1, "study-budget")),
        "sealed": True,
        "own_fingerprint": "SHA256:own",
        "peers": (OwnPeer("south", "SHA256:south", "NOT CONFIRMED", False),),
        "alarms": (OwnAlarm("row 7 <b>contradicts</b>", "`consilium site recover`", True),),
        "networks": (),
        "pause": "consilium site pause trial --site-dir /srv/consilium",
        "site_dir": "/srv/consilium",
        "cases": (),
        "withdrawn": 0,
        "left_out": 0,
        "not_shown": "",
    }
    return HospitalFacts(**(given | of))  # type: ignore[arg-type]


class Fixed(OwnPage):
    def __init__(self, shown: HospitalFacts) -> None:
        self._shown = shown

    def facts(self) -> HospitalFacts:
        return self._shown

    def case(self, number: int) -> ShownCase:
        raise InvalidInput("case", value=number + 1, limit="1 to 0")


def client_of(page: OwnPage, *, key: str = KEY) -> TestClient:
    client = TestClient(create_hospital_app(page, key=KEY), base_url="http://localhost", follow_redirects=True)
    if key:
        assert client.get(f"/?key={key}").status_code in (200, 403)
    return client
