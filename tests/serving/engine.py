"""vLLM's engine on a model in a folder, with composattn's attention, in a process of its own: tests start it.

`python -m tests.serving.engine FOLDER < prompts.json > answers.json`: of each prompt, a list of tokens, the next
tokens and their logarithms of probability; and the queries of each call of a layer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import composattn.integrations.vllm as integration

NEW, AT_ONCE, BLOCK = 16, 64, 32  # tokens to generate; in a step; in a block


def main() -> None:
    import vllm

    given = json.load(sys.stdin)
    integration.register("CPU_ATTN")
    calls: list[int] = []
    forward = integration.Layer.forward

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        calls.extend(of.tokens for of in (*args, *more.values()) if isinstance(of, integration.StepMetadata))
        return forward(self, *args, **more)

    integration.Layer.forward = counted  # type: ignore[method-assign]
    engine = vllm.LLM(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=AT_ONCE, block_size=BLOCK, enable_prefix_caching=True,
    )  # fmt: skip
    options = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=1)
    answers = engine.generate([{"prompt_token_ids": tokens} for tokens in given], options, use_tqdm=False)
    told = [[[int(t), step[t].logprob] for t, step in zip(o.token_ids, o.logprobs, strict=True)]
            for o in (answer.outputs[0] for answer in answers)]  # fmt: skip
    print(json.dumps({"answers": told, "calls": calls}))


if __name__ == "__main__":
    main()
