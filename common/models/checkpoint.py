"""Stores the state of an unfinished training, so that it can be continued.

The file also holds facts that identify the training, such as a hash of its data and recipe. A training with other facts
does not read the state.
"""

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
    """Write a training's state. A crash leaves either the old file or the new one; only the owner can read it.

    Args:
        path: The checkpoint file.
        state: State to store, as ``torch.save`` takes it.
        run: Facts that identify the training.
    """
    stream = io.BytesIO()
    torch.save({**run, **state}, stream)
    write_atomically(path, stream.getvalue(), mode=0o600)


def load_checkpoint(path: Path | None, *, run: Mapping[str, object]) -> dict[str, Any] | None:
    """Read the state that :func:`save_checkpoint` wrote for the same training.

    Args:
        path: The checkpoint file; None if there is none.
        run: Facts that identify the training.

    Returns:
        The state; None if there is no file, it is unreadable, or it belongs to another training.
    """
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
