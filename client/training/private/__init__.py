"""The shared mathematics of training with differential privacy: sampling, clipped integer sums, noise, journal.

Start at :mod:`client.training.private.engine`: one step is drawn, charged, summed, noised and applied there.
"""
