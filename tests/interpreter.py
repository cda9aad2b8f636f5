"""A repair of Triton's interpreter, which knows float8 but not how to round to it."""

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter


def round_to_float8() -> None:
    """Let conversions to float8 (e4m3) round to nearest even, as on a GPU; the interpreter's own lose the carry."""
    convert = interpreter._convert_float

    def rounding(values, source, target, mode):
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(values, source, target, mode)
        floats = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).copy())
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    interpreter._convert_float = rounding
