"""Computes each page's content as frozen facts, which become HTML, JSON and metrics.

Every ε carries accountant, δ, unit and relation. Pure functions of the read model and the time; nothing here touches a
file, and nothing is computed from an un-noised code: the read model has none.
"""
