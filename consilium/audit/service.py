"""Runs a study once in a folder, with production's pipeline, aggregator, workers and both kinds of ledger.

Such a complete run is called a *life*. A *world* states which answer each voter gives. ``consilium.audit.run`` calls
the module. Only the transport and the teachers are replaced: messages go directly to the method ``handle`` of the
workers, and the voters give the world's answers. Results are read from the SQLite files by plain SQL, independently of
the objects that wrote them. The module adds no checks to those of production. If an error ends a life, the error's name
is part of the result.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from jaxtyping import Int64

from client.ledger.site_ledger import SiteLedger, new_site_key
from client.policy import Caps, SiteConfig
from client.worker import Worker
from common.canonical import canonical_bytes, digest, sha256_bytes
from common.config import Study
from common.events import EventLog, read_events
from common.evidence import sign_word
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.ledger.keys import load_signing_key, public_hex
from common.masking import MaskedRoster, MaskKey, Member
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, Several, decode, encode
from common.peers import Peer
from common.privacy.mechanism import AccountantName, Budget, QuerySpec
from common.protocols.frame import Frame
from common.sealing import SealContext, seal
from common.sealing_rotation import load_sealing_keys
from consilium.audit.subject import Limit, Subject
from consilium.audit.world import SiteVoters, VoterAnswers
from consilium.in_process import Sites, Wire, site_config
from server.aggregation.pipeline import collect, countersign
from server.aggregation.sealed_sums import aggregator_of
from server.ledger.server_ledger import Ledger
from server.protocols.query_protocol import protocol_of
from server.protocols.rounds import keep_frame
from server.public.material import CodecRecord
from server.study.create_study import create_study, open_ledger, server_keys
from server.study.workspace import Site, Workspace

T = TypeVar("T")


class Service:
    """A study's server and its sites, set up as in production.

    Args:
        root: Folder of this run of the study.
        subject: The study to audit.
        world: Prescribes each voter's answers.
        sites: Number of sites; by default all of the subject's.
        server_limits: The pools' budgets in the server's ledger; by default the subject's.
        site_limits: The pools' budgets in the sites' ledgers; by default the subject's.
        batch_size: Number of queries in an offer; by default the study's.
    """

    def __init__(
        self,
        root: Path,
        subject: Subject,
        world: VoterAnswers,
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
                answer_key=public_hex(new_site_key(self.key_file(name).with_suffix(".sqlite"))),
            )
            for i, name in enumerate(names)
        )
        self.workspace.save_sites(self.sites)
        self.workspace.save_volumes(subject.volumes)
        codec = self.workspace.objects.put(subject.codec.to_bytes())
        self.workspace.save_codec(CodecRecord(sha256=codec, dimension=subject.codec.dimension))
        if subject.frame is not None:
            keep_frame(self.workspace.public(), subject.frame, after=())
        with open_ledger(self.workspace) as ledger:
            for site, limit in zip(self.sites, self.server_limits, strict=False):
                budget, accountant = Budget(limit.epsilon, limit.delta), AccountantName(limit.accountant)
                ledger.declare_pool(PoolDeclaration(site.pool, site.name, budget, accountant, study.privacy.protection))
        self.events_file = root / "events.jsonl"

    # --- running

    def live(self, wire: Callable[[Mapping[int, Worker]], Wire] = Wire) -> str:
        """Run the study to its end with the server's pipeline.

        Args:
            wire: Makes the transport between the server and the sites' workers.

        Returns:
            Name of the error that ended the run; empty if there was none.
        """
        with closing(self.opened()) as sites:
            events = EventLog(self.events_file, study=self.study.id)
            try:
                transport = wire(sites.workers)
                collect(self.workspace, transport, events=events)
                countersign(self.workspace, transport, events=events)
            except Exception as error:  # noqa: BLE001  the audit reports every failure
                return type(error).__name__
        return ""

    def live_with_a_liar(self, *, far: bool) -> tuple[int, str]:
        """Ask the first query while the last site sends a code beyond its bound.

        Args:
            far: True for a code of 1000 times the norm bound of a site; False for a code just above the bound.

        Returns:
            Number of refused codes, and the name of the error that ended the run (empty if there was none).
        """
        ended = ""
        with closing(self.opened()) as sites, open_ledger(self.workspace) as ledger:
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
                core.run(Wire(sites.workers, intercept=partial(self._lie, far=far)))
            except Exception as error:  # noqa: BLE001
                ended = type(error).__name__
        return self._refused_codes(), ended

    def _lie(self, node: int, body: bytes, reply: bytes, *, far: bool) -> bytes:
        request = next(iter(parts_of(body, CodesRequest)), None)
        liar = self.sites[-1]
        if node != liar.node_id or request is None:
            return reply
        bound = self.subject.radius * self.study.privacy.voters_per_site
        code = np.zeros(self.subject.dimension, dtype=np.int64)
        code[0] = bound * 1000 if far else bound
        code[-1] += 1
        key = self.config(0).server.sealing_public_key
        sign, roster = load_signing_key(self.key_file(liar.name)).sign, request.roster
        sealed, signed = [], []
        for query in request.queries:
            if roster is not None:
                words = code.view(np.uint64)
                signed.append(sign_word(words, roster=roster.id, query=query, site=liar.name, sign=sign))
            context = SealContext(study=self.study.id, query=query, site=liar.name, attempt=request.attempt)
            sealed.append((query, seal(code, public_key=key, context=context)))
        signatures = tuple(signed) or None
        lie = CodesReply(batch=request.batch, attempt=request.attempt, codes=tuple(sealed), signatures=signatures)
        return encode(Several((lie,)))

    def _refused_codes(self) -> int:
        """Count the refused codes; in a sealed study the refused sums, because a masked code cannot be checked."""
        kinds = [(event["event"], event.get("reason")) for event in read_events(self.events_file)]
        spoiled = sum(kind == ("draw-lost", "spoiled") for kind in kinds)
        return spoiled if self.study.privacy.sealed else sum(event == "code-refused" for event, _ in kinds)

    # --- asking for more than the budget allows

    def planned(self) -> tuple[QuerySpec, ...]:
        """Return the queries of the study's first round, which depend on no answer.

        Returns:
            The queries.
        """
        return next(protocol_of(self.study).configure(self.workspace.public(), lambda _query: None))

    def further(self, number: int, *, share: float = 1.0) -> QuerySpec:
        """Return a query that the study does not plan, with a chosen cost.

        Args:
            number: Number of the query.
            share: Its cost μ² relative to that of a planned release.

        Returns:
            The query.
        """
        first = self.planned()[0]
        mechanism = first.mechanism
        if share != 1.0:
            mechanism = replace(
                mechanism, noise_std=mechanism.noise_std * Fraction(share**-0.5).limit_denominator(10**6)
            )
        volumes = self.subject.volumes[-len(first.volumes) :]
        return replace(first, mechanism=mechanism, volumes=volumes, round=self.subject.queries + number)

    def ask_server(self, query: QuerySpec, study: Study) -> bool:
        """Ask the server's ledger, opened anew, to release a query in which every site takes part.

        Args:
            query: The query.
            study: The study for which it is asked.

        Returns:
            True if the query was released and charged; in a sealed study, if a draw was charged.
        """
        with open_ledger(self.workspace) as ledger:
            ledger.register_study(study)
            roster = tuple(RosterEntry(site=site.name, pool=site.pool) for site in self.sites)
            nothing = np.zeros(query.mechanism.dimension, dtype=np.int64)
            if study.privacy.sealed:
                keys = [public_hex(X25519PrivateKey.generate()) for _ in self.sites]  # the private keys are not kept
                made = zip(self.sites, keys, strict=True)
                members = tuple(Member(site.name, MaskKey(key, bytes(64))) for site, key in made)
                masks = MaskedRoster(study.id, ledger.ledger_id, digest("further", query.id), 1, members)
                drawn = ledger.charge_draw(study_id=study.id, roster=roster, masks=masks, queries=[query])
                if drawn.draw is not None:
                    ledger.store_answer(query.id, masks.draw, nothing)
                return not drawn.refused
            result = ledger.release_batch(
                study_id=study.id,
                batch_id=f"further-{query.id[:8]}",
                roster=roster,
                queries=[query],
                draw=lambda _: nothing,
            )
        return not result.refused

    def ask_sites(self, query: QuerySpec, study: Study) -> dict[str, str]:
        """Offer a query to every site's worker, with ledgers and workers opened anew.

        Args:
            query: The query.
            study: The study for which it is asked.

        Returns:
            Each site's answer: ``accepted``, or the reason for declining.
        """
        answers = {}
        batch = digest("batch", {"study": study.id, "queries": [query.id]})
        with closing(self.opened(study)) as sites, open_ledger(self.workspace) as ledger:
            plain = Offer(study=study.id, ledger=ledger.ledger_id, batch=batch, queries=(query,))
            peers = tuple(Peer(site.name, site.answer_key) for site in self.sites)
            offer = encode(replace(plain, draw=1, peers=peers) if study.privacy.sealed else plain)
            for site in self.sites:
                reply = decode(sites.workers[site.node_id].handle(offer))
                answers[site.name] = reply.reason if isinstance(reply, OfferReply) else "malformed"
        return answers

    def ask_again(self, other: Study | None = None) -> int:
        """Ask for every stored answer again and offer the ledger another value for it, which must not be released.

        Args:
            other: Another study of the same ledger for which it is asked; by default the service's own.

        Returns:
            Number of answers that changed.
        """
        changed = 0
        before = {release.query: release for release in read_life(self).releases}
        with open_ledger(self.workspace) as ledger:
            study = ledger.register_study(other or self.study)
            for release in before.values():
                stored = ledger.answer(release.query)
                if stored is None:
                    changed += 1
                    continue
                again = ledger.release_batch(
                    study_id=study,
                    batch_id=release.batch if other is None else f"again-{release.batch[:32]}",
                    roster=stored.roster,
                    queries=[stored.query],
                    draw=lambda _: np.zeros(self.subject.dimension, dtype=np.int64),
                )
                same = again.answers and np.array_equal(again.answers[0].noisy_sum, release.answer)
                changed += not same or not np.array_equal(stored.noisy_sum, release.answer)
        return changed

    # --- helpers

    def opened(self, study: Study | None = None) -> Sites:
        """Open every site's ledger and worker.

        Args:
            study: The study the sites consent to; by default the service's own.

        Returns:
            The sites.
        """
        names = [site.name for site in self.sites]
        made = Sites(
            self.root,
            self.sites,
            study or self.study,
            config=lambda site: self.config(names.index(site.name)),
            voters=lambda site: SiteVoters(self.subject, self.world, names.index(site.name)),
            fetch=self.fetch,
        )
        made.introduce()
        return made

    def config(self, index: int) -> SiteConfig:
        """Return a site's policy. Its caps are the limit that this run gives the site (``site_limits``).

        Args:
            index: Number of the site, from 0.

        Returns:
            The policy.
        """
        limit, privacy = self.site_limits[index], self.study.privacy
        caps = Caps(
            epsilon=limit.epsilon,
            delta=limit.delta,
            accountant=AccountantName(limit.accountant),
            unit=privacy.unit,
            relation=privacy.relation,
            queries_per_day=1_000_000,
        )
        return site_config(self.sites[index], self.study, server_keys(self.workspace), caps=caps)

    def limits(self) -> dict[str, float]:
        """Return the Σμ² that each site's pool may spend: the smaller of its limits in the server's and its own ledger.

        Returns:
            Σμ² by site.
        """
        both = zip(self.sites, self.server_limits, self.site_limits, strict=False)
        return {site.name: min(server.mu_squared, own.mu_squared) for site, server, own in both}

    def site_file(self, index: int) -> Path:
        """Return the file of a site's ledger.

        Args:
            index: Number of the site.

        Returns:
            The path.
        """
        return self.root / self.sites[index].name / "site-ledger.sqlite"

    def key_file(self, site: str) -> Path:
        """Return the path of a site's ledger key, and create its folder.

        The constructor creates the key, because the server must know the public key before it asks a query. The file
        gets this name with the site's ledger.

        Args:
            site: Name of the site.

        Returns:
            The path.
        """
        path = self.root / site / "site-ledger.key"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def fetch(self, name: str) -> bytes:
        """Return a public object. For a volume, its name is returned as content, because no voter reads it.

        Args:
            name: Hash of the object.

        Returns:
            Its bytes.
        """
        return name.encode() if name in self.subject.volumes else self.workspace.objects.get(name)


# --- reading


def parts_of(body: bytes, kind: type[T]) -> list[T]:
    """Return the parts of a message that have a given type.

    Args:
        body: The message's bytes.
        kind: Type of the parts.

    Returns:
        The parts in order.
    """
    message = decode(body)
    return [part for part in (message.parts if isinstance(message, Several) else (message,)) if isinstance(part, kind)]


@dataclass(frozen=True, slots=True, eq=False)
class AuditedRelease:
    """One release: the facts in its ledger row, and the stored answer."""

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
class Charged:
    """A ledger row with a charge, for a release or for a draw (one attempt at a sealed sum) that may have no answer."""

    noise_std: float
    roster: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SiteRecord:
    """The content of a site's ledger file.

    Attributes:
        accepted: Standard deviation, in grid steps of 2⁻¹⁶, of the noise of every accepted query, by query and draw.
        codes: Stored codes by query.
        receipted: Queries with a receipt.
        receipted_mu_squared: Σμ² in the last receipt.
        spent: Σμ² according to the ledger.
    """

    accepted: Mapping[str, float]
    codes: Mapping[str, Int64[np.ndarray, "l"]]
    receipted: frozenset[str]
    receipted_mu_squared: float
    spent: float


@dataclass(frozen=True, slots=True, eq=False)
class AuditedRun:
    """The contents of the server's and the sites' ledgers after one complete run of the study.

    Attributes:
        releases: The releases.
        charged: The ledger rows that charge a release or a draw.
        sites: Content of each site's file, by name.
        spent: Σμ² of each site's pool according to the server's ledger.
        epsilon: ε of each study according to the server's ledger.
    """

    releases: tuple[AuditedRelease, ...]
    charged: tuple[Charged, ...]
    sites: Mapping[str, SiteRecord]
    spent: Mapping[str, float]
    epsilon: Mapping[str, float]


def read_life(service: Service) -> AuditedRun:
    """Read the ledger files by SQL, and the totals that the ledger objects compute.

    Args:
        service: The study's server and sites.

    Returns:
        The ledgers' contents.
    """
    rows, answers = read_rows(service.workspace.ledger_file, "answers")
    drawn = {body["query_id"]: body["draw"] for kind, body in rows if kind == "answer"}
    own = [body for kind, body in rows if kind == "release"]
    named = {sha256_bytes(canonical_bytes(body)): body["roster"] for kind, body in rows if kind == "roster"}
    releases = tuple(_release(body, named, answers) for body in own if drawn.get(body["query_id"]) == body.get("draw"))
    charged = tuple(
        Charged(float(Fraction(body["query"]["mechanism"]["noise_std"])), _roster(body, named)) for body in own
    )
    sites = {site.name: read_site(service, index) for index, site in enumerate(service.sites)}
    gate = AccountantName(service.study.privacy.accountant)
    with Ledger.open(service.workspace.ledger_file) as ledger:
        spent = {site.name: float(ledger.spent(site.pool).mu_squared) for site in service.sites}
        epsilon = {study: ledger.study_spending(study).by(gate).epsilon for study in ledger.books.studies}
    return AuditedRun(releases=releases, charged=charged, sites=sites, spent=spent, epsilon=epsilon)


def frame_of(service: Service, release: AuditedRelease) -> Frame | None:
    """Return the frame of a release: the centre, axes and weights of its round of a joint query.

    Args:
        service: The study's server and sites.
        release: The release.

    Returns:
        The frame; None if the release states the centre ``zero``, as all releases of a study without frames do.
    """
    return None if release.centre == "zero" else Frame.from_bytes(service.workspace.objects.get(release.centre))


def read_site(service: Service, index: int) -> SiteRecord:
    """Read one site's ledger file by SQL, and the spent total that the ledger object computes.

    Args:
        service: The study's server and sites.
        index: Number of the site.

    Returns:
        The content; empty if there is no file.
    """
    path = service.site_file(index)
    if not path.exists():
        return SiteRecord({}, {}, frozenset(), 0.0, 0.0)
    rows, payloads = read_rows(path, "codes")
    # Names with "/" are masked codes.
    codes = {name: vector(data) for name, data in payloads.items() if "/" not in name}
    accepted = {
        f"{body['query_id']}/{body.get('draw')}": float(Fraction(body["query"]["mechanism"]["noise_std"]))
        for kind, body in rows
        if kind == "reservation"
    }
    receipts = [body["receipt"] for kind, body in rows if kind == "receipt"]
    receipted = frozenset(release["body"]["query_id"] for receipt in receipts for release in receipt["releases"])
    told = float(Fraction(receipts[-1]["after"]["mu_squared"])) if receipts else 0.0
    with SiteLedger.read(path) as ledger:
        spent = float(ledger.spent().mu_squared)
    return SiteRecord(accepted, codes, receipted, told, spent)


def _release(body: dict[str, Any], named: Mapping[str, Any], answers: Mapping[str, bytes]) -> AuditedRelease:
    query = body["query"]
    mechanism = query["mechanism"]
    return AuditedRelease(
        query=body["query_id"],
        batch=body["batch"],
        study=body["study"],
        centre=query["centre"],
        noise_std=float(Fraction(mechanism["noise_std"])),
        dimension=mechanism["dimension"],
        radius=mechanism["radius_int"],
        voters_per_site=mechanism["voters_per_site"],
        roster=_roster(body, named),
        answer=vector(answers[body["query_id"]]),
        draw=body.get("draw"),
        masks=body.get("masks", ""),
    )


def _roster(body: dict[str, Any], named: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(site for site, _pool in body.get("roster") or named[body["roster_sha256"]])


def read_rows(path: Path, payloads: str) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, bytes]]:
    """Read a ledger file by plain SQL.

    Args:
        path: The file.
        payloads: Table of the stored codes or answers.

    Returns:
        Kind and body of every row, and stored bytes by name.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
        rows = [(kind, json.loads(body)) for kind, body in file.execute("SELECT kind, body FROM rows ORDER BY seq")]
        return rows, dict(file.execute(f"SELECT query_id, data FROM {payloads}"))


def vector(data: bytes) -> Int64[np.ndarray, "l"]:
    """Decode a stored code or answer.

    Args:
        data: Little-endian int64.

    Returns:
        int64 array [l].
    """
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
