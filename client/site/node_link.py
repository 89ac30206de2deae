"""Writes ``node/link.json``: the values of ``site.toml`` that a site's node needs.

`site init` and `site up` call it. The node's process may run as another user, who must not read ``site.toml`` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from client.policy import load_site
from common.document import Document
from common.objects import write_json


@dataclass(frozen=True, slots=True)
class NodeLink(Document):
    """The content of ``node/link.json``: the site's name and the server's address."""

    site: str
    superlink: str


def write_link(site_dir: Path) -> None:
    """Write ``node/link.json`` from ``site.toml``.

    Args:
        site_dir: The site's directory.
    """
    config = load_site(site_dir)
    link = NodeLink(config.site, config.server.superlink)
    write_json(site_dir / "node" / "link.json", link.to_json())
