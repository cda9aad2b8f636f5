"""The engine: requests in, completions out."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

import torch
from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.build import build_engine_parts
from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.scheduler import Batch
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.step import StepBuilder
from nanovllm.sampling_params import SamplingParams

Prompt = str | Seq[int]
Output = dict[str, Any]


class LLMEngine:
    """Generates text with one model.

    Args:
        model: a folder with a checkpoint, a `.gguf` file (or a folder holding one), or a Hub id.
        options: see `Config`.

    Raises:
        TypeError, ValueError: an option, a checkpoint or a machine that does not fit, by name.
    """

    def __init__(self, model: Any, **options: Any):
        self.config = Config.build(model, options)
        parts = build_engine_parts(self.config)
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self.model_runner = parts.model_runner
        self.scheduler = parts.scheduler
        self._step_builder = StepBuilder(self.scheduler.max_num_seqs)
        self._max_in_flight = 1 if parts.overlap else 0  # steps whose tokens the next step does not wait for
        self._in_flight: deque[tuple[Batch, StepResult]] = deque()
        self._next_seq_id = 0
        self._sequences: dict[int, Sequence] = {}  # unfinished ones
        self._unreported: list[Sequence] = []  # finished while `generate` ran for others
        self._closed = False

    # ---- requests ------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request.

        Args:
            prompt: a text, or token ids.
            sampling_params: default `SamplingParams()`.

        Returns:
            The id under which `step` reports it.

        Raises:
            TypeError, ValueError: a prompt or parameters that can never run.
        """
        self._check_open()
        params = sampling_params if sampling_params is not None else SamplingParams()
        return self._enqueue(self._validated_ids(prompt, "request"), _validated_params(params, "request"))

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step.

        Returns:
            ([(seq_id, completion token ids)] of the requests that it finished, number of tokens it processed).
        """
        self._check_open()
        finished, batch = self._step()
        finished = self._unreported + finished
        self._unreported = []
        return [(seq.seq_id, seq.completion_token_ids) for seq in finished], batch.num_tokens

    def is_finished(self) -> bool:
        """True when no request is left to run or to be reported by `step`."""
        return self.scheduler.is_finished() and not self._unreported

    # ---- whole batches -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Complete one or many prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Returns:
            One dict a prompt, in order: `text` (None without a tokenizer), `token_ids`, `finish_reason`
            ("stop" or "length"), `prompt_token_ids`, `num_cached_tokens` (prompt tokens found in the prefix cache).

        Raises:
            TypeError, ValueError: naming the prompt and what is wrong with it; nothing has run then.
        """
        self._check_open()
        prompt_list = _as_prompt_list(prompts)
        params_list = _as_params_list(sampling_params, len(prompt_list))
        ids_list = [self._validated_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompt_list)]
        seqs = [self._sequences[self._enqueue(ids, params)] for ids, params in zip(ids_list, params_list, strict=True)]
        try:
            self._run(seqs, use_tqdm)
        except BaseException:
            self._abort(seqs)  # nothing of this call may be answered in the next
            raise
        return self._outputs(seqs)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Complete one or many conversations, put into the model's own format by its chat template.

        Args:
            messages: a conversation (list of {"role", "content"}), or a list of conversations.
            sampling_params, use_tqdm: as for `generate`.
            chat_template_kwargs: passed to the template, e.g. `{"enable_thinking": False}`.

        Raises:
            ValueError: no tokenizer or no chat template, or messages that the template refuses.
        """
        self._check_open()
        if not messages:
            raise ValueError("messages is empty")
        conversations: Seq[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = dict(chat_template_kwargs or {})
        prompts = [self._render_chat(talk, i, kwargs) for i, talk in enumerate(conversations)]
        return self.generate(prompts, sampling_params, use_tqdm)

    # ---- lifecycle -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the memory. Further use is an error; closing again is not."""
        if self._closed:
            return
        self._closed = True
        self._sequences.clear()
        self._unreported.clear()
        self._in_flight.clear()
        self.model_runner.drop_graphs()
        del self.model_runner, self.scheduler
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM has been closed")

    # ---- inside --------------------------------------------------------------------------------------------

    def _validated_ids(self, prompt: Prompt, name: str) -> list[int]:
        ids = self._encode(prompt, name)
        if not ids:
            raise ValueError(f"{name}: the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"{name}: token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if len(ids) + 1 > self.max_model_len:
            raise ValueError(
                f"{name}: {len(ids)} prompt tokens and one to generate exceed max_model_len {self.max_model_len}"
            )
        blocks = self.scheduler.block_manager
        if blocks.blocks_for(len(ids)) > blocks.num_blocks:
            raise ValueError(
                f"{name}: {len(ids)} prompt tokens need {blocks.blocks_for(len(ids))} KV blocks, the pool has "
                f"{blocks.num_blocks} of {blocks.block_size} tokens"
            )
        return ids

    def _encode(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{name}: the model came without a tokenizer, so prompts must be token ids")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise TypeError(f"{name}: a prompt is a str or a list of token ids, got {prompt!r}")
        ids = list(prompt)
        if set(map(type, ids)) <= {int}:  # the usual case, checked at the speed of C
            return ids
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, Integral):
                raise TypeError(f"{name}: token ids must be integers, got {i!r}")
        return [int(i) for i in ids]

    def _render_chat(self, conversation: Seq[Mapping[str, Any]], index: int, kwargs: dict[str, Any]) -> list[int]:
        name = f"conversation {index}"
        if self.tokenizer is None:
            raise ValueError(f"{name}: the model came without a tokenizer, so it cannot chat")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{name}: the model's tokenizer has no chat template; use generate()")
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise ValueError(f"{name}: the chat template refused it: {error}") from error
        # The template writes the beginning-of-sequence token itself where the model wants one.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _enqueue(self, ids: list[int], params: SamplingParams) -> int:
        blocks = self.scheduler.block_manager
        # The last token needs no KV: a sequence may fill the pool and then end with one token more.
        max_len = min(len(ids) + params.max_tokens, self.max_model_len, blocks.num_blocks * blocks.block_size + 1)
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        seq = Sequence(seq_id, ids, params, max_len, request_seed(self.config.seed, seq_id))
        self._sequences[seq_id] = seq
        self.scheduler.add(seq)
        return seq_id

    def _step(self) -> tuple[list[Sequence], Batch]:
        """Launch the next step, then take in the tokens of the oldest one in flight, if it is its turn."""
        try:
            batch = self.scheduler.schedule()
            if batch.items:
                self._in_flight.append((batch, self.model_runner.launch(self._step_builder.build(batch))))
            assert self._in_flight or self.scheduler.is_finished(), "no step can run and none is running"
            finished: list[Sequence] = []
            if self._in_flight and (not batch.items or len(self._in_flight) > self._max_in_flight):
                done, result = self._in_flight.popleft()
                finished = self.scheduler.postprocess(done, result.token_ids())
        except BaseException:
            self._recover()
            raise
        for seq in finished:
            del self._sequences[seq.seq_id]
        if self.scheduler.is_finished():
            self._in_flight.clear()  # rows that ran on after an end-of-sequence token: nobody asks for those results
        return finished, batch

    def _recover(self) -> None:
        """After a step that broke off anywhere: all unfinished sequences wait again, with the tokens they have."""
        self._in_flight.clear()
        ended = [seq for seq in self._sequences.values() if seq.status is Status.FINISHED]
        for seq in ended:
            del self._sequences[seq.seq_id]
        self._unreported += ended
        self.scheduler.reset(list(self._sequences.values()))

    def _run(self, seqs: list[Sequence], use_tqdm: bool) -> None:
        """Step until all of `seqs` are finished; what else finishes waits for `step`."""
        open_ids = {seq.seq_id for seq in seqs}
        with Progress(len(seqs), use_tqdm) as progress:
            while open_ids:
                finished, batch = self._step()
                mine = [seq for seq in finished if seq.seq_id in open_ids]
                open_ids.difference_update(seq.seq_id for seq in mine)
                self._unreported.extend(seq for seq in finished if seq not in mine)
                progress.update(batch, len(mine))

    def _abort(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if self._sequences.pop(seq.seq_id, None) is not None:
                self.scheduler.finish(seq, "abort")
        mine = {seq.seq_id for seq in seqs}
        self._unreported = [seq for seq in self._unreported if seq.seq_id not in mine]

    def _outputs(self, seqs: list[Sequence]) -> list[Output]:
        completions = [seq.completion_token_ids for seq in seqs]
        texts: list[str | None] = [None] * len(seqs)
        if self.tokenizer is not None:
            texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return [
            {
                "text": text,
                "token_ids": token_ids,
                "finish_reason": seq.finish_reason,
                "prompt_token_ids": seq.token_ids[: seq.num_prompt_tokens],
                "num_cached_tokens": seq.num_cached_tokens,
            }
            for seq, token_ids, text in zip(seqs, completions, texts, strict=True)
        ]


class Progress:
    """Bar over finished prompts, with the rates of the last second's prefill and decode steps."""

    INTERVAL = 0.5  # seconds between updates of the rates

    def __init__(self, total: int, enabled: bool):
        self._bar = tqdm(total=total, desc="Generating", unit="prompt", dynamic_ncols=True, disable=not enabled)
        self._since = time.perf_counter()
        self._prefill = self._decode = 0

    def update(self, batch: Batch, num_finished: int) -> None:
        if self._bar.disable:
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
        self._bar.close()


def request_seed(engine_seed: int, seq_id: int) -> int:
    """Seed of a request's draws: any 64-bit mix of both does; this one is invertible in `seq_id`."""
    mixed = (engine_seed * 0x9E3779B97F4A7C15 + (seq_id + 1) * 0xBF58476D1CE4E5B9) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _as_prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a str, token ids or a list of them, got {prompts!r}")
    prompt_list = list(prompts)
    if prompt_list and isinstance(prompt_list[0], Integral) and not isinstance(prompt_list[0], bool):
        return [prompt_list]
    return prompt_list


def _as_params_list(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Iterable):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
    params_list = list(params)
    if len(params_list) != count:
        raise ValueError(f"{len(params_list)} sampling_params were given for {count} prompts")
    return [_validated_params(p, f"prompt {i}") for i, p in enumerate(params_list)]


def _validated_params(params: Any, name: str) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{name}: sampling_params must be SamplingParams, got {params!r}")
    return params
