"""The appearance query: asks what structures look like in a few numbers, and makes labels from them and public
shapes.
"""
