"""The ``consilium`` command: joins the server's and the site's commands, and runs the demo with both on one host.

Refuses to be imported where ``common``, ``client`` or ``server`` would come from somewhere else: other distributions
use these names too, and whoever is first on the path would run with a ledger's key.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

for _name in ("common", "client", "server"):
    _spec, _here = find_spec(_name), Path(__file__).resolve().parent.parent
    if _spec is None or _spec.origin is None or Path(_spec.origin).resolve().parent.parent != _here:
        raise ImportError(
            f"the package {_name!r} beside Consilium's is {_spec and _spec.origin}, expected below {_here}; to fix: "
            "install Consilium into a virtual environment of its own, and start it where no folder has this name"
        )
