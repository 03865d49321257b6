"""The planning service of remat: FastAPI in front, a store behind, one process for each solve."""
