"""Splitting: the operations around a large tensor run on some of its rows at a time.

- `states`: how a tensor relates to pieces: by rows, whole, or as a partial sum.
- `rules`: what each operator does with rows.
- `regions`, `stages`: the operations around a tensor that can be split, and which run together.
- `rewriting`: the trace in which they are.
- `splits`: the largest operations of a trace, or the splits of another trace.
- `moved_slices`, `obstacle`: sliced logits, moved out of the way or reported.
"""
