"""Reproduces the papers' networks and tables, and measures utility; no server or site needs it."""
