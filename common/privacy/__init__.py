"""The privacy core: pure functions and frozen values, no torch, no Flower, no I/O.

Read in this order: ``mechanism`` (what is released and how far one unit can move it), ``clip`` and ``quantise`` (why a
code cannot exceed its bound), ``gaussian`` (the noise), ``accounting`` (what a set of releases costs), ``calibration``
(how much noise a plan needs).
"""
