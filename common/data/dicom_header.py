"""Reads what the header of a DICOM file states about its pixels, in bounded time and memory, before a library decodes
it.

Called by :mod:`common.data.dicom` for every file of a folder, and by :mod:`common.data.dicom_structures`. SimpleITK
unpacks compressed slices while it searches for series, follows sequences to any depth, and crashes at some malformed
headers. Therefore these checks come first, in this order:

1. The file meta header (group 2) has at most :data:`META_BYTES`, and the file is not deflated as a whole.
2. The elements up to the pixels are at most :data:`MAX_ELEMENTS`, nested at most :data:`MAX_DEPTH` deep, and end
   within the file.
3. Rows and columns are stated, and no element that is read here occurs twice.
4. Compressed pixels have at most :data:`MAX_FRAGMENTS` pieces. Together these have at most twice the bytes of the
   uncompressed pixels, plus 64 KiB for each frame.
5. A run-length coded frame has one piece, whose header names the planes that the pixels have.
6. A JPEG, JPEG-LS or JPEG 2000 frame has the rows, columns and samples of the file's header.

Reads no value about a patient. Messages name no file. Refuses a file that fails a check.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from common.errors import InvalidInput

META_BYTES = 1 << 16
"""Largest size of the file meta header in bytes. Scanners write a few hundred."""
MAX_ELEMENTS, MAX_DEPTH = 1 << 14, 32
"""Largest number of elements before the pixels, and how deep they may be nested. Scanners write hundreds of elements,
some thousands in private sequences, fewer than ten deep.
"""
MAX_LABEL_ELEMENTS = 1 << 18
"""Largest number of elements of a file of labels. A Segmentation has about 30 for each of some thousand frames."""
MAX_FRAGMENTS = 4096
LARGEST_PACKING = 2
"""Largest size of a compressed frame as a multiple of its uncompressed size. Run-length coding needs at most 1.01
times.
"""
PACKING_SLACK = 1 << 16
"""Number of bytes by which each compressed frame may exceed this multiple, for the codestream's own header."""
_CODESTREAM_BYTES = 1 << 20
"""Number of bytes at the start of a frame that are searched for the frame's rows and columns. A colour profile may come
before these.
"""

DEFLATED = "1.2.840.10008.1.2.1.99"
_IMPLICIT = ("1.2.840.10008.1.2", "1.2.840.113619.5.2")
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_RUN_LENGTH = "1.2.840.10008.1.2.5"
_PICTURES = "1.2.840.10008.1.2.4."
"""Beginning of the UIDs of the JPEG family's transfer syntaxes."""
_LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
"""Value representations whose length field has four bytes, after two reserved ones."""
_UNDEFINED = 0xFFFFFFFF
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_PIXELS = 0x7FE00010
_CLASS, _SYNTAX = 0x00020002, 0x00020010
_NUMBERS = {
    0x00280002: "samples",
    0x00280010: "rows",
    0x00280011: "columns",
    0x00280100: "bits",
}
_TEXTS = {0x00280008: "frames", 0x0020000E: "series"}


@dataclass(frozen=True, slots=True)
class Pixels:
    """Size of an image by its header, and its series' UID. Each pixel has ``samples`` values of ``bits`` bits."""

    rows: int
    columns: int
    series: str = ""
    frames: int = 1
    samples: int = 1
    bits: int = 8

    @property
    def voxels(self) -> int:
        """Number of pixels of all frames."""
        return self.frames * self.rows * self.columns

    @property
    def planes(self) -> int:
        """Number of bytes of one pixel. Run-length coding stores the first bytes of all pixels as one plane, the second
        bytes as the next plane, and so on.
        """
        return self.samples * ((self.bits + 7) // 8)


def read_pixels(stream: BinaryIO) -> Pixels | None:
    """Read a file's header, and run the six checks that the module's docstring lists.

    Args:
        stream: The file, seekable.

    Returns:
        The announced pixels; None if the file has none or is no DICOM file.

    Raises:
        InvalidInput: If one of these checks fails.
    """
    try:
        found = _walked(stream, most=MAX_ELEMENTS)
        return None if found is None else _checked(*found)
    except struct.error as error:
        raise _damaged() from error


def read_class(stream: BinaryIO) -> str:
    """Return the class of object that a file's meta header states.

    Args:
        stream: The file, seekable.

    Returns:
        The SOP class UID; empty if the file has no preamble or states none.

    Raises:
        InvalidInput: If the meta header is too large.
    """
    stream.seek(0)
    return _read_meta(stream).get(_CLASS, "") if stream.read(132)[128:] == b"DICM" else ""


def check_elements(stream: BinaryIO) -> None:
    """Check the size of the file meta header, and the number, nesting and lengths of the elements of a file without
    pixels.

    Args:
        stream: The file, seekable, with a preamble.

    Raises:
        InvalidInput: If a check fails.
    """
    try:
        found = _walked(stream, most=MAX_LABEL_ELEMENTS)
    except struct.error as error:
        raise _damaged() from error
    if found is None:
        raise _damaged()


def _walked(stream: BinaryIO, *, most: int) -> tuple[_Walk, str] | None:
    """Read a file's header up to its pixels; return the reader and the transfer syntax, or None if it is not DICOM."""
    size = stream.seek(0, 2)
    stream.seek(0)
    preamble = stream.read(132)[128:] == b"DICM"
    if not preamble:
        stream.seek(0)
    meta = _read_meta(stream)
    syntax = meta.get(_SYNTAX, "")
    if syntax == DEFLATED:
        raise InvalidInput("DICOM file is deflated", remedy="export the series without compression")
    coding = _coding(stream, syntax)
    if coding is None:
        if preamble or meta:
            raise _damaged()
        return None
    walk = _Walk(stream, size, *coding, most=most)
    walk.read()
    return walk, syntax


def _damaged() -> InvalidInput:
    return InvalidInput("DICOM series cannot be read", remedy="export the series again")


def _read_meta(stream: BinaryIO) -> dict[int, str]:
    """Read the file meta header (group 2) to its end; return its texts by tag, empty if there is no such header."""
    found: dict[int, str] = {}
    left = META_BYTES
    while True:
        start = stream.tell()
        head = stream.read(8)
        if head[:2] != b"\x02\x00" or len(head) < 8:
            stream.seek(start)
            return found
        tag = int.from_bytes(head[:2], "little") << 16 | int.from_bytes(head[2:4], "little")
        kind = head[4:6]
        if kind in _LONG:
            (length,) = struct.unpack("<I", stream.read(4).ljust(4, b"\0"))
        elif kind.isalpha() and kind.isupper():
            (length,) = struct.unpack("<H", head[6:])
        else:  # implicit value representation
            (length,) = struct.unpack("<I", head[4:])
        left -= length
        if left < 0:
            raise InvalidInput(
                "header of a DICOM file", limit=f"at most {META_BYTES} bytes", remedy="export the series again"
            )
        found[tag] = stream.read(length).strip(b"\0 ").decode("ascii", "replace")


def _coding(stream: BinaryIO, syntax: str) -> tuple[bool, str] | None:
    """Return whether elements state their value representation, and the byte order; None if no element follows.

    Without a transfer syntax, both are inferred from the first element.
    """
    start = stream.tell()
    head = stream.read(8)
    stream.seek(start)
    if len(head) < 8:
        return None
    named = head[4:6].isalpha() and head[4:6].isupper()
    if syntax == _BIG_ENDIAN:
        return True, ">"
    if syntax:
        return syntax not in _IMPLICIT, "<"
    if head[:2] == b"\x00\x08":
        return named, ">"
    if head[1] or not head[0] or head[0] % 2:
        return None
    return named, "<"


class _Walk:
    """Walks through the elements of a data set, and notes the facts of :class:`Pixels` and where the pixels start."""

    def __init__(self, stream: BinaryIO, size: int, named: bool, order: str, *, most: int) -> None:
        self._stream, self._size = stream, size
        self._named, self._order = named, order
        self._ends: list[
            tuple[int | None, bool]
        ] = []  # for each open sequence or item: its end, and whether value representations are stated
        self._left, self._most = most, most
        self.noted: dict[str, Any] = {}
        self.twice = False
        self.pixels: int | None = None  # length of the pixels; the stream is at their start

    def read(self) -> None:
        """Read up to the pixels or the end of the file."""
        while self._size - self._stream.tell() >= 8:
            self._close()
            if self._one():
                return

    def _close(self) -> None:
        while self._ends and self._ends[-1][0] is not None and self._stream.tell() >= self._ends[-1][0]:
            self._named = self._ends.pop()[1]

    def _one(self) -> bool:
        """Read the tag and length of one element, then enter the element or skip it; return whether it was the
        pixels.
        """
        self._left -= 1
        if self._left < 0:
            raise InvalidInput(
                "elements of a DICOM file", limit=f"at most {self._most}", remedy="export the series again"
            )
        group, element = struct.unpack(f"{self._order}HH", self._stream.read(4))
        tag = group << 16 | element
        if group == 0xFFFE:
            (length,) = struct.unpack(f"{self._order}I", self._stream.read(4))
            if tag == _ITEM:
                self._open(length)
            elif not self._ends:
                raise _damaged()
            else:
                self._named = self._ends.pop()[1]
            return False
        kind, length = self._kind_and_length()
        if tag == _PIXELS and not self._ends:
            self.pixels = length
            return True
        if length == _UNDEFINED and kind in (b"OB", b"OW"):  # a compressed icon
            self.pieces()
            return False
        if length == _UNDEFINED or kind == b"SQ":
            self._open(length)
            if kind == b"UN":
                self._named = False  # PS3.5 6.2.2: UN of undefined length has implicit representations
            return False
        start = self._stream.tell()
        if length > self._size - start:
            raise _damaged()
        if not self._ends:
            self._note(tag, length)
        self._stream.seek(start + length)
        return False

    def _kind_and_length(self) -> tuple[bytes, int]:
        if not self._named:
            (length,) = struct.unpack(f"{self._order}I", self._stream.read(4))
            return b"", length
        kind = self._stream.read(2)
        if not (kind.isalpha() and kind.isupper()):
            raise _damaged()
        if kind in _LONG:
            (length,) = struct.unpack(f"{self._order}2xI", self._stream.read(6))
        else:
            (length,) = struct.unpack(f"{self._order}H", self._stream.read(2))
        return kind, length

    def pieces(self) -> list[tuple[int, int]]:
        """Return start and length of each piece of compressed pixels at the stream's position, and move the stream
        behind them.

        Raises:
            InvalidInput: If a piece is longer than the file, or there are more than :data:`MAX_FRAGMENTS`.
        """
        found: list[tuple[int, int]] = []
        while True:
            group, element, length = struct.unpack(f"{self._order}HHI", self._stream.read(8))
            tag = group << 16 | element
            if tag == _SEQUENCE_END:
                return found
            start = self._stream.tell()
            if tag != _ITEM or length > self._size - start:
                raise _damaged()
            found.append((start, length))
            if len(found) > MAX_FRAGMENTS:
                raise InvalidInput(
                    "pieces of compressed pixels", limit=f"at most {MAX_FRAGMENTS}", remedy="export the series again"
                )
            self._stream.seek(start + length)

    def take(self, at: int, count: int) -> bytes:
        """Return ``count`` bytes from position ``at`` of the file."""
        self._stream.seek(at)
        return self._stream.read(count)

    def _open(self, length: int) -> None:
        """Enter a sequence or an item."""
        if len(self._ends) >= MAX_DEPTH:
            raise InvalidInput("depth of a DICOM file", limit=f"at most {MAX_DEPTH}", remedy="export the series again")
        end = None if length == _UNDEFINED else self._stream.tell() + length
        if end is not None and end > self._size:
            raise _damaged()
        self._ends.append((end, self._named))

    def _note(self, tag: int, length: int) -> None:
        """Keep the value of an element that the module needs; of several values, only the first."""
        name = _NUMBERS.get(tag) or _TEXTS.get(tag)
        if name is None:
            return
        if name in self.noted:
            self.twice = True
            return
        value = self._stream.read(min(length, 64))
        text = value.strip(b"\0 ").decode("ascii", "replace")
        if name == "series":
            self.noted[name] = text
        elif name == "frames":
            if text and not (text.isascii() and text.isdigit() and len(text) < 10):
                raise _damaged()
            self.noted[name] = int(text or 1)
        elif length == 2:
            (self.noted[name],) = struct.unpack(f"{self._order}H", value)
        else:
            raise _damaged()


def _checked(walk: _Walk, syntax: str) -> Pixels | None:
    """Return the announced pixels, after checking that their size is stated once and agrees with the compressed
    data.
    """
    if walk.pixels is None:
        return None
    if walk.twice or not {"rows", "columns"} <= walk.noted.keys():
        raise InvalidInput(
            "a slice of the DICOM series does not state its size exactly once", remedy="export the series again"
        )
    pixels = Pixels(**walk.noted)
    if walk.pixels != _UNDEFINED:
        return pixels
    pieces = walk.pieces()
    most = LARGEST_PACKING * pixels.voxels * pixels.planes + PACKING_SLACK * pixels.frames
    if sum(length for _, length in pieces) > most:
        raise InvalidInput(
            "compressed pixels of a DICOM file", limit=f"at most {most} bytes", remedy="export the series again"
        )
    frames = pieces[1:]  # the first is a table of offsets
    if not syntax.startswith((_RUN_LENGTH, _PICTURES)):
        return pixels
    if syntax == _RUN_LENGTH or pixels.frames > 1:
        whole = len(frames) == pixels.frames
    else:
        whole, frames = len(frames) > 0, frames[:1]
    if not whole:
        raise _damaged()
    for at, length in frames:
        start = walk.take(at, min(length, _CODESTREAM_BYTES))
        if syntax == _RUN_LENGTH:
            _check_run_length(start, length, pixels.planes)
        elif _picture_size(start) != (pixels.rows, pixels.columns, pixels.samples):
            raise InvalidInput(
                "a compressed slice has another size than its DICOM header says", remedy="export the series again"
            )
    return pixels


def _check_run_length(frame: bytes, length: int, planes: int) -> None:
    """Check a run-length header (PS3.5 G.5): the number of planes, and that each starts behind the one before."""
    if len(frame) < 64:
        raise _damaged()
    count, *starts = struct.unpack("<16I", frame[:64])
    used = starts[:planes]
    if count != planes or planes > 15 or used[0] != 64 or used != sorted(set(used)) or used[-1] >= length:
        raise _damaged()


def _picture_size(start: bytes) -> tuple[int, int, int] | None:
    """Return the rows, columns and samples that the codestream itself states; None if it states none."""
    if start[:3] == b"\xff\xd8\xff":
        return _jpeg_size(start)
    at = start.find(b"\xff\x4f\xff\x51")
    if at < 0 or len(start) < at + 42:
        return None
    right, bottom, left, top = struct.unpack(">4I", start[at + 8 : at + 24])
    (samples,) = struct.unpack(">H", start[at + 40 : at + 42])
    return bottom - top, right - left, samples


def _jpeg_size(start: bytes) -> tuple[int, int, int] | None:
    at = 2
    while at + 10 <= len(start) and start[at] == 0xFF:
        marker = start[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            rows, columns, samples = struct.unpack(">HHB", start[at + 5 : at + 10])
            return rows, columns, samples
        else:
            (length,) = struct.unpack(">H", start[at + 2 : at + 4])
            at += 2 + length
    return None
