"""A study's directory at the server: where everything lies, and the lock that keeps one run at a time in it.

Refuses to run twice at once, a directory without a study, and a study whose recorded codec or volumes have changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from common.canonical import check_hash
from common.config import Study, load_study
from common.document import AS_TEXT, LATER, Document
from common.errors import InvalidInput
from common.objects import ObjectStore, shared
from server.public.kept import KeptInFolder, read_record, write_record
from server.public.material import START_FILE, CodecRecord, PairedFiles, Public
from server.study.locks import held_alone, is_held

LEDGER_RECORD = "ledger.json"
"""In a study's directory: where the ledger lies that it shares with other studies."""
BUSY = "a run is already going on in {}; to fix: `consilium study watch` follows it, `consilium study stop` ends it"
RUN_LOCK = "run.lock"
PAIRED = "paired.json"
VALIDATION = "validation.json"
LEFT = "left.json"


@dataclass(frozen=True, slots=True)
class Site(Document):
    """A registered site: its name, its patient pool, the Flower node id its registered key was given, and the Ed25519
    key (hex) of its own ledger, which signs its replies; empty where it was registered without one."""

    name: str
    pool: str
    node_id: Annotated[int, AS_TEXT]
    answer_key: Annotated[str, LATER] = ""


@dataclass(frozen=True, slots=True)
class Endpoint(Document):
    """Where the server is: ``host`` and ``port`` as sites call it (the gateway), and SuperLink's port on loopback.

    ``behind`` is the directory of the study whose gateway listens there, seen from this study's directory; empty where
    this study has a gateway of its own.
    """

    host: str
    port: int
    internal_port: int
    behind: Annotated[str, LATER] = ""

    def __post_init__(self) -> None:
        for name in ("port", "internal_port"):
            if not 1 <= getattr(self, name) <= 65535:
                raise InvalidInput(f"--{name.replace('_', '-')}", value=getattr(self, name), limit="1 to 65535")
        if self.port == self.internal_port:
            raise InvalidInput("--internal-port", value=self.port, limit="another one than --port")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", self.host):
            raise InvalidInput("--host", value=self.host[:80], limit="a name or an address, without https:// and port")

    @property
    def superlink(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def objects_url(self) -> str:
        return f"https://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SharedLedger(Document):
    """Where the ledger lies that a study shares: another study's directory, seen from its own."""

    directory: str


@dataclass(frozen=True, slots=True)
class LeftSite(Document):
    """A site that left and was forgotten: its name, and the SHA-256 of its node key; neither is admitted again."""

    name: str
    key_sha256: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of a study's directory and its small records."""

    root: Path

    @property
    def study_file(self) -> Path:
        return self.root / "study.toml"

    @property
    def books_dir(self) -> Path:
        """The study's directory with the consortium's ledger and its key: this one, or one it shares them with."""
        path = self.root / LEDGER_RECORD
        if not path.exists():
            return self.root
        record = self._read(LEDGER_RECORD, remedy="restore it: it says where the consortium's ledger lies")
        return self.root / SharedLedger.from_json(record).directory

    def share_ledger(self, directory: Path) -> None:
        """Record that another study's directory holds the ledger; for a directory that has none yet."""
        shared = SharedLedger(os.path.relpath(directory.resolve(), self.root.resolve()))
        self._write(LEDGER_RECORD, shared.to_json())

    @property
    def ledger_file(self) -> Path:
        return self.books_dir / "ledger.sqlite"

    @property
    def events_file(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def sealing_key_file(self) -> Path:
        return self.root / "keys" / "sealing.key"

    @property
    def signing_key_file(self) -> Path:
        return self.books_dir / "keys" / "ledger.key"

    @property
    def flower_dir(self) -> Path:
        return self.root / "flower"

    @property
    def tls_dir(self) -> Path:
        return self.root / "tls"

    @property
    def dashboard_tls_dir(self) -> Path:
        """Certificate and key of the dashboard's own port: all that it holds of what is secret."""
        return self.root / "dashboard-tls"

    @property
    def authority_dir(self) -> Path:
        """The consortium's certificate authority; needed only to renew, and best kept elsewhere between renewals."""
        return self.tls_dir / "authority"

    @property
    def gateway_dir(self) -> Path:
        """All that the gateway reads beside the public objects: certificate, key, list of admitted nodes."""
        return self.root / "gateway"

    @property
    def fleet_dir(self) -> Path:
        """The Unix socket by which the gateway reaches SuperLink's fleet routes."""
        return self.gateway_dir / "run"

    @property
    def relay_dir(self) -> Path:
        """The Unix socket by which a ServerApp reaches the core."""
        return self.root / "relay"

    @property
    def nodes_file(self) -> Path:
        return self.gateway_dir / "nodes.json"

    @property
    def node_keys_dir(self) -> Path:
        """Public node keys of all sites that were ever admitted."""
        return self.root / "node-keys"

    @property
    def labels_dir(self) -> Path:
        return self.root / "labels"

    @property
    def student_dir(self) -> Path:
        return self.root / "student"

    @property
    def start_file(self) -> Path:
        """Weights of the public start, where the study has one: teachers and student may begin with them."""
        return self.root / START_FILE

    @property
    def bundle_dir(self) -> Path:
        return self.root / "bundle"

    @property
    def decisions_file(self) -> Path:
        """Decisions about labels that training keeps to; the dashboard's own file is copied here."""
        return self.root / "decisions.jsonl"

    @property
    def scores_file(self) -> Path:
        """What student and controls scored on the validation set."""
        return self.root / "report.json"

    @property
    def reports_dir(self) -> Path:
        """What sites hand over about themselves, a JSON file each."""
        return self.root / "site-reports"

    @property
    def figures_dir(self) -> Path:
        """What hospitals measured of the student, a signed file each."""
        return self.root / "figures"

    @property
    def verdicts_dir(self) -> Path:
        """What hospitals said of the student, a signed file each."""
        return self.root / "verdicts"

    @property
    def evidence_dir(self) -> Path:
        """What sites signed in sealed sums, a folder a draw."""
        return self.root / "evidence"

    @property
    def spoils_file(self) -> Path:
        """The row of the newest spoiled draw after which somebody chose to go on."""
        return self.root / "spoiled-draw-accepted"

    @property
    def stop_file(self) -> Path:
        """Its presence asks a run to stop at the next safe point."""
        return self.root / "stop-requested"

    @property
    def objects(self) -> ObjectStore:
        return ObjectStore(self.objects_dir)

    @property
    def objects_dir(self) -> Path:
        return self.root / "objects"

    def study(self) -> Study:
        return load_study(self.study_file)

    def public(self, *, codec: CodecRecord | None = None) -> Public:
        """What everybody in the study can read, once volumes are published and a codec is fitted (or given)."""
        return Public(
            self.study(), codec or self.codec(), self.volumes(), self.objects, KeptInFolder(self.root), self.paired()
        )

    def sites(self) -> tuple[Site, ...]:
        """Registered sites in order of their names."""
        records = self._read("sites.json", remedy="admit sites with `consilium provision approve`")
        return tuple(sorted(map(Site.from_json, records), key=lambda site: site.name))

    def registered(self) -> tuple[Site, ...]:
        """Like :meth:`sites`, and none while none is registered."""
        return self.sites() if (self.root / "sites.json").exists() else ()

    def admitted(self) -> tuple[Site, ...]:
        """Registered sites without those that were revoked: nobody waits for them, and their word counts no more.

        All registered sites where there is no list of keys, as in a study that was never provisioned over a network.
        """
        if not self.nodes_file.exists():
            return self.sites()
        from common.node_auth import read_admitted  # cryptography: no command's help needs it

        let_in = {node.site for node in read_admitted(self.nodes_file)}
        return tuple(site for site in self.sites() if site.name in let_in)

    def save_sites(self, sites: tuple[Site, ...]) -> None:
        """Record the sites; what :meth:`check_sites` raises."""
        self.check_sites(sites)
        self._write("sites.json", [site.to_json() for site in sites])

    @staticmethod
    def check_sites(sites: tuple[Site, ...]) -> None:
        """InvalidInput if a name, pool or node id stands twice."""
        for field in ("name", "pool", "node_id"):
            values = [getattr(site, field) for site in sites]
            if len(set(values)) != len(values):
                raise InvalidInput(
                    f"two sites have the same {field}", value=sorted(map(str, values)), limit="each value once"
                )

    def left(self) -> tuple[LeftSite, ...]:
        """Sites that left and were forgotten."""
        if not (self.root / LEFT).exists():
            return ()
        return tuple(map(LeftSite.from_json, self._read(LEFT, remedy="restore it from a backup")))

    def save_left(self, sites: tuple[LeftSite, ...]) -> None:
        self._write(LEFT, [site.to_json() for site in sites])

    def volumes(self) -> tuple[str, ...]:
        """Content hashes of the public volumes, in query order."""
        records = self._read("public.json", remedy="publish volumes with `consilium study publish`")
        return tuple(check_hash(name) for name in records)

    def save_volumes(self, volumes: tuple[str, ...]) -> None:
        self._write("public.json", list(volumes))

    def paired(self) -> tuple[PairedFiles, ...]:
        """The public volumes with label maps; none where the study promises none."""
        if not self.study().codec.paired:
            return ()
        records = self._read(PAIRED, remedy="publish them with `consilium study publish --paired`")
        return tuple(map(PairedFiles.from_json, records))

    def save_paired(self, paired: tuple[PairedFiles, ...]) -> None:
        self._write(PAIRED, [files.to_json() for files in paired])

    def validation(self) -> tuple[PairedFiles, ...]:
        """The labelled public cases that student and controls are scored on; none where none were published."""
        if not (self.root / VALIDATION).exists():
            return ()
        return tuple(map(PairedFiles.from_json, self._read(VALIDATION, remedy="publish them again")))

    def save_validation(self, cases: tuple[PairedFiles, ...]) -> None:
        self._write(VALIDATION, [files.to_json() for files in cases])

    def codec(self) -> CodecRecord:
        return CodecRecord.from_json(self._read("codec.json", remedy="fit one with `consilium codec fit`"))

    def save_codec(self, codec: CodecRecord) -> None:
        self._write("codec.json", codec.to_json())

    def forget_codec(self) -> None:
        (self.root / "codec.json").unlink(missing_ok=True)

    def endpoint(self) -> Endpoint:
        copied = not (self.root / "endpoint.json").exists()  # the network's part sees flower/ alone
        record = self._read(
            "flower/endpoint.json" if copied else "endpoint.json", remedy="set it with `consilium provision server`"
        )
        if isinstance(record, dict):
            record.pop("internal_host", None)  # an earlier version let SuperLink be elsewhere
        return Endpoint.from_json(record)

    def save_endpoint(self, endpoint: Endpoint) -> None:
        self._write("endpoint.json", endpoint.to_json())

    def port_keeper(self) -> Workspace:
        """The study whose gateway sites of this one reach: itself unless it was put behind another one."""
        behind = (self.root / "endpoint.json").exists() and self.endpoint().behind
        return Workspace(self.root / behind) if behind else self

    def copy_endpoint(self) -> None:
        """Write where the server is into ``flower/``, too."""
        self._write("flower/endpoint.json", self.endpoint().to_json())

    def run_id(self) -> int | None:
        """The Flower run last submitted for this study, if any."""
        path = self.root / "run.json"
        return int(json.loads(path.read_text(encoding="utf-8"))["run_id"]) if path.exists() else None

    def save_run_id(self, run_id: int) -> None:
        self._write("run.json", {"run_id": str(run_id)})

    def busy(self) -> bool:
        """Whether a run holds the study's lock now."""
        self._check_there()
        return is_held(self.root / RUN_LOCK) is True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study's lock; the kernel frees it when the process dies, however it dies.

        What is made meanwhile is closed to other users, and so is from now on what earlier versions left open to them:
        events name hospitals, labels are one per public volume. A study whose folder was given to a group stays that
        group's.
        """
        self._check_there()
        with held_alone(self.root / RUN_LOCK, busy=BUSY.format(self.root)):
            others = 0o027 if shared(self.root) else 0o077
            before = os.umask(others)
            try:
                self._close_to(others)
                yield
            finally:
                os.umask(before)

    def _close_to(self, others: int) -> None:
        folders = (self.labels_dir, self.student_dir, self.bundle_dir, self.evidence_dir, self.reports_dir)
        for path in (self.events_file, *folders):
            with suppress(FileNotFoundError, PermissionError):  # another user's: theirs to close
                if (mode := stat.S_IMODE(path.stat().st_mode)) & others:
                    path.chmod(mode & ~others)

    @contextmanager
    def changing_sites(self) -> Iterator[None]:
        """Hold the lock of the lists of sites, waiting for it: who reads one and writes it anew loses no change."""
        self._check_there()
        with (self.root / "sites.lock").open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _check_there(self) -> None:
        if not self.root.is_dir():
            raise InvalidInput(
                "directory of a study", value=str(self.root), limit="one that is there", remedy="`consilium study init`"
            )

    def _read(self, name: str, *, remedy: str) -> Any:
        self._check_there()
        return read_record(self.root / name, remedy=remedy)

    def _write(self, name: str, value: object) -> None:
        write_record(self.root / name, value)
