"""Tests that the linear codec keeps the contract of all codecs; tests/common/codecs tests its mathematics."""

from __future__ import annotations

from tests.contracts.codec_contract import CodecContract


class TestPcaCodec(CodecContract):
    name = "pca"


class TestPcaCodecOfAnotherRadius(CodecContract):
    name = "pca"
    radius = 3.0
    planned_noise = 0.15
