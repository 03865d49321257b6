"""Offloading: tensors that are on the host between the forward and the backward."""
