"""Runs a study in memory: asks teachers, releases noisy sums, decodes labels and trains a student."""
