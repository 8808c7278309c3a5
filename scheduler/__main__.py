"""``python -m scheduler``: the same as the command ``tile-scheduler``."""

from tile_scheduler import main

if __name__ == "__main__":
    main()
