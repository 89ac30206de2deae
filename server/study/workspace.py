"""Names the files of a study's directory, reads and writes its small records, and locks it against a second run.

Nearly every module of the server uses it. It refuses a second concurrent run, a directory without a study, and records
that cannot be read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar

from common.canonical import check_hash
from common.config import Study, load_study
from common.document import AS_TEXT, LATER, Document
from common.errors import InvalidInput
from common.locks import exclusively
from common.objects import ObjectStore, PathInside, shared, write_json
from common.reading import naming_file, parsing
from common.sockets import HOST_LIMIT, HOST_REMEDY
from server.public.material import START_FILE, CodecRecord, PairedFiles, PublicMaterial
from server.public.public_files import FilesInFolder, read_record
from server.study.locks import held_alone, is_held

T = TypeVar("T")
LEDGER_RECORD = "ledger.json"
"""Name of the file that a study has if it shares another study's ledger; it contains that study's directory."""
BUSY = "a run is already active in {}; to fix: `consilium study watch` follows it, `consilium study stop` ends it"
RUN_LOCK = "run.lock"
PAIRED = "paired.json"
VALIDATION = "validation.json"
LEFT = "left.json"
REVOKED = "revoked.json"


@dataclass(frozen=True, slots=True)
class Site(Document):
    """A registered site.

    Attributes:
        name: The site's name, which no other site of the study has.
        pool: Name of its patient pool.
        node_id: Flower's id of the site's node.
        answer_key: Ed25519 public key in hexadecimal that verifies the site's replies; the site's own ledger has the
            same key. Empty if the site was registered without one.
    """

    name: str
    pool: str
    node_id: Annotated[int, AS_TEXT]
    answer_key: Annotated[str, LATER] = ""


@dataclass(frozen=True, slots=True)
class Endpoint(Document):
    """Address and ports of the server.

    Attributes:
        host: Name or address by which sites reach the gateway.
        port: Port of the gateway.
        internal_port: SuperLink's port on loopback.
        behind: Directory of the study whose gateway also serves this study, relative to this study's directory; empty
            if this study has a gateway of its own.

    Raises:
        InvalidInput: If a port or the host is invalid.
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
            raise InvalidInput("--internal-port", value=self.port, limit="a port other than --port")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", self.host):
            raise InvalidInput("--host", value=self.host[:80], limit=HOST_LIMIT, remedy=HOST_REMEDY)
        if ":" in self.host:
            with parsing("--host", value=self.host[:80], limit=HOST_LIMIT, remedy=HOST_REMEDY):
                ip_address(self.host)

    @property
    def superlink(self) -> str:
        """The gateway's ``host:port``, an IPv6 address in brackets, as a URL needs it."""
        host = f"[{ip_address(self.host)}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def objects_url(self) -> str:
        """Address of the public objects."""
        return f"https://{self.superlink}"


@dataclass(frozen=True, slots=True)
class SharedLedger(Document):
    """Record of a shared ledger.

    Attributes:
        directory: Directory of the study that holds the ledger, relative to this study's directory.
    """

    directory: str


@dataclass(frozen=True, slots=True)
class LeftSite(Document):
    """A site that left the study and whose records were deleted; neither its name nor its key is admitted again.

    Attributes:
        name: The site's name.
        key_sha256: SHA-256 of the site's node key.
    """

    name: str
    key_sha256: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """The directory of a study at the server.

    Attributes:
        root: The directory.
    """

    root: Path

    study_file = PathInside("study.toml")

    @property
    def books_dir(self) -> Path:
        """Directory that holds the ledger and its key: this study's, or that of the study whose ledger it shares."""
        path = self.root / LEDGER_RECORD
        if not path.exists():
            return self.root
        remedy = "restore it from a backup: it names the folder of the shared ledger"
        with naming_file(path, remedy=remedy):
            return self.root / SharedLedger.from_json(self._read(LEDGER_RECORD, remedy=remedy)).directory

    def share_ledger(self, directory: Path) -> None:
        """Record that the ledger is in another study's directory. This study must not have a ledger of its own.

        Args:
            directory: The other study's directory, which contains the ledger.
        """
        shared = SharedLedger(os.path.relpath(directory.resolve(), self.root.resolve()))
        self._write(LEDGER_RECORD, shared.to_json())

    ledger_file = PathInside("ledger.sqlite", of="books_dir")
    events_file = PathInside("events.jsonl")
    sealing_key_file = PathInside("keys/sealing.key")
    """Private key that decrypts the sites' codes; each study has its own."""
    signing_key_file = PathInside("keys/ledger.key", of="books_dir")
    """Private key that signs the ledger's heads; shared by all studies of the ledger."""
    flower_dir = PathInside("flower")
    """Folder that Flower's SuperLink and SuperExec use."""
    tls_dir = PathInside("tls")
    dashboard_tls_dir = PathInside("dashboard-tls")
    """Certificate and private key of the dashboard's own port; the dashboard holds no other secret."""
    authority_dir = PathInside("authority", of="tls_dir")
    """Folder of the consortium's certificate authority. Only renewals need it, so it is best kept elsewhere."""
    gateway_dir = PathInside("gateway")
    """Everything that the gateway reads besides the public objects: certificate, key, list of admitted nodes."""
    fleet_dir = PathInside("run", of="gateway_dir")
    """Folder of the Unix socket by which the gateway reaches SuperLink's interface for sites (its fleet API)."""
    relay_dir = PathInside("relay")
    """Folder of the Unix socket by which a ServerApp reaches the core."""
    nodes_file = PathInside("nodes.json", of="gateway_dir")
    """List of the admitted nodes, which the gateway reads."""
    node_keys_dir = PathInside("node-keys")
    """Public node keys of all sites that were ever admitted and not deleted."""
    labels_dir = PathInside("labels")
    student_dir = PathInside("student")
    codec_file = PathInside("codec.json")
    start_file = PathInside(START_FILE)
    """Weights of the public start, if the study has one; teachers and student may start from them."""
    bundle_dir = PathInside("bundle")
    decisions_file = PathInside("decisions.jsonl")
    """Decisions to reject or accept labels, copied from the dashboard's own file; training follows them."""
    scores_file = PathInside("report.json")
    """Scores of student and controls on the validation set."""
    reports_dir = PathInside("site-reports")
    """Reports that sites share about themselves, one JSON file for each site."""
    figures_dir = PathInside("figures")
    """Figures of the student that hospitals measured, one signed file for each site."""
    verdicts_dir = PathInside("verdicts")
    """Verdicts of hospitals on the student, one signed file for each site."""
    certificate_dir = PathInside("certificate")
    """Copy of the newest certificate that a command issued, which the dashboard shows."""
    evidence_dir = PathInside("evidence")
    """Masked codes that sites signed in sealed sums, one folder for each draw."""
    spoils_file = PathInside("spoiled-draw-accepted")
    """File with the row hash of the newest spoiled draw after which a person chose to continue the study."""
    stop_file = PathInside("stop-requested")
    """If this file exists, the run stops at its next safe point."""

    @property
    def objects(self) -> ObjectStore:
        return ObjectStore(self.objects_dir)

    objects_dir = PathInside("objects")

    def study(self) -> Study:
        """Return the study's terms.

        Raises:
            InvalidInput: If the directory holds no study, or its file is invalid.
        """
        return load_study(self.study_file)

    def public(self, *, codec: CodecRecord | None = None) -> PublicMaterial:
        """Return the study's public material: its terms, codec, public volumes and public pairs.

        Args:
            codec: The codec; by default the fitted one.

        Returns:
            The public material.

        Raises:
            InvalidInput: If no volumes are published, or if ``codec`` is not given and no codec is fitted.
        """
        return PublicMaterial(
            self.study(), codec or self.codec(), self.volumes(), self.objects, FilesInFolder(self.root), self.paired()
        )

    def sites(self) -> tuple[Site, ...]:
        """Return the registered sites, ordered by name.

        Raises:
            InvalidInput: If there are none yet.
        """
        sites = self._read_all("sites.json", Site.from_json, remedy="admit sites with `consilium provision approve`")
        return tuple(sorted(sites, key=lambda site: site.name))

    def registered(self) -> tuple[Site, ...]:
        """Return the registered sites, or none if there are none yet."""
        return self.sites() if (self.root / "sites.json").exists() else ()

    def admitted(self) -> tuple[Site, ...]:
        """Return the registered sites that are not revoked.

        A site is revoked if ``revoked.json`` names it, or if the list of admitted nodes lacks it. Earlier versions
        recorded a revocation only in that list. The list is ignored if it does not exist, as in a study that was never
        set up for a network, or if this process has no permission to read it, as the dashboard may have none.

        Raises:
            InvalidInput: If no site is registered yet.
        """
        revoked = self.revoked_names()
        sites = tuple(site for site in self.sites() if site.name not in revoked)
        if not os.access(self.nodes_file, os.R_OK):
            return sites
        from common.node_auth import read_admitted  # cryptography: no command's help needs it

        let_in = {node.site for node in read_admitted(self.nodes_file)}
        return tuple(site for site in sites if site.name in let_in)

    def admitted_count(self) -> int:
        """Return the number of registered sites that are not revoked; 0 if no site is registered yet."""
        return len(self.registered()) - len(self.revoked())

    def revoked(self) -> tuple[Site, ...]:
        """Return the registered sites that are revoked, or none if no site is registered yet."""
        registered = self.registered()
        admitted = {site.name for site in self.admitted()} if registered else set()
        return tuple(site for site in registered if site.name not in admitted)

    revoked_file = PathInside(REVOKED)
    """File with the names of the revoked sites. The dashboard reads it; earlier versions ignore it."""

    def revoked_names(self) -> frozenset[str]:
        """Return the names in :attr:`revoked_file`; an empty set if there is no such file.

        Raises:
            InvalidInput: If the file does not contain a list of names.
        """
        if not self.revoked_file.exists():
            return frozenset()
        found = self._read(REVOKED, remedy="restore it from a backup")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise InvalidInput(
                "list of revoked sites",
                value=str(self.revoked_file),
                limit="a JSON list of names",
                remedy="restore it from a backup",
            )
        return frozenset(found)

    def save_revoked(self, names: Collection[str]) -> None:
        """Write the list of revoked sites.

        Args:
            names: Their names.
        """
        self._write(REVOKED, sorted(names))

    def save_sites(self, sites: tuple[Site, ...]) -> None:
        """Write the list of registered sites.

        Args:
            sites: All registered sites.

        Raises:
            InvalidInput: If two sites have the same name, pool or node id.
        """
        self.check_sites(sites)
        self.save_records("sites.json", sites)

    @staticmethod
    def check_sites(sites: tuple[Site, ...]) -> None:
        """Check that no two sites have the same name, pool or node id.

        Args:
            sites: The sites.

        Raises:
            InvalidInput: If two sites share one of these.
        """
        for field in ("name", "pool", "node_id"):
            values = [getattr(site, field) for site in sites]
            if len(set(values)) != len(values):
                raise InvalidInput(
                    f"two sites have the same {field}",
                    value=sorted(map(str, values)),
                    limit=f"a different {field} for each site",
                )

    def left(self) -> tuple[LeftSite, ...]:
        """Return the sites that left the study and whose records were deleted; empty if there are none."""
        if not (self.root / LEFT).exists():
            return ()
        return self._read_all(LEFT, LeftSite.from_json, remedy="restore it from a backup")

    def volumes(self) -> tuple[str, ...]:
        """Return the content hashes of the public volumes, in query order.

        Raises:
            InvalidInput: If no volumes are published yet.
        """
        return self._read_all("public.json", check_hash, remedy="publish volumes with `consilium study publish`")

    def published(self) -> bool:
        """Whether public volumes are published."""
        return (self.root / "public.json").exists()

    def save_volumes(self, volumes: tuple[str, ...]) -> None:
        """Write the list of public volumes.

        Args:
            volumes: Content hash of each volume, in query order.
        """
        self._write("public.json", list(volumes))

    def paired(self) -> tuple[PairedFiles, ...]:
        """Return the files of the study's public pairs (public volumes with label maps); empty if it has none.

        Raises:
            InvalidInput: If ``codec.paired`` states a number above 0 and no public pairs are published yet.
        """
        if not self.study().codec.paired:
            return ()
        return self._read_all(
            PAIRED, PairedFiles.from_json, remedy="publish them with `consilium study publish --paired`"
        )

    def validation(self) -> tuple[PairedFiles, ...]:
        """Return the labelled public cases on which student and controls are scored; none if none were published."""
        if not (self.root / VALIDATION).exists():
            return ()
        return self._read_all(VALIDATION, PairedFiles.from_json, remedy="publish them again")

    def save_records(self, name: str, records: Iterable[Document]) -> None:
        """Write a file of the study that holds a list of records.

        Args:
            name: Name of the file, such as :data:`PAIRED`.
            records: All records of the list.
        """
        self._write(name, [record.to_json() for record in records])

    def codec(self) -> CodecRecord:
        """Return the record of the fitted codec.

        Raises:
            InvalidInput: If no codec is fitted yet.
        """
        return CodecRecord.from_json(self._read(self.codec_file.name, remedy="fit one with `consilium codec fit`"))

    def save_codec(self, codec: CodecRecord) -> None:
        """Write the record of the fitted codec.

        Args:
            codec: The record.
        """
        self._write(self.codec_file.name, codec.to_json())

    def forget_codec(self) -> None:
        self.codec_file.unlink(missing_ok=True)

    def endpoint(self) -> Endpoint:
        """Return address and ports of the server.

        Raises:
            InvalidInput: If no address of the server is stored yet.
        """
        copied = not (self.root / "endpoint.json").exists()  # the network's part of a server sees only flower/
        record = self._read(
            "flower/endpoint.json" if copied else "endpoint.json", remedy="set it with `consilium provision server`"
        )
        if isinstance(record, dict):
            record.pop("internal_host", None)  # written by an earlier version
        return Endpoint.from_json(record)

    def save_endpoint(self, endpoint: Endpoint) -> None:
        """Write the server's address and ports.

        Args:
            endpoint: Address and ports.
        """
        self._write("endpoint.json", endpoint.to_json())

    def port_keeper(self) -> Workspace:
        """Return the study whose gateway this study's sites connect to; it may be this study itself."""
        behind = (self.root / "endpoint.json").exists() and self.endpoint().behind
        return Workspace(self.root / behind) if behind else self

    def copy_endpoint(self) -> None:
        """Copy the server's address into ``flower/``, the only folder of the study that its network processes see."""
        self._write("flower/endpoint.json", self.endpoint().to_json())

    def run_id(self) -> int | None:
        """Return Flower's id of the run last submitted for this study; None if there is none.

        Raises:
            InvalidInput: If the file with the id is damaged.
        """
        path, remedy = self.root / "run.json", "restore it from a backup, or delete it"
        if not path.exists():
            return None
        with parsing("run.json holds no id of a run", value=str(path), remedy=remedy):
            return int(self._read(path.name, remedy=remedy)["run_id"])

    def save_run_id(self, run_id: int) -> None:
        """Write Flower's id of the run that was submitted for this study.

        Args:
            run_id: The id.
        """
        self._write("run.json", {"run_id": str(run_id)})

    def busy(self) -> bool:
        """Return whether a run holds the study's lock now."""
        self.check_there()
        return is_held(self.root / RUN_LOCK) is True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study's lock inside the block.

        The kernel frees the lock when the process ends, even if the process is killed.

        Files that are created inside the block cannot be read by other users. Event log, labels, student, bundle,
        evidence and site reports that earlier versions left readable for other users are closed to them. If the study's
        folder belongs to a group, the group keeps its access.

        Raises:
            StudyBusy: If another run holds the lock.
        """
        self.check_there()
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
            with suppress(FileNotFoundError, PermissionError):  # another user's file: only that user can close it
                if (mode := stat.S_IMODE(path.stat().st_mode)) & others:
                    path.chmod(mode & ~others)

    @contextmanager
    def changing_sites(self) -> Iterator[None]:
        """Hold the lock of the lists of sites inside the block, so that concurrent changes are not lost.

        It waits while another process holds the lock.
        """
        self.check_there()
        with exclusively(self.root / "sites.lock"):
            yield

    def check_there(self) -> None:
        """Refuse a directory that does not exist.

        Raises:
            InvalidInput: If it does not exist.
        """
        if not self.root.is_dir():
            raise InvalidInput(
                "directory of a study",
                value=str(self.root),
                limit="an existing directory",
                remedy="check the path, or create a study with `consilium study init`",
            )

    def _read(self, name: str, *, remedy: str) -> Any:
        self.check_there()
        return read_record(self.root / name, remedy=remedy)

    def _read_all(self, name: str, parse: Callable[[Any], T], *, remedy: str) -> tuple[T, ...]:
        """Read a file with a list of records."""
        found = self._read(name, remedy=remedy)
        with naming_file(self.root / name, remedy=remedy):
            if not isinstance(found, list):
                raise InvalidInput("file of a study", limit="a JSON list")
            return tuple(map(parse, found))

    def _write(self, name: str, value: object) -> None:
        write_json(self.root / name, value)
