"""A trace into another trace: with gradients that accumulate, random numbers drawn once, other
devices.
"""
