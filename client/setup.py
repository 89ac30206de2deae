"""Setting a site up from the consortium's startup kit: its directory, node key, policy and copy of the study.

Refuses a directory that already holds a site, and a kit that misses a part. The node's private key is made here and
never leaves; the consortium is sent the public one.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from client.cases import counts_for_server, has_trained
from client.daemons import write_link
from client.policy import load_site
from common.admission import JoinRequest, write_request
from common.canonical import check_name, checked_fields
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.site import SiteLedger
from common.objects import write_atomically
from common.pki import create_node_keys

START = "start.pt"
"""Weights made of public data, in the kit and in a site's directory."""


@dataclass(frozen=True, slots=True)
class SiteKit:
    """What a site is given: its name, the server's public keys and addresses, the root certificate and the study.

    A joint study's kit may also hold ``start_file``, weights made of public data that teachers begin from.
    """

    site: str
    sealing_key: str
    signing_key: str
    objects_url: str
    superlink: str
    root_certificate: Path
    study_file: Path
    start_file: Path

    @classmethod
    def load(cls, directory: Path) -> SiteKit:
        """Read a kit's directory: kit.json, ca.crt, study.toml."""
        try:
            record = json.loads((directory / "kit.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInput("startup kit", value=str(directory), limit="kit.json, ca.crt, study.toml") from error
        fields = checked_fields(
            record, dict.fromkeys(("site", "sealing_key", "signing_key", "objects_url", "superlink"), str)
        )
        check_name(fields["site"], what="site in the startup kit")
        kit = cls(
            **fields,
            root_certificate=directory / "ca.crt",
            study_file=directory / "study.toml",
            start_file=directory / START,
        )
        for path in (kit.root_certificate, kit.study_file):
            if not path.is_file():
                raise InvalidInput(
                    "startup kit misses a file", value=path.name, remedy="ask the consortium for a new kit"
                )
        return kit


def public_start(directory: Path) -> Path | None:
    """The site's copy of the weights teachers begin from, if its kit held any."""
    path = directory / START
    return path if path.is_file() else None


def create_site(directory: Path, *, pool: str, data: Path, kit: SiteKit) -> JoinRequest:
    """Lay out a site's directory and its request to the consortium; its caps start as the study's own budget."""
    if (directory / "site.toml").exists():
        raise InvalidInput("directory already holds a site", value=str(directory), remedy="choose another one")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users of the machine have no business in here
    keys = create_node_keys(directory / "node" / "keys", comment=kit.site)
    shutil.copyfile(kit.root_certificate, directory / "node" / "ca.crt")
    shutil.copyfile(kit.study_file, directory / "study.toml")
    if kit.start_file.is_file():
        shutil.copyfile(kit.start_file, directory / START)
    text = _site_toml(
        name=kit.site, pool=pool, data=os.path.relpath(data, directory), kit=kit, study=load_study(kit.study_file)
    )
    write_atomically(directory / "site.toml", text.encode())
    write_link(directory)
    return write_request(
        directory / "request.json",
        study=load_study(kit.study_file).id,
        site=kit.site,
        pool=pool,
        node_key=keys.private,
    )


def site_status(directory: Path) -> dict[str, object]:
    """What the site's own ledger says it has spent: plain facts for a person or a machine.

    ``shared`` holds the counts of its cases, only where its policy shares them and once it has trained.
    """
    config = load_site(directory)
    shared = counts_for_server(directory) if config.share.case_counts and has_trained(directory) else {}
    shared.pop("site", None)
    with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
        return {"site": config.site, **ledger.summary(), "shared": shared}


def _site_toml(*, name: str, pool: str, data: str, kit: SiteKit, study: Study) -> str:
    privacy = study.privacy
    values: dict[str, dict[str, object]] = {
        "": {"schema": 1, "site": name, "pool": pool, "data": data, "study": "study.toml"},
        "server": {
            "sealing_key": kit.sealing_key,
            "signing_key": kit.signing_key,
            "objects_url": kit.objects_url,
            "superlink": kit.superlink,
            "root_certificates": "node/ca.crt",
        },
        "caps": {
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "accountant": privacy.accountant,
            "unit": privacy.unit,
            "relation": privacy.relation,
            "queries_per_day": 1000,
        },
    }
    lines = ["# A hospital's policy. Everything here is the site's own to change; the server cannot."]
    for section, table in values.items():
        lines += ["", f"[{section}]"] if section else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"
