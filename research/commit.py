"""Returns the commit of this clone, which a measurement's record states."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """Return the commit, marked ``-dirty`` if a file was changed that is not a record of results.

    Returns:
        The abbreviated commit; ``unknown`` outside a repository.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    return (_git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def _git(*words: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
