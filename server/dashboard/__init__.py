"""Holds the operator's dashboard: a web server that shows one study and cannot spend its privacy budget.

The dashboard runs as a process of its own. It opens the ledger for reading only and has none of the study's keys. The
decisions that users make (which pseudo-labels to leave out of training) are stored in an append-only file of the
dashboard. Everything that the dashboard shows is public, a release under differential privacy, or post-processing of
such a release.
"""
