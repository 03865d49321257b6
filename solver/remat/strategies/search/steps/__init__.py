"""The steps of a search, one function (state, clock) or a few per module.

- `annealing`: recomputations by simulated annealing, in the graph's order.
- `baselines`: schedules of the quick baseline strategies.
- `checkpoint_cuts`: relaxation at checkpoint cuts, for the lower bound and for advice to eviction.
- `eviction`: schedules by eviction, within a budget or for the smallest peak.
- `feasibility`: a schedule for a budget that is hard to meet, or the error that it is infeasible.
- `identical_blocks`: programs in which identical blocks share decisions.
- `order_search`: orders of the operations; a search around the other steps.
- `slot_programs`: programs over slots, few or all.
- `windows`: large-neighbourhood search, window by window.
"""
