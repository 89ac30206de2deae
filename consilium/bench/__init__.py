"""Benchmarks a user can run: what a recipe is worth, on their data, under a stated guarantee."""
