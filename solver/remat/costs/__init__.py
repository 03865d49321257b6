"""What operations take where nothing is run: data sheets (`devices`), the arithmetic of operations
(`flops`), the `roofline` of both, and `pricing`, which puts costs into a trace. Without torch.
"""
