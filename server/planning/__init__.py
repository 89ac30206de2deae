"""Computes the noise and the expected gain that a privacy budget allows, before any of it is spent."""
