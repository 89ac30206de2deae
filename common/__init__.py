"""What every party shares: privacy, ledger, codecs, data and wire formats. Imports neither server nor client."""
