"""How a study asks its queries and learns from the answers."""
