"""Prints the first GPU of the CUDA driver as JSON, within 0.3 s and without creating a CUDA context.

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
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if error := getattr(driver, name)(*arguments):
            raise OSError(f"{name}: error {error}")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(LONGEST_NAME)
    call("cuDeviceGetName", name, LONGEST_NAME, device)
    return {
        "kind": name.value.decode(),
        "architecture": f"sm_{attribute(CAPABILITY_MAJOR)}{attribute(CAPABILITY_MINOR)}",
        "cores": attribute(MULTIPROCESSOR_COUNT),
    }


if __name__ == "__main__":
    print(json.dumps(described()))
