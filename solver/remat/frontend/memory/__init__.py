"""Measured memory: of a device, of a step, and of an optimizer."""
