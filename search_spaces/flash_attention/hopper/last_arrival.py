"""The last CTA of those that share a head of keys combines what all have left in device memory, in the same launch.

Each CTA stores its partial result, makes that visible to the GPU, and counts itself in. The counters belong to the
kernel's module, as a `__device__` array of CUDA C++ does: they are zero when it is loaded, and the count of all CTAs
takes them back to zero (`atom.inc` wraps around), so that no launch has to clear them. Launches of one kernel on one
device must come one after another, as those of a JAX program do.

The interpreter has no such memory: there `combine.py` does this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from search_spaces.hopper.dsmem import ptx
from search_spaces.hopper.limits import WARPGROUP, WGMMA_ROWS
from search_spaces.jax_compat import mosaic_gpu_code, plgpu

VECTOR = 4  # float32 numbers that a thread loads at a time
IN_FLIGHT = 16  # of these loads, before the first is used
LOWEST = -1e30

# PTX ISA, atom: the old value, which becomes zero where it is the bound, and else one more.
ARRIVE = """{{
    .global .align 4 .u32 flash_decoding_arrivals[{counters}];
    .reg .b64 place;
    .reg .b32 arrived;
    mov.u64 place, flash_decoding_arrivals;
    mad.wide.u32 place, $1, 4, place;
    @$0 atom.acq_rel.gpu.global.inc.u32 arrived, [place], {bound};
    @$0 st.shared.u32 [$2], arrived;
}}"""


@dataclasses.dataclass(frozen=True)
class LastArrival:
    """Combines partial results ``[partials, groups, rows, columns]``, of which a CTA writes some fragments.

    Attributes:
      partials: CTAs that are counted, one of each cluster.
      groups: results, each of so many partial ones.
      cluster: CTAs that share each partial result: fragment f is that of rank ``f % cluster``.
      fragment: elements of a fragment.
      rows, columns: of a result.
    """

    partials: int
    groups: int
    cluster: int
    fragment: int
    rows: int
    columns: int

    def combine(self, group: Any, rank: Any, smem: Any, partial: Sequence[Any], results: Sequence[Any]) -> None:
        """Counts this CTA in; the last one stores the fragments of its rank.

        Args:
          group, rank: of this CTA.
          smem: float32 in shared memory, which nobody reads any more.
          partial: flat float32 in device memory, results and the log-sum-exp to base 2 of each element.
          results: flat in device memory, and perhaps natural log-sum-exps ``[groups, 64]``.
        """

        def meaning(*_: Any) -> None:
            raise NotImplementedError("the interpreter has no counters that outlive a launch")

        refs = (*partial, *results, smem)
        splat = plgpu.Layout.WG_SPLAT

        @mosaic_gpu_code(meaning, arg_types=(*[plgpu.RefType()] * len(refs), splat, splat))
        def arrive_and_combine(_: Any, *args: Any) -> None:
            *refs, group, rank = args
            group, rank = group.registers.item(), rank.registers.item()
            with mgpu.utils.when(self._last(refs[-1], group, rank)):
                self._combine(group, rank, refs[:2], refs[2:-1])

        arrive_and_combine(*refs, group, rank)

    def _last(self, smem: Any, group: Any, rank: Any) -> Any:
        """Whether all others have been counted before this CTA."""
        bits = ir.IntegerType.get_signless(32)
        flag = mgpu.utils.memref_ptr(smem)
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP, bits))
        first = arith.cmpi(arith.CmpIPredicate.eq, thread, mgpu.c(0, bits))
        number = arith.addi(arith.muli(group, mgpu.c(self.cluster, bits)), rank)
        ptx("fence.acq_rel.gpu;")
        mgpu.warpgroup_barrier()
        arrive = ARRIVE.format(counters=self.groups * self.cluster, bound=self.partials - 1)
        ptx(arrive, [first, number, llvm.ptrtoint(bits, flag)], "b,r,r")
        mgpu.warpgroup_barrier()
        arrived: Any = llvm.inline_asm(
            bits, [llvm.ptrtoint(bits, flag)], "ld.shared.u32 $0, [$1];", "=r,r,~{memory}", has_side_effects=True
        )
        return arith.cmpi(arith.CmpIPredicate.eq, arrived, mgpu.c(self.partials - 1, bits))

    def _combine(self, group: Any, rank: Any, partial: Sequence[Any], results: Sequence[Any]) -> None:
        bits = ir.IntegerType.get_signless(32)
        elements = self.rows * self.columns
        fragments, share = elements // self.fragment, self.fragment // VECTOR
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP, bits))
        own, lane = arith.divui(thread, mgpu.c(share, bits)), arith.remui(thread, mgpu.c(share, bits))
        at_once = WARPGROUP // share
        for first in range(0, -(-fragments // self.cluster), at_once):
            number = arith.addi(own, mgpu.c(first, bits))
            number = arith.addi(arith.muli(number, mgpu.c(self.cluster, bits)), rank)
            element = arith.addi(
                arith.muli(number, mgpu.c(self.fragment, bits)), arith.muli(lane, mgpu.c(VECTOR, bits))
            )
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, mgpu.c(fragments, bits))):
                self._combine_vector(group, element, partial, results)

    def _combine_vector(self, group: Any, element: Any, partial: Sequence[Any], results: Sequence[Any]) -> None:
        """Elements next to each other, of one row."""
        bits, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        elements = self.rows * self.columns
        place = arith.addi(arith.muli(group, mgpu.c(elements, bits)), element)

        def address(ref: Any, split: int) -> Any:
            index = arith.addi(place, mgpu.c(split * self.groups * elements, bits))
            return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], f32)

        splits = range(self.partials)
        logarithms = [_load(address(partial[1], split), 1)[0] for split in splits]
        loaded = [_load(address(partial[0], split), VECTOR) for split in splits[:IN_FLIGHT]]
        most = mgpu.c(LOWEST, f32)
        for one in logarithms:
            most = arith.maximumf(most, one)
        total, sums = mgpu.c(0.0, f32), [mgpu.c(0.0, f32)] * VECTOR
        for split in splits:
            if split and split % IN_FLIGHT == 0:
                loaded = [_load(address(partial[0], one), VECTOR) for one in splits[split : split + IN_FLIGHT]]
            weight = _approximate("ex2.approx.ftz.f32", arith.subf(logarithms[split], most))
            total = arith.addf(total, weight)
            sums = [arith.addf(x, arith.mulf(y, weight)) for x, y in zip(sums, loaded[split % IN_FLIGHT], strict=True)]
        seen = arith.cmpf(arith.CmpFPredicate.OGT, total, mgpu.c(0.0, f32))
        inverse = arith.select(seen, arith.divf(mgpu.c(1.0, f32), total), mgpu.c(0.0, f32))
        value = vector.from_elements(ir.VectorType.get((VECTOR,), f32), [arith.mulf(x, inverse) for x in sums])
        out = results[0]
        kind = ir.MemRefType(out.type).element_type
        if kind != f32:
            value = arith.truncf(ir.VectorType.get((VECTOR,), kind), value)
        llvm.store(value, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [place], kind))
        for lse in results[1:]:
            columns = mgpu.c(self.columns, bits)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(element, columns), mgpu.c(0, bits))):
                row = arith.addi(arith.muli(group, mgpu.c(WGMMA_ROWS, bits)), arith.divui(element, columns))
                natural = arith.addf(most, _approximate("lg2.approx.f32", total))
                natural = arith.mulf(natural, mgpu.c(math.log(2), f32))
                llvm.store(natural, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(lse), [row], f32))


def _load(address: Any, count: int) -> list[Any]:
    """Numbers that another CTA has written: from the last-level cache."""
    f32 = ir.F32Type.get()
    if count == 1:
        text = "ld.relaxed.gpu.f32 $0, [$1];"
        return [llvm.inline_asm(f32, [address], text, "=f,l,~{memory}", has_side_effects=True)]
    kind = llvm.StructType.get_literal([f32] * count)
    names = ", ".join(f"${number}" for number in range(count))
    text = f"ld.relaxed.gpu.v{count}.f32 {{{names}}}, [${count}];"
    loaded: Any = llvm.inline_asm(
        kind, [address], text, ",".join(["=f"] * count) + ",l,~{memory}", has_side_effects=True
    )
    return [llvm.extractvalue(f32, loaded, [number]) for number in range(count)]


def _approximate(instruction: str, x: Any) -> Any:
    return llvm.inline_asm(ir.F32Type.get(), [x], f"{instruction} $0, $1;", "=f,f")
