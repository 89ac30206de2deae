"""Teachers that a hospital already has: declared, confined, asked like any other."""
