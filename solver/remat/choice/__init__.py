"""The choice of operations to split and tensors to offload, for a step and a budget."""
