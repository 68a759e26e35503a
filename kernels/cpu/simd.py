"""Vectors of LANES float32 for kernels, and the memory operations that widen and narrow.

Written out rather than left to the compiler's vectoriser: the order of every sum is then part of
the source, so a row's result never depends on what is computed beside it.

Arrays are one-dimensional and say how numbers are stored: float32, uint16 (the bits of a
bfloat16), int16 (those of a float16) or int8. `load` gives float32 whatever the storage, `store`
rounds to nearest even.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from pagemesh.kernels.cpu.jit import LANES

F32: Final = ir.FloatType()
F16: Final = ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def vector_of(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


F32S, F16S, I8S, I16S, I32S = map(vector_of, (F32, F16, I8, I16, I32))


class _Vector(types.Type):  # type: ignore[misc]  # numba is not typed
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


VECTOR: Final = _Vector()


@register_model(_Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, F32S)


# -- building blocks of generated code ------------------------------------------------------------


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Call an LLVM intrinsic, or a function of the C library, by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args)


def repeat(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def splat_value(builder: Any, scalar: Any) -> Any:
    """A vector of copies of a float32."""
    undefined = ir.Constant(F32S, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, repeat(I32S, 0))


def element_pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


def widen(builder: Any, raw: Any, stored: Any) -> Any:
    """float32 lanes of lanes stored as the numba type `stored`."""
    if stored == types.float32:
        return raw
    if stored == types.int16:
        return builder.fpext(builder.bitcast(raw, F16S), F32S)
    if stored == types.uint16:
        wide = builder.shl(builder.zext(raw, I32S), repeat(I32S, 16))
        return builder.bitcast(wide, F32S)
    return builder.sitofp(builder.sext(raw, I32S), F32S)


def narrow(builder: Any, value: Any, stored: Any) -> Any:
    """The lanes as they are stored, rounded to nearest even; NaN stays NaN."""
    if stored == types.float32:
        return value
    if stored == types.int16:
        return builder.bitcast(builder.fptrunc(value, F16S), I16S)
    bits = builder.bitcast(value, I32S)
    odd = builder.and_(builder.lshr(bits, repeat(I32S, 16)), repeat(I32S, 1))
    rounded = builder.add(builder.add(bits, repeat(I32S, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, builder.or_(bits, repeat(I32S, 0x400000)), rounded)
    return builder.trunc(builder.lshr(kept, repeat(I32S, 16)), I16S)


STORED: Final = {types.float32: F32S, types.int16: I16S, types.uint16: I16S, types.int8: I8S}
_NAMES: Final = {F32S: f"v{LANES}f32", I16S: f"v{LANES}i16", I8S: f"v{LANES}i8"}


def first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first `count` (int64, any size) lanes."""
    capped = builder.select(builder.icmp_signed("<", count, I64(LANES)), count, I64(LANES))
    capped = builder.select(builder.icmp_signed(">", capped, I64(0)), capped, I64(0))
    numbers = ir.Constant(I32S, list(range(LANES)))
    undefined = ir.Constant(I32S, ir.Undefined)
    first = builder.insert_element(undefined, builder.trunc(capped, I32), I32(0))
    counts = builder.shuffle_vector(first, undefined, repeat(I32S, 0))
    return builder.icmp_signed("<", numbers, counts)


def _is_full(builder: Any, count: Any) -> Any:
    """Nearly always: the branch spares the mask, which costs more than the memory operation."""
    return builder.icmp_signed(">=", count, I64(LANES))


# -- memory ---------------------------------------------------------------------------------------


@intrinsic
def load(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """Lanes array[index], array[index + 1] …; zero from `count` on, where memory is not read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw, align = STORED[array.dtype], array.dtype.bitwidth // 8
        pointer = element_pointer(context, builder, array, args[0], args[1])
        pointer = builder.bitcast(pointer, raw.as_pointer())
        with builder.if_else(_is_full(builder, args[2])) as (full, part):
            with full:
                whole, whole_end = builder.load(pointer, align=align), builder.block
            with part:
                name = f"llvm.masked.load.{_NAMES[raw]}.p0"
                mask, zeros = first_lanes(builder, args[2]), ir.Constant(raw, None)
                some = call(builder, name, raw, pointer, I32(align), mask, zeros)
                some_end = builder.block
        lanes = builder.phi(raw)
        lanes.add_incoming(whole, whole_end)
        lanes.add_incoming(some, some_end)
        return widen(builder, lanes, array.dtype)

    return VECTOR(array, types.intp, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, count: Any, value: Any) -> Any:
    """array[index], array[index + 1] … = the first `count` lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw, align = STORED[array.dtype], array.dtype.bitwidth // 8
        pointer = element_pointer(context, builder, array, args[0], args[1])
        pointer = builder.bitcast(pointer, raw.as_pointer())
        lanes = narrow(builder, args[3], array.dtype)
        with builder.if_else(_is_full(builder, args[2])) as (full, part):
            with full:
                builder.store(lanes, pointer, align=align)
            with part:
                name = f"llvm.masked.store.{_NAMES[raw]}.p0"
                mask = first_lanes(builder, args[2])
                call(builder, name, ir.VoidType(), lanes, pointer, I32(align), mask)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, VECTOR), generate


@intrinsic
def load_one(typing: Any, array: Any, index: Any) -> Any:
    """array[index] as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = builder.load(element_pointer(context, builder, array, args[0], args[1]))
        if array.dtype == types.float32:
            return raw
        if array.dtype == types.int16:
            return builder.fpext(builder.bitcast(raw, F16), F32)
        if array.dtype == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(raw, I32), I32(16)), F32)
        return builder.sitofp(raw, F32)

    return types.float32(array, types.intp), generate


@intrinsic
def store_one(typing: Any, array: Any, index: Any, number: Any) -> Any:
    """array[index] = a float32, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = narrow(builder, splat_value(builder, args[2]), array.dtype)
        pointer = element_pointer(context, builder, array, args[0], args[1])
        builder.store(builder.extract_element(lanes, I32(0)), pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


# -- arithmetic -----------------------------------------------------------------------------------


def _operation(n_args: int, generate: Any) -> Any:
    """An intrinsic of `n_args` vectors giving a vector; `generate(builder, *lanes)` makes it."""

    def generated(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return generate(builder, *args)

    signature = VECTOR(*[VECTOR] * n_args)
    if n_args == 1:
        return intrinsic(lambda typing, a: (signature, generated))
    if n_args == 2:
        return intrinsic(lambda typing, a, b: (signature, generated))
    return intrinsic(lambda typing, a, b, c: (signature, generated))


def _fma(builder: Any, *lanes: Any) -> Any:
    return call(builder, f"llvm.fma.{_NAMES[F32S]}", F32S, *lanes)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    """b where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _floor(builder: Any, a: Any) -> Any:
    return call(builder, f"llvm.floor.{_NAMES[F32S]}", F32S, a)


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2 ** exponent for whole exponents of -126 to 127."""
    is_number = builder.fcmp_ordered("ord", exponent, exponent)
    number = builder.select(is_number, exponent, ir.Constant(F32S, None))  # NaN has no integer
    biased = builder.add(builder.fptosi(number, I32S), repeat(I32S, 127))
    return builder.bitcast(builder.shl(biased, repeat(I32S, 23)), F32S)


def _zero_below(builder: Any, value: Any, x: Any, bound: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", x, bound), ir.Constant(F32S, None), value)


add = _operation(2, lambda builder, a, b: builder.fadd(a, b))
sub = _operation(2, lambda builder, a, b: builder.fsub(a, b))
mul = _operation(2, lambda builder, a, b: builder.fmul(a, b))
div = _operation(2, lambda builder, a, b: builder.fdiv(a, b))
fma = _operation(3, _fma)
larger = _operation(2, _larger)
smaller = _operation(2, _smaller)
floor = _operation(1, _floor)
power_of_two = _operation(1, _power_of_two)
zero_below = _operation(3, _zero_below)


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """A vector of copies of a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat_value(builder, args[0])

    return VECTOR(types.float32), generate


@intrinsic
def only_between(typing: Any, value: Any, low: Any, high: Any, outside: Any) -> Any:
    """The lanes low to high - 1 (any int64), `outside` in the others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        not_before = builder.not_(first_lanes(builder, args[1]))
        inside = builder.and_(not_before, first_lanes(builder, args[2]))
        return builder.select(inside, args[0], splat_value(builder, args[3]))

    return VECTOR(VECTOR, types.intp, types.intp, types.float32), generate


@intrinsic
def first_of(typing: Any, value: Any) -> Any:
    """The first lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], I32(0))

    return types.float32(VECTOR), generate


def _halving(combine: Any) -> Any:
    """An intrinsic that folds a vector to one number: lane i with lane i + half, and so on."""

    def generated(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes, width = args[0], LANES
        undefined = ir.Constant(F32S, ir.Undefined)
        while width > 1:
            width //= 2
            order = [(lane + width) % LANES for lane in range(LANES)]
            lanes = combine(
                builder, lanes, builder.shuffle_vector(lanes, undefined, ir.Constant(I32S, order))
            )
        return builder.extract_element(lanes, I32(0))

    return intrinsic(lambda typing, value: (types.float32(VECTOR), generated))


sum_of = _halving(lambda builder, a, b: builder.fadd(a, b))
largest_of = _halving(_larger)
