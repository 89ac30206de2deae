"""The public Python interface: accounting, calibration, noise, codecs, ledger verification and the planner.

The names are those of ``consilium.api``. Each is loaded when it is first used, so importing this package alone loads
nothing. ``__version__`` is the version of the release.

Importing this package fails if ``common``, ``client`` or ``server`` come from another distribution than this one.
Other distributions also have packages of these names, and their code would run with access to a ledger's key.
"""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consilium.api import *  # noqa: F403

    __version__: str

if "USER" not in os.environ:  # importing MONAI fails for a user id without a name, as Kubernetes gives them
    os.environ["USER"] = str(os.getuid())
    with suppress(KeyError):
        os.environ["USER"] = pwd.getpwuid(os.getuid()).pw_name

for _name in ("common", "client", "server"):
    _spec, _here = find_spec(_name), Path(__file__).resolve().parent.parent
    if _spec is None or _spec.origin is None or Path(_spec.origin).resolve().parent.parent != _here:
        raise ImportError(
            f"the package {_name!r} is loaded from {_spec and _spec.origin}, expected below {_here}; to fix: install "
            "Consilium into a virtual environment of its own, and start it from a folder without a package of this name"
        )


if not TYPE_CHECKING:  # otherwise a type checker would accept any name as public

    def __getattr__(name: str) -> Any:
        """Return a public name of this package, ``__all__`` or ``__version__``, loaded at its first use (PEP 562)."""
        if name == "__version__":
            return import_module("common").__version__
        if name == "__all__" or not name.startswith("_"):
            api = import_module("consilium.api")
            if name == "__all__" or name in api.__all__:
                return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__version__"]
