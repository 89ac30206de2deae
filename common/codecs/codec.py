"""Defines the interface of codecs, registers codecs, and fits, stores and reads them.

A codec turns the class probabilities of a volume into a code, a vector of ``dimension`` numbers. It also turns a noisy
mean of codes back into probabilities. A codec is public: it is fitted on public label maps only, every site fetches it
by its content hash, and this hash is part of every query's id. The planner and studies fit codecs; sites and the server
load them. :func:`fit_codec` refuses a label map whose hash is in a list of private cases. :func:`load_codec` refuses
bytes that differ from those that :meth:`Codec.to_bytes` returns for the codec in them.

The shapes of arrays in all codecs use these letters: l is the length of a code, k the number of classes with the
background, s = k − 1 the number of structures. The study's grid has x × y × z voxels. Most codecs compute log-ratios
(:mod:`common.codecs.shapes`) on a coarser grid of u × v × w voxels.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from common.canonical import (
    canonical_bytes,
    check_hash,
    check_integer,
    check_schema,
    digest,
    parse_canonical,
    sha256_bytes,
)
from common.config import CodecConfig, Study
from common.document import Document
from common.errors import InvalidInput
from common.privacy.checks import check_kind
from common.protocol_terms import CODECS
from common.reading import parsing
from common.registry import registered
from common.study_mechanism import mean_noise_std

CODEC_SCHEMA = 1
MAX_CODEC_BYTES = 1 << 28
MIN_LABEL_MAPS = 2
_HEADER = "header"


@dataclass(frozen=True, slots=True)
class Provenance(Document):
    """States on which label maps a codec was fitted, and for which noise.

    Attributes:
        label_maps: Content hashes of the public label maps: at least two, all different.
        augmentations: Number of deformed copies that were added.
        seed: Seed of the fit, from 0 to 2³² − 1.
        noise_std: Planned standard deviation of the noise on the **mean** code, in the code's units.

    Raises:
        InvalidInput: If a value is outside its range.
    """

    label_maps: tuple[str, ...]
    augmentations: int
    seed: int
    noise_std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_maps", tuple(check_hash(h) for h in self.label_maps))
        if len(self.label_maps) < MIN_LABEL_MAPS or len(set(self.label_maps)) != len(self.label_maps):
            raise InvalidInput(
                "public label maps",
                value=f"{len(self.label_maps)} hashes, {len(set(self.label_maps))} of them different",
                limit=f"at least {MIN_LABEL_MAPS} hashes, and no hash twice",
                remedy="give more public label maps, each of them once",
            )
        check_integer("codec seed", self.seed, least=0, most=2**32 - 1, limit="an integer from 0 to 2^32 - 1")
        check_integer("augmentations", self.augmentations, least=0)
        check_noise_std(self.noise_std)


def _check_grid(grid: tuple[int, ...]) -> None:
    if min(grid) < 8:
        raise InvalidInput("grid of a codec", value=grid, limit="three integers from 8")


@dataclass(frozen=True, slots=True)
class CodecHeader(Document):
    """The header of a codec's bytes. ``grid`` is in voxels, and None if the arrays determine it."""

    SCHEMA: ClassVar = ("codec", CODEC_SCHEMA)

    name: str
    provenance: Provenance
    radius: float
    grid: Annotated[tuple[int, int, int], _check_grid] | None = None


@runtime_checkable
class Codec(Protocol):
    """A fitted codec, which turns class probabilities into codes, and mean codes into class probabilities.

    All its attributes are public.

    Attributes:
        name: Key of the codec in :data:`~common.protocol_terms.CODECS`.
        dimension: Length l of a code.
        radius: Clipping norm C of one voter's code.
        labels: Number of classes, the background included.
        grid: Shape [x, y, z] of a volume in voxels.
        provenance: Which public label maps it was fitted on, and with which settings.

    >>> isinstance(c.fit_codec(study, maps, sites=8), c.Codec)
    True
    """

    name: ClassVar[str]

    @property
    def dimension(self) -> int: ...
    @property
    def radius(self) -> float: ...
    @property
    def labels(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def linear(self) -> LinearCodec | None:
        """The codec itself if it is a :class:`LinearCodec`, else None. Some protocols use a linear codec's basis."""
        ...

    def encode(self, probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "l"]:
        """Encode class probabilities as a code.

        Args:
            probabilities: Float array of shape [k, x, y, z] with values ≥ 0 that sum to 1 in every voxel.

        Returns:
            Float64 array of shape [l]. Its norm is not bounded; :func:`common.privacy.quantise.quantise` clips it.

        Raises:
            InvalidInput: For another grid or number of classes, NaN or infinite values, or values that are no
                probabilities.
        """
        ...

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "k x y z"]:
        """Decode a noisy mean code; this is post-processing and costs no privacy.

        Args:
            mean_code: Float array of shape [l].
            noise_std: Standard deviation of the noise on every coordinate of ``mean_code``, in the same units.

        Returns:
            Float32 array of shape [k, x, y, z] that sums to 1 in every voxel. The zero code gives the public mean
            shape for every ``noise_std``.

        Raises:
            InvalidInput: For another shape, or a value that is NaN or infinite.
        """
        ...

    def to_bytes(self) -> bytes:
        """Return the codec as bytes. The same codec gives the same bytes, so their SHA-256 names it."""
        ...

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """Rebuild a codec from the header and arrays that :func:`unpack` read.

        Args:
            header: Facts of the header, with ``schema`` and ``name`` checked.
            arrays: The arrays by name.

        Returns:
            The codec.

        Raises:
            InvalidInput: If header and arrays contradict each other.
        """
        ...

    @classmethod
    def fit(
        cls,
        label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
        *,
        labels: int,
        config: CodecConfig,
        provenance: Provenance,
    ) -> Self:
        """Fit the codec on public label maps that :func:`fit_codec` has checked.

        Args:
            label_maps: Public label maps, uint8 [x, y, z], all of one shape.
            labels: Number of classes, the background included.
            config: The study's codec settings.
            provenance: Hashes, seed and planned noise.

        Returns:
            The fitted codec.

        Raises:
            InvalidInput: If the maps do not suit the codec.
        """
        ...


class LinearCodec(Codec, Protocol):
    """A codec whose code is linear in a shape's log-ratios. Each coordinate is decoded independently of the others.

    The log-ratios of a shape, on a coarser grid than the codec's, are ``centre`` + Σ z_i · ``basis``_i / ``metric``,
    with the shape's coordinates z_i. The code consists of the products w_i · z_i with fixed weights w_i.

    Attributes:
        basis: Orthonormal directions, [l, s, u, v, w].
        centre: Log-ratios of the public mean shape, [s, u, v, w].
        metric: Weight of each coarse voxel, [u, v, w].
        variances: Variances of z_i over public shapes, [l].
        powers: Variances of the code's coordinates, [l].
    """

    @property
    def basis(self) -> Float[np.ndarray, "l s u v w"]: ...
    @property
    def centre(self) -> Float[np.ndarray, "s u v w"]: ...
    @property
    def metric(self) -> Float[np.ndarray, "u v w"]: ...
    @property
    def variances(self) -> Float[np.ndarray, "l"]: ...
    @property
    def powers(self) -> Float[np.ndarray, "l"]: ...


def codec_class(name: str) -> type[Codec]:
    """Return the codec class of a registered name, importing it on first use.

    Args:
        name: Key of :data:`~common.protocol_terms.CODECS`.

    Returns:
        The class.

    Raises:
        InvalidInput: If the name is unknown.

    >>> codec_class("pca").__name__
    'PcaCodec'
    """
    if name not in CODECS:
        raise InvalidInput("codec", value=name, limit=", ".join(sorted(CODECS)))
    found: type[Codec] = registered(CODECS[name])
    return found


def fit_codec(
    study: Study,
    label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
    *,
    noise_std: float | None = None,
    sites: int | None = None,
    map_hashes: Sequence[str] | None = None,
    private_hashes: Collection[str] = (),
    seed: int = 0,
) -> Codec:
    """Fit the study's codec on public label maps, for the noise that the mean code is planned to carry.

    The same arguments give the same bytes, on the same machine with the same number of threads.

    Args:
        study: The study; its ``codec`` section names the codec and the settings of the fit.
        label_maps: uint8 arrays on the study's grid, from patients who are in no site's pool.
        noise_std: Standard deviation of the noise on the mean code, in the code's units: the standard deviation on the
            integer sum, divided by 2¹⁶ and by the number of voters in the sum.
        sites: Number of sites that are expected to answer, from which the noise is computed. Give either ``noise_std``
            or ``sites``.
        map_hashes: Hashes by which the provenance names the maps, such as their files'; by default
            :func:`label_map_hash`.
        private_hashes: Hashes of maps that are known to be private, or of validation and test cases. A match is
            refused, because a basis fitted on a protected patient voids the guarantee. This catches mix-ups, not an
            altered copy.
        seed: Seed of the maps' augmentation.

    Returns:
        The fitted codec, which is public.

    Raises:
        InvalidInput: For maps of another type or shape, labels outside the study, a label of the study in no map, a map
            given twice or known to be private, or fewer sites than the quorum.

    >>> codec = c.fit_codec(study, maps, sites=8)
    >>> codec.name, codec.radius, codec.grid
    ('pca', 1.0, (8, 8, 8))
    """
    check_kind("study", study, Study)
    hashes_given = () if map_hashes is None else map_hashes
    for what, given, kinds in (
        ("public label maps", label_maps, list | tuple | np.ndarray),
        ("hashes of public label maps", hashes_given, list | tuple),
        ("hashes of private label maps", private_hashes, Collection),
    ):
        if not isinstance(given, kinds) or getattr(given, "ndim", 1) == 0:
            raise InvalidInput(
                what,
                value=type(given).__name__,
                limit="a list",
                remedy="make a list of the items, as list(...) does",
            )
    if not all(isinstance(each, str) for each in (*hashes_given, *private_hashes)):
        raise InvalidInput("hashes of label maps", limit="strings, each a SHA-256 in hex digits")
    if (noise_std is None) == (sites is None):
        raise InvalidInput("arguments of fit_codec", limit="either noise_std or sites")
    if sites is not None:
        least = study.privacy.quorum
        noise_std = mean_noise_std(
            study,
            sites=check_integer(
                "sites", sites, least=least, most=1 << 20, limit=f"an integer from {least}, the study's quorum, to 2^20"
            ),
        )
    assert noise_std is not None
    kind = codec_class(study.codec.name)
    labels = len(study.data.labels)
    hashes, voxels = list[str](), np.zeros(labels, dtype=np.int64)
    for number, label_map in enumerate(label_maps, start=1):
        if isinstance(label_map, np.ma.MaskedArray):
            raise InvalidInput(
                f"public label map {number}",
                value="a masked array",
                limit="a plain array",
                remedy="fill the masked voxels",
            )
        if not isinstance(label_map, np.ndarray) or label_map.dtype != np.uint8 or label_map.shape != study.data.grid:
            raise InvalidInput(
                f"public label map {number}",
                value=(str(getattr(label_map, "dtype", type(label_map).__name__)), getattr(label_map, "shape", None)),
                limit=f"uint8 on the study's grid {study.data.grid}",
                remedy=""
                if getattr(label_map, "dtype", None) == np.uint8
                else "convert it with np.asarray(label_map, np.uint8)",
            )
        if int(label_map.max()) >= labels:
            raise InvalidInput(
                f"public label map {number}: label", value=int(label_map.max()), limit=f"0 to {labels - 1}"
            )
        voxels += np.bincount(label_map.ravel(), minlength=labels)
        content = label_map_hash(label_map)
        if content in hashes:
            raise InvalidInput(
                f"public label map {number}",
                value=f"a copy of map {hashes.index(content) + 1}",
                limit="different maps only",
                remedy="leave out the copy",
            )
        hashes.append(content)
        known = [h for h in (hashes[-1], *(map_hashes or ())[number - 1 : number]) if h in private_hashes]
        if known:
            raise InvalidInput(
                f"public label map {number} is also a private, validation or test case",
                value=known[0],
                limit="label maps of patients who are used for nothing else",
                remedy="leave it out of the public label maps",
            )
    if len(hashes) < MIN_LABEL_MAPS:
        raise InvalidInput(
            "public label maps",
            value=len(hashes),
            limit=f"at least {MIN_LABEL_MAPS}",
            remedy="give more public label maps",
        )
    if absent := [name for name, count in zip(study.data.labels, voxels, strict=True) if not count]:
        raise InvalidInput(
            "labels in no public label map",
            value=", ".join(absent),
            limit="every label of the study in at least one map, because a code cannot describe a label that is in "
            "none",
            remedy="add maps that show them, or create the study without these labels; `consilium demo` and `consilium "
            "simulate` choose other maps with another --seed and another --out",
        )
    if map_hashes is not None and len(map_hashes) != len(hashes):
        raise InvalidInput(
            "hashes of public label maps", value=len(map_hashes), limit=f"{len(hashes)} hashes, one for each map"
        )
    provenance = Provenance(
        label_maps=tuple(hashes if map_hashes is None else map_hashes),
        augmentations=study.codec.augmentations,
        seed=seed,
        noise_std=check_noise_std(noise_std),
    )
    return kind.fit(label_maps, labels=labels, config=study.codec, provenance=provenance)


def load_codec(data: bytes, *, expected_hash: str | None = None) -> Codec:
    """Read a codec from its bytes.

    Args:
        data: What :meth:`Codec.to_bytes` returned.
        expected_hash: SHA-256 that the bytes must have, in hex.

    Returns:
        The codec.

    Raises:
        InvalidInput: If the hash differs, the codec is unknown, or the bytes are not exactly those of a codec.

    >>> codec = c.fit_codec(study, maps, sites=8)
    >>> c.load_codec(codec.to_bytes()).to_bytes() == codec.to_bytes()
    True
    """
    if not isinstance(data, bytes):
        raise InvalidInput("codec file", value=type(data).__name__, limit="bytes", remedy="read the file's bytes")
    if expected_hash is not None and sha256_bytes(data) != check_hash(expected_hash):
        raise InvalidInput(
            "hash of a codec file", value=sha256_bytes(data), limit=expected_hash, remedy="fetch the file again"
        )
    header, arrays = unpack(data)
    with parsing("codec file", limit="the arrays of a codec", remedy="fetch it again"):
        codec = codec_class(header["name"]).from_parts(header, arrays)
        same = packed_as(codec.to_bytes(), data)
    if not same:
        raise InvalidInput("codec file", limit="exactly the bytes that a codec's file has", remedy="fetch it again")
    return codec


def label_map_hash(label_map: UInt8[np.ndarray, "x y z"]) -> str:
    """Return the SHA-256 of a label map on the study's grid, over shape and voxels but no file name or header.

    Args:
        label_map: Array of shape [x, y, z]; converted to uint8.

    Returns:
        The hash as a hex string.
    """
    array = np.ascontiguousarray(label_map, dtype=np.uint8)
    return digest("label-map", {"shape": list(array.shape), "voxels": sha256_bytes(array.tobytes())})


def pack(header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Write a header and numeric arrays as one uncompressed npz without pickle or time stamps.

    Args:
        header: Facts that are written as canonical JSON.
        arrays: Arrays by name.

    Returns:
        The bytes; the same input gives the same bytes with every version of Python.

    Raises:
        InvalidInput: If the result would be larger than :data:`MAX_CODEC_BYTES`, which a site would not read.
    """
    size = sum(array.nbytes for array in arrays.values())
    if size > MAX_CODEC_BYTES - (1 << 16):
        raise InvalidInput(
            "codec is too large",
            value=f"{size} bytes",
            limit=f"at most {MAX_CODEC_BYTES} bytes with its header",
            remedy="lower codec.max_dimension",
        )
    parts, members = {_HEADER: np.frombuffer(canonical_bytes(dict(header)), dtype=np.uint8), **arrays}, {}
    for name in sorted(parts):
        member = io.BytesIO()
        np.lib.format.write_array(member, np.ascontiguousarray(parts[name]), version=(1, 0), allow_pickle=False)
        members[f"{name}.npy"] = member.getvalue()
    return _npz(members)


def _npz(members: Mapping[str, bytes], *, before_3_11_4: bool = False) -> bytes:
    """Return an uncompressed ZIP file, byte for byte as `zipfile` of Python 3.11.4 and newer writes it with
    ``force_zip64``.

    This function builds the file because `zipfile` of older Pythons writes different headers, and sites compare the
    file's hash.

    Args:
        members: Contents by name, in the file's order.
        before_3_11_4: Write the headers of Python up to 3.11.3, with which studies may have begun.
    """
    version, epoch = (20 if before_3_11_4 else 45), (1 << 5 | 1) << 16  # 1 January 1980
    files, directory = io.BytesIO(), io.BytesIO()
    for name, content in members.items():
        path, size, offset = name.encode("ascii"), len(content), files.tell()
        checked = (epoch, zlib.crc32(content))
        shown = size if before_3_11_4 else 0xFFFFFFFF
        files.write(struct.pack("<4s3H4I2H", b"PK\3\4", version, 0, 0, *checked, shown, shown, len(path), 20))
        files.write(path + struct.pack("<2H2Q", 1, 16, size, size))  # the sizes again, in 64 bits
        files.write(content)
        directory.write(struct.pack("<4s2B3H4I", b"PK\1\2", version, 3, version, 0, 0, *checked, size, size))
        directory.write(struct.pack("<5H2I", len(path), 0, 0, 0, 0, 0o600 << 16, offset) + path)
    count, size, offset = len(members), directory.tell(), files.tell()
    files.write(directory.getvalue())
    files.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, offset, 0))
    return files.getvalue()


def packed_as(made: bytes, data: bytes) -> bool:
    """Return whether ``data`` is exactly what :func:`pack` writes, now or as it did under Python 3.11.3 and older.

    Args:
        made: The result of :func:`pack` for the header and arrays that :func:`unpack` read from ``data``.
        data: The bytes of a file.

    Returns:
        True if it is.
    """
    if made == data:
        return True
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return _npz(members, before_3_11_4=True) == data


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the bytes that :func:`pack` wrote.

    Args:
        data: At most :data:`MAX_CODEC_BYTES` bytes.

    Returns:
        The header, with ``schema`` and ``name`` checked, and the arrays by name.

    Raises:
        InvalidInput: If the bytes are too large, damaged, compressed, or of an unknown schema.
    """
    if len(data) > MAX_CODEC_BYTES:
        raise InvalidInput(
            "codec file is too large", value=f"{len(data)} bytes", limit=f"at most {MAX_CODEC_BYTES} bytes"
        )
    arrays: dict[str, np.ndarray] = {}
    with parsing("codec file is damaged or no codec", limit="the bytes of a codec", remedy="fetch it again"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise InvalidInput("codec file", limit="an uncompressed npz")
            if sum(info.file_size for info in archive.infolist()) > len(data):  # overlapping members
                raise InvalidInput("codec file", limit="members stored one after another without gaps")
            for info in archive.infolist():
                with archive.open(info) as member:
                    _check_size(member, info.file_size)
                    member.seek(0)
                    arrays[info.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
        header = parse_canonical(arrays.pop(_HEADER).tobytes())
    if not isinstance(header, dict) or not isinstance(header.get("name"), str):
        raise InvalidInput(
            "codec header", limit="a header with a schema and a name", remedy="fetch the codec file again"
        )
    check_schema("codec", header.get("schema"), known=CODEC_SCHEMA)
    return header, arrays


def write_codec(codec: Codec, arrays: Mapping[str, np.ndarray], *, grid: bool) -> bytes:
    """Return a codec's bytes: its arrays, and a header with its name, provenance and radius.

    Args:
        codec: The codec.
        arrays: Its arrays by name.
        grid: True to write the codec's grid into the header too.

    Returns:
        The bytes of :func:`pack`.

    Raises:
        InvalidInput: If they would be too large.
    """
    header = CodecHeader(codec.name, codec.provenance, codec.radius, codec.grid if grid else None)
    return pack(header.to_json(), arrays)


def read_header(
    header: Mapping[str, Any], *, grid: bool, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, type]
) -> dict[str, Any]:
    """Check a header and arrays that :func:`write_codec` wrote, and return them as arguments of a codec's constructor.

    Args:
        header: The header.
        grid: True if the header must hold a grid.
        arrays: The arrays by name.
        dtypes: The dtype that each array must have.

    Returns:
        Keyword arguments: the arrays, ``provenance`` and ``radius``; also ``grid`` if the argument ``grid`` is True.

    Raises:
        InvalidInput: If a field or an array is missing, unknown or of another type.
    """
    read = CodecHeader.from_json(dict(header))
    if (read.grid is not None) != grid:
        limit = "three integers from 8" if grid else "no grid"
        raise InvalidInput(f"{read.name} codec: grid", value=read.grid, limit=limit)
    if arrays.keys() != dtypes.keys() or any(arrays[name].dtype != dtype for name, dtype in dtypes.items()):
        raise InvalidInput(f"{read.name} codec: arrays", value=sorted(arrays), limit=", ".join(dtypes))
    return {**arrays, "provenance": read.provenance, "radius": read.radius} | ({"grid": read.grid} if grid else {})


def is_pooled(grid: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return whether each voxel of the grid ``coarse`` consists of f × f × f voxels of ``grid``, for one integer f.

    Args:
        grid: Sizes of the fine grid.
        coarse: Sizes of the coarse grid, as many.

    Returns:
        True if one integer factor relates all axes.

    >>> is_pooled((8, 8, 16), (4, 4, 8)), is_pooled((8, 8, 16), (4, 4, 4))
    (True, False)
    """
    factors = {n / m if m else 0.5 for n, m in zip(grid, coarse, strict=True)}
    return len(factors) == 1 and factors.pop().is_integer()


def frozen(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Return a read-only copy of an array.

    Args:
        array: Any array.
        dtype: Type of the copy.

    Returns:
        The copy, in C order.
    """
    copy: np.ndarray = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def _check_size(member: IO[bytes], size: int) -> None:
    """Check that an array's header announces exactly the bytes that follow, before memory is allocated for it."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("version of an array")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != size - member.tell():
        raise ValueError("size of an array")


def check_probabilities(
    probabilities: np.ndarray, *, labels: int, grid: tuple[int, int, int]
) -> Float[np.ndarray, "k x y z"]:
    """Return class probabilities as float64 if they are valid, else refuse.

    Args:
        probabilities: Array of shape [labels, *grid].
        labels: Number of classes.
        grid: Shape of the volume in voxels.

    Returns:
        Float64 array of the same shape.

    Raises:
        InvalidInput: If the shape is wrong, a value is not finite or below −1e-3, or the sum in a voxel is off 1 by
            more than 1e-2.
    """
    if type(probabilities) is not np.ndarray or probabilities.shape != (labels, *grid):
        raise InvalidInput(
            "class probabilities", value=_shape(probabilities), limit=f"a numpy array of shape {(labels, *grid)}"
        )
    values = probabilities.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInput("class probabilities", limit="finite numbers")
    if values.min() < -1e-3 or abs(values.sum(axis=0) - 1).max() > 1e-2:
        raise InvalidInput("class probabilities", limit="numbers ≥ 0 that sum to 1 in every voxel")
    return values


def _shape(given: object) -> object:
    """Return an array's shape, or the type of a value that is no plain numpy array."""
    return given.shape if type(given) is np.ndarray else type(given).__name__


def check_code(code: np.ndarray, *, dimension: int) -> Float[np.ndarray, "l"]:
    """Return a code as float64 if it is a finite vector of ``dimension`` numbers, else refuse.

    Args:
        code: Array of shape [dimension].
        dimension: Length l of a code.

    Returns:
        Float64 array of shape [dimension].

    Raises:
        InvalidInput: If the shape is wrong or a value is not finite.
    """
    if type(code) is not np.ndarray or code.shape != (dimension,):
        raise InvalidInput("code", value=_shape(code), limit=f"a numpy array of shape {(dimension,)}")
    values = code.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInput("code", limit="finite numbers")
    return values


def check_noise_std(noise_std: float) -> float:
    """Return the standard deviation of the noise on the mean code if it is finite and at least 0, else refuse.

    Args:
        noise_std: The standard deviation, in the code's units.

    Returns:
        The value as a float.

    Raises:
        InvalidInput: If it is no number, not finite or negative.
    """
    if isinstance(noise_std, bool) or not isinstance(noise_std, int | float) or not 0 <= noise_std <= 2**60:
        raise InvalidInput("noise on the mean code", value=noise_std, limit="a number from 0 to 2^60")
    return float(noise_std)
