"""Operators as a CUDA GPU runs them, for a GPU that this machine does not have.

Such a step is captured on CPU tensors; these kernels replace torch's during the capture.

    attention       the kernel of `scaled_dot_product_attention`: flash, efficient, cuDNN or math
    cuda_autocast   CUDA's autocast policies, applied to CPU tensors
    cuda_kernels    the remaining operators for which CUDA runs other kernels: batch norm, softmax
"""
