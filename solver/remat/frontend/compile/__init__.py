"""torch.compile within a memory budget: `torch.compile(model, backend="remat", options=...)`."""
