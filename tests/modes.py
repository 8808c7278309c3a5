"""Files that this process may not write, or not reach, whoever runs it."""

import contextlib
import os


@contextlib.contextmanager
def with_modes(modes):
    """Within, these files have these modes, and this process may do no more than they say.

    Root may do whatever it wants, so it is somebody else meanwhile.
    """
    before = {place: place.stat().st_mode for place in modes}
    for place, mode in modes.items():
        place.chmod(mode)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
        for place, mode in before.items():
            place.chmod(mode)


def frozen(*files):
    """Within, none of `files`, nor the directory of each, may be written by this process."""
    return with_modes({file.parent: 0o555 for file in files} | dict.fromkeys(files, 0o444))
