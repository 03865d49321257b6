"""Peak memory of training that others have published, against the predictions of `remat.fit`.

Each source states the configuration of its runs. A row is reproduced by configuration only: no
weights, no GPU. `python -m benchmarks.fit_world --only litgpt` runs the rows of one source.
"""
