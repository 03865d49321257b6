"""Corrections to a recorded step, so that it has the operators that eager mode runs, also on a GPU
that this machine does not have. `overrides` registers them for one capture.
"""
