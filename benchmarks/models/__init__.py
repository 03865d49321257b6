"""Models and graphs that the benchmarks run on.

`workloads` are models with a batch, `families` those of the benchmarks of torch.compile,
`networks` are architectures that no installed library has, `traced` are training graphs in a cache
folder, and `published_graphs` reads the graphs of published papers.
"""
