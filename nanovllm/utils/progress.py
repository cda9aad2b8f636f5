"""Progress bar of a batch."""

import time

from tqdm.auto import tqdm

from nanovllm.engine.scheduler import Batch


class Progress:
    """Bar over finished prompts, with the rates of the last half second's prefill and decode."""

    INTERVAL = 0.5  # seconds between updates of the rates

    def __init__(self, total: int, enabled: bool):
        # Even a disabled bar takes most of a millisecond to make.
        self._bar = tqdm(total=total, desc="Generating", unit="prompt", dynamic_ncols=True) if enabled else None
        self._since = time.perf_counter()
        self._prefill = self._decode = 0

    def update(self, batch: Batch, num_finished: int) -> None:
        """Count a step and the prompts that it finished."""
        if self._bar is None:
            return
        self._decode += batch.num_decode_tokens
        self._prefill += batch.num_tokens - batch.num_decode_tokens
        elapsed = time.perf_counter() - self._since
        if elapsed > self.INTERVAL:
            rates = {"prefill": f"{self._prefill / elapsed:.0f} tok/s", "decode": f"{self._decode / elapsed:.0f} tok/s"}
            self._bar.set_postfix(rates, refresh=False)
            self._since += elapsed
            self._prefill = self._decode = 0
        self._bar.update(num_finished)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
