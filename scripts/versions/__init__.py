"""Tests of remat in every supported environment: `make test-versions`.

`__main__` is the command, `rows` the table of environments, `pythons` finds Pythons and makes
virtual environments, `debian` makes a Debian in a folder, `images`, `containers` and `services`
build and run the container images.
"""
