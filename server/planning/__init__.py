"""Computes what a budget buys, before it is spent."""
