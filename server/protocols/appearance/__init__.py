"""The appearance query: asks in a few numbers how structures look, and labels public volumes by that and public
shapes.
"""
