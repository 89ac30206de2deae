"""Stores the public data of a study in its directory or in memory."""
