"""One life of a study under audit: production's pipeline, aggregator, workers and both kinds of ledger, in a folder.

Only the wire and the teachers are not production's: messages go straight to the workers' ``handle``, and a voter says
what the world it lives in tells it to. A life is read back from its SQLite files by plain SQL, apart from the objects
that wrote them. Refuses nothing that production would not: an error that ends a life is part of what came out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from client.ledger.site_ledger import SiteLedger
from client.policy import Caps, Consent, ServerFacts, SiteConfig
from client.worker import Worker
from common.canonical import canonical_bytes, digest, sha256_bytes
from common.config import Study
from common.events import EventLog, read_events
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.ledger.keys import create_signing_key, load_signing_key, public_hex
from common.masking import MaskedRoster, MaskKey, Member
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, Several, decode, encode
from common.peers import Peer
from common.privacy.mechanism import AccountantName, QuerySpec
from common.protocols.joint.frame import Frame
from common.sealing import SealContext, seal
from common.sealing_rotation import load_sealing_keys
from consilium.audit.subject import Limit, Subject
from consilium.audit.world import SiteVoters, Wire, World
from server.aggregation.pipeline import collect
from server.aggregation.sealed_sums import aggregator_of
from server.ledger.server_ledger import Candidate, Ledger
from server.protocols.base import protocol_of
from server.protocols.joint.rounds import keep_frame
from server.study.create_study import create_study, server_keys
from server.study.workspace import CodecRecord, Site, Workspace


class Service:
    """A study's server and ``sites`` of its sites in ``root``, set up as production sets them up.

    ``server_limits`` and ``site_limits`` are the pools' budgets by either's account; the subject's by default.
    """

    def __init__(
        self,
        root: Path,
        subject: Subject,
        world: World,
        *,
        sites: int | None = None,
        server_limits: Sequence[Limit] | None = None,
        site_limits: Sequence[Limit] | None = None,
        batch_size: int | None = None,
    ) -> None:
        study = subject.study
        if batch_size is not None:
            study = replace(study, collection=replace(study.collection, batch_size=batch_size))
        self.root, self.subject, self.world, self.study = root, subject, world, study
        self.server_limits, self.site_limits = server_limits or subject.limits, site_limits or subject.limits
        self.workspace = Workspace(root / "server")
        create_study(self.workspace, study)
        names = [f"site-{i}" for i in range(len(subject.limits) if sites is None else sites)]
        self.sites = tuple(
            Site(
                name,
                pool=f"{name}-pool",
                node_id=100 + i,
                answer_key=public_hex(create_signing_key(self.key_file(name))),
            )
            for i, name in enumerate(names)
        )
        self.workspace.save_sites(self.sites)
        self.workspace.save_volumes(subject.volumes)
        codec = self.workspace.objects.put(subject.codec.to_bytes())
        self.workspace.save_codec(CodecRecord(sha256=codec, dimension=subject.codec.dimension))
        if subject.frame is not None:
            keep_frame(self.workspace.public(), subject.frame, after=())
        with self._ledger() as ledger:
            for site, limit in zip(self.sites, self.server_limits, strict=False):
                ledger.declare_pool(self._declaration(site, limit))
        self.events_file = root / "events.jsonl"

    # --- living

    def live(self) -> str:
        """Run the study to its end, as the server's pipeline does; the error's name that ended it, or nothing."""
        with closing(_Open(self)) as sites:
            events = EventLog(self.events_file, study=self.study.id)
            try:
                collect(self.workspace, Wire(sites.workers), events=events)
            except Exception as error:  # noqa: BLE001  whatever a fault does is the audit's to report
                return type(error).__name__
        return ""

    def live_with_a_liar(self, *, far: bool) -> tuple[int, str]:
        """Ask the first query while the last site seals a code a thousand times m·R long, or one grid step outside.

        How many codes were refused, and the name of the error that ended it, or nothing.
        """

        def lie(node: int, body: bytes, reply: bytes) -> bytes:
            return self._lie(node, body, reply, far=far)

        with closing(_Open(self)) as sites, self._ledger() as ledger:
            core = aggregator_of(self.study)(
                study=self.study,
                queries=self.planned()[:1],
                sites=self.workspace.sites,
                ledger=ledger,
                sealing_key=load_sealing_keys(self.workspace.sealing_key_file),
                events=EventLog(self.events_file, study=self.study.id),
                retry_pause_s=0.0,
            )
            try:
                core.run(Wire(sites.workers, intercept=lie))
            except Exception as error:  # noqa: BLE001
                return self._refused_codes(), type(error).__name__
        return self._refused_codes(), ""

    def _lie(self, node: int, body: bytes, reply: bytes, *, far: bool) -> bytes:
        asked = decode(body)
        parts = asked.parts if isinstance(asked, Several) else (asked,)
        request = next((part for part in parts if isinstance(part, CodesRequest)), None)
        liar = self.sites[-1]
        if node != liar.node_id or request is None:
            return reply
        bound = self.subject.radius * self.study.privacy.voters_per_site
        code = np.zeros(self.subject.dimension, dtype=np.int64)
        code[0] = bound * 1000 if far else bound
        code[-1] += 1
        key = self.config(0).server.sealing_public_key
        sealed = []
        for query in request.queries:
            context = SealContext(study=self.study.id, query=query, site=liar.name, attempt=request.attempt)
            sealed.append((query, seal(code, public_key=key, context=context)))
        return encode(Several((CodesReply(batch=request.batch, attempt=request.attempt, codes=tuple(sealed)),)))

    def _refused_codes(self) -> int:
        """Codes refused, or sums: of a sealed study's words one cannot be told from another."""
        kinds = [(event["event"], event.get("reason")) for event in read_events(self.events_file)]
        spoiled = sum(kind == ("draw-lost", "spoiled") for kind in kinds)
        return spoiled if self.study.privacy.sealed else sum(event == "code-refused" for event, _ in kinds)

    # --- asking for more than there is

    def planned(self) -> tuple[QuerySpec, ...]:
        """What the study asks before anything is answered."""
        return next(protocol_of(self.study).questions(self.workspace.public(), lambda _query: None))

    def further(self, number: int, *, share: float = 1.0) -> QuerySpec:
        """A query nobody planned, the ``number``-th of them; at ``share`` of a release's cost."""
        first = self.planned()[0]
        mechanism = first.mechanism
        if share != 1.0:
            mechanism = replace(
                mechanism, noise_std=mechanism.noise_std * Fraction(share**-0.5).limit_denominator(10**6)
            )
        volumes = self.subject.volumes[-len(first.volumes) :]
        return replace(first, mechanism=mechanism, volumes=volumes, round=self.subject.queries + number)

    def ask_server(self, query: QuerySpec, study: Study) -> bool:
        """Whether the server's ledger would release ``query`` for ``study`` with every site on the roster; the ledger
        is opened anew for it."""
        with self._ledger() as ledger:
            ledger.register_study(study)
            roster = tuple(RosterEntry(site=site.name, pool=site.pool) for site in self.sites)
            nothing = np.zeros(query.mechanism.dimension, dtype=np.int64)
            if study.privacy.sealed:
                masks = made_up_roster(study.id, ledger.ledger_id, query.id, self.sites)
                drawn = ledger.charge_draw(study_id=study.id, roster=roster, masks=masks, queries=[query])
                if drawn.draw is not None:
                    ledger.store_answer(query.id, masks.draw, nothing)
                return not drawn.refused
            result = ledger.release_batch(
                study_id=study.id,
                batch_id=f"further-{query.id[:8]}",
                roster=roster,
                candidates=[Candidate(query, lambda: nothing)],
            )
        return not result.refused

    def ask_sites(self, query: QuerySpec, study: Study) -> dict[str, str]:
        """What every site's worker answers to an offer of ``query``; ledgers and workers are opened anew for it."""
        answers = {}
        batch = digest("batch", {"study": study.id, "queries": [query.id]})
        with closing(_Open(self, study)) as sites, self._ledger() as ledger:
            plain = Offer(study=study.id, ledger=ledger.ledger_id, batch=batch, queries=(query,))
            peers = tuple(Peer(site.name, site.answer_key) for site in self.sites)
            offer = encode(replace(plain, draw=1, peers=peers) if study.privacy.sealed else plain)
            for site in self.sites:
                reply = decode(sites.workers[site.node_id].handle(offer))
                answers[site.name] = reply.reason if isinstance(reply, OfferReply) else "malformed"
        return answers

    def ask_again(self) -> int:
        """Ask for every stored answer once more with another in its place; how many came back changed."""
        changed = 0
        before = {release.query: release for release in read_life(self).releases}
        with self._ledger() as ledger:
            for release in before.values():
                stored = ledger.answer(release.query)
                if stored is None:
                    changed += 1
                    continue
                again = ledger.release_batch(
                    study_id=self.study.id,
                    batch_id=release.batch,
                    roster=stored.roster,
                    candidates=[Candidate(stored.query, lambda: np.zeros(self.subject.dimension, dtype=np.int64))],
                )
                same = again.answers and np.array_equal(again.answers[0].noisy_sum, release.answer)
                changed += not same or not np.array_equal(stored.noisy_sum, release.answer)
        return changed

    # --- helpers

    def _ledger(self) -> Ledger:
        return Ledger.open(self.workspace.ledger_file, signing_key=load_signing_key(self.workspace.signing_key_file))

    def _declaration(self, site: Site, limit: Limit) -> PoolDeclaration:
        return PoolDeclaration(
            pool=site.pool,
            site=site.name,
            budget=limit.budget,
            accountant=AccountantName(limit.accountant),
            protection=self.study.privacy.protection,
        )

    def config(self, index: int) -> SiteConfig:
        site, limit, privacy = self.sites[index], self.site_limits[index], self.study.privacy
        keys = server_keys(self.workspace)
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
            caps=Caps(
                epsilon=limit.epsilon,
                delta=limit.delta,
                accountant=AccountantName(limit.accountant),
                unit=privacy.unit,
                relation=privacy.relation,
                queries_per_day=1_000_000,
            ),
        )

    def site_file(self, index: int) -> Path:
        return self.root / self.sites[index].name / "site-ledger.sqlite"

    def key_file(self, site: str) -> Path:
        """The key of a site's ledger, made before the ledger, as the server is told it before anything is asked."""
        path = self.root / site / "site-ledger.key"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def fetch(self, name: str) -> bytes:
        """A public object; a volume is its name, for nobody looks into it."""
        return name.encode() if name in self.subject.volumes else self.workspace.objects.get(name)


class _Open:
    """Every site's ledger and worker, opened as a site opens them, for ``study`` or the service's own."""

    def __init__(self, service: Service, study: Study | None = None) -> None:
        self.ledgers: list[SiteLedger] = []
        self.workers: dict[int, Worker] = {}
        consent = Consent.of(study or service.study)
        for index, site in enumerate(service.sites):
            config = service.config(index)
            path = service.site_file(index)
            path.parent.mkdir(exist_ok=True)
            ledger = SiteLedger.open(path, site.pool, caps=config.caps, site=site.name)
            self.ledgers.append(ledger)
            ledger.consent(consent.study)
            voters = SiteVoters(service.subject, service.world, index)
            self.workers[site.node_id] = Worker(
                config=config, consent=consent, ledger=ledger, voters=voters, fetch=service.fetch
            )
        for site, ledger in zip(service.sites, self.ledgers, strict=True) if consent.study.privacy.sealed else ():
            for peer in service.sites:
                if peer != site:
                    ledger.confirm_peer(consent.study.id, Peer(peer.name, peer.answer_key))

    def close(self) -> None:
        for ledger in self.ledgers:
            ledger.close()


# --- reading


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """One release as its row says, and the answer stored with it."""

    query: str
    batch: str
    study: str
    centre: str
    noise_std: float
    dimension: int
    radius: int
    voters_per_site: int
    roster: tuple[str, ...]
    answer: Int64[np.ndarray, "l"]
    draw: int | None
    masks: str


@dataclass(frozen=True, slots=True, eq=False)
class SiteRecord:
    """What a site's file holds: σ of every accepted query by its id, the codes, and what its receipts add up to."""

    accepted: Mapping[str, float]
    codes: Mapping[str, Int64[np.ndarray, "l"]]
    receipted: frozenset[str]
    receipted_mu_squared: float
    spent: float


@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """All that two kinds of ledger hold after a life. ``spent`` and ``epsilon`` are what the server's ledger says of
    pools and of its studies."""

    releases: tuple[Release, ...]
    sites: Mapping[str, SiteRecord]
    spent: Mapping[str, float]
    epsilon: Mapping[str, float]


def read_life(service: Service) -> Life:
    """Read the files back, and ask the ledgers for their sums."""
    rows, answers = read_rows(service.workspace.ledger_file, "answers")
    drawn = {body["query_id"]: body["draw"] for kind, body in rows if kind == "answer"}
    own = (body for kind, body in rows if kind == "release")
    named = {sha256_bytes(canonical_bytes(body)): body["roster"] for kind, body in rows if kind == "roster"}
    releases = tuple(_release(body, named, answers) for body in own if drawn.get(body["query_id"]) == body.get("draw"))
    sites = {site.name: _site(service, index) for index, site in enumerate(service.sites)}
    gate = AccountantName(service.study.privacy.accountant)
    with Ledger.open(service.workspace.ledger_file) as ledger:
        spent = {site.name: float(ledger.spent(site.pool).mu_squared) for site in service.sites}
        epsilon = {terms.id: ledger.study_guarantees(terms.id)[gate].epsilon for terms in ledger.studies()}
    return Life(releases=releases, sites=sites, spent=spent, epsilon=epsilon)


def frame_of(service: Service, release: Release) -> Frame | None:
    return None if release.centre == "zero" else Frame.from_bytes(service.workspace.objects.get(release.centre))


def _site(service: Service, index: int) -> SiteRecord:
    path = service.site_file(index)
    if not path.exists():
        return SiteRecord({}, {}, frozenset(), 0.0, 0.0)
    rows, payloads = read_rows(path, "codes")
    codes = {name: vector(data) for name, data in payloads.items() if "/" not in name}  # the others are masked
    accepted = {
        body["query_id"]: float(Fraction(body["query"]["mechanism"]["noise_std"]))
        for kind, body in rows
        if kind == "reservation"
    }
    receipts = [body["receipt"] for kind, body in rows if kind == "receipt"]
    receipted = frozenset(release["body"]["query_id"] for receipt in receipts for release in receipt["releases"])
    told = float(Fraction(receipts[-1]["after"]["mu_squared"])) if receipts else 0.0
    with SiteLedger.read(path) as ledger:
        spent = float(ledger.spent().mu_squared)
    return SiteRecord(accepted, codes, receipted, told, spent)


def _release(body: dict[str, Any], named: Mapping[str, Any], answers: Mapping[str, bytes]) -> Release:
    query = body["query"]
    mechanism = query["mechanism"]
    return Release(
        query=body["query_id"],
        batch=body["batch"],
        study=body["study"],
        centre=query["centre"],
        noise_std=float(Fraction(mechanism["noise_std"])),
        dimension=mechanism["dimension"],
        radius=mechanism["radius_int"],
        voters_per_site=mechanism["voters_per_site"],
        roster=tuple(site for site, _pool in body.get("roster") or named[body["roster_sha256"]]),
        answer=vector(answers[body["query_id"]]),
        draw=body.get("draw"),
        masks=body.get("masks", ""),
    )


def read_rows(path: Path, payloads: str) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, bytes]]:
    """(kind, body) of every row and what is stored beside them, by plain SQL."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
        rows = [(kind, json.loads(body)) for kind, body in file.execute("SELECT kind, body FROM rows ORDER BY seq")]
        return rows, dict(file.execute(f"SELECT query_id, data FROM {payloads}"))


def vector(data: bytes) -> Int64[np.ndarray, "l"]:
    """A stored code or answer."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def made_up_roster(study: str, ledger: str, query: str, sites: Sequence[Site]) -> MaskedRoster:
    """A roster that a ledger can charge, whose mask keys nobody holds."""
    members = (Member(site.name, MaskKey(digest("mask", [site.name, query]), bytes(64))) for site in sites)
    return MaskedRoster(study, ledger, digest("further", query), 1, tuple(members))
