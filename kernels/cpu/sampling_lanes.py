"""What sampling needs of vectors beyond simd: comparisons, sums in float64, and their bits."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from pagemesh.kernels.cpu.jit import LANES
from pagemesh.kernels.cpu.simd import (
    F32,
    F32S,
    I32,
    I32S,
    I64,
    VECTOR,
    call,
    element_pointer,
    first_lanes,
    repeat,
    splat_value,
    vector_of,
)

_F64: Final = ir.DoubleType()
_F64S: Final = vector_of(_F64)
_LANE_BITS: Final = ir.IntType(LANES)
_SQRT_HALF_BITS: Final = 0x3F3504F3


class _Doubles(types.Type):  # type: ignore[misc]  # numba is not typed
    def __init__(self) -> None:
        super().__init__(name=f"float64x{LANES}")


DOUBLES: Final = _Doubles()


@register_model(_Doubles)
class _DoublesModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Doubles) -> None:
        super().__init__(manager, kind, _F64S)


# -- memory ---------------------------------------------------------------------------------------


@intrinsic
def load_or(typing: Any, array: Any, index: Any, count: Any, fill: Any) -> Any:
    """Lanes array[index], array[index + 1] … of float32; `fill` from `count` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, array, args[0], args[1])
        pointer = builder.bitcast(pointer, F32S.as_pointer())
        is_full = builder.icmp_signed(">=", args[2], I64(LANES))
        with builder.if_else(is_full) as (full, part):
            with full:
                whole, whole_end = builder.load(pointer, align=4), builder.block
            with part:
                name, mask = f"llvm.masked.load.v{LANES}f32.p0", first_lanes(builder, args[2])
                rest = splat_value(builder, args[3])
                some = call(builder, name, F32S, pointer, I32(4), mask, rest)
                some_end = builder.block
        lanes = builder.phi(F32S)
        lanes.add_incoming(whole, whole_end)
        lanes.add_incoming(some, some_end)
        return lanes

    return VECTOR(array, types.intp, types.intp, types.float32), generate


# -- comparisons with a number --------------------------------------------------------------------


def _lanes_where(relation: str, builder: Any, lanes: Any, scalar: Any) -> Any:
    """An integer of LANES bits, the first lane's lowest; no bit for a NaN."""
    mask = builder.fcmp_ordered(relation, lanes, splat_value(builder, scalar))
    return builder.bitcast(mask, _LANE_BITS)


@intrinsic
def any_above(typing: Any, lanes: Any, bound: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.icmp_unsigned("!=", _lanes_where(">", builder, *args), _LANE_BITS(0))

    return types.boolean(VECTOR, types.float32), generate


@intrinsic
def any_from(typing: Any, lanes: Any, bound: Any) -> Any:
    """Whether a lane is `bound` or more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.icmp_unsigned("!=", _lanes_where(">=", builder, *args), _LANE_BITS(0))

    return types.boolean(VECTOR, types.float32), generate


@intrinsic
def count_from(typing: Any, lanes: Any, bound: Any) -> Any:
    """How many lanes are `bound` or more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _lanes_where(">=", builder, *args)
        return builder.zext(call(builder, f"llvm.ctpop.i{LANES}", _LANE_BITS, bits), I64)

    return types.int64(VECTOR, types.float32), generate


@intrinsic
def first_equal(typing: Any, lanes: Any, value: Any) -> Any:
    """The first lane that equals `value`; LANES if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _lanes_where("==", builder, *args)
        zeros = call(builder, f"llvm.cttz.i{LANES}", _LANE_BITS, bits, ir.IntType(1)(0))
        return builder.zext(zeros, I64)

    return types.int64(VECTOR, types.float32), generate


@intrinsic
def only_from(typing: Any, lanes: Any, bound: Any) -> Any:
    """The lanes; -inf where they are below `bound`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        below = builder.fcmp_ordered("<", args[0], splat_value(builder, args[1]))
        return builder.select(below, repeat(F32S, float("-inf")), args[0])

    return VECTOR(VECTOR, types.float32), generate


# -- sums in float64 ------------------------------------------------------------------------------


@intrinsic
def no_doubles(typing: Any) -> Any:
    """Zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_F64S, None)

    return DOUBLES(), generate


@intrinsic
def add_doubles(typing: Any, total: Any, lanes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], builder.fpext(args[1], _F64S))

    return DOUBLES(DOUBLES, VECTOR), generate


@intrinsic
def sum_of_doubles(typing: Any, total: Any) -> Any:
    """Of all lanes, first to last."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [builder.extract_element(args[0], I32(lane)) for lane in range(LANES)]
        while len(parts) > 1:
            parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return types.float64(DOUBLES), generate


# -- bits -----------------------------------------------------------------------------------------


@intrinsic
def binary_exponent(typing: Any, lanes: Any) -> Any:
    """e of positive, normal lanes m * 2**e, with m from sqrt(1/2) to sqrt(2)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(_exponents(builder, builder.bitcast(args[0], I32S)), F32S)

    return VECTOR(VECTOR), generate


@intrinsic
def binary_fraction(typing: Any, lanes: Any) -> Any:
    """m of positive, normal lanes m * 2**e (see binary_exponent)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32S)
        shifted = builder.shl(_exponents(builder, bits), repeat(I32S, 23))
        return builder.bitcast(builder.sub(bits, shifted), F32S)

    return VECTOR(VECTOR), generate


@intrinsic
def rough_log2(typing: Any, lanes: Any) -> Any:
    """Of positive, normal lanes m * 2**e, m from 1 to 2: e + m - 1, at most 0.087 too small.

    The bits of a float32, read as an integer, are just that with an offset.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.sitofp(builder.bitcast(args[0], I32S), F32S)
        scaled = builder.fmul(number, repeat(F32S, 2.0**-23))
        return builder.fsub(scaled, repeat(F32S, 127.0))

    return VECTOR(VECTOR), generate


def _exponents(builder: Any, bits: Any) -> Any:
    return builder.ashr(builder.sub(bits, repeat(I32S, _SQRT_HALF_BITS)), repeat(I32S, 23))


@intrinsic
def order_of(typing: Any, value: Any) -> Any:
    """int32 that are ordered as float32 are; -0.0 comes before 0.0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _flip_negative(builder, builder.bitcast(args[0], I32))

    return types.int32(types.float32), generate


@intrinsic
def value_of_order(typing: Any, order: Any) -> Any:
    """The float32 with this place in the order (see order_of)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_flip_negative(builder, args[0]), F32)

    return types.float32(types.int32), generate


def _flip_negative(builder: Any, bits: Any) -> Any:
    """Its own inverse: the magnitude's bits of a negative number are inverted."""
    sign = builder.ashr(bits, I32(31))
    return builder.xor(bits, builder.and_(sign, I32(0x7FFFFFFF)))
