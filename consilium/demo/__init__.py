"""Runs the demo: every party of a study as real daemons on one machine."""

import os

# All parties share the cores, so each uses one thread. Set before the numerical libraries read it; daemons inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
