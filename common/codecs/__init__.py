"""Codecs: turn the segmentation of a whole volume into a short code inside a ball, and back. Fitted on public maps
only.
"""

from common.codecs.codec import CODECS, Codec, Provenance, codec_class, fit_codec, label_map_hash, load_codec

__all__ = ["CODECS", "Codec", "Provenance", "codec_class", "fit_codec", "label_map_hash", "load_codec"]
