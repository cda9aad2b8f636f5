"""The OpenAI batch file form: `{"custom_id", "method", "url", "body"}` in, `{"custom_id", "response", "error"}` out."""

import time
from dataclasses import fields as dataclass_fields
from typing import Any

from nanovllm.cli.records import Fields, Job
from nanovllm.sampling_params import GRAMMARS, SamplingParams

URL = "/v1/chat/completions"
SAMPLING = {f.name for f in dataclass_fields(SamplingParams)} - {"logprobs", "prompt_logprobs", "detokenize"}
WITHOUT_EFFECT = {"model", "messages", "user", "metadata", "store", "service_tier"}  # on what is generated
ALLOWED = {"stream": (False, None)}  # other values would be ignored
ANY_OBJECT = {"type": "object"}
SCHEMA_FIELDS = {"name", "description", "schema", "strict"}  # it is followed, strict or not


def is_batch_line(fields: Fields) -> bool:
    return "custom_id" in fields and "body" in fields


def parse_batch_job(fields: Fields) -> Job:
    """What a line of the batch form asks for.

    Raises:
        TypeError, ValueError: naming what is missing, wrong or not supported.
    """
    body = fields["body"]
    if fields.get("url", URL) != URL:
        raise ValueError(f"url must be {URL}, got {fields['url']!r}")
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise TypeError("body must be an object with a list of messages")
    return Job("messages", body["messages"], _sampling(body), _template(body))


def _template(body: Fields) -> Fields:
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, dict):
        raise TypeError(f"chat_template_kwargs must be an object, got {template!r}")
    return template


def _sampling(body: Fields) -> Fields:
    """Sampling parameters under our names; null means the default, as it does there."""
    sampling: Fields = {}
    for name, value in body.items():
        if name in WITHOUT_EFFECT or name in ("chat_template_kwargs", "top_logprobs") or value is None:
            continue
        if name in ALLOWED:
            if value not in ALLOWED[name]:
                raise ValueError(f"{name}={value!r} is not supported")
        elif name == "logprobs":
            if value:
                sampling["logprobs"] = body.get("top_logprobs") or 0
        elif name == "response_format":
            sampling.update(_response_format(value, body))
        elif name == "max_completion_tokens":
            sampling["max_tokens"] = value
        elif name in SAMPLING:
            sampling.setdefault(name, value)
        else:
            raise ValueError(f"{name} is not supported")
    return sampling


def _response_format(value: Any, body: Fields) -> Fields:
    """The sampling parameters of a `response_format`: none for text, else a schema."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"response_format must be of type text, json_object or json_schema, got {value!r}")
    own = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if set(value) - own:
        raise ValueError(f"response_format of type {kind} has no {', '.join(sorted(set(value) - own))}")
    if kind == "text":
        return {}
    others = [name for name in GRAMMARS if body.get(name) is not None]
    if others:
        raise ValueError(f"response_format {kind} and {others[0]} cannot be combined")
    return {"json_schema": ANY_OBJECT if kind == "json_object" else _schema(value.get("json_schema"))}


def _schema(wrapper: Any) -> Fields:
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict):
        raise TypeError(f"response_format.json_schema must be an object with an object schema, got {wrapper!r}")
    unknown = sorted(set(wrapper) - SCHEMA_FIELDS)
    if unknown:
        raise ValueError(f"response_format.json_schema has no {', '.join(unknown)}")
    return wrapper["schema"]


def batch_success(fields: Fields, output: Fields, index: int) -> Fields:
    """The line out of a finished request; `output` is as from `LLM.generate`."""
    completions = output.get("completions", [output])
    prompt_tokens = len(output["prompt_token_ids"])
    output_tokens = sum(len(c["token_ids"]) for c in completions)
    top = fields["body"].get("top_logprobs") or 0
    body = {
        "id": f"chatcmpl-{index}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": fields["body"].get("model"),
        "choices": [_choice(i, completion, top) for i, completion in enumerate(completions)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": output["num_cached_tokens"]},
        },
    }
    response = {"status_code": 200, "request_id": f"req_{index}", "body": body}
    return {"id": f"batch_req_{index}", "custom_id": fields["custom_id"], "response": response, "error": None}


def batch_failure(fields: Fields, message: str, index: int) -> Fields:
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{index}", "custom_id": fields["custom_id"], "response": None, "error": error}


def _choice(index: int, completion: Fields, top: int) -> Fields:
    entries = completion.get("logprobs")
    return {
        "index": index,
        "message": {"role": "assistant", "content": completion["text"]},
        "logprobs": None if entries is None else {"content": [_token(entry, top) for entry in entries]},
        "finish_reason": completion["finish_reason"],
    }


def _token(entry: dict[int, Fields], top: int) -> Fields:
    """The drawn token comes first in an entry, whether or not it is among the `top` most likely ones."""
    ranked = sorted(entry.values(), key=lambda item: item["logprob"], reverse=True)[:top]
    return {**_token_fields(next(iter(entry.values()))), "top_logprobs": [_token_fields(item) for item in ranked]}


def _token_fields(item: Fields) -> dict[str, Any]:
    text = item["token"]  # None without detokenize
    return {"token": text, "logprob": item["logprob"], "bytes": None if text is None else list(text.encode())}
