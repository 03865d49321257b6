"""Capture of a training step as a `Trace`, on fake tensors: nothing is computed.

trace              `trace`: captures a model's step; the entry point
symbolic_capture   one capture for all sizes of some dimensions
symbol_values      the numbers that the symbols of such a capture stand for in one call
model/             the model during the capture: arguments, hooks, state to preserve
eager_kernels/     corrections, so that the graph has the operators that eager mode runs
absent_gpu/        operators of a CUDA GPU that this machine does not have
reading/           the exported joint graph, read into a trace
"""
