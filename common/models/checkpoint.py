"""Stores the state of an interrupted training, which only the same training reads again."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.objects import write_atomically

log = logging.getLogger(__name__)


def save_checkpoint(path: Path, state: Mapping[str, Any], *, run: Mapping[str, object]) -> None:
    """Write ``state`` under the name of its ``run``, so that a crash leaves the old file or the new one; mode 0600."""
    stream = io.BytesIO()
    torch.save({**run, **state}, stream)
    write_atomically(path, stream.getvalue(), mode=0o600)


def load_checkpoint(path: Path | None, *, run: Mapping[str, object]) -> dict[str, Any] | None:
    """The state that :func:`save_checkpoint` wrote for this ``run``; None where there is none, or none to be read."""
    if path is None or not path.exists():
        return None
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        fits = all(saved[name] == value for name, value in run.items())
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError, TypeError):
        log.warning("checkpoint=unreadable starting_from=0")
        return None
    if not fits:
        log.warning("checkpoint=of_another_run starting_from=0")
        return None
    return {name: value for name, value in saved.items() if name not in run}
