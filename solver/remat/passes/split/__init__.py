"""Splitting: the operations around a large tensor run on some of its rows at a time.

- `states`: how a tensor relates to pieces: by rows, whole, or as a partial sum.
- `operators`, `rules`: what each operator does with rows.
- `regions`: the operations around a tensor that can be split.
- `rewriting`: the trace in which they are.
"""
