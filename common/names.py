"""Checks and compares the names that a study gives to labels, channels and regions; a region is a union of labels.

Called when a study or a bundle is read, and when a site's names are matched to a study's. Refuses names that MONAI's
configuration language would interpret, and regions that leave a label out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

from common.errors import InvalidInput


def check_text(text: object, *, what: str) -> str:
    """Return a name if it is one short printable line that is safe in MONAI's configuration files.

    Args:
        text: 1 to 64 printable characters.
        what: What the name is for, in the words of an error.

    Returns:
        The text.

    Raises:
        InvalidInput: For anything else, and for characters with a meaning in MONAI's configuration language: ``$`` for
            an expression, ``@`` for a reference, ``%`` for a file, ``#`` and ``::`` for a path, ``_`` at the start for
            a key of its own.
    """
    plain = isinstance(text, str) and 1 <= len(text) <= 64 and text.isprintable() and not text.startswith("_")
    if not plain or any(sign in str(text) for sign in ("$", "@", "%", "#", "::")):
        raise InvalidInput(
            what, value=str(text)[:80], limit="1 to 64 printable characters, none of $ @ % # ::, no '_' at the start"
        )
    return str(text)


def is_utf8(name: str) -> bool:
    r"""Return whether a name can be stored; Python reads file names that are not UTF-8 as unpaired surrogates.

    Args:
        name: The name.

    Returns:
        False if it contains an unpaired surrogate.

    >>> is_utf8("M\u00fcller"), is_utf8("M\udcfcller")
    (True, False)
    """
    return not any("\ud800" <= character <= "\udfff" for character in name)


def comparable(name: str) -> str:
    """Return a label's name in a form for comparison, without differences in letter case, Unicode form or separators.

    Args:
        name: The name.

    Returns:
        The name in lower case, with one blank between words.

    >>> comparable("Left_Hippocampus "), comparable("left-hippocampus")
    ('left hippocampus', 'left hippocampus')
    """
    return re.sub(r"[\s_-]+", " ", _folded(name)).strip()


_SAME = {"t1w": "t1", "t1n": "t1", "cet1w": "t1c", "t1ce": "t1c", "t1gd": "t1c", "t1wce": "t1c"} | {
    "t2w": "t2",
    "t2f": "flair",
    "t2flair": "flair",
}
"""Other names of the same contrasts in MSD, BIDS, nnU-Net and BraTS."""


def contrast(name: str) -> str:
    """Return a channel's name in a form for comparison: letters and digits only, one name for each common contrast.

    Args:
        name: The name.

    Returns:
        The name in lower case; empty if it has no letter and no digit.

    >>> contrast("T1w"), contrast("ce-T1w"), contrast("T2 FLAIR")
    ('t1', 't1c', 'flair')
    """
    plain = re.sub(r"[\W_]", "", _folded(name))
    return _SAME.get(plain, plain)


def check_distinct(names: Sequence[str], *, what: str, form: Callable[[str], str]) -> None:
    """Refuse names that hospitals cannot tell apart, because a hospital's names are matched to them in a simplified
    form.

    Args:
        names: The names of a new study.
        what: What the names are for, in the words of an error.
        form: :func:`comparable` or :func:`contrast`.

    Raises:
        InvalidInput: If two names have the same form, or one has an empty form.
    """
    forms = [form(name) for name in names]
    alike = [name for name, own in zip(names, forms, strict=True) if not own or forms.count(own) > 1]
    if alike:
        raise InvalidInput(
            f"names in {what} that hospitals could not tell apart",
            value=alike,
            limit="names that differ in more than letter case, blanks, hyphens and Unicode form; of one contrast, "
            "one channel",
            remedy="choose other names",
        )


def _folded(name: str) -> str:
    """Return a name without differences in letter case and Unicode form."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


_OTHER_MODALITIES = {"CT": ("ct", "cta", "cbct"), "PET": ("pet", "pt"), "US": ("us", "ultrasound")}


def modality_in(name: str) -> str:
    """Return the modality that a channel's name states: CT, PET, US, or else MR, whose contrasts have many names.

    Args:
        name: Name of a channel, or DICOM's word for a modality.

    Returns:
        The modality.

    >>> modality_in("CT_arterial"), modality_in("PT"), modality_in("T1 gd")
    ('CT', 'PET', 'MR')
    """
    words = comparable(name).split()
    return next((kind for kind, names in _OTHER_MODALITIES.items() if any(word in names for word in words)), "MR")


def region_names(regions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of regions.

    Args:
        regions: Texts ``"name = label + label"``.

    Returns:
        The names.

    >>> region_names(("WT = core + edema",))
    ('WT',)
    """
    return tuple(text.partition("=")[0].strip() for text in regions)


def region_members(regions: tuple[str, ...], labels: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the label values of every region, in the order of the regions.

    Args:
        regions: Texts ``"name = label + label"``.
        labels: Names of the label values.

    Returns:
        Label values of each region.

    Raises:
        InvalidInput: If a label is unknown.

    >>> region_members(("WT = core + edema",), ("background", "core", "edema"))
    ((1, 2),)
    """
    return tuple(tuple(_value(name, labels) for name in text.partition("=")[2].split("+")) for text in regions)


def check_regions(regions: tuple[str, ...], labels: tuple[str, ...]) -> None:
    """Check that every structure is in a region, no two regions share a name, and no region lists a structure twice.

    Args:
        regions: Texts ``"name = label + label"``; the tuple may be empty.
        labels: Names of the label values.

    Raises:
        InvalidInput: If a rule is broken.
    """
    names, members = region_names(regions), region_members(regions, labels)
    for name, values in zip(names, members, strict=True):
        check_text(name, what="name in data.regions")
        if 0 in values or len(set(values)) != len(values):
            raise InvalidInput("data.regions", value=name, limit="names of structures, each listed once")
    lost = [label for value, label in enumerate(labels) if value and all(value not in own for own in members)]
    if regions and (lost or len(set(names)) != len(names)):
        raise InvalidInput(
            "data.regions",
            value=lost or names,
            limit="every structure in at least one region, and each region's name only once",
        )


def _value(name: str, labels: tuple[str, ...]) -> int:
    if name.strip() not in labels:
        raise InvalidInput("data.regions", value=name.strip(), limit=f"'name = label + label' with labels of {labels}")
    return labels.index(name.strip())
