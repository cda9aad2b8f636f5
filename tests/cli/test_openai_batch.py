"""The OpenAI batch form, without an engine."""

import pytest

from nanovllm import SamplingParams
from nanovllm.cli.openai_batch import batch_success, parse_batch_job

MESSAGES = [{"role": "user", "content": "hi"}]


def batch_line(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES, **body}}


def test_parameters_come_under_our_names():
    job = parse_batch_job(
        batch_line(
            model="m",
            max_completion_tokens=5,
            temperature=None,
            logprobs=True,
            top_logprobs=2,
            stop=["x"],
            stream=False,
        )
    )
    assert (job.source, job.prompt) == ("messages", MESSAGES)
    assert job.sampling == {"max_tokens": 5, "logprobs": 2, "stop": ["x"]}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        (None, {}),
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_schema": {"type": "object"}}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "array"}}},
            {"json_schema": {"type": "array"}},
        ),
    ],
)
def test_response_format_becomes_a_schema(response_format, expected):
    job = parse_batch_job(batch_line(response_format=response_format, max_tokens=3))
    assert job.sampling == {"max_tokens": 3, **expected}
    SamplingParams(**job.sampling)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (batch_line(tools=[1]), "tools is not supported"),
        (batch_line(stream=True), "stream=True is not supported"),
        (
            batch_line(response_format={"type": "xml"}),
            "response_format must be of type text, json_object or json_schema",
        ),
        (batch_line(response_format="json_object"), "response_format must be of type"),
        (batch_line(response_format={"type": "json_object", "schema": {}}), "of type json_object has no schema"),
        (batch_line(response_format={"type": "json_schema"}), "json_schema must be an object with an object schema"),
        (batch_line(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "with an object schema"),
        (
            batch_line(response_format={"type": "json_schema", "json_schema": {"schema": {}, "shape": 1}}),
            "response_format.json_schema has no shape",
        ),
        (batch_line(response_format={"type": "json_object"}, regex="a"), "json_object and regex cannot be combined"),
        ({**batch_line(), "url": "/v1/embeddings"}, "url must be /v1/chat/completions"),
        ({"custom_id": "a", "body": {}}, "list of messages"),
    ],
)
def test_what_would_be_ignored_is_refused(line, message):
    with pytest.raises((TypeError, ValueError), match=message):
        parse_batch_job(line)


def test_a_response_has_the_form_of_the_api():
    def token(text, logprob):
        return {"token": text, "logprob": logprob}

    completion = {"text": "ab", "token_ids": [4, 5], "finish_reason": "length", "stop_reason": None}
    completion["logprobs"] = [{4: token("a", -2.0), 9: token("z", -0.5), 8: token("y", -1.0)}, {5: token("b", -0.1)}]
    output = {**completion, "prompt_token_ids": [1, 2, 3], "num_cached_tokens": 0}
    record = batch_success(batch_line(model="m", top_logprobs=2), output, index=6)
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    body = record["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["usage"]["total_tokens"] == 5
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab"}
    assert choice["finish_reason"] == "length"
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("a", [97])
    assert [top["token"] for top in first["top_logprobs"]] == ["z", "y"]  # the drawn one is not among the first two
    without_text = {**output, "text": None, "logprobs": [{4: token(None, -2.0)}]}
    (choice,) = batch_success(batch_line(model="m"), without_text, index=7)["response"]["body"]["choices"]
    assert choice["logprobs"]["content"] == [{"token": None, "logprob": -2.0, "bytes": None, "top_logprobs": []}]
