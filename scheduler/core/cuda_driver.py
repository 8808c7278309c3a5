"""Calls of the CUDA driver: a copy on a device, and the first GPU as JSON, within 0.3 s and without a CUDA context.

`Gpu.target` runs this file as a separate program. The file imports nothing from this package.
"""

from __future__ import annotations

import ctypes
import json

# `CUdevice_attribute` of the CUDA driver API (cuda.h).
MULTIPROCESSOR_COUNT, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
LONGEST_NAME = 256


def described() -> dict[str, str | int]:
    """Returns the name, the architecture and the number of multiprocessors of the first GPU.

    Raises:
      OSError: there is no CUDA driver, or a driver call failed; the message has the driver's error code.
    """

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    _call("cuInit", 0)
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(LONGEST_NAME)
    _call("cuDeviceGetName", name, LONGEST_NAME, device)
    return {
        "kind": name.value.decode(),
        "architecture": f"sm_{attribute(CAPABILITY_MAJOR)}{attribute(CAPABILITY_MINOR)}",
        "cores": attribute(MULTIPROCESSOR_COUNT),
    }


def copy(target: int, source: int, size: int, stream: int) -> None:
    """Copies bytes between two addresses on a device, in the order of a stream.

    Raises:
      OSError: as in `described`.
    """
    addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
    _call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size), ctypes.c_void_p(stream))


def _call(name: str, *arguments: object) -> None:
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise OSError(f"{name}: error {error}")


if __name__ == "__main__":
    print(json.dumps(described()))
