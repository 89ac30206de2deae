"""Tests a dispute about a draw of a sealed sum: it names the dishonest site, and never an honest one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from typer.testing import CliRunner

from client.site.disclose import sealed_disclosure
from common.config import render_study
from common.disclosure import SealedDisclosure
from common.errors import InvalidInput, Refused
from common.evidence import DrawEvidence, SiteCodes
from common.ledger.keys import public_hex
from common.messages import CodesReply, Several, decode, encode
from common.peers import Peer
from common.privacy.mechanism import Protection
from consilium.audit.dispute import Judgement, judge
from consilium.cli.main import app
from server.study.evidence import store_codes
from server.study.workspace import Workspace
from tests.commands import typed
from tests.federation import Federation, make_study
from tests.worlds import HURRIED, silent

pytestmark = pytest.mark.slow

SITES, CULPRIT, NOW = 4, "site-1", "2026-11-24T09:00:00.000000Z"
AUDITOR = X25519PrivateKey.generate()
Sampler = Callable[[int, Fraction], np.ndarray]


class Study(Federation):
    """Holds a federation whose server stores the sites' signatures as the pipeline does."""

    def __init__(self, root: Path, *, queries: int = 2) -> None:
        terms = {"quorum": 3, "planned_queries": queries, "aggregation": "sealed-sum", "spare_draws": 4}
        study = make_study(collection=HURRIED, **terms)
        super().__init__(root, study=study, sites=SITES)

    def run(self) -> None:
        core = self.core()
        core._store_codes = lambda codes: store_codes(self.root / "evidence", codes)
        core.run(self.transport)

    def evidence(self, number: int = -1) -> DrawEvidence:
        """Return the evidence of a draw, by default of the newest."""
        roster = list(self.ledger.rosters_drawn(self.study.id))[number]
        draw = self.ledger.drawn(self.study.id, roster)
        folder = self.root / "evidence" / roster
        sites = tuple(SiteCodes.parse(path.read_bytes()) for path in sorted(folder.iterdir()))
        return DrawEvidence.parse(DrawEvidence(draw.roster, draw.queries, sites).render())

    def disclosed(self, name: str, draw: str, *, auditor: X25519PrivateKey = AUDITOR) -> SealedDisclosure:
        worker = next(one for one in self.workers.values() if one._config.site == name)
        of = {"auditor": public_hex(auditor), "now": datetime(2026, 11, 24, tzinfo=UTC)}
        _, sealed = sealed_disclosure(worker._config, worker._ledger, draw, **of)  # type: ignore[arg-type]
        return SealedDisclosure.parse(sealed.render())

    @property
    def identities(self) -> dict[str, str]:
        return {site.name: site.answer_key for site in self.sites}

    def judged(self, *, by: tuple[str, ...] = (), without: tuple[str, ...] = (), number: int = -1) -> Judgement:
        return self.judged_with_doubts(by=by, without=without, number=number)[0]

    def judged_with_doubts(
        self, *, by: tuple[str, ...] = (), without: tuple[str, ...] = (), number: int = -1
    ) -> tuple[Judgement, tuple[str, ...]]:
        evidence = self.evidence(number)
        names = by or tuple(name for name in evidence.roster.sites if name not in without)
        disclosures = [self.disclosed(name, evidence.roster.id) for name in names]
        return judge(evidence, disclosures, identities=self.identities, auditor=AUDITOR, now=NOW)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Study]:
    study = Study(tmp_path)
    yield study
    study.close()


def pushing(world: Study, by: float) -> Sampler:
    """Return a sampler that adds to a site's noise a push of ``by`` times m·R in one direction."""
    longest = world.planned()[0].mechanism.site_radius_int
    honest = world.workers[101]._sampler

    def sampler(size: int, std: Fraction) -> np.ndarray:
        noise = honest(size, std)
        noise[0] -= int(by * longest)
        return noise

    return sampler


def parts(judged: Judgement) -> dict[str, str]:
    return {finding.site: finding.part for finding in judged.findings}


WITHIN = dict.fromkeys((f"site-{k}" for k in range(SITES)), "within")


def test_nobody_is_blamed_where_all_are_honest(world: Study) -> None:
    world.run()
    judged, doubts = world.judged_with_doubts()
    assert parts(judged) == WITHIN
    assert judged.blamed == ()
    assert not judged.spoiled
    assert doubts == ()


def test_a_site_that_spoils_a_sum_is_found_and_no_other(world: Study) -> None:
    world.workers[101]._sampler = lambda size, std: np.full(size, 1 << 60, dtype=np.int64)
    with pytest.raises(Refused, match="spoiled"):
        world.run()
    judged = world.judged()
    assert parts(judged) == WITHIN | {CULPRIT: "outside"}
    assert judged.blamed == (CULPRIT,)
    assert judged.spoiled


def test_a_site_that_steers_within_the_noise_is_found_though_every_sum_was_accepted(world: Study) -> None:
    """The sums, alone and together, do not reveal this push, but one site's own part does.

    Nobody draws noise here, so that it is the same every time.
    """
    for worker in world.workers.values():
        worker._sampler = silent
    world.workers[101]._sampler = pushing(world, 10)
    world.run()
    assert len(world.core().answers()) == 2
    judged = world.judged()
    assert judged.blamed == (CULPRIT,)
    assert not judged.spoiled


def test_a_culprit_that_discloses_nothing_is_found_by_the_keys_of_the_others(world: Study) -> None:
    world.workers[101]._sampler = pushing(world, 60)
    with pytest.raises(Refused):
        world.run()
    judged = world.judged(without=(CULPRIT,))
    assert judged.blamed == (CULPRIT,)
    finding = next(one for one in judged.findings if one.site == CULPRIT)
    assert (finding.disclosure, finding.part) == ("none", "outside")


def test_a_culprit_that_was_revoked_at_once_is_judged_with_the_files_that_the_consortium_hands_over(
    world: Study, tmp_path: Path
) -> None:
    world.workers[101]._sampler = lambda size, std: np.full(size, 1 << 60, dtype=np.int64)
    with pytest.raises(Refused):
        world.run()
    workspace = Workspace(world.root)
    workspace.study_file.write_text(render_study(world.study))
    workspace.save_sites(world.sites)
    workspace.save_revoked({CULPRIT})
    draw, evidence, files = world.evidence().roster.id, tmp_path / "draw.json", []
    signing, sealing = Ed25519PrivateKey.generate(), AUDITOR
    for name in WITHIN.keys() - {CULPRIT}:
        files.append(tmp_path / f"{name}.disclosure")
        files[-1].write_bytes(world.disclosed(name, draw).render())
    typed(app, "dispute", "evidence", world.root, draw, "--out", evidence)
    words = ["dispute", "judge", str(evidence), *map(str, files), "--keys", "auditor"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("consilium.audit.auditor.load_auditor", lambda folder: (signing, sealing))
        listed = ["--peers", str(tmp_path / "draw-peers.json"), "--out", str(tmp_path / "judged.json")]
        done = CliRunner().invoke(app, [*words, *listed])
    assert done.exit_code == 11, done.output
    assert f"against: {CULPRIT}\n" in done.output


def test_two_that_disclose_nothing_are_named_and_nobody_is_blamed_for_them(world: Study) -> None:
    world.workers[101]._sampler = pushing(world, 60)
    with pytest.raises(Refused):
        world.run()
    judged = world.judged(without=(CULPRIT, "site-3"))
    assert parts(judged) == WITHIN | {CULPRIT: "unknown", "site-3": "unknown"}
    assert judged.blamed == ()


def lying(world: Study, draw: str, *, key: X25519PrivateKey, name: str = CULPRIT) -> SealedDisclosure:
    """Return a disclosure that the site signed, with another key than the draw's."""
    true = world.disclosed(name, draw).opened(AUDITOR)
    ledger = world.site_ledgers[name]
    return SealedDisclosure.of(replace(true, key=key.private_bytes_raw().hex()).signed_by(ledger.sign))


def test_a_culprit_that_discloses_a_false_key_is_named_for_it_and_can_blame_nobody(world: Study) -> None:
    world.workers[101]._sampler = pushing(world, 60)
    with pytest.raises(Refused):
        world.run()
    evidence = world.evidence()
    honest = [world.disclosed(name, evidence.roster.id) for name in evidence.roster.sites if name != CULPRIT]
    false = lying(world, evidence.roster.id, key=X25519PrivateKey.generate())
    judged, _ = judge(evidence, [*honest, false], identities=world.identities, auditor=AUDITOR, now=NOW)
    assert parts(judged) == WITHIN | {CULPRIT: "outside"}
    assert next(one for one in judged.findings if one.site == CULPRIT).disclosure == "false"


def test_an_honest_site_is_not_blamed_by_false_keys_of_all_the_others(world: Study) -> None:
    world.run()
    evidence = world.evidence()
    others = [name for name in evidence.roster.sites if name != "site-0"]
    false = [lying(world, evidence.roster.id, key=X25519PrivateKey.generate(), name=name) for name in others]
    alone, _ = judge(evidence, false, identities=world.identities, auditor=AUDITOR, now=NOW)
    assert parts(alone)["site-0"] == "unknown"  # not even a disclosure helps it
    judged, _ = judge(
        evidence,
        [world.disclosed("site-0", evidence.roster.id), *false],
        identities=world.identities,
        auditor=AUDITOR,
        now=NOW,
    )
    assert parts(judged)["site-0"] == "within"
    assert set(judged.blamed) == set(others)


def test_a_disclosure_replayed_from_another_draw_site_or_auditor_is_refused(tmp_path: Path) -> None:
    world = Study(tmp_path, queries=4)
    world.run()
    evidence, other = world.evidence(0), world.evidence(1)
    replayed = world.disclosed("site-0", other.roster.id)
    for wrong in (
        replayed,
        replace(replayed, roster=evidence.roster.id),
        world.disclosed("site-0", evidence.roster.id, auditor=X25519PrivateKey.generate()),
        replace(world.disclosed("site-0", evidence.roster.id), site="site-2"),
    ):
        with pytest.raises(InvalidInput, match="disclosure"):
            judge(evidence, [wrong], identities=world.identities, auditor=AUDITOR, now=NOW)
    twice = [world.disclosed("site-0", evidence.roster.id)] * 2
    with pytest.raises(InvalidInput, match=r"site-0 .*twice"):
        judge(evidence, twice, identities=world.identities, auditor=AUDITOR, now=NOW)
    inner = world.disclosed("site-0", evidence.roster.id).opened(AUDITOR)
    resealed = SealedDisclosure.of(replace(inner, roster=other.roster.id))  # its signature covers another draw
    with pytest.raises(InvalidInput, match="signed"):
        judge(other, [resealed], identities=world.identities, auditor=AUDITOR, now=NOW)
    world.close()


@pytest.mark.parametrize("what", ["changed", "of another site", "of another query"])
def test_the_server_cannot_attribute_another_masked_code_to_a_site(world: Study, what: str) -> None:
    world.run()
    evidence = world.evidence()
    first, second, *rest = evidence.sites
    match what:
        case "changed":
            word = first.words[0]
            changed = replace(word, words=bytes([word.words[0] ^ 1]) + word.words[1:])
            sites = (replace(first, words=(changed, *first.words[1:])), second, *rest)
        case "of another site":
            sites = (replace(first, words=second.words), second, *rest)
        case _:
            one, two = first.words
            swapped = (replace(one, query=two.query), replace(two, query=one.query))
            sites = (replace(first, words=swapped), second, *rest)
    with pytest.raises(InvalidInput, match=r"masked code.* site-0"):
        judge(replace(evidence, sites=sites), [], identities=world.identities, auditor=AUDITOR, now=NOW)


def test_a_roster_of_identities_that_nobody_compared_is_not_judged(world: Study) -> None:
    """A server that invents a site or exchanges a site's key cannot make the auditor judge it."""
    world.run()
    stranger = public_hex(Ed25519PrivateKey.generate())
    with pytest.raises(InvalidInput, match=r"identity key: got \['site-2'\]"):
        judge(world.evidence(), [], identities=world.identities | {"site-2": stranger}, auditor=AUDITOR, now=NOW)


def test_a_hospital_whose_key_another_hospital_knows_differently_is_a_doubt(world: Study) -> None:
    world.run()
    world.site_ledgers["site-0"].confirm_peer(world.study.id, Peer("site-3", "7" * 64))
    _, (doubt,) = world.judged_with_doubts()
    assert re.match("site-0 .*key of site-3", doubt)


def test_a_masked_code_without_its_sites_signature_is_not_added_and_the_site_is_named(world: Study) -> None:
    def unsigned(node: int, body: bytes, reply: bytes) -> bytes:
        message = decode(reply)
        if node != 101 or not isinstance(message, Several):
            return reply
        parts = [
            replace(part, signatures=(bytes(64),) * len(part.codes)) if isinstance(part, CodesReply) else part
            for part in message.parts
        ]
        return encode(Several(tuple(parts)))

    world.transport.intercept = unsigned
    world.run()
    assert {(event["site"], event["reason"]) for event in world.events("code-refused")} == {(CULPRIT, "unsigned")}
    assert [event["sites"] for event in world.events("draw-lost")] == [[CULPRIT]]
    assert {entry.site for answer in world.core().answers() for entry in answer.roster}.isdisjoint({CULPRIT})


@pytest.mark.parametrize("what", ["evidence", "disclosure", "judgement"])
def test_files_of_a_dispute_that_were_tampered_with_get_an_error_and_never_a_traceback(world: Study, what: str) -> None:
    """Bytes are changed, cut, doubled or nested. A file that can still be read is judged or refused."""
    world.run()
    evidence, honest = world.evidence(), None
    honest = world.disclosed("site-0", evidence.roster.id)
    signed = world.judged().signed(Ed25519PrivateKey.generate())
    whole = {"evidence": evidence.render(), "disclosure": honest.render(), "judgement": signed.render()}[what]
    rng = np.random.default_rng(11)
    for number in range(150):
        data = bytearray(whole)
        at = int(rng.integers(len(data)))
        match number % 5:
            case 0:
                data[at] = int(rng.integers(32, 127))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + 40]
            case 3:
                data[at:at] = b"[" * 3_000
            case _:
                data[at : at + 4] = rng.choice([b"null", b"1e99", b'"\\u0', b"-1,,"])
        try:
            if what == "evidence":
                found = DrawEvidence.parse(bytes(data))
                judge(found, [honest], identities=world.identities, auditor=AUDITOR, now=NOW)
            elif what == "disclosure":
                sealed = SealedDisclosure.parse(bytes(data))
                judge(evidence, [sealed], identities=world.identities, auditor=AUDITOR, now=NOW)
            else:
                Judgement.parse(bytes(data))
        except (InvalidInput, Refused):
            continue


# --- the row in a site's ledger


def test_a_disclosure_is_on_record_with_its_auditor_its_draw_and_what_it_would_cost(world: Study) -> None:
    world.run()
    evidence, ledger = world.evidence(), world.site_ledgers["site-0"]
    before = ledger.spent()
    shown = ledger.disclosure_cost(evidence.roster.id[:12])
    world.disclosed("site-0", evidence.roster.id)
    (record,) = ledger.books.sealed.disclosed
    assert (record.masks, record.auditor, record.queries) == (evidence.roster.id, public_hex(AUDITOR), 2)
    mechanism, privacy = evidence.queries[0].mechanism, world.study.privacy
    # At noise σ; a disclosure leaves s = σ/√(K − t).
    one = mechanism.mu_squared(Protection(privacy.unit, privacy.relation))
    assert float(record.mu_squared) == pytest.approx(float(2 * (SITES - 1) * one), rel=1e-9)
    assert record.mu_squared == shown.mu_squared
    assert ledger.spent() == before  # a disclosure releases nothing while the auditor keeps it secret
    world.disclosed("site-0", evidence.roster.id)
    assert len(ledger.books.sealed.disclosed) == 1


def test_nothing_is_masked_any_more_with_a_key_that_was_disclosed(world: Study) -> None:
    world.run()
    evidence, ledger = world.evidence(), world.site_ledgers["site-0"]
    world.disclosed("site-0", evidence.roster.id)
    with pytest.raises(Refused, match="disclosed"):
        ledger.mask_key(evidence.roster.draw_id)


def test_a_draw_is_not_disclosed_after_a_patient_in_it_was_withdrawn(world: Study) -> None:
    world.run()
    ledger = world.site_ledgers["site-0"]
    ledger._books.teachers.last_withdrawal = ledger.row_count + 1
    with pytest.raises(Refused) as refused:
        ledger.disclose(world.evidence().roster.id, auditor=public_hex(AUDITOR))
    assert refused.value.reason == "withdrawn"
    assert ledger.books.sealed.disclosed == []


@pytest.mark.parametrize("named", ["", "abc", "f" * 64, "'; drop", "%" * 16])
def test_a_draw_that_this_site_sent_nothing_in_is_not_disclosed(world: Study, named: str) -> None:
    world.run()
    with pytest.raises(InvalidInput, match="draw"):
        world.site_ledgers["site-0"].disclosure_cost(named)


def test_only_the_chosen_auditor_opens_a_disclosure(world: Study) -> None:
    world.run()
    sealed = world.disclosed("site-0", world.evidence().roster.id)
    with pytest.raises(InvalidInput, match="auditor's key"):
        sealed.opened(X25519PrivateKey.generate())


def test_a_judgement_has_one_word_for_each_site_and_the_auditors_signature(world: Study) -> None:
    world.run()
    signing = Ed25519PrivateKey.generate()
    signed = world.judged().signed(signing)
    found = Judgement.parse(signed.render())
    assert found.is_genuine(signing.public_key())
    assert not replace(found, spoiled=True).is_genuine(signing.public_key())
    assert {tuple(sorted(one.to_json())) for one in found.findings} == {("disclosure", "part", "site", "word")}
