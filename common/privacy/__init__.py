"""The privacy core: the cost of a release, the noise that it needs, and the code that adds the noise.

The modules hold pure functions and frozen values. They import neither torch nor Flower, and read and write no files.
Read them in this order:

1. ``mechanism``: what is released, and the sensitivity of a release.
2. ``quantise``: why a code cannot exceed its norm bound.
3. ``gaussian``: the noise.
4. ``release``: the function that sums codes and adds the noise.
5. ``accounting``: what a set of releases costs.
6. ``calibration``: how much noise a plan needs.
"""
