"""A federation in one process: every site's worker over its own ledger, and a wire that hands messages over.

Messages are encoded, signed, sealed, checked, charged and received as between daemons; only what carries them is left
out. Simulation, audit, benchmarks and tests are built of this. One person holds every party's keys and data here, so
it promises nobody anything.
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
from common.ledger.charges import PoolDeclaration
from common.peers import Peer
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.protocols.site_protocol import Fetch
from server.aggregation.exchange import Reply
from server.study.create_study import ServerKeys
from server.study.workspace import Site

Intercept = Callable[[int, bytes, bytes], bytes | None]
"""(node, what it was asked, its reply) → the reply that it signs instead; None where none comes."""


@dataclass
class Wire:
    """Messages go to workers by node id. Nodes that are ``offline`` are not there; ``intercept`` may exchange a reply
    before its site signs it, or drop it; ``replies`` are those that came, unsigned."""

    workers: Mapping[int, Worker]
    offline: set[int] = field(default_factory=set)
    intercept: Intercept = lambda _node, _body, reply: reply
    replies: list[tuple[int, bytes]] = field(default_factory=list)

    def online(self) -> frozenset[int]:
        return frozenset(self.workers) - self.offline

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Every message is handled, also where the core stops listening before the last reply."""
        return iter([self._handled(node, body) for node, body in bodies.items()])

    def _handled(self, node: int, message: bytes) -> Reply:
        worker = self.workers[node]
        try:
            body = worker.asked(message)
            reply = self.intercept(node, body, worker.handle(body))
        except ConsiliumError:
            reply = None
        if reply is None:
            return Reply(node, None, problem="deadline")
        self.replies.append((node, reply))
        return Reply(node, worker.replied(reply, request=message))


def pool_of(site: Site, study: Study) -> PoolDeclaration:
    """A site's patient pool with the study's own budget for life."""
    privacy = study.privacy
    return PoolDeclaration(site.pool, site.name, privacy.budget, privacy.accountant, privacy.protection)


def site_config(
    site: Site, study: Study, keys: ServerKeys, *, caps: Caps | None = None, queries_per_day: int = 1000
) -> SiteConfig:
    """A site's settings as its kit gives them; by default its caps are the study's own budget."""
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
    """Every site's ledger and worker, opened below ``root`` as a site opens them, with consent given to ``study``.

    ``config`` and ``voters`` give each site's settings and teachers; ``consented``: consent is on record already.
    Afterwards ``sites`` have the keys by which their ledgers sign.
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
        """Open a site's ledger and worker, in place of those that were open: its process was started again."""
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
        """Confirm every peer's key at every site, as people do before a sealed sum; nothing for an open study."""
        for site in self.sites if self.study.privacy.sealed else ():
            for peer in self.sites:
                if peer.name != site.name:
                    self.ledgers[site.name].confirm_peer(self.study.id, Peer(peer.name, peer.answer_key))

    def close(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()
