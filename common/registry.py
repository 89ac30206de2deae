"""Resolves a registry's ``module:name`` and imports it when it is first used."""

from __future__ import annotations

import importlib
from typing import Any


def registered(target: str) -> Any:
    """The class or function ``module:name``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
