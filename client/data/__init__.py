"""A hospital's own files: layouts, cases, and a verdict on each."""
