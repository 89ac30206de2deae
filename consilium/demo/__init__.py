"""The demo: every party of a study as real daemons on one machine."""
