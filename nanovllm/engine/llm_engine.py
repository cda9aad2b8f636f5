"""The engine: requests in, completions out."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from nanovllm.engine.engine_loop import EngineLoop
from nanovllm.engine.inputs import Prompt, params_list, prompt_list
from nanovllm.engine.request import Output, Request, StreamOutput
from nanovllm.sampling_params import SamplingParams, checked_int
from nanovllm.utils.collector import collector_frozen, collector_off

Messages = Seq[Mapping[str, Any]]


class LLMEngine(EngineLoop):
    """Generates text with one model.

    Args:
        model: a folder with a checkpoint, a `.gguf` file (or a folder holding one), or a Hub id.
        options: see `Config`.

    Raises:
        TypeError, ValueError: an option, a checkpoint or a machine that does not fit, by name.
    """

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
        requests: list[Request] = []
        try:
            with self._open():
                ids = self._inputs.token_ids(prompt, "request")
                self._enqueue(ids, self._inputs.params(sampling_params, "request"), requests, by_step=True)
            return requests[0].request_id
        except BaseException:
            self._abandoned.extend(requests)  # its id never reached the caller
            raise

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step.

        Returns:
            ([(seq_id, token ids of the first completion)] of the requests that it finished, number of tokens that it
            processed).
        """
        return self._report(
            lambda request: (request.request_id, request.sequences[0].completion_token_ids),
            lambda outs, batch: (outs, batch.num_tokens),
        )

    def step_outputs(self) -> list[tuple[int, Output]]:
        """Run one step; (seq_id, output as from `generate`) of each request that it finished."""
        return self._report(lambda request: (request.request_id, request.output()), lambda outs, batch: outs)

    def is_finished(self) -> bool:
        """True when no request is left to run or to be reported by `step`."""
        with self._open():
            return self.scheduler.is_finished() and not self._finished

    def abort(self, seq_id: int) -> bool:
        """Drop a request that `add_request` returned; False when there is no such unfinished request.

        Raises:
            TypeError, ValueError: `seq_id` is no id.
        """
        with self._open():
            wanted = checked_int("seq_id", seq_id, 0)
            request = self._requests.get(wanted)
            if request is None:  # that completion is done, if there ever was one; others of its request may not be
                request = next((other for other in self._requests.values() if other.request_id == wanted), None)
            if request is None or request.request_id != wanted:
                return False
            self._abandoned.append(request)
            self._abort_abandoned()
            return True

    def stats(self) -> dict[str, float]:
        """Where the engine stands and what it did.

        Returns:
            `running`, `waiting` (sequences), `kv_blocks`, `kv_blocks_used`, totals since the start: `steps`,
            `preemptions`, `computed_tokens`, `generated_tokens`, `prefix_queried_tokens`, `prefix_hit_tokens`,
            `seconds` (spent in steps), and `generated_tok_s`.
        """
        with self._open():
            blocks, scheduler = self.scheduler.block_manager, self.scheduler
            return {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "kv_blocks": blocks.num_blocks,
                "kv_blocks_used": blocks.num_blocks - blocks.num_free_blocks,
                **asdict(scheduler.counters),
                "seconds": self._seconds,
                "generated_tok_s": scheduler.counters.generated_tokens / self._seconds if self._seconds else 0.0,
            }

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._open():
            self.scheduler.block_manager.reset_prefix_cache()

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
            One dict a prompt, in order: `text` (None without a tokenizer), `token_ids`, `finish_reason` ("stop",
            "length", or "error" where the tokenizer failed at this completion), `stop_reason` (the stop string or
            stop token id that ended it, or what failed), `prompt_token_ids`,
            `num_cached_tokens` (prompt tokens found in the prefix cache), `metrics` (seconds: `queue_time`,
            `time_to_first_token`, `time_per_output_token`), `logprobs` where asked for (a dict a token: id to
            `logprob` and `token`), `prompt_logprobs` likewise (None for the first token), and for `n` > 1
            `completions`, a list of dicts of which the first is repeated above.

        Raises:
            TypeError, ValueError: naming the prompt and what is wrong with it; nothing has run then.
        """
        requests: list[Request] = []
        try:
            with ExitStack() as run:
                with collector_off():
                    self._enqueue_all(self._checked(prompts, sampling_params), requests, together=True)
                    run.enter_context(collector_frozen())  # first: switched on again, it would look at all of it
                return self._run(requests, use_tqdm)
        except BaseException:
            self._abandoned.extend(requests)  # nothing of this call may be answered in the next
            raise

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete prompts and yield what comes as it comes; leaving the loop early aborts the rest.

        Args, Raises: as for `generate`; a bad prompt is refused by this call, before the first iteration.
        """
        return self._stream(self._checked(prompts, sampling_params))

    def chat(
        self,
        messages: Messages | Seq[Messages],
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
            TypeError, ValueError: no tokenizer or no chat template, or messages that the template refuses.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Seq):
            raise TypeError(f"messages must be a list of messages or of conversations, got {messages!r}")
        if not messages:
            raise ValueError("messages is empty")
        talks: Seq[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = _template_kwargs(chat_template_kwargs)
        with self._open():
            prompts = [self._inputs.chat(talk, f"conversation {i}", kwargs) for i, talk in enumerate(talks)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def score(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[Output]:
        """Log-likelihoods of texts or token ids under the model; nothing is generated from them.

        Args:
            prompts: as for `generate`.
            use_tqdm: show a progress bar.

        Returns:
            One dict a prompt, in order: `token_ids`, `logprobs` (one a token; None for the first, which nothing comes
            before), and `total`, their sum.

        Raises:
            TypeError, ValueError: as for `generate`; a prompt has to leave room for one token.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = []
        for out in self.generate(prompts, params, use_tqdm):
            ids, entries = out["prompt_token_ids"], out["prompt_logprobs"]
            logprobs = [entry and entry[token]["logprob"] for token, entry in zip(ids, entries, strict=True)]
            scored.append({"token_ids": ids, "logprobs": logprobs, "total": sum(value or 0.0 for value in logprobs)})
        return scored

    def render_chat(self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of one conversation in the model's own format, ready to be answered."""
        with self._open():
            return self._inputs.chat(messages, "conversation", _template_kwargs(chat_template_kwargs))

    # ---- inside --------------------------------------------------------------------------------------------

    def _checked(self, prompts: Any, sampling_params: Any) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and parameters of each prompt, all of them validated."""
        listed = prompt_list(prompts)
        listed_params = params_list(sampling_params, len(listed))
        with self._open():
            return [
                (self._inputs.token_ids(prompt, f"prompt {i}"), self._inputs.params(params, f"prompt {i}"))
                for i, (prompt, params) in enumerate(zip(listed, listed_params, strict=True))
            ]

    def _enqueue_all(
        self, checked: list[tuple[list[int], SamplingParams]], requests: list[Request], together: bool = False
    ) -> None:
        """Queue all; `requests` grows with each, so that the caller knows them whenever this is interrupted.

        `together`: the caller waits for all of them.
        """
        with self._open():
            batch = self._next_seq_id if together else None
            for ids, params in checked:
                self._enqueue(ids, params, requests, batch=batch)

    def _stream(self, checked: list[tuple[list[int], SamplingParams]]) -> Iterator[StreamOutput]:
        requests: list[Request] = []
        try:
            self._enqueue_all(checked, requests)  # not before somebody iterates
            while not all(request.finished for request in requests):
                self._step_for(requests)
                for index, request in enumerate(requests):
                    yield from request.increments(index)
        finally:
            self._abandoned.extend(requests)


def _template_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, got {kwargs!r}")
    return dict(kwargs or {})
