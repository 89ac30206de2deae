"""Runs the demo: every party of a study as real daemons on one machine."""

import os

# All parties share the cores: one thread each, set before the numerical libraries read it; daemons inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
