"""Codecs: a segmentation of a whole volume ↔ a short code in a ball, fitted on public label maps only."""

from common.codecs.codec import CODECS, Codec, Provenance, codec_class, fit_codec, label_map_hash, load_codec

__all__ = ["CODECS", "Codec", "Provenance", "codec_class", "fit_codec", "label_map_hash", "load_codec"]
