"""What a graph's step needs of each token, gathered from the device's rows in one launch."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.reference import DecodeInputs


@triton.jit(
    do_not_specialize=["batch", "table_stride"], do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "given_ptr"]
)
def _decode_inputs_kernel(
    rows_ptr,
    lens_ptr,
    given_ptr,
    last_tokens_ptr,
    tables_ptr,
    temperatures_ptr,
    seeds_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    rows_out_ptr,
    temperatures_out_ptr,
    seeds_out_ptr,
    batch,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < batch
    row = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
    position = tl.load(lens_ptr + index, mask=mask, other=1) - 1
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=mask, other=0)
    tl.store(slots_ptr + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
    tl.store(positions_ptr + index, position.to(tl.int64), mask=mask)
    tl.store(rows_out_ptr + index, row, mask=mask)
    given = tl.load(given_ptr + index, mask=mask, other=0).to(tl.int64)
    token_id = tl.where(given < 0, tl.load(last_tokens_ptr + row, mask=mask, other=0), given)
    tl.store(token_ids_ptr + index, token_id, mask=mask)
    tl.store(temperatures_out_ptr + index, tl.load(temperatures_ptr + row, mask=mask, other=0.0), mask=mask)
    tl.store(seeds_out_ptr + index, tl.load(seeds_ptr + row, mask=mask, other=0), mask=mask)


def decode_inputs(
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    given: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """`reference.decode_inputs`."""
    batch = rows.shape[0]
    device = rows.device
    out = DecodeInputs(
        token_ids=torch.empty(batch, dtype=torch.int64, device=device),
        positions=torch.empty(batch, dtype=torch.int64, device=device),
        slots=torch.empty(batch, dtype=torch.int32, device=device),
        rows=torch.empty(batch, dtype=torch.int64, device=device),
        temperatures=torch.empty(batch, dtype=torch.float32, device=device),
        seeds=torch.empty(batch, dtype=torch.int64, device=device),
    )
    block = 64
    _decode_inputs_kernel[(-(-batch // block),)](
        rows,
        context_lens,
        given,
        last_tokens,
        block_tables,
        temperatures,
        seeds,
        out.token_ids,
        out.positions,
        out.slots,
        out.rows,
        out.temperatures,
        out.seeds,
        batch,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=2,
    )
    return out
