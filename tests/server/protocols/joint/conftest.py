"""Fits the linear codec of a joint study once for each module."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.codecs.codec import fit_codec
from common.codecs.pca import PcaCodec
from tests.contracts.codec_contract import CodecContract, patients


class _Linear(CodecContract):
    name = "pca"


@pytest.fixture(scope="module")
def codec() -> PcaCodec:
    terms = _Linear.study()
    study = replace(terms, codec=replace(terms.codec, joint=True), privacy=replace(terms.privacy, planned_queries=1))
    fitted = fit_codec(study, list(patients(10, seed=1)), noise_std=0.05)
    assert isinstance(fitted, PcaCodec)
    return fitted
