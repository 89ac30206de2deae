"""Trains a site's teachers: each voter on its own patients only."""
