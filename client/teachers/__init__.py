"""Teachers as they answer, and the student that comes back."""
