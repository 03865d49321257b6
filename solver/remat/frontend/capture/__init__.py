"""Capture of a training step as a `Trace`, on fake tensors: nothing is computed.

`trace` prepares the model, `attempts` runs it in eager mode or else as compiled code, `recording`
and `operator_recorder` record forward and backward in a joint graph, and `reading` makes a trace of
the graph.
"""
