"""Computes each page's content as frozen dataclasses, from which HTML, JSON and metrics are made.

Every ε is stated with accountant, δ, unit and relation. The views are functions of the read model and the time. The
read model contains no code of a hospital, only noisy answers, so no view can reveal a code.
"""
