"""A site's directory and the books of its patient pool."""
