"""Another codec takes one file and one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.codecs import base
from tests.contracts.codec_contract import CodecContract


class TestAToyCodecTakesOneFileAndOneLine(CodecContract):
    name = "mirror"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _registered(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "CODECS", {**base.CODECS, "mirror": "tests.contracts.toy_codec:MirrorCodec"})
            yield
