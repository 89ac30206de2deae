"""How a study asks: what the server asks, what it reads in the answers, and the student it makes of them."""
