"""Names that a study gives to labels, channels and regions: one printable line each; a region is a union of labels.

Refuses names that MONAI's configuration language would take for something to run, and regions that leave a label out.
"""

from __future__ import annotations

from common.errors import InvalidInput


def check_text(text: object, *, what: str) -> str:
    """A name from a study that is shown to people and written into configuration files: one short printable line.

    InvalidInput for anything else, and for what MONAI's configuration language would take for an expression (``$``),
    a reference (``@``), a file to read (``%``), a path of its own (``#``, ``::``) or a key of its own (``_``).
    """
    plain = isinstance(text, str) and 1 <= len(text) <= 64 and text.isprintable() and not text.startswith("_")
    if not plain or any(sign in str(text) for sign in ("$", "@", "%", "#", "::")):
        raise InvalidInput(
            what, value=str(text)[:80], limit="1 to 64 printable characters, none of $ @ % # ::, no '_' at the start"
        )
    return str(text)


def region_names(regions: tuple[str, ...]) -> tuple[str, ...]:
    """The names in ``"name = label + label"``."""
    return tuple(text.partition("=")[0].strip() for text in regions)


def region_members(regions: tuple[str, ...], labels: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The label values of every region; InvalidInput for a label that is none."""
    return tuple(tuple(_value(name, labels) for name in text.partition("=")[2].split("+")) for text in regions)


def check_regions(regions: tuple[str, ...], labels: tuple[str, ...]) -> None:
    """InvalidInput unless every structure is in a region, and no region has a name or a structure twice."""
    names, members = region_names(regions), region_members(regions, labels)
    for name, values in zip(names, members, strict=True):
        check_text(name, what="name in data.regions")
        if 0 in values or len(set(values)) != len(values):
            raise InvalidInput("data.regions", value=name, limit="structures, none of them twice")
    lost = [label for value, label in enumerate(labels) if value and all(value not in own for own in members)]
    if regions and (lost or len(set(names)) != len(names)):
        raise InvalidInput("data.regions", value=lost or names, limit="every structure in a region, no name twice")


def _value(name: str, labels: tuple[str, ...]) -> int:
    if name.strip() not in labels:
        raise InvalidInput("data.regions", value=name.strip(), limit=f"name = label + label of {labels}")
    return labels.index(name.strip())
