"""Provides example study files by name, from which a person writes a study's own file.

`consilium study template NAME` prints one. An unknown name is refused.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import InvalidInput

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names of the templates, sorted.

    >>> all(template(name) for name in names())
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def template(name: str) -> str:
    """Return the text of an example study file, with comments.

    Args:
        name: One of the names that :func:`names` returns.

    Returns:
        TOML text that ``common.config.parse_study`` reads.

    Raises:
        InvalidInput: If there is no such template.
    """
    if name not in names():
        raise InvalidInput("study template", value=name, limit=", ".join(names()))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
