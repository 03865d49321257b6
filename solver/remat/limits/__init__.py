"""Memory limits of a plan.

`budget` parses budgets; `reserve` parses the bytes for other users of the memory; `limits` combines
budget, reserve and external memory; `infeasible` is the option for budgets that no plan fits;
`outputs` is the option for outputs that live during the backward; `pieces` and `offload` are the
options for split operations and offloaded tensors; `units` formats bytes and seconds.
"""
