"""Models by name: from a user's file, or with random weights from a configuration of transformers
or diffusers. `sources` is the entrance.
"""
