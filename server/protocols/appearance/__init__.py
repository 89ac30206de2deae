"""The server's side of the appearance query, in which hospitals send a few numbers about how each structure looks.

These numbers are the mean and spread of a structure's intensities. The server labels the public volumes from them and
from public shapes.
"""
