"""What reading lines and writing results costs: `nanovllm generate`'s feed beside `LLM.generate`. Run as a script.

Both complete the same random prompts on the embedded default model, greedy, taking turns, with an empty prefix cache.
Times are of the processor, which other programs on the machine change least.
"""

import json
import random
import statistics
import time

from nanovllm import LLM, SamplingParams
from nanovllm.cli.generate import Defaults, Feed
from nanovllm.cli.records import Line
from nanovllm.utils.default_model import default_model_path

NUM_PROMPTS = 32
NUM_TOKENS = 16
REPEATS = 5


def main():
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 20000) for _ in range(rng.randrange(20, 60))] for _ in range(NUM_PROMPTS)]
    lines = [Line(i, i + 1, 1, json.dumps({"token_ids": ids}).encode()) for i, ids in enumerate(prompts)]
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with LLM(str(default_model_path()), max_num_seqs=16, num_kvcache_blocks=400) as llm:

        def by_generate():
            outs = llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
            return [out["token_ids"] for out in outs]

        def by_feed():
            results = Feed(llm, lines, Defaults(sampling, token_ids=True), ordered=True)
            return [json.loads(result.data)["output_token_ids"] for result in results if result is not None]

        assert by_generate() == by_feed()
        times = {by_generate: [], by_feed: []}
        for _ in range(REPEATS):
            for way, taken in times.items():
                llm.reset_prefix_cache()
                start = time.process_time()
                way()
                taken.append(time.process_time() - start)
    rates = [NUM_PROMPTS * NUM_TOKENS / statistics.median(taken) for taken in times.values()]
    print(f"tokens a CPU second: LLM.generate {rates[0]:.1f}, nanovllm generate {rates[1]:.1f}")
    print(f"ratio {rates[1] / rates[0]:.3f}")


if __name__ == "__main__":
    main()
