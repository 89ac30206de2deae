"""What every party shares: privacy, ledger, codecs, data and message formats. Imports neither server nor client."""

__version__ = "0.2.0"
"""Version of the running code; the package has the same."""
