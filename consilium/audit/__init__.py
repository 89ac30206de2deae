"""Implements ``consilium audit``: runs whole studies through the production code and tests everything they release."""
