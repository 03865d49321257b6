"""Offloading: tensors that wait on the host between the forward and the backward."""
