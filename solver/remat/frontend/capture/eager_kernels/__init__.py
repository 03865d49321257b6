"""Corrections to a recorded step, so that it has the operators that eager mode runs.

overrides        registers the replacements below in torch's Python dispatcher for one capture;
                 recurrent networks and slices
autocast         one cast per parameter under autocast, and CUDA's policies on CPU tensors
sampling         dropout, random integers, normal numbers and rrelu in the order in memory
fake_results     strides and dtypes of fake tensors, where torch's differ from the kernel's
cuda_kernels     the operators for which CUDA runs other kernels: batch norm, softmax
attention        the kernel of `scaled_dot_product_attention` on a GPU that this machine lacks
"""
