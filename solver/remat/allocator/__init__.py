"""torch's caching allocator as pure data: a `replay` of it, what it makes of a plan (`prediction`),
and plans that fit as it counts (`fitting`).
"""
