"""Prints the id of the node that SuperLink lists with a public key: ``python registered_node.py KEY_FILE CONNECTION``.

Flower's command that lists nodes prints no keys. This program therefore sends SuperLink the same request as that
command, in a process of its own, and prints JSON of the same form. ``daemons.register_node`` runs it. Errors of
Flower's client are not caught.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.engine import (
    ListNodesRequest,
    init_http_client_from_connection,
    read_superlink_connection,
    try_load_public_key,
)

if __name__ == "__main__":
    wanted = try_load_public_key(Path(sys.argv[1]))
    client = init_http_client_from_connection(read_superlink_connection(sys.argv[2]))
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    finally:
        client.close()
    found = [str(node.node_id) for node in nodes if node.public_key == wanted and node.status != "unregistered"]
    sys.stdout.write(json.dumps({"success": True, "node-ids": found}) + "\n")
