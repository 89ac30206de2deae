"""What a registry's ``module:name`` stands for, imported when it is asked for and not before."""

from __future__ import annotations

import importlib
from typing import Any


def registered(target: str) -> Any:
    """The class or function ``module:name``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
