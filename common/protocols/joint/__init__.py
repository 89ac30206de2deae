"""Joint queries: every query is about all public volumes at once, relative to a public frame."""
