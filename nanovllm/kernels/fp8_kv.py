"""What the attention kernels do with a KV cache in float8 (e4m3), in registers.

A value is its byte times the scale of its KV head. The keys' scale goes into the query and the values' into the output,
so that a byte costs one conversion and no product. The conversion is to float16, which holds every e4m3 value and is
the one that the hardware has (two values an instruction); bfloat16 would take three. A float32 query stays float32.

Decode attention reads values as pairs of dimensions, 16 bits each. Its products go over keys, along which values do not
lie together: what turns a tile on its way to the tensor cores has elements of 16 bits, single bytes would be gathered
one by one. The even and the odd dimensions are two products.
"""

import triton
import triton.language as tl


@triton.jit
def scale_query(q, k_scale):
    """A query times the keys' scale, in the type that keys and values are computed in."""
    if q.dtype == tl.float32:
        return q * k_scale
    else:
        return tl.clamp(q.to(tl.float32) * k_scale, -65504.0, 65504.0).to(tl.float16)


@triton.jit
def split_pairs(pairs, like, NATIVE: tl.constexpr):
    """The low and the high byte of 16-bit elements as float8, in the type of `like`.

    NATIVE, for float16: three instructions for four bytes, of which the compiler makes twice as many by itself.
    """
    if NATIVE:
        asm: tl.constexpr = """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }"""
        low, high = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(like.dtype)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(like.dtype)
    return low, high


@triton.jit
def to_e4m3(x, scale):
    """x / scale, saturating; NaN stays NaN."""
    scaled = x.to(tl.float32) / scale
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store_kv(pointers, x, mask, scale, FP8: tl.constexpr):
    if FP8:
        tl.store(pointers, to_e4m3(x, scale), mask=mask)
    else:
        tl.store(pointers, x, mask=mask)
