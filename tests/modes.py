"""Files that this process may not write, or not reach, whoever runs it."""

import contextlib
import ctypes

# <linux/capability.h>: what lets root read and write files whatever their modes say.
CAPABILITY_VERSION = 0x20080522
OVERRIDES = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def with_modes(modes):
    """Within, these files have these modes, and this thread, and those it starts, may do no more than they say.

    Root may do whatever it wants, so it does without that meanwhile.
    """
    before = {place: place.stat().st_mode for place in modes}
    for place, mode in modes.items():
        place.chmod(mode)
    try:
        with _as_an_owner():
            yield
    finally:
        for place, mode in before.items():
            place.chmod(mode)


@contextlib.contextmanager
def _as_an_owner():
    libc = ctypes.CDLL(None, use_errno=True)
    header, has = Header(CAPABILITY_VERSION, 0), (Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), has) == 0, ctypes.get_errno()
    effective = has[0].effective
    has[0].effective = effective & ~OVERRIDES
    assert libc.capset(ctypes.byref(header), has) == 0, ctypes.get_errno()
    try:
        yield
    finally:
        has[0].effective = effective
        assert libc.capset(ctypes.byref(header), has) == 0, ctypes.get_errno()


def frozen(*files):
    """Within, none of `files`, nor the directory of each, may be written by this process."""
    return with_modes({file.parent: 0o555 for file in files} | dict.fromkeys(files, 0o444))
