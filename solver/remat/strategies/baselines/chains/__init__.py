"""Baseline strategies for chains.

- `chain`: a training step as a chain of stages, and a writer of its schedules.
- `chain_costs`: the costs of a chain's stages.
- `revolve`: binomial checkpointing; `rotor`: optimal checkpointing of heterogeneous chains.
"""
