"""Measures the time and workspace of operations by running them.

- `measure`: `remat.measure`, the entry point: a trace with costs.
- `operation_costs`: costs of a list of operations, each distinct one measured once.
- `operation_benchmark`: runs one operation at a time on a device.
- `operands`: creates the tensors that an operation needs.
- `timers`: times one call on the CPU or a CUDA device.
- `calibration`: estimates operations that cannot be measured, by a fitted roofline.
- `cost_cache`: measured costs on disk.
- `cost_key`: the keys of the cache.
- `progress_bar`: reports the progress of a measurement.
"""
