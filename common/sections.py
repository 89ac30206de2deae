"""Converts a section of a TOML file to its frozen dataclass, and back.

Called for studies and site policies. Refuses unknown and missing keys and values of another type; the error names the
key.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, cast

from common.errors import InvalidInput
from common.reading import parsing


class TomlSection:
    """One section of a study's file, a frozen dataclass.

    Attributes:
        LATER: Names of fields that later versions added.
    """

    __slots__ = ()
    LATER: ClassVar[tuple[str, ...]] = ()

    def to_table(self) -> dict[str, Any]:
        """Return the section's keys and values, but omit each field in :attr:`LATER` that has its default value.

        So a version that adds a field does not change the hashes and ids of existing sections.
        """
        return {
            one.name: value
            for one in dataclasses.fields(cast(Any, self))
            if (value := getattr(self, one.name)) != one.default or one.name not in self.LATER
        }

    def __repr__(self) -> str:
        """Return the call that makes the section; the identities of trainings contain it."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_table().items())})"


def read_section(kind: type[Any], table: object, *, where: str) -> Any:
    """Build a frozen dataclass from a TOML table.

    Args:
        kind: The dataclass.
        table: The parsed table.
        where: Name of the section, for errors.

    Returns:
        An instance of ``kind``.

    Raises:
        InvalidInput: For an unknown or missing key or a value of another type.
    """
    if not isinstance(table, dict):
        raise InvalidInput(f"section [{where}]", value=table, limit="a TOML table")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    no_unknown(table, set(fields), where=where)
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name not in table:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise InvalidInput(f"{where}.{name} is missing", remedy="add the key")
            continue
        values[name] = _typed(table[name], str(spec.type), where=f"{where}.{name}")
    with parsing(f"[{where}]", limit="the values listed in docs/configuration.md"):
        return kind(**values)


def check_types(config: Any, *, where: str) -> None:
    """Check that each field of a section has the type of its annotation, as if it was read from a file.

    Called first when a section is made. A list becomes a tuple, and an integer given for a float becomes a float, so
    that a section made in Python has the id of the same section in a file. A set is refused, because it has no order.

    Args:
        config: The section, a frozen dataclass.
        where: Name of the section, for errors.

    Raises:
        InvalidInput: For a value of another type.
    """
    for spec in dataclasses.fields(config):
        given = getattr(config, spec.name)
        object.__setattr__(config, spec.name, _typed(given, str(spec.type), where=f"{where}.{spec.name}"))


def check_ranges(config: Any, ranges: Mapping[str, tuple[float, float]], *, where: str) -> None:
    """Check that fields of a section are within their ranges.

    Args:
        config: The section.
        ranges: Least and largest value of each field to check.
        where: Name of the section, for errors.

    Raises:
        InvalidInput: For a value outside its range.
    """
    for name, (least, most) in ranges.items():
        if not least <= getattr(config, name) <= most:
            raise InvalidInput(f"{where}.{name}", value=getattr(config, name), limit=f"{least} to {most}")


def _typed(value: object, annotation: str, *, where: str) -> object:
    if annotation.startswith("tuple["):
        if not isinstance(value, list | tuple):
            raise InvalidInput(where, value=value, limit="a list")
        return tuple(_typed(item, annotation[6:-1].split(",")[0], where=where) for item in value)
    match annotation:
        case "int":
            ok = isinstance(value, int) and not isinstance(value, bool)
        case "float":
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
                return float(value)  # neither NaN nor infinite, and no integer beyond every float
            ok = False
        case "bool":
            ok = isinstance(value, bool)
        case _:
            ok = isinstance(value, str)
    if not ok:
        raise InvalidInput(where, value=value, limit=_KINDS.get(annotation, "text"))
    return value


_KINDS = {"int": "an integer", "float": "a finite number", "bool": "true or false"}


def no_unknown(table: dict[str, Any], known: set[str], *, where: str) -> None:
    """Refuse a table with an unknown key.

    Args:
        table: The parsed table.
        known: Known keys.
        where: Name of the section, for the error.

    Raises:
        InvalidInput: With the nearest known key as a remedy.
    """
    unknown = sorted(table.keys() - known)
    if unknown:
        limit = ", ".join(sorted(known))
        raise InvalidInput(f"unknown key in [{where}]", value=unknown[0], limit=limit, remedy=meant(unknown[0], known))


def meant(word: str, known: Collection[str]) -> str:
    """Return a remedy for an unknown word: a question with the nearest known word, or the advice to remove the word.

    Args:
        word: The unknown word.
        known: Known words.

    Returns:
        The remedy.

    >>> meant("epslion", {"epsilon", "delta"}), meant("colour", {"epsilon", "delta"})
    ("did you mean 'epsilon'?", 'take it out')
    """
    near = get_close_matches(str(word)[:64], sorted(known), n=1)
    return f"did you mean '{near[0]}'?" if near else "take it out"
