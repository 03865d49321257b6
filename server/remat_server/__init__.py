"""The planning service of remat.

It comes with a later release: this package holds its name and its place, and nothing else yet.
Until then plans are made in process, by `remat.solve`.
"""
