"""Contains the shared mathematics of differentially private training: sampling, clipped integer sums, noise, journal.

Begin reading with :mod:`client.training.private.engine`, which draws, charges, sums, noises and applies one step.
"""
