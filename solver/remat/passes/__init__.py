"""Passes that turn a trace into another trace. Pure data, without torch.

- `gradient_accumulation`: gradients are added into existing `.grad` tensors.
- `device_placement`: the step is moved to another device.
- `trace_equality`: compares traces, for reuse of schedules.
"""
