"""The functions that users call on PyTorch models.

`optimize` and `enable` plan a model's training step; `estimate` predicts its peak; `max_batch`
finds the largest batch within a budget; `trial` compares a step with and without remat, with the
measurements in `comparison`.
"""
