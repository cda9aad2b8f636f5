"""The feed: order, bounds, errors, and the same completions as `LLM.generate`."""

import itertools
import json

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.generate import HELD, RUNNING, Defaults, Feed, sampling_fields
from nanovllm.cli.records import Line


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, device="cpu", max_num_seqs=4) as engine:
        yield engine


def lines_of(records):
    for i, record in enumerate(records):
        yield Line(i, i + 1, 1, record if isinstance(record, bytes) else json.dumps(record).encode())


def run(llm, records, ordered=True, **sampling):
    feed = Feed(llm, lines_of(records), Defaults({"max_tokens": 5, **sampling}, token_ids=True), ordered)
    results = [result for result in feed if result is not None]
    assert llm.is_finished()
    return results, [json.loads(result.data) for result in results]


def test_completions_are_those_of_generate(llm, tiny):
    """Draws included: a line's seed comes from its number, as a request's comes from the engine's count."""
    records = [{"id": i, "token_ids": [3 + i, 7, 9]} for i in range(20)]
    _, outs = run(llm, records, temperature=1.0)
    with LLM(tiny, device="cpu") as fresh:
        expected = fresh.generate([r["token_ids"] for r in records], SamplingParams(max_tokens=5), use_tqdm=False)
    assert [out["id"] for out in outs] == list(range(20))
    assert [out["output_token_ids"] for out in outs] == [out["token_ids"] for out in expected]
    assert [out["text"] for out in outs] == [out["text"] for out in expected]
    assert {out["finish_reason"] for out in outs} <= {"stop", "length"}
    assert all(out["num_prompt_tokens"] == 3 and out["num_output_tokens"] <= 5 for out in outs)


def test_resumed_lines_draw_as_if_nothing_had_happened(llm):
    records = [{"prompt": "same"} for _ in range(6)]
    _, outs = run(llm, records, temperature=1.0, ignore_eos=True)
    rest = itertools.islice(lines_of(records), 3, None)
    again = [r for r in Feed(llm, rest, Defaults({"max_tokens": 5, "ignore_eos": True}), True) if r is not None]
    assert [json.loads(r.data)["text"] for r in again] == [out["text"] for out in outs[3:]]
    assert len({out["text"] for out in outs}) > 1


def test_bad_lines_become_errors_and_the_others_go_on(llm):
    records = [
        {"id": 0, "prompt": "abc", "tag": [1, {"x": None}]},
        b"{bad",
        {"id": 2},
        {"id": 3, "token_ids": [1] * 400},
        {"id": 4, "token_ids": [999]},
        {"id": 5, "prompt": "x", "sampling_params": {"temperature": -1}},
        {"id": 6, "prompt": "x", "sampling_params": {"temprature": 1}},
        {"id": 7, "prompt": "x", "sampling_params": {"logit_bias": {"a": 1}}},
        {"id": 8, "messages": [{"role": "user", "content": "hi"}], "sampling_params": {"max_tokens": 2}},
        {"id": 9, "messages": [1]},
        {"id": 10, "prompt": ""},
        {"custom_id": "k", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}},
        {"custom_id": "l", "body": {"messages": [], "tools": []}},
        {"id": 13, "prompt": "xy", "sampling_params": {"n": 2, "logprobs": 1, "prompt_logprobs": 1}},
    ]
    results, outs = run(llm, records, ignore_eos=True)
    bad = {i for i, result in enumerate(results) if result.error}
    assert bad == {1, 2, 3, 4, 5, 6, 7, 9, 10, 12}
    assert outs[0]["tag"] == [1, {"x": None}]
    assert outs[1]["line"] == 2
    assert [out.get("id") for out in outs[2:11]] == list(range(2, 11))
    assert all(isinstance(outs[i]["error"], str) for i in bad - {12})
    assert "max_model_len" in outs[3]["error"]
    assert "temprature" in outs[6]["error"]
    assert "outside the vocabulary" in outs[4]["error"]
    assert outs[8]["num_output_tokens"] == 2
    assert outs[11]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (outs[12]["custom_id"], outs[12]["error"]["code"]) == ("l", "invalid_request")
    assert len(outs[13]["completions"]) == 2
    assert [entry is None for entry in outs[13]["prompt_logprobs"]] == [True, False, False]
    assert results[13].output_tokens == 10


def test_order_and_bounds_with_one_long_request(llm):
    """The engine stays full, and never are more lines in flight or held than the bounds say."""
    read, written, ahead, running = [], [], [], []

    def lines():
        for line in lines_of(
            {"token_ids": [5], "sampling_params": {"max_tokens": 200 if i == 3 else 1}} for i in range(300)
        ):
            read.append(line.index)
            yield line

    feed = Feed(llm, lines(), Defaults({"ignore_eos": True}), ordered=True)
    for result in feed:
        running.append(len(feed._running))
        ahead.append(len(read) - len(written))
        if result is not None:
            written.append(result.index)
    assert written == list(range(300))
    assert max(running) == RUNNING * 4
    assert max(ahead) <= HELD * 4


def test_unordered_lines_overtake(llm):
    records = [{"token_ids": [5], "sampling_params": {"max_tokens": 50 if i == 0 else 1}} for i in range(100)]
    results, _ = run(llm, records, ordered=False, ignore_eos=True)
    order = [result.index for result in results]
    assert sorted(order) == list(range(100))
    assert order.index(0) > 40


def test_a_stream_without_lines_does_not_hold_up_the_running_ones(llm):
    """`None` stands for "none yet": the first line is answered before the second one comes."""
    answered = []

    def lines():
        yield next(lines_of([{"prompt": "a"}]))
        while not answered:
            yield None
        yield Line(1, 2, 1, b'{"prompt": "b"}')

    for result in Feed(llm, lines(), Defaults({"max_tokens": 2}), ordered=True):
        if result is not None:
            answered.append(result.index)
    assert answered == [0, 1]


def test_response_formats_of_the_batch_form_are_followed(llm):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    formats = [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}},
        {"type": "text"},
    ]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    results, outs = run(
        llm, [{"custom_id": str(i), "body": {**body, "response_format": f}} for i, f in enumerate(formats)]
    )
    assert [result.error for result in results] == [False, False, True, False]
    texts = [out["response"]["body"]["choices"][0]["message"]["content"] for out in outs if out["response"]]
    assert list(json.loads(texts[0])) == ["a"]
    assert texts[1].lstrip().startswith("{")
    assert "json_schema" in outs[2]["error"]["message"]


def test_logit_bias_keys_are_ids_again():
    assert sampling_fields({"logit_bias": {"5": 2}}) == {"logit_bias": {5: 2}}
