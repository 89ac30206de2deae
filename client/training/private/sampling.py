"""Chooses the patients of a training step: by coins from the operating system's CSPRNG, or a partition dealt once.

Nothing here looks at a record. Patients are slots 0 … n − 1; an empty slot may be picked and contributes zero.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from common.errors import InvalidInput
from common.privacy.training import Sampling, TrainingEvent

Entropy = Callable[[int], bytes]
"""(count) → random bytes. Production uses ``os.urandom``; tests inject others."""


class Sampler(Protocol):
    """Chooses the patients of a step; ``expected`` is the constant every sum is divided by."""

    @property
    def expected(self) -> float: ...

    def batch(self, step: int) -> Int64[np.ndarray, "b"]: ...


@dataclass(frozen=True, slots=True)
class PoissonSampler:
    """Every patient joins every step with probability ``rate``, independently: sizes vary, and may be 0.

    The coin compares 64 random bits with ⌊q·2⁶⁴⌋, so the probability is never above q and short of it by under 2⁻⁶⁴.
    """

    patients: int
    rate: Fraction
    entropy: Entropy = os.urandom

    @property
    def expected(self) -> float:
        return float(self.patients * self.rate)

    def batch(self, step: int) -> Int64[np.ndarray, "b"]:
        """The slots of one step in order; ``step`` plays no part, every call draws anew."""
        words = np.frombuffer(self.entropy(8 * self.patients), dtype="<u8")
        threshold = (self.rate.numerator << 64) // self.rate.denominator
        joined = np.ones(self.patients, dtype=bool) if threshold >> 64 else words < np.uint64(threshold)
        return np.flatnonzero(joined).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FixedPartition:
    """Slots dealt to ``batches`` disjoint batches by ``key`` alone, visited in turn; the same key deals alike.

    The deal reads no record and does not depend on how many slots are filled, so one patient moves one batch. ``key``
    is kept with the run: a resumed run must meet the same batches.
    """

    patients: int
    batches: int
    key: bytes

    def __post_init__(self) -> None:
        if not 1 <= self.batches <= self.patients:
            raise InvalidInput("batches of a fixed partition", value=self.batches, limit=f"1 to {self.patients}")
        if len(self.key) < 16:
            raise InvalidInput("key of a fixed partition", value=f"{len(self.key)} bytes", limit="at least 16 bytes")

    @property
    def expected(self) -> float:
        return self.patients / self.batches

    def batch(self, step: int) -> Int64[np.ndarray, "b"]:
        words = np.frombuffer(hashlib.shake_256(self.key).digest(8 * self.patients), dtype="<u8")
        order = np.argsort(words, kind="stable").astype(np.int64)
        return np.sort(order[step % self.batches :: self.batches])


def sampler_for(event: TrainingEvent, *, patients: int, key: bytes, entropy: Entropy = os.urandom) -> Sampler:
    """The sampler an event is accounted for: there is no other way to get one that goes with it."""
    if event.sampling is Sampling.POISSON:
        return PoissonSampler(patients, event.rate, entropy)
    return FixedPartition(patients, event.rate.denominator, key)
