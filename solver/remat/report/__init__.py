"""What is known, in words and tables: a plan (`describe`, `explain`), a step before it runs
(`estimate`), the largest batch (`max_batch`). Pictures are in `remat.view`.
"""
