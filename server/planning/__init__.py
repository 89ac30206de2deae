"""What a budget buys, before it is spent."""
