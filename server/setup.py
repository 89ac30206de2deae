"""Setting a study up at the server: its directory, keys, ledger, public volumes, codec and sites.

Refuses a directory that already holds a study, a public volume that cannot be read on the study's grid, a label map
that belongs to a public volume's case, and a site registered twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.canonical import sha256_file
from common.config import Study, render_study
from common.errors import InvalidInput
from common.ledger.keys import (
    create_sealing_key,
    create_signing_key,
    load_sealing_key,
    load_signing_key,
    public_hex,
    public_pem,
)
from common.ledger.store import Ledger, PoolDeclaration
from common.objects import write_atomically
from common.privacy.calibration import study_mechanism
from common.privacy.mechanism import GRID_BITS
from server.progress import OnStage
from server.workspace import CodecRecord, Site, Workspace


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The public halves of the server's keys, in hex, for the sites' startup kits."""

    sealing_key: str
    signing_key: str


def create_study(workspace: Workspace, study: Study) -> None:
    """Lay out a study's directory with its keys and an empty ledger that knows the study."""
    if workspace.study_file.exists():
        raise InvalidInput("directory already holds a study", value=str(workspace.root), remedy="choose another one")
    workspace.root.mkdir(parents=True, exist_ok=True)
    workspace.sealing_key_file.parent.mkdir(mode=0o700, exist_ok=True)
    create_sealing_key(workspace.sealing_key_file)
    signing_key = create_signing_key(workspace.signing_key_file)
    with Ledger.create(workspace.ledger_file, signing_key=signing_key) as ledger:
        ledger.register_study(study)
    write_atomically(workspace.study_file, render_study(study).encode())


def server_keys(workspace: Workspace) -> ServerKeys:
    """The server's public keys."""
    return ServerKeys(
        sealing_key=public_hex(load_sealing_key(workspace.sealing_key_file)),
        signing_key=public_hex(load_signing_key(workspace.signing_key_file)),
    )


def publish_volumes(workspace: Workspace, images: Sequence[Path]) -> tuple[str, ...]:
    """Put the public volumes into the object store, in the given order; each must load on the study's grid."""
    from common.data.volume import volume_from_bytes

    study = workspace.study()
    volumes = []
    for image in images:
        data = image.read_bytes()
        volume_from_bytes(data, study.data)
        volumes.append(workspace.objects.put(data))
    if len(set(volumes)) != len(volumes):
        raise InvalidInput("public volumes", limit="no volume twice", remedy="remove the duplicate")
    needed = 1 if study.codec.joint else study.privacy.planned_queries
    if len(volumes) < needed:
        raise InvalidInput(
            "public volumes",
            value=len(volumes),
            limit=f"at least {needed}",
            remedy="publish more volumes or plan fewer queries",
        )
    workspace.save_volumes(tuple(volumes))
    return tuple(volumes)


def fit_study_codec(
    workspace: Workspace,
    label_maps: Sequence[Path],
    *,
    sites: int,
    private_hashes: Collection[str] = (),
    on_stage: OnStage | None = None,
) -> CodecRecord:
    """Fit the study's codec on public label maps for the planned noise on the mean code of ``sites`` sites.

    For a joint query, also train the public start and make the query's frame; the volumes must be published before.
    ``private_hashes``: SHA-256 of label map files known to be of private, validation or test cases; a match is refused.
    """
    from common.codecs.base import fit_codec
    from common.data.volume import load_label

    study = workspace.study()
    if not label_maps:
        raise InvalidInput("public label maps", value=0, limit="at least 4")
    maps = [load_label(path, study.data) for path in label_maps]
    voters = sites * study.privacy.voters_per_site
    noise_std = float(study_mechanism(study, dimension=1).noise_std) / 2**GRID_BITS / voters
    codec = fit_codec(
        study,
        maps,
        noise_std=noise_std,
        map_hashes=[sha256_file(path) for path in label_maps],
        private_hashes=private_hashes,
    )
    record = CodecRecord(sha256=workspace.objects.put(codec.to_bytes()), dimension=codec.dimension)
    workspace.save_codec(record)
    if study.codec.joint:
        from server.joint_run import prepare  # torch, where a student is trained anyway

        prepare(workspace, sites=sites, on_stage=on_stage)
    return record


def add_site(workspace: Workspace, site: Site) -> None:
    """Record a registered site and declare its patient pool with the study's budget."""
    workspace.save_sites((*workspace.registered(), site))
    privacy = workspace.study().privacy
    declaration = PoolDeclaration(
        pool=site.pool,
        site=site.name,
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
    )
    with Ledger.open(workspace.ledger_file, signing_key=load_signing_key(workspace.signing_key_file)) as ledger:
        ledger.declare_pool(declaration)


def write_kit(
    workspace: Workspace, directory: Path, *, site: str, superlink: str, objects_url: str, authority: Path
) -> None:
    """A site's startup kit: kit.json (name, public keys, addresses), ca.crt and study.toml; nothing in it is secret.

    consortium.pem is the signing key's public half once more, for checking the offline bundle with openssl.
    For a joint study whose teachers have the student's network also start.pt, the public start.
    """
    keys = server_keys(workspace)
    kit = {
        "objects_url": objects_url,
        "sealing_key": keys.sealing_key,
        "signing_key": keys.signing_key,
        "site": site,
        "superlink": superlink,
    }
    write_atomically(directory / "kit.json", (json.dumps(kit, indent=1) + "\n").encode())
    write_atomically(directory / "consortium.pem", public_pem(load_signing_key(workspace.signing_key_file)))
    write_atomically(directory / "ca.crt", authority.read_bytes())
    write_atomically(directory / "study.toml", workspace.study_file.read_bytes())
    study = workspace.study()
    if workspace.start_file.exists() and study.teacher.channels == study.student.channels:
        write_atomically(directory / "start.pt", workspace.start_file.read_bytes())
