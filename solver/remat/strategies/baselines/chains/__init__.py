"""Baseline strategies for chains.

- `chain`: a training step as a chain of stages, and a writer of its schedules; `chain_costs`: the costs of its stages.
- `revolve`: binomial checkpointing; `rotor`: optimal checkpointing of heterogeneous chains.
"""
