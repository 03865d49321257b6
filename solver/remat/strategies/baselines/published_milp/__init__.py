"""Checkmate (Jain et al., MLSys 2020) as published.

- `checkmate`: the optimum by its program, which is in `checkmate_program`.
- `lp_rounding`: its approximation from the relaxed program; `rounding`: its two phases.
"""
