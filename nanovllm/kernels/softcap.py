"""Soft-capping of attention scores, in registers: cap * tanh(score / cap), so that no score passes the cap."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap(scores, SCALE_LOG2: tl.constexpr, CAP: tl.constexpr):
    """Raw scores, scaled and capped; times log2(e), ready for exp2. SCALE_LOG2 is the scale times log2(e).

    tanh(x) = 1 - 2 / (exp(2 x) + 1) holds where the exponential overflows (the quotient is 0) and where it vanishes.
    Its error is absolute, some roundings of 1: a small score is off by as much as one near the cap.
    """
    FACTOR: tl.constexpr = 2.0 * SCALE_LOG2 / CAP
    SPAN: tl.constexpr = CAP * LOG2_E
    return SPAN - 2.0 * SPAN / (tl.exp2(scores * FACTOR) + 1.0)
