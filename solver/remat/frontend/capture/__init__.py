"""Capture of a training step as a `Trace`, on fake tensors: nothing is computed.

trace              `trace`: captures a model's step; the entry point
symbolic_capture   one capture for all sizes of some dimensions
attempts           the recording as eager mode runs the model, or else as compiled code
recording          forward and backward on fake tensors, in a joint graph
operator_recorder  the mode that records operators in a graph
symbol_values      the numbers that the symbols of a symbolic capture stand for in one call
model/             the model during the capture: arguments, hooks, state to preserve
eager_kernels/     corrections, so that the graph has the operators that eager mode runs, also on a
                   CUDA GPU that this machine does not have
reading/           the joint graph, read into a trace
"""
