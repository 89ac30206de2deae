"""Runs a study in memory: ask teachers, release noisy sums, decode labels, train a student."""
