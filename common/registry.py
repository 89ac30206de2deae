"""Resolves an entry ``module:name`` of a registry, importing the module on first use."""

from __future__ import annotations

import importlib
from typing import Any


def registered(target: str) -> Any:
    """Return the class or function of a registry's entry.

    Args:
        target: ``module:name``.

    Returns:
        The object.

    >>> registered("math:sqrt")(4.0)
    2.0
    """
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
