"""Imports the modules of registries (``module:name``) and optional packages on first use."""

from __future__ import annotations

import importlib
from typing import Any

from common.errors import InvalidInput


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


def optional(module: str, *, user: str, install: str) -> Any:
    """Import a module of a package that only some installations have.

    Args:
        module: The module.
        user: What needs the package, for the error.
        install: Arguments of ``pip install``, for the error.

    Returns:
        The module.

    Raises:
        InvalidInput: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(
            f"{user} needs the package {error.name or module}, which is not installed",
            remedy=f"pip install {install}",
        ) from error
