"""A `Program` as a module that trains. `module` is the entrance.

`lower` makes two graphs of a program, `launch` one plain function of each, `step` one autograd node
of both; `guards` checks each call against what was planned, `random` replays what was drawn.
"""
