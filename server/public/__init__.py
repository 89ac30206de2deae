"""Holds what is public of a study, in its directory or in memory."""
