"""Per-thread numbers and memory accesses in Mosaic GPU: addresses in bytes, words of memory, barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm

from search_spaces.hopper import ACCESS_BYTES


def bits(width: int) -> Any:
    """Returns the integer type of this width."""
    return ir.IntegerType.get_signless(width)


def number(value: Any, *, signed: bool = False) -> Any:
    """Returns a per-thread integer for arithmetic, from an MLIR value or a scalar of Pallas."""
    registers = getattr(value, "registers", None)
    return mgpu.FragmentedArray.splat(value if registers is None else registers.item(), (), is_signed=signed)


def wide(value: Any) -> Any:
    """Converts to 64 bits."""
    return value.astype(bits(64), is_signed=False)


def wide_signed(value: Any) -> Any:
    return value.astype(bits(64), is_signed=True)


def as_signed(value: Any) -> Any:
    """Reinterprets the bits as signed."""
    return number(register(value), signed=True)


def unsigned(value: Any) -> Any:
    """Reinterprets the bits as unsigned."""
    return number(register(value))


def thread() -> Any:
    """Returns the index of the thread in the CTA."""
    return number(mgpu.thread_idx())


def gmem_address(ref: Any) -> Any:
    pointer = mgpu.utils.memref_ptr(ref)
    return number(llvm.ptrtoint(bits(64), llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)))


def smem_address(ref: Any) -> Any:
    """Returns the 32-bit address within the CTA's shared memory."""
    return number(llvm.ptrtoint(bits(32), mgpu.utils.memref_ptr(ref)))


def register(value: Any) -> Any:
    """Returns the value as an operand of an instruction."""
    return value.registers.item()


def instruct(text: str, constraints: str, operands: Sequence[Any], result: Any = None) -> Any:
    """Emits an instruction that keeps its order among memory accesses."""
    nothing = ir.Type.parse("!llvm.void")
    return llvm.inline_asm(
        nothing if result is None else result, list(operands), text, constraints, has_side_effects=True
    )


def synchronize() -> None:
    """Synchronizes all threads of the CTA, and their shared memory writes."""
    gpu.barrier()


def load(space: str, address: Any, offset: int, element: Any, count: int, inside: Any = None) -> Any:
    """Loads a vector of `count` elements from "shared" or "global" memory; zeros if not `inside`.

    It lies `offset` bytes after the address, aligned to its size, and is read by accesses of at most 16 bytes.
    """
    width = mgpu.utils.bitwidth(element) * count
    words = _words(width)
    results = [f"${at}" for at in range(len(words))]
    operands, given = [register(address)], f"${len(words)}"
    text = [f"mov.b{words[0]} {result}, 0;" for result in results] if inside is not None else []
    predicate = ""
    if inside is not None:
        operands.append(register(inside))
        predicate = f"@${len(words) + 1} "
    for first, some in _accesses(results, words[0]):
        text.append(f"{predicate}ld.{space}{_vector(some)}.b{words[0]} {_braced(some)}, [{given}+{offset + first}];")
    # Early clobber: results are written before the last operand is read.
    marks = [f"=&{'h' if words[0] == 16 else 'r'}"] * len(words)
    marks += ["r" if space == "shared" else "l", *(["b"] if inside is not None else [])]
    integer = bits(words[0])
    if len(words) == 1:
        loaded = [instruct(" ".join(text), ",".join(marks), operands, integer)]
    else:
        struct = llvm.StructType.get_literal([integer] * len(words))
        together = instruct(" ".join(text), ",".join(marks), operands, struct)
        loaded = [llvm.extractvalue(integer, together, [at]) for at in range(len(words))]
    vector = llvm.mlir_undef(ir.VectorType.get((len(words),), integer))
    for at, word in enumerate(loaded):
        vector = llvm.insertelement(vector, word, position=mgpu.utils.c(at, bits(32)))
    return mgpu.utils.bitcast(vector, ir.VectorType.get((count,), element))


def store(space: str, address: Any, offset: int, value: Any, inside: Any = None) -> None:
    """Stores a vector as `load` reads it; does nothing if not `inside`."""
    kind = ir.VectorType(value.type)
    words = _words(mgpu.utils.bitwidth(kind.element_type) * kind.shape[0])
    integer = bits(words[0])
    vector = mgpu.utils.bitcast(value, ir.VectorType.get((len(words),), integer))
    held = [llvm.extractelement(vector, mgpu.utils.c(at, bits(32))) for at in range(len(words))]
    operands = [register(address), *held, *([register(inside)] if inside is not None else [])]
    names = [f"${at + 1}" for at in range(len(words))]
    predicate = f"@${len(words) + 1} " if inside is not None else ""
    text = [
        f"{predicate}st.{space}{_vector(some)}.b{words[0]} [$0+{offset + first}], {_braced(some)};"
        for first, some in _accesses(names, words[0])
    ]
    marks = ["r" if space == "shared" else "l", *["h" if words[0] == 16 else "r"] * len(words)]
    instruct(" ".join(text), ",".join([*marks, *(["b"] if inside is not None else [])]), operands)


def _words(width: int) -> list[int]:
    """Returns the widths of the registers that hold `width` bits."""
    return [16] if width == 16 else [32] * (width // 32)


def _accesses(names: list[str], width: int) -> list[tuple[int, list[str]]]:
    """Groups registers by access, with the byte offset of each access."""
    most = ACCESS_BYTES * 8 // width
    return [(first * width // 8, names[first : first + most]) for first in range(0, len(names), most)]


def _vector(names: list[str]) -> str:
    return f".v{len(names)}" if len(names) > 1 else ""


def _braced(names: list[str]) -> str:
    return "{" + ", ".join(names) + "}" if len(names) > 1 else names[0]
