"""Corrections to a recorded step, so that it has the operators that eager mode runs.

overrides        registers the replacements below in torch's Python dispatcher for one capture
autocast_cache   one cast per parameter under autocast, as by eager mode's cache
dropout          dropout on the CPU, and Bernoulli sampling in memory order
memory_order     the order of a tensor's elements in memory
recurrent        dropout between the layers of recurrent networks
sampling         random integers, normal numbers and rrelu
slicing          slices of a whole symbolic dimension, which eager mode skips
fake_layouts     strides of fake tensors, where a decomposition differs from the kernel
fake_dtypes      dtypes of fake tensors, where torch's differ from the kernel's
"""
