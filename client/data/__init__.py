"""Reads a hospital's own files: their layout, their cases, and whether each case is usable."""
