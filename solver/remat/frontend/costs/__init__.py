"""What operations take, by running them. `measure` is the entrance.

`tensors` makes operands, `timers` times, `calibration` estimates what cannot be run, and `cache`
keeps what was measured, under `key`.
"""
