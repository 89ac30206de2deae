"""Runs a federation in one process: real workers, ledgers, sealing and core; only transport and teachers are stubs.

It extends the product's own federation (:mod:`consilium.in_process`) by a server whose keys and ledger a test can use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import nibabel as nib
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from client.worker import Worker
from common.codecs.codec import Codec, fit_codec
from common.config import Study, render_study
from common.errors import LedgerCorrupt
from common.events import EventLog
from common.ledger.keys import public_hex
from common.ledger.rollback_guard import SiteLedgerStanding, standing_path
from common.messages import CodesReply, CodesRequest, Offer, Part, Several, decode
from common.objects import ObjectStore
from common.peers import Peer
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import QuerySpec
from common.sealing import SealContext, unseal
from consilium.in_process import Sites, Wire, site_config
from server.aggregation.aggregator import Aggregator
from server.aggregation.sealed_sums import aggregator_of
from server.ledger.server_ledger import Ledger
from server.protocols.per_volume import plan_queries
from server.protocols.rounds import round_query
from server.public.material import CodecRecord
from server.study.create_study import ServerKeys
from server.study.workspace import Site, Workspace
from tests.backups import put_copy
from tests.waiting import events_of
from tests.worlds import make_study as make_study
from tests.worlds import pool_of, site_toml

GRID = (8, 8, 8)
P = TypeVar("P", bound=Part)


def ball(centre: tuple[float, float, float], radius: float) -> np.ndarray:
    axes = np.meshgrid(*(np.arange(n) for n in GRID), indexing="ij")
    distance = np.sum([(axis - middle) ** 2 for axis, middle in zip(axes, centre, strict=True)], axis=0)
    return np.asarray(distance <= radius**2, dtype=np.uint8)


@cache
def make_codec(study: Study, *, noise_std: float = 0.01) -> Codec:
    """Return the codec of a study. It is fitted once for each process, because nothing changes it."""
    maps = [ball((3 + i / 5, 3 + (i % 3) / 2, 4), 1.5 + (i % 4) / 3) for i in range(10)]
    return fit_codec(study, maps, noise_std=noise_std)


@dataclass
class StubVoters:
    """Stands for teachers that see the same ball in every volume, or that fail in a chosen way."""

    radius: float = 2.0
    failure: Exception | str | None = None
    voters: int = 1
    asked: list[int] = field(default_factory=list)
    """The size of each volume; a list, because a worker's threads may add to it at once and none is lost."""

    @property
    def calls(self) -> int:
        return len(self.asked)

    def predict(self, volume: bytes) -> list[Callable[[], np.ndarray | None]]:
        self.asked.append(len(volume))
        return [self.answer] * self.voters

    def answer(self) -> np.ndarray | None:
        if isinstance(self.failure, Exception):
            raise self.failure
        body = ball((4, 4, 4), self.radius).astype(np.float32)
        probabilities = np.stack([1 - body, body])
        if self.failure == "nan":
            probabilities = np.full_like(probabilities, np.nan)
        if self.failure == "huge":
            probabilities = probabilities * 1e30
        return probabilities


def part(body: bytes, kind: type[P]) -> P | None:
    """Return the part of a message that has this kind, if there is one."""
    message = decode(body)
    parts = message.parts if isinstance(message, Several) else (message,)
    return next((found for found in parts if isinstance(found, kind)), None)


class Federation:
    """Holds K hospitals and one server, with everything on disk under ``root``."""

    frame: CodecRecord | None = None
    """The frame of a joint query, after a test has made one."""

    def __init__(
        self,
        root: Path,
        *,
        study: Study | None = None,
        sites: int = 3,
        volumes: int | None = None,
        sampler: Sampler = rounded_gaussian,
        share_sampler: Sampler = rounded_gaussian,
        queries_per_day: int = 1000,
    ):
        self.queries_per_day = queries_per_day
        self.root, self.study, self.sampler = root, study or make_study(), sampler
        self.share_sampler = share_sampler
        self.objects = ObjectStore(root / "objects")
        self.codec = make_codec(self.study)
        self.codec_hash = self.objects.put(self.codec.to_bytes())
        count = volumes or self.study.privacy.planned_queries
        self.volumes = tuple(self.objects.put(f"volume {i}".encode()) for i in range(count))
        self.signing_key = Ed25519PrivateKey.generate()
        self.sealing_key = X25519PrivateKey.generate()
        self.ledger = Ledger.create(root / "ledger.sqlite", signing_key=self.signing_key)
        self.ledger.register_study(self.study)
        self.sites = tuple(Site(name=f"site-{i}", pool=f"pool-{i}", node_id=100 + i) for i in range(sites))
        self.voters = {site.name: StubVoters(radius=1.5 + i / 4) for i, site in enumerate(self.sites)}
        for site in self.sites:
            self.ledger.declare_pool(pool_of(site, self.study))
        self.events_file = root / "events.jsonl"
        self.open_sites()

    def open_sites(self) -> None:
        """Open every site's ledger and worker for the study, in place of those that were open."""
        keys = ServerKeys(public_hex(self.sealing_key), public_hex(self.signing_key))
        self.hospitals = Sites(
            self.root,
            self.sites,
            self.study,
            config=lambda site: site_config(site, self.study, keys, queries_per_day=self.queries_per_day),
            voters=lambda site: self.voters[site.name],
            fetch=self.objects.get,
            sampler=self.share_sampler,
        )
        self.hospitals.introduce()
        self.sites, self.site_ledgers = self.hospitals.sites, self.hospitals.ledgers
        self.workers = self.hospitals.workers
        self.transport = Wire(self.workers)

    def take_images(self) -> None:
        """Make all volumes real images, so that a student can be trained on them."""
        draws = np.random.default_rng(5)
        images = (nib.Nifti1Image(draws.normal(size=GRID).astype(np.float32), np.eye(4)) for _ in self.volumes)
        self.volumes = tuple(self.objects.put(image.to_bytes()) for image in images)

    def workspace(self) -> Workspace:
        """Return the study's folder, with its terms, volumes and codec written into it."""
        workspace = Workspace(self.root)
        workspace.study_file.write_text(render_study(self.study))
        workspace.save_volumes(self.volumes)
        workspace.save_codec(CodecRecord(sha256=self.codec_hash, dimension=self.codec.dimension))
        return workspace

    def put_back(self, copy: Path) -> SiteLedger:
        """Replace the first site's ledger by an older copy, take the steps that its staff are told to, and return the
        ledger.
        """
        site, path = self.sites[0], self.root / "site-0" / "site-ledger.sqlite"
        caps = self.workers[site.node_id]._config.caps
        self.site_ledgers[site.name].close()
        put_copy(copy, path)
        with pytest.raises(LedgerCorrupt, match="older copy"):
            SiteLedger.open(path, site.pool, caps=caps, site=site.name)
        with SiteLedger.open(path, site.pool, caps=caps, site=site.name, restored=True) as lost:
            lost.charge_lost(SiteLedgerStanding.load(standing_path(path)))
        ledger = self.hospitals.open(site)._ledger
        ledger.decide(self.study.id, "resume")
        for peer in self.sites[1:]:
            ledger.confirm_peer(self.study.id, Peer(peer.name, peer.answer_key))
        return ledger

    def site_toml(self, name: str, pool: str, more: str = "") -> str:
        """Return the policy file of one of these sites."""
        return site_toml(
            site=name,
            pool=pool,
            data="data",
            sealing_key=public_hex(self.sealing_key),
            signing_key=public_hex(self.signing_key),
            server="localhost",
            more=more,
        )

    def write_site_files(self, more: str = "") -> None:
        """Write each site's policy file, and the study that it consented to, into the site's folder."""
        for site in self.sites:
            folder = self.root / site.name
            (folder / "site.toml").write_text(self.site_toml(site.name, site.pool, more))
            (folder / "study.toml").write_text(render_study(self.study))

    def set_collection(self, **values: Any) -> None:
        """Change settings of the study's section ``[collection]``."""
        self.study = replace(self.study, collection=replace(self.study.collection, **values))

    def core(self, queries: Sequence[QuerySpec] | None = None, **changes: Any) -> Aggregator:
        """Return a new core, as after a restart: it knows only what is on disk. By default it asks all planned queries.

        ``changes`` are further arguments of :class:`Aggregator`.
        """
        usual: dict[str, Any] = {"sampler": self.sampler, "retry_pause_s": 0.01}
        return aggregator_of(self.study)(
            study=self.study,
            queries=self.planned() if queries is None else queries,
            sites=lambda: self.sites,
            ledger=self.ledger,
            sealing_key=self.sealing_key,
            events=EventLog(self.events_file, study=self.study.id),
            **usual | changes,
        )

    def worker(self, **changes: Any) -> Worker:
        """Return another worker of the first site on its open ledger. ``changes`` are arguments of :class:`Worker`."""
        old = self.workers[100]
        usual = {"config": old._config, "consent": old._consent, "ledger": old._ledger, "fetch": self.objects.get}
        return Worker(**{"voters": self.voters["site-0"], **usual, **changes})

    def planned(self) -> tuple[QuerySpec, ...]:
        record = CodecRecord(sha256=self.codec_hash, dimension=self.codec.dimension)
        if self.frame is None:
            return plan_queries(self.study, codec=record, volumes=self.volumes)
        return (round_query(self.study, codec=record, volumes=self.volumes, frame=self.frame),)

    def offer(self, queries: Sequence[QuerySpec], **changes: Any) -> Offer:
        """Return the message with which the server offers these queries."""
        return Offer(**self._asked() | {"queries": tuple(queries)} | changes)

    def request(self, queries: Sequence[QuerySpec], **changes: Any) -> CodesRequest:
        """Return the message with which the server requests their codes."""
        asked = {"attempt": 1, "deadline_s": 60, "queries": tuple(query.id for query in queries)}
        return CodesRequest(**self._asked() | asked | changes)

    def _asked(self) -> dict[str, Any]:
        return {"study": self.study.id, "ledger": self.ledger.ledger_id, "batch": "b" * 64}

    def opened(self, reply: bytes, queries: Sequence[QuerySpec], *, site: str = "site-0") -> list[np.ndarray]:
        """Return the codes in a reply to :meth:`request`, opened as the core opens them."""
        message = decode(reply)
        assert isinstance(message, CodesReply)
        return [
            unseal(
                sealed,
                private_key=self.sealing_key,
                context=SealContext(study=self.study.id, query=query.id, site=site, attempt=message.attempt),
                dimension=query.mechanism.dimension,
            )
            for query, (_, sealed) in zip(queries, message.codes, strict=False)
        ]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events_of(self.events_file, kind)

    def close(self) -> None:
        self.ledger.close()
        self.hospitals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
