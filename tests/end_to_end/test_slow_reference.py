"""The real application against plain transformers forwards: it samples what it says it samples.

Every answer is recomputed from its own receipt: the prompts and tokens of ``explain``, the resolved
values of ``rapid``. Other requests run at the same time, so batches are ragged and mixed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.generator import generate_document
from tests.reference import Reference, Settings, load_reference

pytestmark = pytest.mark.ray

EOS = 5
NUM_TOKENS = 60


def body(seed: int, **rapid: Any) -> dict[str, Any]:
    document = generate_document(seed, 500 + 100 * (seed % 4))
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": document.questions[0].question}],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": NUM_TOKENS,
        "rapid": {
            "documents": [{"name": document.name, "text": document.text}],
            "explain": "tokens",
            **rapid,
        },
    }


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=each) for each in bodies)
        )
    assert [reply.status_code for reply in replies] == [200] * len(bodies), replies[0].text
    return [reply.json() for reply in replies]


def tokens(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["rapid"]["explain"]["token_ids"][0]
    return ids


def recomputed(reply: dict[str, Any], request: dict[str, Any]) -> bool:
    """Whether the answer parts from the reference at a numeric tie; any other difference fails."""
    receipt = reply["rapid"]
    explain = receipt["explain"]
    is_fused = receipt["contract"] == "fused"
    settings = Settings(
        seed=receipt["seed"],
        temperature=request["temperature"],
        top_p=request.get("top_p", 1.0),
        top_k=request.get("top_k"),
        eta=receipt["eta"] if is_fused else 0.0,
        transfer=receipt["transfer"],
        plausibility=receipt["plausibility"],
        draft_top_k=receipt["draft_top_k"],
        transfer_temperature=receipt["transfer_temperature"],
    )
    reference = Reference(
        load_reference(TARGET),
        explain["target_prompt_ids"],
        settings,
        num_tokens=request["max_tokens"],
        drafter=load_reference(DRAFTER) if is_fused else None,
        drafter_prompt=explain["drafter_prompt_ids"],
        witness_prompt=(explain["witness_prompt_ids"] or None) if is_fused else None,
        eos_ids=[EOS],
    )
    return reference.is_tied(tokens(reply))


async def test_lossless_is_plain(application: str) -> None:
    seeds = range(8)
    plain = await ask_all(application, [body(seed, mode="plain") for seed in seeds])
    lossless = await ask_all(
        application,
        [
            body(seed, mode="lossless", max_draft=max_draft)
            for seed in seeds
            for max_draft in (1, 4, 10)
        ],
    )
    num_ties = 0
    for seed in seeds:
        for reply in lossless[3 * seed : 3 * seed + 3]:
            assert reply["rapid"]["coupling"] == "shared_noise"
            assert reply["rapid"]["drafted"] > 0
            if tokens(reply) != tokens(plain[seed]):
                num_ties += recomputed(reply, body(seed))
    assert num_ties <= len(lossless) / 100
    assert not any(recomputed(reply, body(seed)) for seed, reply in zip(seeds, plain, strict=True))


@pytest.mark.parametrize("settings", [
    {"transfer": "boost", "eta": 10},
    {"transfer": "distill", "eta": 10, "draft_top_k": None},
    {"transfer": "adaptive", "eta": 10},
    {"transfer": "mixture", "eta": 1},
    {"transfer": "boost", "eta": 40, "plausibility": 0.0, "draft_top_k": 16},
])  # fmt: skip
async def test_fused_is_the_fused_distribution_at_every_position(application, settings) -> None:
    bodies = [
        body(seed, mode="fused", max_draft=max_draft, **settings)
        for seed in range(20, 24)
        for max_draft in (1, 3, 10)
    ]
    replies = await ask_all(application, bodies)
    num_ties = 0
    for reply, request in zip(replies, bodies, strict=True):
        assert reply["rapid"]["contract"] == "fused"
        num_ties += recomputed(reply, request)
    assert num_ties <= len(replies) / 100


async def test_a_greedy_answer_and_a_filtered_one(application) -> None:
    greedy = body(31, mode="fused") | {"temperature": 0}
    filtered = body(32, mode="fused") | {"top_p": 0.9, "top_k": 20}
    replies = await ask_all(application, [greedy, filtered])
    assert not recomputed(replies[0], greedy)
    assert not recomputed(replies[1], filtered)
