"""Coverage of Transformers' architectures: which of them train under remat, with equal gradients.

`__main__` is the command, `small_models` builds the models, `eager_comparison`, `sizes` and
`compiled` are the three checks.
"""
