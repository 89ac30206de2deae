"""The joint query: a public start, its tangent kernel, rounds with a frame each, the student that learns from them."""
