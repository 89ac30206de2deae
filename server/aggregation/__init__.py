"""Offers queries to sites, releases and stores noisy aggregates, runs a study's stages and reports progress."""
