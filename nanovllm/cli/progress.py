"""What a long run shows on standard error: how far it is, how fast, and how long it will take."""

import sys
import time

from tqdm.auto import tqdm

from nanovllm.cli.resume import Totals

INTERVAL = 0.5  # seconds between updates on a terminal; a log file gets one in LOG_INTERVAL
LOG_INTERVAL = 30.0


class BatchProgress:
    """Bar over the size of the input, since its number of lines is not known.

    Args:
        totals: what an earlier start of the same command did.
        size: of the whole input, None for a stream.
        unit: "B", or "row" for Parquet.
        enabled: show the bar.
    """

    def __init__(self, totals: Totals, size: int | None, unit: str, enabled: bool):
        self._earlier = Totals(**vars(totals))
        self._start = self._shown = time.perf_counter()
        ends = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]" if size is not None else "{n_fmt} [{elapsed}]"
        self._bar = tqdm(
            total=size,
            initial=totals.size,
            unit=unit,
            unit_scale=True,
            unit_divisor=1000,
            desc="Generating",
            dynamic_ncols=True,
            mininterval=INTERVAL if sys.stderr.isatty() else LOG_INTERVAL,
            smoothing=0.05,
            bar_format=("{l_bar}{bar}| " if size is not None else "{desc}: ") + ends + "{postfix}",
            disable=not enabled,
        )

    def update(self, totals: Totals, last: bool = False) -> None:
        """Show the new totals, if it is time to."""
        now = time.perf_counter()
        if not self._bar.disable and (last or now - self._shown > self._bar.mininterval):
            self._shown = now
            self._bar.set_postfix_str(f"{totals.lines:,} lines, {self._rates(totals)}", refresh=False)
            self._bar.update(totals.size - self._bar.n)

    def summary(self, totals: Totals) -> str:
        lines, seconds = totals.lines - self._earlier.lines, time.perf_counter() - self._start
        earlier = f" (and {self._earlier.lines:,} earlier)" if self._earlier.lines else ""
        return (
            f"{lines:,} lines{earlier} in {seconds:.1f} s, {self._rates(totals)}; {totals.errors:,} lines with an error"
        )

    def close(self) -> None:
        self._bar.close()

    def _rates(self, totals: Totals) -> str:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        prompt = (totals.prompt_tokens - self._earlier.prompt_tokens) / seconds
        output = (totals.output_tokens - self._earlier.output_tokens) / seconds
        return f"prompt {prompt:,.0f} tok/s, output {output:,.0f} tok/s"
