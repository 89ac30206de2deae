"""Tests that a site adds its code only with peers that a person there confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.policy import Caps
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.records import parse_record
from common.ledger.sealed_records import PeerRecord
from common.peers import Peer
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import ledger_study, make_mechanism, make_query, write_raw

A, B, C = "a" * 64, "b" * 64, "c" * 64
CAPS = Caps(epsilon=8.0, delta=1e-3)
STUDY, OTHER = ledger_study(), ledger_study("another")


def opened(folder: Path, *, restored: bool = False) -> SiteLedger:
    ledger = SiteLedger.open(folder / "site-ledger.sqlite", "north-mri", site="north", caps=CAPS, restored=restored)
    for study in (STUDY, OTHER):
        ledger.consent(study)
    return ledger


def test_the_bytes_of_a_row_are_read_for_ever() -> None:
    row = f'{{"key":"{A}","site":"south","study":"{STUDY.id}"}}'
    assert parse_record("site", "peer", row) == PeerRecord(STUDY.id, "south", A)
    with pytest.raises(InvalidInput):
        parse_record("server", "peer", row)


def test_a_confirmation_survives_a_restart_and_verifies(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(STUDY.id, Peer("south", A))
        rows = ledger.row_count
        ledger.confirm_peer(STUDY.id, Peer("south", A))
        assert ledger.row_count == rows
    with opened(tmp_path) as ledger:
        assert ledger.peers(STUDY.id) == {"south": A}
    assert verify(tmp_path / "site-ledger.sqlite").ok


def test_a_peer_of_another_study_is_none_of_this_one(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(OTHER.id, Peer("south", A))
        assert ledger.peers(STUDY.id) == {}
        ledger.confirm_peer(STUDY.id, Peer("west", A))
        with pytest.raises(InvalidInput, match="consented"):
            ledger.confirm_peer(C, Peer("south", A))


def test_a_renewed_key_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        for key in (A, B):
            ledger.confirm_peer(STUDY.id, Peer("south", key))
        assert ledger.peers(STUDY.id) == {"south": B}
        ledger.confirm_peer(STUDY.id, Peer("west", A))


def test_a_key_names_one_site_only(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(STUDY.id, Peer("south", A))
        with pytest.raises(InvalidInput, match="south"):
            ledger.confirm_peer(STUDY.id, Peer("west", A))
        assert ledger.peers(STUDY.id) == {"south": A}


def test_a_site_is_no_peer_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        for peer in (Peer("north", A), Peer("south", ledger.public_key)):
            with pytest.raises(InvalidInput, match=f"peer: got '{peer.site}'"):
                ledger.confirm_peer(STUDY.id, peer)


def test_a_confirmation_can_be_taken_back_and_given_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        with pytest.raises(InvalidInput, match="confirmed"):
            ledger.distrust_peer(STUDY.id, "south")
        ledger.confirm_peer(STUDY.id, Peer("south", A))
        ledger.distrust_peer(STUDY.id, "south")
        assert ledger.peers(STUDY.id) == {}
        ledger.confirm_peer(STUDY.id, Peer("south", A))
    with opened(tmp_path) as ledger:
        assert ledger.peers(STUDY.id) == {"south": A}


def test_another_process_sees_at_once_whom_this_one_confirmed(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as worker:
        with SiteLedger.read(tmp_path / "site-ledger.sqlite") as reader:
            writer.confirm_peer(STUDY.id, Peer("south", A))
            assert worker.peers(STUDY.id) == reader.peers(STUDY.id) == {"south": A}
            worker.distrust_peer(STUDY.id, "south")
            assert writer.peers(STUDY.id) == reader.peers(STUDY.id) == {}
        writer.confirm_peer(STUDY.id, Peer("south", A))
        with pytest.raises(InvalidInput, match="south"):  # the other process's row refuses it
            worker.confirm_peer(STUDY.id, Peer("west", A))


def test_a_restored_copy_asks_for_every_peer_again(tmp_path: Path) -> None:
    """The lost rows may have withdrawn a key."""
    path = tmp_path / "site-ledger.sqlite"
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(STUDY.id, Peer("south", A))
    older = path.read_bytes()
    with opened(tmp_path) as ledger:
        ledger.distrust_peer(STUDY.id, "south")
        ledger.reserve(STUDY.id, [make_query(1, make_mechanism())])
    path.write_bytes(older)
    with opened(tmp_path, restored=True) as ledger:
        ledger.charge_lost(None)
        assert ledger.peers(STUDY.id) == {}
        ledger.confirm_peer(STUDY.id, Peer("south", A))
    assert verify(path).ok


@pytest.mark.parametrize("renewed", [False, True])
def test_a_copy_of_before_a_key_was_taken_back_is_not_opened(renewed: bool, tmp_path: Path) -> None:
    path = tmp_path / "site-ledger.sqlite"
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(STUDY.id, Peer("south", A))
    older = path.read_bytes()
    with opened(tmp_path) as ledger:
        if renewed:
            ledger.confirm_peer(STUDY.id, Peer("south", B))
        else:
            ledger.distrust_peer(STUDY.id, "south")
    path.write_bytes(older)
    with pytest.raises(LedgerCorrupt, match="older copy"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        {"study": C, "site": "south", "key": A},
        {"study": STUDY.id, "site": "north", "key": A},
        {"study": STUDY.id, "site": "west", "key": B},
        {"study": STUDY.id, "site": "west", "key": ""},
        {"study": STUDY.id, "site": "west", "key": "A" * 64},
    ],
)
def test_a_row_that_breaks_a_rule_cannot_be_written_or_read(body: dict[str, object], tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.confirm_peer(STUDY.id, Peer("south", B))
        with pytest.raises(LedgerCorrupt), ledger._writing():
            write_raw(ledger, "peer", body)
        assert ledger.peers(STUDY.id) == {"south": B}
