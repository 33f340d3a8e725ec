"""The reference's side of `reference.py`: answers in its own environment, with its own code.

    python reference_side.py CHECKOUT THREADS     cases on standard input, times on standard output

A case and its times are one JSON object per line. The script does what the checkout's own engine
does (`LongSpecEngine.generate`): it reads both prompts but their last token, then the patched
`generate` decodes and times itself (its CPU time is taken around it). It leaves out what needs a
GPU or retrieval, which is the model loading and `src/rag.py`, and the print of the whole residual
after a rejection, which would make the reference look slower. A prompt is read once, and each run
decodes on a copy of its keys and values.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=4)
def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()


@lru_cache(maxsize=4)
def read(folder: str, prompt: tuple[int, ...]) -> Any:
    """Return the keys and values of all but the last token of a prompt."""
    ids = torch.tensor([prompt[:-1]])
    return load(folder)(ids, use_cache=True, num_logits_to_keep=1).past_key_values


def run(case: dict[str, Any]) -> dict[str, float]:
    target, drafter = load(case["target"]), load(case["drafter"])
    prompt, short = tuple(case["prompt"]), tuple(case["short"])
    settings = {
        "max_new_tokens": case["max_tokens"],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": case["eos_ids"],
        "pad_token_id": 0,
        "past_key_values": copy.deepcopy(read(case["target"], prompt)),
        "use_cache": True,
    }
    torch.manual_seed(case["seed"])
    ids = torch.tensor([prompt])
    began, began_cpu = time.time(), time.process_time()
    if not case["speculative"]:
        answer = target.generate(ids, output_latency=False, **settings)
        num_tokens = answer.shape[1] - len(prompt)
        return {
            "decode_s": time.time() - began,
            "cpu_s": time.process_time() - began_cpu,
            "tokens": num_tokens,
            "rounds": num_tokens,
        }
    answer, latency = target.generate(
        ids,
        assistant_input_ids=torch.tensor([short]),
        assistant_model=drafter,
        assistant_past_key_values=copy.deepcopy(read(case["drafter"], short)),
        assistant_confidence_threshold=0.1,
        num_assistant_tokens=case["max_draft"],
        speculative_margin=case["eta"],
        spec_alpha=0.1,
        output_latency=True,
        **settings,
    )
    num_tokens, accepted = answer.shape[1] - len(prompt), int(latency["accept_tokens"])
    return {
        "decode_s": latency["decoding_time"],
        "cpu_s": time.process_time() - began_cpu,
        "tokens": num_tokens,
        "rounds": num_tokens - accepted,
        "drafted": latency["candidates_tokens"],
        "accepted": accepted,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr
    checkout, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    sys.path.insert(0, checkout)
    import src.generator
    import src.utils  # this import patches transformers

    for module in (src.generator, src.utils):
        module.print = lambda *told: None
    with torch.no_grad():
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
