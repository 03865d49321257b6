"""Memory limits of a plan.

`budget` parses budgets; `reserve` parses the bytes for other users of the memory; `limits` combines
budget, reserve and external memory; `outputs` is whether a step's outputs live during the backward;
`units` formats bytes and seconds.
"""
