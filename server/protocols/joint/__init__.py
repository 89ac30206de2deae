"""The joint query: a public start, its tangent kernel, rounds with a frame each, and the student that continues from
it.
"""
