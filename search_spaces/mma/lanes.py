"""Numbers and accesses of each thread's own, in Mosaic GPU's terms: addresses in bytes, words of memory, barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm

from search_spaces.hopper.limits import ACCESS_BYTES


def bits(width: int) -> Any:
    """The type of integers so wide."""
    return ir.IntegerType.get_signless(width)


def number(value: Any, *, signed: bool = False) -> Any:
    """An integer of each thread's own, for arithmetic: of an MLIR value, or of a scalar of Pallas."""
    registers = getattr(value, "registers", None)
    return mgpu.FragmentedArray.splat(value if registers is None else registers.item(), (), is_signed=signed)


def wide(value: Any) -> Any:
    """The same in 64 bits."""
    return value.astype(bits(64), is_signed=False)


def wide_signed(value: Any) -> Any:
    return value.astype(bits(64), is_signed=True)


def as_signed(value: Any) -> Any:
    """The same bits."""
    return number(register(value), signed=True)


def unsigned(value: Any) -> Any:
    """The same bits."""
    return number(register(value))


def thread() -> Any:
    """Of the CTA."""
    return number(mgpu.thread_idx())


def gmem_address(ref: Any) -> Any:
    pointer = mgpu.utils.memref_ptr(ref)
    return number(llvm.ptrtoint(bits(64), llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)))


def smem_address(ref: Any) -> Any:
    """Within the CTA's shared memory, whose addresses have 32 bits."""
    return number(llvm.ptrtoint(bits(32), mgpu.utils.memref_ptr(ref)))


def register(value: Any) -> Any:
    """As an operand of an instruction."""
    return value.registers.item()


def instruct(text: str, constraints: str, operands: Sequence[Any], result: Any = None) -> Any:
    """An instruction that stays in its place among those that touch memory."""
    nothing = ir.Type.parse("!llvm.void")
    return llvm.inline_asm(
        nothing if result is None else result, list(operands), text, constraints, has_side_effects=True
    )


def synchronize() -> None:
    """Waits for all threads of the CTA, and for what they wrote to shared memory."""
    gpu.barrier()


def load(space: str, address: Any, offset: int, element: Any, count: int, inside: Any = None) -> Any:
    """A vector of so many elements from "shared" or "global" memory, at a multiple of its size; zeros if not `inside`.

    It lies `offset` bytes behind the address, and is read by accesses of 16 bytes at most.
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
    # Results are written before the last operand is read.
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
    """Stores a vector likewise; nothing if not `inside`."""
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
    """Widths of the registers that hold so many bits."""
    return [16] if width == 16 else [32] * (width // 32)


def _accesses(names: list[str], width: int) -> list[tuple[int, list[str]]]:
    """Registers by access, and the byte at which each begins."""
    most = ACCESS_BYTES * 8 // width
    return [(first * width // 8, names[first : first + most]) for first in range(0, len(names), most)]


def _vector(names: list[str]) -> str:
    return f".v{len(names)}" if len(names) > 1 else ""


def _braced(names: list[str]) -> str:
    return "{" + ", ".join(names) + "}" if len(names) > 1 else names[0]
