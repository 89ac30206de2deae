"""What every codec is, where codecs are registered, and how one is fitted, stored and read back.

A codec turns class probabilities into a code of ``dimension`` numbers and a noisy mean code back into probabilities.
It is public: fitted on public label maps only, sent to every site by content hash, part of every query's id. Refuses to
be fitted on a label map whose hash is known as private, and refuses bytes that are not exactly what a codec writes.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from common.canonical import (
    canonical_bytes,
    check_hash,
    check_schema,
    digest,
    parse_canonical,
    sha256_bytes,
)
from common.config import CodecConfig, Study
from common.document import Document
from common.errors import InvalidInput
from common.registry import registered

CODEC_SCHEMA = 1
MAX_CODEC_BYTES = 1 << 28
MIN_LABEL_MAPS = 2
_HEADER = "header"


@dataclass(frozen=True, slots=True)
class Provenance(Document):
    """What a codec was made from: the hashes of its public label maps, its seed, and what it was fitted for.

    ``noise_std`` is the planned standard deviation of the noise on the **mean** code, in the code's own units.
    """

    label_maps: tuple[str, ...]
    augmentations: int
    seed: int
    noise_std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_maps", tuple(check_hash(h) for h in self.label_maps))
        if len(self.label_maps) < MIN_LABEL_MAPS or len(set(self.label_maps)) != len(self.label_maps):
            raise InvalidInput(
                "public label maps", value=len(self.label_maps), limit=f"at least {MIN_LABEL_MAPS}, none twice"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise InvalidInput("codec seed", value=self.seed, limit="0 to 2^32 - 1")
        if not isinstance(self.augmentations, int) or self.augmentations < 0:
            raise InvalidInput("augmentations", value=self.augmentations, limit="an integer from 0")
        check_noise_std(self.noise_std)


def _check_grid(grid: tuple[int, ...]) -> None:
    if min(grid) < 8:
        raise InvalidInput("grid of a codec", value=grid, limit="three integers from 8")


@dataclass(frozen=True, slots=True)
class CodecHeader(Document):
    """What a codec's bytes say beside its arrays; ``grid`` in voxels, unless the arrays tell it."""

    SCHEMA: ClassVar = ("codec", CODEC_SCHEMA)

    name: str
    provenance: Provenance
    radius: float
    grid: Annotated[tuple[int, int, int], _check_grid] | None = None


@runtime_checkable
class Codec(Protocol):
    """A fitted codec; all of it is public.

    ``name`` is its key in :data:`CODECS`; ``dimension`` is l; ``radius`` the clipping norm C of one voter's code;
    ``labels`` counts classes with background; ``grid`` is [x, y, z] in voxels.
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

    def encode(self, probabilities: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "l"]:
        """Class probabilities → float64 code, weighted but not clipped (``common.privacy.quantise`` clips).

        Raises InvalidInput for another grid or number of classes, non-finite values, or values that are not
        probabilities. Nothing in the result bounds its norm: only the clip does.
        """
        ...

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "c x y z"]:
        """A noisy mean code → float32 probabilities summing to 1; pure post-processing.

        ``noise_std`` is the standard deviation of the noise on every coordinate of ``mean_code``, in the same units.
        The zero code decodes to the public mean shape, whatever ``noise_std``.
        """
        ...

    def to_bytes(self) -> bytes:
        """The codec as bytes; the same codec gives the same bytes, so their SHA-256 is its name."""
        ...

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """Rebuild from what :func:`unpack` read; InvalidInput for anything inconsistent."""
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
        """Fit on public label maps, already checked by :func:`fit_codec`."""
        ...


CODECS: Mapping[str, str] = MappingProxyType(
    {
        "pca": "common.codecs.pca:PcaCodec",
        "ball-ae": "common.codecs.ball_autoencoder:BallAutoencoder",
        "paper-pca": "common.codecs.paper:PaperPcaCodec",
    }
)
"""Every codec by the name a study gives it (``codec.name``): ``module:class``, imported on use, for one needs torch."""


def codec_class(name: str) -> type[Codec]:
    """The codec of that name; an unknown name is refused."""
    if name not in CODECS:
        raise InvalidInput("codec", value=name, limit=", ".join(sorted(CODECS)))
    found: type[Codec] = registered(CODECS[name])
    return found


def fit_codec(
    study: Study,
    label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
    *,
    noise_std: float,
    map_hashes: Sequence[str] | None = None,
    private_hashes: Collection[str] = (),
    seed: int = 0,
) -> Codec:
    """Fit the study's codec on public label maps for the planned noise on the mean code.

    ``label_maps``: uint8 on the study's grid, from patients who are in no site's pool. ``noise_std``: σ_int / 2¹⁶ /
    voters. ``map_hashes``: the hashes the provenance names the maps by, such as their files'; by default
    :func:`label_map_hash`. ``private_hashes``: hashes of either kind of maps known to be private (or of validation and
    test cases); a match is refused, because a basis fitted on a protected patient voids the guarantee. This catches
    mix-ups, not an altered copy. The same arguments give the same bytes.
    """
    kind = codec_class(study.codec.name)
    labels = len(study.data.labels)
    hashes = []
    for number, label_map in enumerate(label_maps, start=1):
        if not isinstance(label_map, np.ndarray) or label_map.dtype != np.uint8 or label_map.shape != study.data.grid:
            raise InvalidInput(
                f"public label map {number}",
                value=(str(getattr(label_map, "dtype", type(label_map))), getattr(label_map, "shape", None)),
                limit=f"uint8 on the study's grid {study.data.grid}",
            )
        if int(label_map.max()) >= labels:
            raise InvalidInput(
                f"public label map {number}: label", value=int(label_map.max()), limit=f"0 to {labels - 1}"
            )
        hashes.append(label_map_hash(label_map))
        known = [h for h in (hashes[-1], *(map_hashes or ())[number - 1 : number]) if h in private_hashes]
        if known:
            raise InvalidInput(
                f"public label map {number} is also a private, validation or test case",
                value=known[0],
                limit="label maps of patients in no other role",
                remedy="leave it out of the public label maps",
            )
    if len(set(hashes)) != len(hashes) or (map_hashes is not None and len(map_hashes) != len(hashes)):
        raise InvalidInput("public label maps", value=len(hashes), limit="one hash each, no map twice")
    provenance = Provenance(
        label_maps=tuple(hashes if map_hashes is None else map_hashes),
        augmentations=study.codec.augmentations,
        seed=seed,
        noise_std=check_noise_std(noise_std),
    )
    return kind.fit(label_maps, labels=labels, config=study.codec, provenance=provenance)


def load_codec(data: bytes, *, expected_hash: str | None = None) -> Codec:
    """Read a codec's bytes; another hash, an unknown codec, damage or anything beside the codec is refused."""
    if expected_hash is not None and sha256_bytes(data) != check_hash(expected_hash):
        raise InvalidInput("codec is not the one announced", value=sha256_bytes(data), limit=expected_hash)
    header, arrays = unpack(data)
    codec = codec_class(header["name"]).from_parts(header, arrays)
    if codec.to_bytes() != data:
        raise InvalidInput("codec file", limit="exactly the bytes a codec writes", remedy="fetch it again")
    return codec


def label_map_hash(label_map: UInt8[np.ndarray, "x y z"]) -> str:
    """SHA-256 of a label map on the study's grid: shape and voxels, no name and no header."""
    array = np.ascontiguousarray(label_map, dtype=np.uint8)
    return digest("label-map", {"shape": list(array.shape), "voxels": sha256_bytes(array.tobytes())})


def pack(header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A header (canonical JSON) and numeric arrays as one uncompressed npz without pickle or time stamps.

    More than a site would read back (:data:`MAX_CODEC_BYTES`) is refused.
    """
    size = sum(array.nbytes for array in arrays.values())
    if size > MAX_CODEC_BYTES - (1 << 16):
        raise InvalidInput(
            "codec is too large",
            value=f"{size} bytes",
            limit=f"{MAX_CODEC_BYTES} bytes with its header",
            remedy="lower codec.max_dimension",
        )
    stream = io.BytesIO()
    members = {_HEADER: np.frombuffer(canonical_bytes(dict(header)), dtype=np.uint8), **arrays}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(
                    member, np.ascontiguousarray(members[name]), version=(1, 0), allow_pickle=False
                )
    return stream.getvalue()


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what :func:`pack` wrote: the header, with ``schema`` and ``name`` checked, and the arrays."""
    if len(data) > MAX_CODEC_BYTES:
        raise InvalidInput("codec file is too large", value=len(data), limit=f"{MAX_CODEC_BYTES} bytes")
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise InvalidInput("codec file", limit="an uncompressed npz")
            if sum(info.file_size for info in archive.infolist()) > len(data):  # members that share their bytes
                raise InvalidInput("codec file", limit="members that lie one after another")
            for info in archive.infolist():
                with archive.open(info) as member:
                    _check_size(member, info.file_size)
                    member.seek(0)
                    arrays[info.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
        header = parse_canonical(arrays.pop(_HEADER).tobytes())
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, NotImplementedError, MemoryError) as error:
        raise InvalidInput(
            "codec file is damaged or no codec", limit="bytes a codec wrote", remedy="fetch it again"
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("name"), str):
        raise InvalidInput("codec header", limit="a schema and a name")
    check_schema("codec", header.get("schema"), known=CODEC_SCHEMA)
    return header, arrays


def write_codec(codec: Codec, arrays: Mapping[str, np.ndarray], *, grid: bool) -> bytes:
    """A codec's bytes: its arrays, and in the header its name, provenance and radius, with ``grid`` also its grid."""
    header = CodecHeader(codec.name, codec.provenance, codec.radius, codec.grid if grid else None)
    return pack(header.to_json(), arrays)


def read_header(
    header: Mapping[str, Any], *, grid: bool, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, type]
) -> dict[str, Any]:
    """What :func:`write_codec` wrote, as a codec's constructor takes it; InvalidInput for anything else."""
    read = CodecHeader.from_json(dict(header))
    if (read.grid is not None) != grid:
        limit = "three integers from 8" if grid else "none"
        raise InvalidInput(f"{read.name} codec: grid", value=read.grid, limit=limit)
    if arrays.keys() != dtypes.keys() or any(arrays[name].dtype != dtype for name, dtype in dtypes.items()):
        raise InvalidInput(f"{read.name} codec: arrays", value=sorted(arrays), limit=", ".join(dtypes))
    return {**arrays, "provenance": read.provenance, "radius": read.radius} | ({"grid": read.grid} if grid else {})


def is_pooled(grid: Sequence[int], coarse: Sequence[int]) -> bool:
    """Whether the voxels of ``coarse`` are cubes of one size of ``grid``'s."""
    factors = {n / m if m else 0.5 for n, m in zip(grid, coarse, strict=True)}
    return len(factors) == 1 and factors.pop().is_integer()


def frozen(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """A read-only copy of this type."""
    copy: np.ndarray = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def _check_size(member: IO[bytes], size: int) -> None:
    """That an array's header announces just the bytes that follow: nothing is allocated for what is not there."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("version of an array")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != size - member.tell():
        raise ValueError("size of an array")


def check_probabilities(
    probabilities: np.ndarray, *, labels: int, grid: tuple[int, int, int]
) -> Float[np.ndarray, "c x y z"]:
    """Return ``probabilities`` as float64 if they are finite class probabilities on the grid, else refuse."""
    if not isinstance(probabilities, np.ndarray) or probabilities.shape != (labels, *grid):
        raise InvalidInput(
            "class probabilities", value=getattr(probabilities, "shape", None), limit=f"shape {(labels, *grid)}"
        )
    values = probabilities.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInput("class probabilities", limit="finite numbers")
    if values.min() < -1e-3 or abs(values.sum(axis=0) - 1).max() > 1e-2:
        raise InvalidInput("class probabilities", limit="numbers ≥ 0 that sum to 1 in every voxel")
    return values


def check_code(code: np.ndarray, *, dimension: int) -> Float[np.ndarray, "l"]:
    """Return ``code`` as float64 if it is a finite vector of ``dimension`` numbers, else refuse."""
    if not isinstance(code, np.ndarray) or code.shape != (dimension,):
        raise InvalidInput("code", value=getattr(code, "shape", None), limit=f"shape {(dimension,)}")
    values = code.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInput("code", limit="finite numbers")
    return values


def check_noise_std(noise_std: float) -> float:
    """Return the standard deviation of the noise on the mean code if it is finite and ≥ 0, else refuse."""
    if isinstance(noise_std, bool) or not isinstance(noise_std, int | float) or not math.isfinite(noise_std):
        raise InvalidInput("noise on the mean code", value=noise_std, limit="a finite number ≥ 0")
    if noise_std < 0:
        raise InvalidInput("noise on the mean code", value=noise_std, limit="a finite number ≥ 0")
    return float(noise_std)
