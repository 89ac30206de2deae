"""Codecs: turn the segmentation of a whole volume into a short code inside a ball, and a code back into a segmentation.
They are fitted on public label maps only.
"""

from common.codecs.codec import Codec, Provenance, codec_class, fit_codec, label_map_hash, load_codec
from common.protocol_terms import CODECS

__all__ = ["CODECS", "Codec", "Provenance", "codec_class", "fit_codec", "label_map_hash", "load_codec"]
