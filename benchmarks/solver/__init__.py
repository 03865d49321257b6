"""Benchmark of the quality and time of schedules, against published results and baselines.

`__main__` is the command. Sections: `published` (and random) graphs, `traced_graphs`, `baselines`
(and table 2), `peers`. Each solve runs in a process: `jobs` starts `worker`, `baseline_worker` or
`peer_worker`. `record` prints and stores rows, `remat_plans` holds remat's plans to compare with,
`peer_models` the models of `peers`."""
