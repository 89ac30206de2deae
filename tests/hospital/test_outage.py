"""Tests a whole study whose hospitals are behind real proxies, with an outage of the proxies in its middle.

`CONSILIUM_OUTAGE_S=1800 make test-hospital` makes the outage half an hour long.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.operations.readiness import check_site
from common.config import CollectionConfig
from consilium.demo import federation
from consilium.demo.federation import admit
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.operations.supervisor import RunFailed, supervise
from tests.e2e.road import PRIVACY, build
from tests.hospital.parties import consilium, up, wait
from tests.hospital.squid import readable_by_squid, squid
from tests.waiting import events_of, until

pytestmark = pytest.mark.hospital
OUTAGE_S = float(os.environ.get("CONSILIUM_OUTAGE_S", "60"))
HOST, ADDRESS = "127.0.0.1", "10.77.43.1"
SITES = ("direct", "proxied", "inspected")
COLLECTION = CollectionConfig(batch_size=1, offer_deadline_s=30.0, patience_s=OUTAGE_S + 600.0)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield an address of this machine that is reached through a site's proxy; loopback's own addresses never are."""
    words = ("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    subprocess.run(words, check=True, capture_output=True)
    monkeypatch.setattr(federation, "HOST", ADDRESS)
    try:
        yield ADDRESS
    finally:
        subprocess.run([word.replace("add", "del", 1) if word == "add" else word for word in words], check=True)


def test_a_study_goes_on_after_an_outage_of_the_hospitals_proxies(tmp_path: Path, address: str) -> None:
    privacy = replace(PRIVACY, quorum=3)
    workspace, sites = build(tmp_path, SITES, collection=COLLECTION, privacy=privacy)
    server, study = workspace.endpoint().port, workspace.study()

    def released() -> list[float]:
        return [float(len(events_of(workspace.events_file, "released")))]

    def wait_for(count: int, *, timeout_s: float = 300.0) -> None:
        until(lambda: released()[0] >= count, lambda: f"{released()} of {count} answers", timeout_s=timeout_s)

    with contextlib.ExitStack() as parties:
        of_squid = Path(parties.enter_context(tempfile.TemporaryDirectory(prefix="squid-")))
        readable_by_squid(of_squid)
        ca = of_squid / "study-ca.crt"
        ca.write_bytes((sites["direct"] / "node" / "ca.crt").read_bytes())
        ca.chmod(0o644)
        daemons = parties.enter_context(
            up(tmp_path / "server.log", "server", "up", str(workspace.root), "--bind", address)
        )
        wait(tmp_path / "server.log", "server is up", daemons)
        admit(workspace, sites)
        proxies = parties.enter_context(contextlib.ExitStack())
        passes = proxies.enter_context(squid(of_squid / "squid-1", server=server, study_ca=ca))
        inspects = proxies.enter_context(squid(of_squid / "squid-2", server=server, study_ca=ca, inspects=True))
        with (sites["inspected"] / "node" / "ca.crt").open("ab") as stream:
            stream.write((of_squid / "squid-2" / "hospital.crt").read_bytes())
        for name, port in zip(SITES, (0, passes, inspects), strict=True):
            way = {"HTTPS_PROXY": f"http://{HOST}:{port}"} if port else {}
            consilium("site", "consent", "--site-dir", str(sites[name]), "--by", "A. Noether", "--yes")
            log = tmp_path / f"{name}.log"
            site = parties.enter_context(up(log, "site", "up", "--site-dir", str(sites[name]), env=way))
            wait(log, "connected", site)
        stopped: list[RunFailed] = []

        def study_run() -> None:
            try:
                supervise(workspace)
            except RunFailed as error:
                stopped.append(error)

        run = threading.Thread(target=study_run, daemon=True)
        run.start()
        wait_for(1)
        proxies.close()
        down, before = time.monotonic(), released()[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("https_proxy", f"http://{HOST}:{passes}")
            network = next(one for one in check_site(sites["proxied"]) if one.check == "network")
        assert f"{HOST}:{passes}" in network.text
        assert "proxy" in network.text + network.remedy
        time.sleep(OUTAGE_S)
        assert before < privacy.planned_queries
        assert released()[0] <= before + 1, "without its quorum the study waits"
        outage = time.monotonic() - down
        parties.enter_context(squid(of_squid / "squid-3", server=server, study_ca=ca, port=passes))
        parties.enter_context(squid(of_squid / "squid-4", server=server, study_ca=ca, port=inspects))
        back = time.monotonic()
        run.join(timeout=600)
        assert not run.is_alive()
        for error in stopped:  # an offer expired without a quorum; the operator resumes without loss
            assert "quorum" in str(error)
            supervise(workspace)
        said = f"{len(stopped)} runs ended without a quorum"
        print(f"outage of {outage:.0f} s, {said}; all answers {time.monotonic() - back:.0f} s after it")
    with Ledger.open(workspace.ledger_file) as ledger:
        assert len(ledger.answers(study.id)) == privacy.planned_queries
    assert verify(workspace.ledger_file).ok
