"""The command line as `python -m remat`."""

from remat.cli import main

if __name__ == "__main__":
    main()
