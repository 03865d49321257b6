"""Loads the model that a SOURCE on the command line names, with random weights and one batch.

- `sources`: parses a SOURCE and loads the training step; the entry point of this package.
- `factories`: calls a function of the user's code, and locates its errors.
- `configurations`: builds a model of transformers or diffusers from a configuration.
- `batches`: random batches for models of transformers.
"""
