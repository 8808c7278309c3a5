"""Runs the ``tile-scheduler`` command as ``python -m scheduler``."""

from tile_scheduler.__main__ import main

if __name__ == "__main__":
    main()
