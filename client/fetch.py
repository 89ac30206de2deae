"""Public objects at a site: fetched once from the server by content hash, verified, cached.

Refuses an answer whose SHA-256 is not the one asked for, and any connection whose certificate the site's own root does
not vouch for.
"""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request

from client.policy import SiteConfig
from common.canonical import check_hash, sha256_bytes
from common.errors import InvalidInput
from common.objects import MAX_OBJECT_BYTES, ObjectStore

TIMEOUT_S = 30.0
TRIES = 5


class PublicObjects:
    """Reads through the site's cache to ``GET {objects_url}/public/{sha256}``."""

    def __init__(self, config: SiteConfig) -> None:
        self._store = ObjectStore(config.root / "cache")
        self._url = config.server.objects_url.rstrip("/")
        self._tls = ssl.create_default_context(cafile=str(config.path(config.server.root_certificates)))

    def get(self, name: str) -> bytes:
        """The object's bytes; :class:`InvalidInput` when it cannot be had or is not what its name says."""
        if name in self._store:
            return self._store.get(name)
        data = self._download(check_hash(name))
        if sha256_bytes(data) != name:
            raise InvalidInput("public object does not match its hash", value=name, remedy="tell the server's operator")
        self._store.put(data)
        return data

    def _download(self, name: str) -> bytes:
        for remaining in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(
                    f"{self._url}/public/{name}", timeout=TIMEOUT_S, context=self._tls
                ) as reply:
                    return bytes(reply.read(MAX_OBJECT_BYTES + 1))
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                if remaining == 0 or (isinstance(error, urllib.error.HTTPError) and error.code == 404):
                    raise InvalidInput(
                        "public object cannot be fetched", value=name, remedy="check the network"
                    ) from error
                time.sleep(1.0)
        raise AssertionError("unreachable")
