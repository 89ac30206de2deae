"""Contains the shared mathematics of differentially private training: sampling, clipped integer sums, noise, journal.

Begin with :mod:`client.training.private.engine`: it draws, charges, sums, noises and applies one step.
"""
