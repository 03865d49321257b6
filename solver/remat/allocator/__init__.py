"""torch's CUDA caching allocator as pure data, without torch.

- `replay`: replays a sequence of allocations and frees with the allocator's rules.
- `prediction`: predicts the allocated and reserved peaks of a plan by such a replay.
- `budget_fitting`: solves for plans whose allocated peak is within the budget.
"""
