"""Measured memory: of a device, of a step, and of an optimizer.

`device_memory` reads a device's free memory and the size of library workspaces; `auto_budget` turns
free memory into the limits of the budget "auto"; `reserve` measures an optimizer's state; `meter`
counts live storages on the CPU; `gauge` reads live and peak bytes on the CPU or a GPU;
`allocator_peak` reads the peak of torch's own allocators.
"""
