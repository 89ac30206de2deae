"""Computes the hashes of label files and of the student's weights, and caches them until a file changes.

The service creates it; the Labels page uses it.
"""

from __future__ import annotations

from pathlib import Path

from common.canonical import sha256_file
from server.study.workspace import Workspace


class LabelFiles:
    """Cached SHA-256 hashes of a study's label files and of its student's weights.

    Args:
        workspace: The study's directory.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._known: dict[Path, tuple[int, str]] = {}

    def hash(self, volume: str) -> str | None:
        """Return the SHA-256 of a volume's label file.

        Args:
            volume: SHA-256 of the volume.

        Returns:
            The hash in hexadecimal; None before the label is decoded.
        """
        return self._hash(self._workspace.labels_dir / f"{volume}.npz")

    def student(self) -> str:
        """Return the SHA-256 of the student's weights; an empty text before it is trained."""
        return self._hash(self._workspace.student_dir / "weights.pt") or ""

    def _hash(self, path: Path) -> str | None:
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = (stamp, sha256_file(path))
            self._known[path] = known
        return known[1]
