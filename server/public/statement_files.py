"""Names the files of two signed statements about a study: on its student, and on its sites' keys.

``postprocess.bundle`` and `consilium provision` write these files, and ``objects_app`` serves them. A study id that is
not 64 hexadecimal digits is refused.
"""

from __future__ import annotations

from pathlib import Path

from common.canonical import check_hash

STUDENTS, PEERS = "students", "peers"


def said_file(objects: Path, what: str, study_id: str) -> Path:
    """Return the file of a statement about a study.

    Args:
        objects: Directory of the object store.
        what: Subject of the statement, :data:`STUDENTS` (the student) or :data:`PEERS` (the sites' keys).
        study_id: The study's id.

    Returns:
        The file's path; the file may not exist.

    Raises:
        InvalidInput: If the id is not 64 hexadecimal digits.
    """
    return objects / what / check_hash(study_id)
