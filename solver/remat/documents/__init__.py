"""JSON documents: what a plan, a trace, a program and a sweep look like in files and over HTTP.

`plan`, `trace` and `program` are documents, `records` and `structure` their parts, `arguments` the
arguments of operations, `writes` and `targets` the operations that remat adds. `base` has what all
documents share, `names` the names that may become code, and `json_forms` what JSON schemas say of
names and arguments.
"""
