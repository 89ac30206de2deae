"""Runs a federation in one process: every site's worker with its own ledger, and a transport to the server.

Simulation, audit, benchmarks and tests use it. Messages are encoded, signed, encrypted, checked, charged and received
as between daemons; only the network is left out. One person holds every party's keys and data, so such a federation
protects nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from client.declined import DECLINED
from client.ledger.site_ledger import SiteLedger
from client.policy import LEDGER_FILE, Caps, Consent, ServerFacts, SiteConfig
from client.worker import Voters, Worker
from common.config import Study
from common.errors import ConsiliumError
from common.peers import Peer
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.protocols.site_protocol import Fetch
from server.aggregation.exchange import Reply
from server.study.create_study import ServerKeys
from server.study.workspace import Site

Intercept = Callable[[int, bytes, bytes], bytes | None]
"""A function of node id, request and reply. It returns the reply that the node signs instead, or None to drop the
reply."""


@dataclass
class Wire:
    """Transport that delivers messages directly to workers in the same process, by node id.

    Attributes:
        workers: The workers by node id.
        offline: Nodes that are not reachable.
        intercept: May replace a reply before its site signs it, or drop it.
        replies: All replies so far without their signatures, each with its node id.
    """

    workers: Mapping[int, Worker]
    offline: set[int] = field(default_factory=set)
    intercept: Intercept = lambda _node, _body, reply: reply
    replies: list[tuple[int, bytes]] = field(default_factory=list)

    def online(self) -> frozenset[int]:
        """Return the nodes that are reachable.

        Returns:
            Their ids.
        """
        return frozenset(self.workers) - self.offline

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Deliver all messages and return the replies.

        Every message is handled, even if the caller stops reading replies early.

        Args:
            bodies: Message by node id.
            timeout_s: Not used.

        Returns:
            The replies.
        """
        return iter([self._handled(node, body) for node, body in bodies.items()])

    def _handled(self, node: int, message: bytes) -> Reply:
        worker = self.workers[node]
        try:
            body = worker.open_request(message)
            reply = self.intercept(node, body, worker.handle(body))
        except ConsiliumError:
            reply = None
        if reply is None:
            return Reply(node, None, problem="deadline")
        self.replies.append((node, reply))
        return Reply(node, worker.sign_reply(reply, request=message))


def site_config(
    site: Site, study: Study, keys: ServerKeys, *, caps: Caps | None = None, queries_per_day: int = 1000
) -> SiteConfig:
    """Return a site's settings as its kit gives them.

    Args:
        site: The site.
        study: The study.
        keys: The server's public keys.
        caps: The site's caps; by default the study's own budget.
        queries_per_day: Daily limit in the default caps.

    Returns:
        The settings.
    """
    of = study.privacy
    usual = Caps(of.epsilon, of.delta, of.accountant, of.unit, of.relation, queries_per_day)
    return SiteConfig(
        site=site.name,
        pool=site.pool,
        data="data",
        server=ServerFacts(
            sealing_key=keys.sealing_key,
            signing_key=keys.signing_key,
            objects_url="https://localhost",
            superlink="localhost:1",
            root_certificates="ca.crt",
        ),
        caps=caps or usual,
    )


class Sites:
    """Every site's ledger and worker in one process, with consent given to the study.

    Args:
        root: Folder with one folder for each site.
        sites: The sites.
        study: The study.
        config: Returns a site's settings.
        voters: Returns a site's teachers.
        fetch: Returns a public object by its hash.
        sampler: The noise sampler of a sealed sum.
        consented: True if consent is recorded already.
    """

    def __init__(
        self,
        root: Path,
        sites: Sequence[Site],
        study: Study,
        *,
        config: Callable[[Site], SiteConfig],
        voters: Callable[[Site], Voters],
        fetch: Fetch,
        sampler: Sampler = rounded_gaussian,
        consented: bool = False,
    ) -> None:
        self.root, self.study, self._consent = root, study, Consent.of(study)
        self._config, self._voters, self._fetch, self._sampler = config, voters, fetch, sampler
        self._consented = consented
        self.ledgers: dict[str, SiteLedger] = {}
        self.workers: dict[int, Worker] = {}
        for site in sites:
            self.open(site)
        self.sites = tuple(replace(site, answer_key=self.ledgers[site.name].public_key) for site in sites)

    def open(self, site: Site) -> Worker:
        """Open a site's ledger and worker, and replace those that are open, as if the site's process had restarted.

        Args:
            site: The site.

        Returns:
            The worker.
        """
        config, path = self._config(site), self.root / site.name / LEDGER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = SiteLedger.open(path, site.pool, caps=config.caps, site=site.name)
        if not self._consented:
            ledger.consent(self.study)
        self.ledgers[site.name] = ledger
        self.workers[site.node_id] = Worker(
            config=config,
            consent=self._consent,
            ledger=ledger,
            voters=self._voters(site),
            fetch=self._fetch,
            sampler=self._sampler,
            declined=path.with_name(DECLINED),
        )
        return self.workers[site.node_id]

    def introduce(self) -> None:
        """Confirm every peer's key at every site, as people do before a sealed sum. In an open study, do nothing."""
        for site in self.sites if self.study.privacy.sealed else ():
            for peer in self.sites:
                if peer.name != site.name:
                    self.ledgers[site.name].confirm_peer(self.study.id, Peer(peer.name, peer.answer_key))

    def close(self) -> None:
        """Close all ledgers."""
        for ledger in self.ledgers.values():
            ledger.close()
