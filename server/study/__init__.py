"""A study's directory: how it is made, what its terms say in words, where everything lies."""
