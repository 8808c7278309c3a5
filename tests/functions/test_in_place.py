"""Copies of operands that stay on a device, with the driver's copy and the addresses of buffers of a CPU."""

import ctypes
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.buffer_callback import buffer_callback

from scheduler.core import cuda_driver
from scheduler.rewriting import in_place
from scheduler.rewriting.in_place import Copy, InPlace


class Buffer:
    """A buffer of a callback on a CPU, with the interface of one on a GPU."""

    def __init__(self, buffer):
        self.__cuda_array_interface__ = np.asarray(buffer).__array_interface__


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    def called(run, results, **options):
        def on_cpu(context, result, *own):
            run(types.SimpleNamespace(stream=0), result, *map(Buffer, own))

        return buffer_callback(on_cpu, results, **options)

    monkeypatch.setattr(in_place, "buffer_callback", called)
    monkeypatch.setattr(cuda_driver, "copy", lambda target, source, size, _: ctypes.memmove(target, source, size))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def handed_out(copy, *operands):
    in_place._hand_out(copy, 1, operands)
    return operands[0] + 1


def test_operands_of_any_dtype_are_copied():
    operands = [jnp.arange(12.0).reshape(3, 4), jnp.arange(8, dtype=jnp.bfloat16), jnp.arange(4) > 1, jnp.int32(7)]
    copy = Copy(operands)
    copy.reserve(jax.devices()[0])
    jax.block_until_ready(jax.jit(handed_out, static_argnums=0)(copy, *operands))
    assert copy.filled
    for own, expected in zip(copy.operands, operands, strict=True):
        assert own.dtype == expected.dtype
        np.testing.assert_array_equal(np.float64(own), np.float64(expected))


def test_the_last_run_whose_number_is_a_power_of_two_is_kept():
    copy = Copy([jnp.zeros(4)])
    copy.reserve(jax.devices()[0])

    @jax.jit
    def looped(x):
        return jax.lax.scan(lambda x, _: (handed_out(copy, x), None), x, length=7)[0]

    jax.block_until_ready(looped(jnp.zeros(4)))
    np.testing.assert_array_equal(copy.operands[0], np.full(4, 3.0))  # of the fourth run


def test_nothing_is_copied_without_memory():
    copy = Copy([jnp.zeros(4)])
    jax.block_until_ready(jax.jit(handed_out, static_argnums=0)(copy, jnp.zeros(4)))
    assert not copy.filled


@pytest.mark.parametrize(("stats", "reserved"), [(None, 2), ({"bytes_limit": 100, "bytes_in_use": 20}, 1)])
def test_copies_get_memory_up_to_the_limit_of_the_allocator_if_it_has_one(monkeypatch, stats, reserved):
    made = []
    monkeypatch.setattr(Copy, "reserve", lambda copy, device: made.append(copy))
    compared = InPlace(1)
    copies = [compared._copy(("key", str(size)), [jnp.zeros(size)]) for size in (20, 10)]
    compared.reserve(types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats), lambda: 20)
    assert made == copies[::-1][:reserved]
