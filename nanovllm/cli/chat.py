"""`nanovllm chat`: a talk in the terminal."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm import SamplingParams
from nanovllm.engine.llm_engine import LLMEngine

HELP = "Ctrl-C stops an answer, /reset forgets the talk, /exit or Ctrl-D ends it."


def chat(
    llm: LLMEngine,
    params: SamplingParams,
    system: str | None,
    template: Mapping[str, Any],
    read: Callable[[str], str] = input,
) -> None:
    """Talk until the user ends it.

    Args:
        params: for every answer.
        system: a system message, or None.
        template: arguments for the chat template.
        read: asks for a line; EOFError ends the talk.
    """
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    print(HELP)
    while True:
        try:
            text = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(opening)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": answer(llm, messages, params, template)})
            except ValueError as error:  # no chat template, or the talk outgrew the model's window
                messages.pop()
                print(f"{error}\n(/reset forgets the talk so far)")


def answer(llm: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, template: Mapping[str, Any]) -> str:
    """Print the model's answer as it comes; what of it there is when Ctrl-C stops it."""
    parts: list[str] = []
    stream = llm.stream([llm.render_chat(messages, template)], params)
    try:
        for new in stream:
            parts.append(new.text)
            print(new.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined] # a generator: closing it takes the request out of the engine
    print()
    return "".join(parts)
