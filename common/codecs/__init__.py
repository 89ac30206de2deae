"""Codecs: a segmentation of a whole volume ↔ a short code in a ball, fitted on public label maps only."""

from common.codecs import pca as pca  # importing registers it
from common.codecs.base import CODECS, Codec, Provenance, fit_codec, label_map_hash, load_codec

__all__ = ["CODECS", "Codec", "Provenance", "fit_codec", "label_map_hash", "load_codec"]
