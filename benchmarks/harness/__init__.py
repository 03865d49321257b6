"""Code that several benchmarks share.

`machine` describes the machine, `measurement` takes peaks and step times, `methods` are the ways to
run a step, `report` prints and writes results, `run_models` runs a benchmark over models.
"""
