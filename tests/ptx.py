"""Runs PTX with NumPy: kernels by warp-level MMA give numbers where no GPU is, and races in shared memory show.

All threads of a CTA run in lockstep, so a branch must go the same way for all of them. What this cannot tell apart from
right, and a GPU might: threads that run ahead of each other are caught only by what they access in shared memory
without a barrier in between; and how tensor cores round.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

import ml_dtypes
import numpy as np

WARP, WARPGROUP = 32, 128
GRANULE = 4  # bytes of shared memory that are watched as one
SPACING = 1 << 40  # addresses of one array and the next
MMA_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
}
TYPES = {
    f"{kind}{width}": np.dtype(f"{letter}{width // 8}")
    for kind, letter in (("u", "u"), ("s", "i"), ("b", "u"))
    for width in (8, 16, 32, 64)
} | {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "min": np.minimum,
    "max": np.maximum,
}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
COMPARISONS |= {"gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal}
COMPARISONS |= {"hi": np.greater, "hs": np.greater_equal}


class Race(AssertionError):
    """Two threads touched the same shared memory, one of them to write, with no barrier in between."""


@dataclasses.dataclass
class Instruction:
    predicate: str
    name: str
    operands: list[str]


def parse(text: str) -> tuple[list[Instruction], dict[str, int], list[str], int]:
    """Instructions, the numbers of those behind labels, the names of parameters, and threads of a block."""
    text = re.sub(r"//[^\n]*", "", text)
    _head, _, body = text.partition(".entry")
    parameters = re.findall(r"\.param[^,)]*?(\w+_param_\d+)", body.partition("{")[0])
    (threads,) = re.findall(r"\.(?:max|req)ntid\s+(\d+)", body)
    body = body.partition("{")[2].rpartition("}")[0]
    instructions, labels = [], {}
    body = re.sub(r"\.(loc|file|pragma|section)[^\n;]*[;\n]", "\n", body)
    for raw in body.split(";"):
        statement = " ".join(raw.split())
        while match := re.match(r"([$\w]+):(?!:)\s*", statement):
            labels[match[1]] = len(instructions)
            statement = statement[match.end() :]
        statement = statement.lstrip("{} ") if not statement.startswith("{%") else statement
        if not statement or statement.startswith("."):
            continue
        predicate = ""
        if statement.startswith("@"):
            predicate, _, statement = statement[1:].partition(" ")
        name, _, rest = statement.strip().partition(" ")
        instructions.append(Instruction(predicate, name, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)))
    return instructions, labels, parameters, int(threads)


class Cta:
    """One CTA of a launch, run to its end."""

    def __init__(self, program, ctaid: int, smem_bytes: int, arrays: list[np.ndarray], grid: int) -> None:
        self.instructions, self.labels, self.parameters, self.threads = program
        self.ctaid, self.grid, self.arrays = ctaid, grid, arrays
        self.registers: dict[str, np.ndarray] = {}
        self.smem = np.zeros(smem_bytes, np.uint8)
        granules = -(-smem_bytes // GRANULE)
        self.in_flight = np.zeros(granules, bool)
        # Of the last to write and to read each granule: the thread (-1: nobody, -2: several), and which barriers it
        # saw.
        self.last = {kind: np.full((3, granules), -1) for kind in ("write", "read")}
        self.epochs = [0, 0]  # of the CTA, of its warpgroups
        self.groups: list[list[tuple]] = []
        self.open_group: list[tuple] = []

    def run(self) -> None:
        number = 0
        while number < len(self.instructions):
            number = self.step(self.instructions[number], number)

    def step(self, at: Instruction, number: int) -> int:
        opcode, *kinds = at.name.split(".")
        active = np.ones(self.threads, bool)
        if at.predicate:
            active = self.registers[at.predicate.lstrip("!")].astype(bool) ^ at.predicate.startswith("!")
        if opcode == "bra":
            if active.all():
                return self.labels[at.operands[0]]
            assert not active.any(), "threads of a CTA part"
            return number + 1
        if opcode in ("ret", "exit"):
            return len(self.instructions)
        getattr(self, f"do_{opcode}", self.arithmetic)(at, opcode, kinds, active)
        return number + 1

    # Values ---------------------------------------------------------------------------------------------------------

    def get(self, operand: str, kind: np.dtype) -> np.ndarray:
        if operand in ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid"):
            value = {"%tid.x": np.arange(self.threads), "%laneid": np.arange(self.threads) % WARP}.get(
                operand, {"%ntid.x": self.threads, "%ctaid.x": self.ctaid, "%nctaid.x": self.grid}.get(operand, 0)
            )
            raw = np.broadcast_to(np.asarray(value, np.uint64), self.threads)
        elif operand.startswith(("%tid", "%ctaid")):
            raw = np.zeros(self.threads, np.uint64)
        elif operand.startswith("%"):
            raw = self.registers[operand]
        elif operand.startswith(("0f", "0d")):
            raw = np.full(self.threads, int(operand[2:], 16), np.uint64)
        elif re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+U?", operand):
            raw = np.full(self.threads, int(operand.rstrip("U"), 0) & (2**64 - 1), np.uint64)
        elif operand in self.parameters:
            raw = np.full(self.threads, SPACING * (1 + self.parameters.index(operand)), np.uint64)
        else:  # the name of shared memory
            raw = np.zeros(self.threads, np.uint64)
        return raw.astype(f"u{kind.itemsize}").view(kind)

    def set(self, register: str, value: np.ndarray, active: np.ndarray) -> None:
        value = np.ascontiguousarray(np.broadcast_to(value, self.threads))
        raw = value.view(f"u{value.dtype.itemsize}").astype(np.uint64)
        old = self.registers.get(register, np.zeros(self.threads, np.uint64))
        self.registers[register] = np.where(active, raw, old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        return (self.get(base, np.dtype("u8")) + np.uint64(int(offset or 0) & (2**64 - 1))).astype(np.int64)

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def arithmetic(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        to, *operands = at.operands
        kind = next((TYPES[k] for k in reversed(kinds) if k in TYPES), np.dtype("u1"))
        if opcode in ("mov", "cvta"):
            if operands[0].startswith("{"):
                parts = [self.get(x, np.dtype(f"u{kind.itemsize // 2}")) for x in re.findall(r"[%\w]+", operands[0])]
                return self.set(to, np.stack(parts, 1).reshape(-1).view(f"u{kind.itemsize}"), active)
            if to.startswith("{"):
                names = re.findall(r"[%\w]+", to)
                parts = self.get(operands[0], kind).view(f"u{kind.itemsize // len(names)}").reshape(-1, len(names))
                for part, name in enumerate(names):
                    if name != "_":
                        self.set(name, parts[:, part], active)
                return None
            return self.set(to, self.get(operands[0], kind), active)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kinds and kinds[-1] == "pred":
                a, b = (self.get(x, np.dtype("u1")) for x in (*operands, *operands)[:2])
                value = 1 - a if opcode == "not" else BINARY[opcode](a, b)
            elif opcode == "cvt":
                return self.convert(to, operands, kinds, active)
            elif opcode in BINARY:
                value = BINARY[opcode](*(self.get(x, kind) for x in operands))
            elif opcode in ("mul", "mad"):
                value = self.product(kinds, kind, operands)
            elif opcode == "fma":
                a, b, c = (self.get(x, kind).astype(np.float64) for x in operands)
                value = (a * b + c).astype(kind)
            elif opcode in ("shl", "shr"):
                by = self.get(operands[1], np.dtype("u4")).astype(np.uint64)
                value = (np.left_shift if opcode == "shl" else np.right_shift)(
                    self.get(operands[0], kind), np.minimum(by, kind.itemsize * 8 - 1).astype(kind)
                )
                value = np.where(by >= kind.itemsize * 8, 0, value).astype(kind) if kind.kind == "u" else value
            elif opcode in ("div", "rem"):
                a, b = (self.get(x, kind) for x in operands)
                if kind.kind == "f":
                    value = a / b
                else:
                    quotient = np.where(b == 0, 0, np.trunc(a.astype(np.float64) / np.maximum(b, 1))).astype(kind)
                    value = quotient if opcode == "div" else a - quotient * b
            elif opcode == "bfe":
                first, count = (int(x) for x in operands[1:])
                value = (self.get(operands[0], kind) >> kind.type(first)) & kind.type((1 << count) - 1)
            elif opcode == "setp":
                compared = COMPARISONS[kinds[0].removesuffix("u")](*(self.get(x, kind) for x in operands[:2]))
                value = compared.astype(np.uint8)
            elif opcode == "selp":
                a, b = (self.get(x, kind) for x in operands[:2])
                value = np.where(self.registers[operands[2]].astype(bool), a, b)
            elif opcode in ("neg", "not", "abs", "ex2", "rcp", "lg2", "sqrt", "rsqrt"):
                x = self.get(operands[0], kind)
                value = {
                    "neg": lambda: -x,
                    "not": lambda: ~x,
                    "abs": lambda: np.abs(x),
                    "ex2": lambda: np.exp2(x),
                    "rcp": lambda: 1 / x,
                    "lg2": lambda: np.log2(x),
                    "sqrt": lambda: np.sqrt(x),
                    "rsqrt": lambda: 1 / np.sqrt(x),
                }[opcode]().astype(kind)
            elif opcode == "prmt":
                pair = np.stack([self.get(x, np.dtype("u4")) for x in operands[:2]], 1).view(np.uint8)
                chosen = self.get(operands[2], np.dtype("u4"))
                picked = [pair[np.arange(self.threads), (chosen >> (4 * i)) & 7] for i in range(4)]
                value = np.stack(picked, 1).reshape(-1).view(np.uint32)
            elif opcode == "shfl":
                source = self.get(operands[1], np.dtype("u4")).astype(int) % WARP
                lanes = np.arange(self.threads)
                value = self.get(operands[0], np.dtype("u4"))[lanes // WARP * WARP + source]
                to = to.partition("|")[0]
            else:
                raise NotImplementedError(f"{at.name} {at.operands}")
        self.set(to, value, active)
        return None

    def product(self, kinds: list[str], kind: np.dtype, operands: list[str]) -> np.ndarray:
        a, b = (self.get(x, kind) for x in operands[:2])
        if kind.kind == "f":
            return a * b
        if "wide" in kinds:
            double = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
            value = a.astype(double) * b.astype(double)
            return value + self.get(operands[2], double) if len(operands) > 2 else value
        if "hi" in kinds:
            big = [int(x) * int(y) >> (8 * kind.itemsize) for x, y in zip(a, b, strict=True)]
            value = np.array(big).astype(kind)
        else:
            value = a * b
        return value + self.get(operands[2], kind) if len(operands) > 2 else value

    def convert(self, to: str, operands: list[str], kinds: list[str], active: np.ndarray) -> None:
        target, source = [k for k in kinds if k in TYPES or k.endswith("x2")][-2:]
        if target.endswith("x2"):  # the first operand takes the upper half
            half = np.dtype(MMA_TYPES[target.removesuffix("x2")])
            high, low = (self.get(x, TYPES[source]).astype(half).view(np.uint16) for x in operands)
            return self.set(to, np.stack([low, high], 1).reshape(-1).view(np.uint32), active)
        value = self.get(operands[0], TYPES[source])
        if "rzi" in kinds:
            value = np.trunc(value)
        self.set(to, value.astype(TYPES[target]), active)
        return None

    # Memory ---------------------------------------------------------------------------------------------------------

    def bytes_of(self, address: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The array in device memory of an access, and the indices of its bytes."""
        number = int(address[0] // SPACING) - 1
        array, first = self.arrays[number], address - SPACING * (number + 1)
        assert ((first >= 0) & (first + width <= array.size)).all(), "beyond an array in device memory"
        assert (first % width == 0).all(), "a misaligned access"
        return array, first[:, None] + np.arange(width)

    def touch(self, kind: str, address: np.ndarray, width: int, threads: np.ndarray) -> None:
        """Notes accesses of threads to shared memory, and raises where one of another thread is not ordered before."""
        assert ((address >= 0) & (address + width <= self.smem.size)).all(), "beyond shared memory"
        granules = address[:, None] // GRANULE + np.arange(-(-width // GRANULE))
        who = np.broadcast_to(threads[:, None], granules.shape)
        if self.in_flight[granules].any():
            raise Race("shared memory is touched while a copy to it is in flight")
        for other in ("write",) if kind == "read" else ("write", "read"):
            thread, cta, wg = self.last[other][:, granules]
            same_group = (thread >= 0) & (thread // WARPGROUP == who // WARPGROUP)
            ordered = (cta < self.epochs[0]) | (same_group & (wg < self.epochs[1]))
            if not ((thread == -1) | (thread == who) | ordered).all():
                raise Race(f"a {kind} of shared memory after a {other} of another thread without a barrier")
        thread, cta, wg = self.last[kind]
        before = np.where((cta[granules] == self.epochs[0]) & (wg[granules] == self.epochs[1]), thread[granules], -1)
        thread[granules] = np.where((before == -1) | (before == who), who, -2)
        # Of several in a group of instructions the last assignment wins; what matters is that they differ.
        shared = np.unique(granules, return_counts=True)
        thread[shared[0][shared[1] > 1]] = -2
        cta[granules], wg[granules] = self.epochs

    def do_ld(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        if kinds[0].startswith("param"):
            return self.set(at.operands[0], self.get(at.operands[1].strip("[]"), np.dtype("u8")), active)
        names, kind = re.findall(r"[%\w]+", at.operands[0]), TYPES[kinds[-1]]
        width, threads = kind.itemsize * len(names), np.flatnonzero(active)
        if not len(threads):
            return None
        address = self.address(at.operands[1])[threads]
        if "shared" in at.name:
            self.touch("read", address, width, threads)
            found = self.smem[address[:, None] + np.arange(width)]
        else:
            array, index = self.bytes_of(address, width)
            found = array[index]
        values = np.zeros((self.threads, len(names)), kind)
        values[threads] = np.ascontiguousarray(found).view(kind)
        for column, name in enumerate(names):
            self.set(name, values[:, column], active)
        return None

    def do_st(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        names, kind = re.findall(r"[%\w]+", at.operands[1]), TYPES[kinds[-1]]
        width, threads = kind.itemsize * len(names), np.flatnonzero(active)
        if not len(threads):
            return
        address = self.address(at.operands[0])[threads]
        values = np.stack([self.get(name, kind) for name in names], 1)[threads]
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(threads), width)
        if "shared" in at.name:
            self.touch("write", address, width, threads)
            self.smem[address[:, None] + np.arange(width)] = raw
        else:
            array, index = self.bytes_of(address, width)
            array[index] = raw

    def do_cp(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        if "commit_group" in kinds:
            self.groups.append(self.open_group)
            self.open_group = []
        elif "wait_group" in kinds:
            pending = int(at.operands[0])
            while len(self.groups) > pending:
                for threads, address, found in self.groups.pop(0):
                    self.in_flight[(address // GRANULE)[:, None] + np.arange(found.shape[1] // GRANULE)] = False
                    self.touch("write", address, found.shape[1], threads)
                    self.smem[address[:, None] + np.arange(found.shape[1])] = found
        else:
            threads, width = np.flatnonzero(active), int(at.operands[2])
            to, source = (self.address(operand)[threads] for operand in at.operands[:2])
            wanted = self.get(at.operands[3], np.dtype("u4")).astype(int)[threads]
            assert set(np.unique(wanted)) <= {0, width}
            found = np.zeros((len(threads), width), np.uint8)
            inside = wanted > 0
            if inside.any():
                array, index = self.bytes_of(source[inside], width)
                found[inside] = array[index]
            assert (to % width == 0).all()
            self.touch("write", to, width, threads)
            self.in_flight[(to // GRANULE)[:, None] + np.arange(width // GRANULE)] = True
            self.open_group.append((threads, to, found))

    def do_bar(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        if "warp" in kinds:
            return
        self.epochs[1 if len(at.operands) > 1 else 0] += 1

    do_barrier = do_bar

    def do_ldmatrix(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        names = re.findall(r"[%\w]+", at.operands[0])
        lanes = np.arange(self.threads)
        address = self.address(at.operands[1])
        assert (address % 16 == 0).all()
        self.touch("read", address, 16, lanes // WARP * WARP)  # a warp reads as one
        rows = self.smem[address[:, None] + np.arange(16)].reshape(-1, 4, 8, 16)  # warp, matrix, row
        for number, name in enumerate(names):
            matrix = np.ascontiguousarray(rows[:, number]).view(np.uint16)  # warp, row, column
            if "trans" in kinds:
                matrix = matrix.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(matrix.reshape(-1, 8, 4, 2)).view(np.uint32)
            self.set(name, pairs.reshape(-1), active)

    def do_mma(self, at: Instruction, opcode: str, kinds: list[str], active: np.ndarray) -> None:
        to, a, b, c = (list(re.findall(r"[%\w]+", operand)) for operand in at.operands)
        kind = np.dtype(MMA_TYPES[next(k for k in kinds if k in MMA_TYPES)])
        out = np.dtype(np.int32 if kind == np.int8 else np.float32)

        def words(names: list[str]) -> np.ndarray:  # warp, group, thread of the group, register
            return np.stack([self.get(name, np.dtype("u4")) for name in names], 1).reshape(-1, 8, 4, len(names))

        # Registers are rows and rows + 8 of the first half of k, then of the second.
        left = words(a).reshape(-1, 8, 4, 2, 2).transpose(0, 4, 1, 3, 2).reshape(-1, 16, 8)
        right = words(b).transpose(0, 1, 3, 2).reshape(-1, 8, 8)
        left, right = (np.ascontiguousarray(x).view(kind).astype(np.float64) for x in (left, right))
        acc = words(c).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        acc = np.ascontiguousarray(acc).view(out).astype(np.float64) + left @ right.transpose(0, 2, 1)
        held = acc.astype(out).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
        for number, name in enumerate(to):
            self.set(name, held[:, number], active)


def launch(text: str, grid: int, smem_bytes: int, arrays: list[np.ndarray]) -> None:
    """Runs a kernel's CTAs one after the other; `arrays` are its parameters, as bytes, results among them."""
    program = parse(text)
    assert len(program[2]) == len(arrays)
    for ctaid in range(grid):
        Cta(program, ctaid, smem_bytes, arrays, grid).run()
