"""Runs teachers that a hospital already has: declared, confined by the kernel, and asked like trained ones."""
