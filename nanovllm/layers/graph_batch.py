"""What a step attends with inside a CUDA graph, where lengths change from replay to replay: all of it on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GraphPrompts:
    """Sequences with several tokens in a step, for `paged_prefill`; those of length 0 are none."""

    rows: torch.Tensor  # [n] int32
    starts: torch.Tensor  # [n + 1] int32, their first tokens in the step, and the end of the last
    context_lens: torch.Tensor  # [n] int32, after the step


@dataclass(frozen=True)
class GraphBatch:
    """The tokens of a step, each as a decode; those of `prompts` are decodes without context."""

    rows: torch.Tensor  # [T] int32
    context_lens: torch.Tensor  # [T] int32
    block_tables: torch.Tensor  # [rows, blocks] int32, of all rows
    shared: bool  # with a pass over shared prefixes
    prompts: GraphPrompts | None
