"""Holds what every party shares: privacy, ledger, codecs, data and wire formats. Imports neither server nor client."""

__version__ = "0.2.0"
"""Of the code that runs; pip is told the same."""
