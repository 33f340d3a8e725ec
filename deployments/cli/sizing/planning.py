"""The command ``rapid plan``: memory, the possible and the likely speed, and the cost."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.sizing.plan_tables import (
    beside,
    plan_object,
    show_memory,
    show_shared_memory,
    show_speed,
)
from deployments.cli.terminal import USAGE, AsJson, fail, note, print_json, say

if TYPE_CHECKING:
    from rapid.planning.packed_bits import StoredBits
    from rapid.planning.plan import Losses, Replica
    from rapid.planning.shapes import ModelShape

# arXiv 2502.20330: the share of drafts accepted, in blocks of ten, in its multi-turn task where
# Llama-3.1-8B drafts for itself on retrieved text (56.34 % in plain speculative decoding on the
# whole text).
ACCEPTANCE = 0.77
_ACCEPTANCE_SOURCE = (
    "Acceptance 0.77 is what arXiv 2502.20330 reports of Llama-3.1-8B drafting for itself; "
    "yours is in every receipt (accepted of drafted): pass --acceptance."
)
_MOST_PADDING = 1024  # rows of a known model's vocabulary that are no token, or tokens without one
_who = partial(typer.Option, rich_help_panel="What runs where")
_how = partial(typer.Option, rich_help_panel="How it runs")


def plan(
    target: Annotated[
        str,
        _who(
            help="llama-3.1-8b, ...: a wrong name lists them; or a directory or GGUF file.",
            metavar="MODEL",
        ),
    ],
    drafter: Annotated[str, _who(help="Likewise.", metavar="MODEL")],
    gpu: Annotated[
        str,
        _who(help="Of both: h100, h200, ...: a wrong name lists them.", metavar="GPU"),
    ],
    context: Annotated[int, _who(help="Tokens of a target's sequence.", min=1)],
    batch: Annotated[int, _who(help="Sequences decoded at once.", min=1)] = 1,
    drafter_context: Annotated[
        int | None,
        _who(
            help="Tokens of a drafter's sequence; by default the retriever's budget for the "
            "context.",
            min=1,
        ),
    ] = None,
    target_gpus: Annotated[int, _who(help="That share one target.", min=1)] = 1,
    drafter_gpus: Annotated[
        int | None,
        _who(
            help="That share one drafter, 0 for the target's own; by default as few as hold it.",
            min=0,
        ),
    ] = None,
    machine_gpus: Annotated[
        int, _who(help="GPUs of one machine; a replica with more is spread over several.", min=1)
    ] = 8,
    target_bits: Annotated[
        float | None,
        _who(
            help="Of a weight: 8 with quantization: fp8, 4 with int4; by default as a checkpoint "
            "that is published quantized stores them, or 16.",
            min=1,
            max=32,
        ),
    ] = None,
    drafter_bits: Annotated[float | None, _who(help="Likewise.", min=1, max=32)] = None,
    kv_bits: Annotated[
        float,
        _who(
            help="Of a number in keys and values, of both; 8 with kv_cache_dtype: fp8.",
            min=1,
            max=32,
        ),
    ] = 16,
    shared: Annotated[
        int,
        _who(
            help="Tokens that the target's sequences begin with in common, as questions on one "
            "document: held and read once.",
            min=0,
        ),
    ] = 0,
    acceptance: Annotated[
        float | None,
        _how(
            help=f"Chance that a drafted token is accepted; by default {ACCEPTANCE}, the paper's.",
            min=0,
            max=1,
        ),
    ] = None,
    hits: Annotated[
        float | None,
        _how(
            help="Share of blocks drafted ahead that are right; by default those accepted whole.",
            min=0,
            max=1,
        ),
    ] = None,
    extra_position: Annotated[
        bool,
        _how(
            "--extra-position",
            help="Count a token after a block that is accepted whole, as published formulas do; "
            "without drafting ahead.",
        ),
    ] = False,
    measured: Annotated[
        Path | None,
        _how(
            help="Report of benchmarks/gpu.py, whose losses replace the estimates of what is "
            "likely.",
            metavar="FILE",
        ),
    ] = None,
    gpu_hour: Annotated[
        float | None,
        _how(
            help="Price of one GPU for an hour; turns GPU-seconds into money.",
            min=0,
            metavar="PRICE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a deployment by arithmetic: no GPU is used and nothing is loaded.

    It shows whether the models fit, for how many sequences, the best possible and the likely speed
    with their draft lengths, how many targets one drafter should serve, and the cost of a million
    tokens against plain decoding.
    """
    from rapid.planning.gpus import find_gpu
    from rapid.planning.plan import GROUP_SIZES, LIMIT, Replica, group_sizes
    from rapid.planning.schedules import Speculating

    device = find_gpu(gpu)
    if device.name != gpu.lower():
        note(f"{gpu} is taken as {device.name}")
    if drafter_context is None:
        from retrieval.settings import RetrievalConfig

        drafter_context = RetrievalConfig().budget_for(context)
    if shared >= context:
        fail(
            f"sequences of {context:,} tokens cannot have {shared:,} in common: lower --shared",
            USAGE,
        )
    reads = Replica(
        gpu=device, context=context, shared=shared, num_gpus=target_gpus, machine_gpus=machine_gpus,
        kv_bytes=kv_bits / 8, losses=LIMIT, **_weights("target", target, target_bits),
    )  # fmt: skip
    own = _weights("drafter", drafter, drafter_bits)
    drafts = replace(reads, context=drafter_context, shared=0, **own)
    _check_pair(target, drafter)
    if drafter_gpus is None:
        drafter_gpus = next(iter(group_sizes(drafts, batch)), GROUP_SIZES[-1])
    drafts = replace(drafts, num_gpus=drafter_gpus)
    for role, replica in (("target", reads), ("drafter", drafts)):
        if problem := _unspread(role, replica):
            fail(problem, USAGE)
        if what := replica.shape.find_undivided(replica.num_at_once):
            fail(f"the {role} has {what}, which {replica.num_gpus} GPUs do not divide", USAGE)
        if problem := _why_not_packed(
            role, replica if replica.num_gpus else beside(replica, reads)
        ):
            fail(problem, USAGE)
    how = Speculating(batch, ACCEPTANCE if acceptance is None else acceptance, hits, extra_position)
    losses = _likely(measured)
    likely = replace(reads, losses=losses, witness=drafter_context), replace(drafts, losses=losses)
    if as_json:
        print_json(plan_object((reads, drafts), likely, how, is_one_model=target == drafter))
        return
    say(
        f"{target} reads {context:,} tokens, {drafter} drafts on {drafter_context:,}; "
        f"batch {batch}; {device.source}"
    )
    for name, replica in {target: reads, drafter: drafts}.items():
        if replica.stored is not None:
            say(f"{name} is stored quantized: {replica.stored}")
    if drafter_gpus:
        problem = show_memory(reads, drafts, batch)
    else:
        problem = show_shared_memory(reads, drafts, batch, is_one_model=target == drafter)
    if problem:  # nothing that was typed is wrong
        fail(problem)
    show_speed((reads, drafts), likely, how, gpu_hour)
    if acceptance is None:
        note(_ACCEPTANCE_SOURCE)
    if max(reads.num_machines, drafts.num_machines) > 1:
        note(
            "Over several machines (pool.nodes) a sum is assumed to take 30 µs and 400 Gb/s for "
            "each GPU, as with InfiniBand: nothing of it was measured."
        )
    note(
        "limit: memory read once at the bandwidth of the GPUs that compute a layer together (with "
        "weights of other than 16, 8 or 4 bits one), and Python's time. likely: with launches, "
        "sampling, a witness, Ray and what kernels reach, "
        f"{'as estimated for an H200' if measured is None else f'as in {measured}'}. "
        "docs/planning.md has the numbers, and what is left out."
    )


def _likely(measured: Path | None) -> Losses:
    """Return what steps are likely to lose: as estimated, or as a report has measured it."""
    from rapid.planning.plan import LIKELY

    try:
        losses = {} if measured is None else json.loads(measured.read_text())["losses"]
        if not all(isinstance(value, int | float) and value > 0 for value in losses.values()):
            raise ValueError("a loss is no number above 0")
        return replace(LIKELY, **losses)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"{measured} is no report of benchmarks/gpu.py that this plan can use: {error}", USAGE)


def _unspread(role: str, replica: Replica) -> str | None:
    """Return why a replica cannot be spread over the machines that its GPUs need, if it cannot."""
    if replica.num_machines == 1:
        return None
    spread = f"{replica.num_gpus} GPUs for the {role} are those of {replica.num_machines} machines"
    if replica.num_at_once == 1:
        what = "experts" if replica.shape.experts else "weights"
        return (
            f"{spread}, and {what} of {replica.layer_bits:g} bits are split by "
            f"layers within one: lower --{role}-gpus to {replica.machine_gpus}"
        )
    if replica.num_gpus % replica.machine_gpus:
        return f"{spread}, each with {replica.machine_gpus}: plan a multiple of that"
    return None


def _why_not_packed(role: str, replica: Replica) -> str | None:
    """Return why the weights of a replica cannot have four bits, if they cannot."""
    from rapid.planning.packed_bits import PACKED_ROWS

    if (what := replica.unpackable) is None:
        return None
    of_gpu = " on each GPU" if replica.num_at_once > 1 else ""
    return (
        f"the {role} has {what}{of_gpu}, and quantization: int4 packs {PACKED_ROWS} together: "
        f"change --{role}-gpus or --{role}-bits"
    )


def _check_pair(target: str, drafter: str) -> None:
    """Fail, as the server does, where the token ids of the two models do not mean the same."""
    from rapid.planning.known_models import KNOWN_VOCABULARIES

    known = [KNOWN_VOCABULARIES.get(model.lower()) for model in (target, drafter)]
    if target == drafter or (known[0] is not None and known[0] == known[1]):
        return
    from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
    from rapid.checkpoints.vocabulary import (
        ModelVocabulary,
        check_same_vocabulary,
        different_vocabularies,
        num_ids,
    )

    def vocabulary(model: str) -> ModelVocabulary:
        tokenizer = load_tokenizer(model)
        return ModelVocabulary(tokenizer, read_eos_ids(checkpoint_source(model), tokenizer))

    if not any(known):
        check_same_vocabulary(vocabulary(target), vocabulary(drafter))
        return
    sizes = [
        _shape(model)[0].vocabulary if of else num_ids(vocabulary(model).tokenizer)
        for model, of in zip((target, drafter), known, strict=True)
    ]
    if all(known) or abs(sizes[0] - sizes[1]) > _MOST_PADDING:
        whose = [f" ({of}'s)" if of else "" for of in known]
        raise different_vocabularies(
            f"that of {target}{whose[0]} has {sizes[0]:,} tokens, that of {drafter}{whose[1]} "
            f"{sizes[1]:,}"
        )


def _weights(role: str, model: str, bits: float | None) -> dict[str, Any]:
    """Return the fields of a `Replica` that say what its weights are."""
    shape, stored = _shape(model)
    if stored is not None and bits is not None:
        fail(f"{model} is stored quantized ({stored}): leave --{role}-bits out", USAGE)
    own_bits = 16 if stored is None else stored.bits
    return {"shape": shape, "layer_bits": bits or own_bits, "stored": stored}


def _shape(model: str) -> tuple[ModelShape, StoredBits | None]:
    from rapid.catalogue import CATALOGUE
    from rapid.planning.known_models import KNOWN_SHAPES

    if model.lower() in KNOWN_SHAPES:
        return KNOWN_SHAPES[model.lower()][1], None
    is_path = Path(os.path.expanduser(model)).exists() or model.startswith("embedded:")
    if not (is_path or any(entry.name == model.lower() for entry in CATALOGUE)):
        near = get_close_matches(model.lower(), KNOWN_SHAPES, n=2)
        did_you_mean = f"did you mean {' or '.join(near)}? " if near else ""
        fail(
            f"no model {model!r} is known: {did_you_mean}take one of {', '.join(KNOWN_SHAPES)}, "
            "a name of 'rapid models list', a GGUF file, or a directory with a config.json",
            USAGE,
        )
    from rapid.checkpoints.facts import read_model_facts
    from rapid.config import EngineConfig

    facts = read_model_facts(EngineConfig(model=model))
    return facts.shape, facts.stored
