"""The appearance query: hospitals answer with a few numbers on how each structure looks.

The server labels the public volumes from these numbers and from public shapes.
"""
