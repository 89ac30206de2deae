"""Chooses the patients of a training step: by random coins from the operating system, or by a fixed partition.

``client.training.private.engine`` calls it. Sampling reads no patient's data: patients are numbered slots 0 … n − 1,
and an empty slot may be chosen and contributes zero. The module refuses a partition with more batches than patients, or
with a short key.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from common.errors import InvalidInput
from common.privacy.gaussian import Entropy
from common.privacy.training import Sampling, TrainingEvent


class Sampler(Protocol):
    """Chooses the patients of each step."""

    @property
    def expected(self) -> float:
        """Expected number of patients of a step."""
        ...

    def batch(self, step: int) -> Int64[np.ndarray, "b"]:
        """Choose the slots of one step.

        Args:
            step: Number of the step.

        Returns:
            Slots in ascending order, int64 [b].
        """
        ...


@dataclass(frozen=True, slots=True)
class PoissonSampler:
    """Includes every patient in every step independently with probability ``rate``; batch sizes vary and may be 0.

    A patient is included if 64 random bits are below ⌊q·2⁶⁴⌋. The probability is thus never above q, and less than 2⁻⁶⁴
    below it.

    Attributes:
        patients: Number of slots n.
        rate: Sampling rate q.
        entropy: Source of random bytes.
    """

    patients: int
    rate: Fraction
    entropy: Entropy = os.urandom

    @property
    def expected(self) -> float:
        return float(self.patients * self.rate)

    def batch(self, step: int) -> Int64[np.ndarray, "b"]:
        """Draw the slots of one step. Every call draws anew; ``step`` is not used."""
        words = np.frombuffer(self.entropy(8 * self.patients), dtype="<u8")
        threshold = (self.rate.numerator << 64) // self.rate.denominator
        joined = np.ones(self.patients, dtype=bool) if threshold >> 64 else words < np.uint64(threshold)
        return np.flatnonzero(joined).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FixedPartition:
    """Divides the slots once into disjoint batches, which the steps visit in turn.

    The division depends on ``key`` only, not on patients' data or on which slots are filled, so one patient influences
    one batch only. The key is stored with the run, so that a resumed run has the same batches.

    Attributes:
        patients: Number of slots n.
        batches: Number of batches, 1 to n.
        key: At least 16 random bytes.

    Raises:
        InvalidInput: If ``batches`` or ``key`` is out of range.
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
        """Return the slots of the batch that this step visits."""
        words = np.frombuffer(hashlib.shake_256(self.key).digest(8 * self.patients), dtype="<u8")
        order = np.argsort(words, kind="stable").astype(np.int64)
        return np.sort(order[step % self.batches :: self.batches])


def sampler_for(event: TrainingEvent, *, patients: int, key: bytes, entropy: Entropy = os.urandom) -> Sampler:
    """Return the sampler that a privacy event assumes: Poisson sampling, or a fixed partition.

    Args:
        event: The planned event.
        patients: Number of slots n.
        key: Key of a fixed partition.
        entropy: Source of random bytes for Poisson sampling.

    Returns:
        The sampler.
    """
    if event.sampling is Sampling.POISSON:
        return PoissonSampler(patients, event.rate, entropy)
    return FixedPartition(patients, event.rate.denominator, key)
