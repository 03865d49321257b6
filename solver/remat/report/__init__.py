"""What is known, in words and tables: a plan (`describe`, `explain`), a step before it runs
(`estimate`), strategies beside each other (`comparison`). Pictures are in `remat.view`.
"""
