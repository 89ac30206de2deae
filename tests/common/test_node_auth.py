"""Tests which requests are admitted. Flower's own code signs the headers, as a SuperNode does."""

from __future__ import annotations

from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from common.errors import InvalidInput, Refused
from common.node_auth import AdmittedNode, RequestAdmission, read_admitted, signed_headers, write_admitted
from common.pki import create_node_keys, load_node_key, read_node_public_key

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
P384_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973


@pytest.fixture
def keys(tmp_path: Path):
    return create_node_keys(tmp_path / "north")


@pytest.fixture
def gatekeeper(tmp_path: Path, keys) -> RequestAdmission:
    write_admitted(tmp_path / "nodes.json", (AdmittedNode(site="north", key=read_node_public_key(keys.public)),))
    return RequestAdmission(tmp_path / "nodes.json")


def flower_headers(private: Path, now: datetime = NOW) -> dict[str, str]:
    key = load_node_key(private)
    stamp = now.isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(sign_message(key, stamp.encode("ascii"))).decode(),
    }


def admit(gatekeeper: RequestAdmission, headers, *, method="POST", path="/v1/fleet/get-run", now=NOW) -> str:
    return gatekeeper.admit(headers, method=method, path=path, now=now)


def test_a_supernode_s_own_signature_names_its_site(gatekeeper, keys):
    assert admit(gatekeeper, flower_headers(keys.private)) == "north"


def test_a_signed_download_names_its_site_and_is_good_for_that_path_only(gatekeeper, keys):
    headers = signed_headers(load_node_key(keys.private), method="GET", path="/public/abc", now=NOW)
    for method, path in (("GET", "/public/abd"), ("POST", "/public/abc")):
        with pytest.raises(Refused, match="signature"):
            admit(gatekeeper, headers, method=method, path=path)
    assert admit(gatekeeper, headers, method="GET", path="/public/abc") == "north"


def test_a_request_is_good_once_also_with_its_signature_turned_over(gatekeeper, keys):
    headers = flower_headers(keys.private)
    admit(gatekeeper, headers)
    with pytest.raises(Refused, match="replayed"):
        admit(gatekeeper, headers, now=NOW + timedelta(seconds=200))
    r, s = decode_dss_signature(b64decode(headers["flwr-signature"]))
    turned = headers | {"flwr-signature": b64encode(encode_dss_signature(r, P384_ORDER - s)).decode()}
    assert turned != headers
    with pytest.raises(Refused, match="replayed"):  # a second valid signature of the same request
        admit(gatekeeper, turned)


def test_a_request_that_was_used_before_a_restart_is_not_admitted_again_after_it(gatekeeper, keys, tmp_path):
    headers = flower_headers(keys.private)
    admit(gatekeeper, headers)
    restarted = RequestAdmission(tmp_path / "nodes.json", started=NOW + timedelta(seconds=5))
    with pytest.raises(Refused, match="starting"):
        admit(restarted, headers, now=NOW + timedelta(seconds=10))
    later = NOW + timedelta(seconds=6)
    assert admit(restarted, flower_headers(keys.private, later), now=later) == "north"


def test_a_clock_that_was_ahead_at_the_start_keeps_no_site_out_once_it_is_set_right(gatekeeper, keys, tmp_path):
    started = RequestAdmission(tmp_path / "nodes.json", started=NOW + timedelta(hours=1))
    assert admit(started, flower_headers(keys.private)) == "north"


@pytest.mark.parametrize(("seconds", "passes"), [(-61, False), (-59, True), (299, True), (301, False)])
def test_a_request_with_a_wrong_clock_is_refused_for_that_reason(gatekeeper, keys, seconds, passes):
    headers = flower_headers(keys.private)
    if passes:
        assert admit(gatekeeper, headers, now=NOW + timedelta(seconds=seconds)) == "north"
    else:
        with pytest.raises(Refused, match="clock"):
            admit(gatekeeper, headers, now=NOW + timedelta(seconds=seconds))


def test_a_key_nobody_admitted_and_a_borrowed_one_are_refused(gatekeeper, keys, tmp_path):
    stranger = create_node_keys(tmp_path / "stranger")
    with pytest.raises(Refused, match="unknown-key"):
        admit(gatekeeper, flower_headers(stranger.private))
    borrowed = flower_headers(stranger.private) | {
        "flwr-public-key": flower_headers(keys.private)["flwr-public-key"],
    }
    with pytest.raises(Refused, match="signature"):
        admit(gatekeeper, borrowed)


@pytest.mark.parametrize("missing", ["flwr-timestamp", "flwr-signature", "flwr-public-key"])
def test_a_part_that_is_missing_or_nonsense_is_no_signature(gatekeeper, keys, missing):
    headers = flower_headers(keys.private)
    with pytest.raises(Refused, match="unsigned"):
        admit(gatekeeper, {name: value for name, value in headers.items() if name != missing})
    with pytest.raises(Refused, match=r"unsigned|signature"):
        admit(gatekeeper, headers | {missing: "%%%"})


def test_a_request_without_headers_is_refused(gatekeeper):
    with pytest.raises(Refused, match="unsigned"):
        admit(gatekeeper, {})


def test_a_revocation_and_an_admission_hold_at_once(gatekeeper, keys, tmp_path):
    admit(gatekeeper, flower_headers(keys.private))
    admitted = read_admitted(tmp_path / "nodes.json")
    write_admitted(tmp_path / "nodes.json", ())
    with pytest.raises(Refused, match="unknown-key"):
        admit(gatekeeper, flower_headers(keys.private))
    write_admitted(tmp_path / "nodes.json", admitted)
    admit(gatekeeper, flower_headers(keys.private))
    (tmp_path / "nodes.json").unlink()
    with pytest.raises(Refused, match="unknown-key"):
        admit(gatekeeper, flower_headers(keys.private))


def test_no_key_stands_for_two_sites(tmp_path, keys):
    key = read_node_public_key(keys.public)
    with pytest.raises(InvalidInput, match="have the same"):
        write_admitted(tmp_path / "n.json", (AdmittedNode(site="a", key=key), AdmittedNode(site="b", key=key)))
