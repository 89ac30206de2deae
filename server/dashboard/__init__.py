"""The operator's dashboard: a web server that shows one study and cannot spend its privacy budget.

It runs as a process of its own. It opens the ledger for reading only and has none of the study's keys. The decisions
that users make (which pseudo-labels to leave out of training) go to an append-only file of the dashboard. Everything
that it shows is public, a release under differential privacy, or post-processing of such a release.
"""
