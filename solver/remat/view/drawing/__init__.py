"""Drawing primitives that the pictures of a plan share.

`svg` writes SVG elements and has the palette, `text` escapes names, `axes` draws axes and ticks,
`marks` draws one marker per strategy, `memory_layers` splits the memory of each run by what it is
used for, and `schedule_grid` maps a schedule to rows and columns.
"""
