"""JSON documents: data only, validated when they are read.

`base` has the base classes, validation and file access. `trace`, `program`, `plan` and `sweep` are
the documents. Traces and programs are built from `records` (tensors, operations, outputs),
`arguments` (of operations) and `structure` (nesting of inputs and outputs). `quantities` has the
ranges of numbers, and `json_forms` what JSON schemas say of names and arguments.
"""
