"""torch.compile: remat as a backend, and as the partitioner of AOTAutograd's joint graphs.

torch.compile(model, backend="remat", options={"budget": "60%"})
"""
