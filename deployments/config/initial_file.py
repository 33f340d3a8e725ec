"""A first configuration file for some GPUs, with the numbers of its plan as comments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml

from deployments.config.api_config import ApiKey
from rapid.planning.division import Demand, Division
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import FP8_BITS, Replica
from retrieval.settings import RetrievalConfig

MOST_CONTEXT = 131_072  # tokens that Qwen3 reads with YaRN's factor 4, says its model card
HEADROOM = 3_072  # tokens of a sequence beside the document: instructions, question and answer
_ANSWER_TOKENS = 1_024  # of those
_OWN_POSITIONS = 40_960  # tokens that Qwen3 reads as it is, in its config.json
_TRAINED_POSITIONS = 32_768  # of which YaRN takes a multiple
_STEP = 1_024  # contexts are multiples of it, as pages divide it
_PEOPLE_FOR_A_QUESTION = 10  # of ten people one asks while the others read; an assumption
_GIB = 2**30  # bytes
_ENGINE_CPUS = 4  # cores reserved for an engine on a GPU, as in cluster/configs


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a server is for: `people` who ask about documents of so many tokens at most."""

    document_tokens: int
    people: int

    def demand(self, acceptance: float) -> Demand:
        """Return what they ask of the GPUs."""
        retrieved = RetrievalConfig().budget_for(self.document_tokens)
        return Demand(
            _round_up(self.document_tokens + HEADROOM),
            _round_up(retrieved + HEADROOM),
            -(-self.people // _PEOPLE_FOR_A_QUESTION),
            acceptance,
        )


def people_for(questions: int) -> int:
    """Return the people of whom as many questions at once are expected."""
    return questions * _PEOPLE_FOR_A_QUESTION


def compose_file(wishes: Wishes, demand: Demand, division: Division, keys: Sequence[ApiKey]) -> str:
    """Return the text of a configuration file."""
    settings = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "logging_config": {"encoding": "JSON"},
        "applications": [
            {
                "name": "rapid",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": _compose_args(demand, division, keys),
            }
        ],
    }
    lines = _describe(wishes, demand, division).splitlines()
    head = "\n".join(f"# {line}".rstrip() for line in lines)
    body = yaml.safe_dump(settings, sort_keys=False, width=100)
    return f"{head}\n{body}"


def _compose_args(demand: Demand, division: Division, keys: Sequence[ApiKey]) -> dict[str, object]:
    drafter: object = "target"
    if division.num_drafters:
        drafter = _compose_pool(
            division.drafter,
            division.drafts,
            division.num_drafters,
            demand.drafter_context,
            demand.questions * demand.drafter_context,
            demand.questions,
            demand.questions,
        )
    api: dict[str, object] = {"model": division.target}
    if keys:
        api["keys"] = [key.model_dump(exclude_defaults=True) for key in keys]
    return {
        "target": _compose_pool(
            division.target,
            division.reads,
            division.num_targets,
            demand.context,
            division.each * division.reads.context,
            2 * division.each,
            division.each,
        ),
        "drafter": drafter,
        "retriever": {
            "retrieval": {
                "embedder": {"kind": "lexical"},
                "store": {"kind": "local"},
                "chunk_tokens": 512,
            }
        },
        "orchestrator": {"default_max_tokens": _ANSWER_TOKENS},
        "api": api,
        "library": {},  # files, in a folder: the file is for one machine
    }


def _compose_pool(
    name: str,
    replica: Replica,
    num_replicas: int,
    context: int,
    kv_tokens: int,
    leases: int,
    questions: int,
) -> dict[str, object]:
    engine: dict[str, object] = {"model": KNOWN_SHAPES[name][0], "dtype": "bfloat16"}
    if replica.layer_bits == FP8_BITS:
        engine["quantization"] = "fp8"
    if replica.num_gpus > 1:
        engine["tensor_parallel"] = replica.num_gpus
    if context > _OWN_POSITIONS:
        engine["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 2.0 if context <= 2 * _TRAINED_POSITIONS else 4.0,
            "original_max_position_embeddings": _TRAINED_POSITIONS,
        }
    engine |= {"max_context": context, "kv_cache_tokens": kv_tokens, "max_leases": leases}
    pool = {
        "min_replicas": num_replicas,
        "max_replicas": num_replicas,
        "target_ongoing_requests": questions,
        "num_gpus": replica.num_gpus,
        "engine_cpus": _ENGINE_CPUS,
    }
    return {"engine": engine | {"step_tokens": 4096}, "pool": pool}


def describe_parts(division: Division) -> str:
    """Return which model runs where, in a sentence without its full stop."""
    reads = f"{division.num_targets} x {division.target} ({_gpus(division.reads)} each) for reading"
    if not division.num_drafters:
        return f"{reads} and drafting"
    bits = "in fp8, " * (division.drafts.layer_bits == FP8_BITS)
    where = f"{bits}{_gpus(division.drafts)} each"
    return f"{reads}, {division.num_drafters} x {division.drafter} ({where}) for drafting"


def _describe(wishes: Wishes, demand: Demand, division: Division) -> str:
    reads, drafts = division.reads, division.drafts
    prefill_s = replace(reads, context=demand.context).prefill_s()
    speedup = division.operate(demand).speedup
    lines = [
        f"{describe_parts(division)}.",
        f"It is for {wishes.people} people, who ask {demand.questions} questions at once, and was "
        "written by",
        "",
        f"  rapid init --gpus {division.num_gpus}x{reads.gpu.name} --document-tokens "
        f"{wishes.document_tokens} --people {wishes.people}",
        "",
        "The numbers are those of",
        "",
        *_plan_command(demand, division),
        "",
        f"by arithmetic on the {reads.gpu.source}. Nothing of it has run on one.",
        "",
        *_describe_memory("target", division.each, reads, 2 * division.each),
    ]
    if division.num_drafters:
        lines += _describe_memory("drafter", demand.questions, drafts, demand.questions)
    lines += [
        f"speed    a document is read in {prefill_s:.0f} s at best, once; then a question likely "
        "gets",
        f"         {division.tokens_per_s(demand):.0f} tokens a second, {speedup:.2f} of plain "
        f"decoding's, if {demand.acceptance:.0%} of the drafts are accepted",
    ]
    return "\n".join(lines)


def _plan_command(demand: Demand, division: Division) -> list[str]:
    drafts = division.drafts
    bits = " --drafter-bits 8" * (drafts.layer_bits == FP8_BITS)
    context = division.reads.context if division.num_drafters else demand.context
    return [
        f"  rapid plan --target {division.target} --drafter {division.drafter} "
        f"--target-gpus {division.reads.num_gpus} --drafter-gpus {drafts.num_gpus}{bits} \\",
        f"      --gpu {drafts.gpu.name} --context {context} "
        f"--drafter-context {drafts.context} --batch {division.each}",
    ]


def _describe_memory(what: str, questions: int, replica: Replica, leases: int) -> list[str]:
    kv = replica.kv_of(questions)
    need = replace(replica.need(leases), kv_pool=kv)
    return [
        f"{what:<9}each replica holds {questions} questions: weights {need.weights / _GIB:.1f}, KV "
        f"{kv / _GIB:.1f},",
        f"         in all {need.total / _GIB:.1f} GiB of {replica.usable / _GIB:.1f} usable on "
        f"{_gpus(replica)}",
    ]


def _gpus(replica: Replica) -> str:
    return f"{replica.num_gpus} {replica.gpu.name}"


def _round_up(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP
