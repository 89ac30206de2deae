"""Builds a study on disk, with its sites trained, for tests over real Flower daemons."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.ledger.site_ledger import SiteLedger
from client.training.private.settings import PrivateSettings
from common.config import CodecConfig, CollectionConfig, DataConfig, GateConfig, PrivacyConfig, Study, TrainingConfig
from common.data.msd import write_dataset
from common.data.synthetic import study_data, write_phantoms
from common.privacy.mechanism import GRID_BITS
from consilium.demo.federation import Federation, write_server, write_sites
from consilium.demo.training import train_all
from server.ledger.server_ledger import Ledger
from server.public.public_files import PEERS, said_file
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.commands import run_here
from tests.studies import made_study
from tests.waiting import events_of, until
from tests.worlds import make_privacy

SITES, QUERIES, PATIENTS = 3, 6, 2
CHUNK = 1 << 26
NO_GATE = GateConfig()
DATA = study_data(2)
RECIPE = TrainingConfig(channels=(4, 8), steps=4)
CODEC = CodecConfig(augmentations=20, max_dimension=8)
PRIVACY = make_privacy(planned_queries=QUERIES)


class OfStudy:
    """Reads a study's directory: its answers, events and state."""

    workspace: Workspace

    def ledger(self) -> Ledger:
        return Ledger.open(self.workspace.ledger_file)

    def answers(self) -> dict[str, bytes]:
        with self.ledger() as ledger:
            return {a.query.id: a.noisy_sum.tobytes() for a in ledger.answers(self.workspace.study().id)}

    def events(self, kind: str) -> list[dict]:
        return events_of(self.workspace.events_file, kind)


@dataclass
class Road(OfStudy):
    root: Path
    workspace: Workspace
    sites: dict[str, Path]
    federation: Federation

    @property
    def peers_file(self) -> Path:
        """Return the list of hospitals and keys that the server gives."""
        return said_file(self.workspace.objects_dir, PEERS, self.workspace.study().id)

    def disclosed(self, name: str, draw: str, auditor: Path) -> str:
        """Let a hospital disclose a draw to an auditor; return the file."""
        out = str(self.root / f"{name}.disclosure")
        done = run_here(
            *("site", "disclose", draw, "--to", str(auditor / "auditor.json"), "--yes"),
            *("--site-dir", str(self.sites[name]), "--out", out),
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"would have spent ε = [\d.]+", done.stdout)
        return out

    def wait(self, kind: str, *, timeout_s: float = 600.0) -> dict:
        lives = lambda: self.federation.group.check() is None  # noqa: E731
        return until(lambda: self.events(kind), f"a {kind} event", timeout_s=timeout_s, alive=lives)[-1]

    def consilium(self, *arguments: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", "from consilium.cli.main import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def memory_with_one_reply(road: Road, read: Callable[[int], bytes] | None = None) -> bytes:
    """Return the core's memory while it has the codes of the first hospital only. The other workers are stopped
    meanwhile.
    """
    road.wait("batch-dispatched")
    workers = [daemon for daemon in road.federation.group.daemons if daemon.spec.role == "worker"]
    others = [daemon.pid for daemon in workers if daemon.spec.name != next(iter(road.sites))]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        road.wait("reply-received")
        assert len(road.events("reply-received")) == 1
        return (read or memory_of)(road.events("run-started")[-1]["pid"])
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def files_now(folders: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yield every file below the folders, with its content, while daemons may write there.

    A file that disappears before it is read is left out. SQLite creates and removes its -wal and -shm files.
    """
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        try:
            if path.is_file():
                yield path, path.read_bytes()
        except FileNotFoundError:
            continue


def known_codes(sites: Iterable[Path], queries: Iterable[str]) -> list[NDArray[np.int64]]:
    """Return the codes of these sites' ledgers that are not zero."""
    codes, wanted = [], list(queries)
    for directory in sites:
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            codes += [code for query in wanted if (code := ledger.code(query)) is not None and code.any()]
    return codes


def spellings(code: NDArray[np.int64]) -> tuple[bytes, ...]:
    """Return the byte strings that a code may be stored as: as integers or in units of C, as numbers or as text."""
    real = code / 2.0**GRID_BITS
    raw = [code.astype(kind).tobytes() for kind in ("<i8", ">i8", "<i4", ">i4", "<f8", ">f8")]
    raw += [real.astype(kind).tobytes() for kind in ("<f8", ">f8", "<f4", ">f4")]
    texts = [separator.join(map(str, one.tolist())).encode() for one in (code, real) for separator in (",", ", ", " ")]
    # A code may begin at any byte of a base64 group.
    inside = [base64.b64encode(one[skip:])[2:-4] for one in raw[:2] for skip in range(3)]
    return (*raw, *texts, *inside, *(one.hex().encode() for one in raw[:2]))


def found_in(content: bytes, codes: Iterable[NDArray[np.int64]]) -> bool:
    """Return whether the content contains one of the codes in any spelling.

    All codes are sought in one pass: first four bytes of each spelling at every position, then the whole spelling
    there.
    """
    anchors: dict[int, list[tuple[bytes, int]]] = {}
    maybe = np.zeros(1 << 16, dtype=bool)
    for spelling in {one for code in codes for one in spellings(code)}:
        place = max(range(len(spelling) - 3), key=lambda i: len(set(spelling[i : i + 4])))
        word = int.from_bytes(spelling[place : place + 4], "little")
        anchors.setdefault(word, []).append((spelling, place))
        maybe[_slot(np.array([word], dtype=np.uint32))] = True
    words_sought = np.array(list(anchors), dtype=np.uint32)
    for start in range(0, len(content), CHUNK):
        for offset in range(start, min(start + 4, len(content) - 3)):
            count = (min(start + CHUNK + 3, len(content)) - offset) // 4
            words = np.frombuffer(content, dtype="<u4", count=count, offset=offset)
            near = np.flatnonzero(maybe[_slot(words)])
            for at in near[np.isin(words[near], words_sought)]:
                for spelling, place in anchors[int(words[at])]:
                    begin = offset + 4 * int(at) - place
                    if begin >= 0 and content.startswith(spelling, begin):
                        return True
    return False


def _slot(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return (words * np.uint32(2654435761)) >> np.uint32(16)


def memory_of(pid: int) -> bytes:
    """Return the present content of a process's writable memory, without empty pages."""
    found = []
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if not rights.startswith("rw") or "[v" in line:
                continue
            start, end = (int(edge, 16) for edge in span.split("-"))
            memory.seek(start)
            pages = np.frombuffer(memory.read(end - start), dtype=np.uint64).reshape(-1, 512)
            found.append(pages[pages.any(axis=1)].tobytes())
    return b"".join(found)


def build(
    root: Path,
    names: Sequence[str],
    *,
    collection: CollectionConfig,
    privacy: PrivacyConfig = PRIVACY,
    codec: CodecConfig = CODEC,
    private: PrivateSettings | None = None,
    patients: int = PATIENTS,
    gate: GateConfig = NO_GATE,
    data: DataConfig = DATA,
) -> tuple[Workspace, dict[str, Path]]:
    """Make a study with its codec and volumes, and sites with trained teachers. No daemon is started.

    ``private`` holds the settings of the teachers' private training, if they are trained privately.
    """
    phantoms = write_phantoms(root / "all", cases=len(names) * patients + privacy.planned_queries + 8, seed=1)
    cases = list(phantoms.cases)
    for k, name in enumerate(names):
        part = cases[k * patients : (k + 1) * patients]
        write_dataset(
            root / "data" / name,
            name=name,
            labels=phantoms.labels,
            channels=phantoms.channels,
            cases=part,
            synthetic=True,
        )
    rest = cases[len(names) * patients :]
    study = Study(
        name="road",
        data=data,
        privacy=privacy,
        codec=codec,
        teacher=RECIPE,
        student=RECIPE,
        collection=collection,
        gate=gate,
    )
    workspace = made_study(root / "server", study)
    setup.publish_volumes(workspace, [case.image for case in rest[: privacy.planned_queries]])
    setup.fit_study_codec(workspace, [case.label for case in rest[privacy.planned_queries :]], sites=len(names))
    write_server(workspace)
    sites = write_sites(workspace, root / "sites", names=names, data=root / "data")
    train_all(sites, seed=0, processes=1, on_steps=lambda done, total: None, private=private)
    return workspace, sites
