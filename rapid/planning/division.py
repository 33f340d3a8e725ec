"""Division of some GPUs among targets and drafters of a family, for so many questions at once.

The first of these that holds all questions is taken: the largest target, with the largest drafter
above it, in 16 bits before 8; and a target that drafts for itself before a smaller target. Of the
numbers of replicas, and of GPUs that share one drafter, those are taken with which a question is
likely answered fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rapid.planning.gpus import GPU
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import FP8_BITS, LIKELY, LIMIT, Replica, group_sizes
from rapid.planning.schedules import Operation, Schedule, Speculating, fastest

_TARGETS = ("qwen3-8b", "qwen3-4b", "qwen3-1.7b")  # the preferred first
_DRAFTERS = ("qwen3-32b", "qwen3-14b", "qwen3-8b")  # likewise
_SCHEDULES: tuple[Schedule, ...] = ("sequential", "draft ahead")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the GPUs.

    Attributes:
        context: Tokens of a target's sequence: document, question and answer.
        drafter_context: Tokens of a drafter's sequence: what is retrieved, question and answer.
        questions: Questions that are answered at once, over all targets.
        acceptance: Chance that a drafted token is accepted.
    """

    context: int
    drafter_context: int
    questions: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Division:
    """A division of GPUs.

    Attributes:
        target: The name of the target.
        drafter: The name of the drafter; the target's, where it drafts for itself.
        reads: A replica of the target, in which a question takes two sequences: of the whole text,
            and of what is retrieved, which it weighs or drafts on.
        drafts: A replica of the drafter, without GPUs where the target drafts for itself.
        num_targets: Replicas of the target.
        num_drafters: Replicas of the drafter; 0 where the target drafts for itself.
        each: Questions that a replica of the target holds.
    """

    target: str
    drafter: str
    reads: Replica
    drafts: Replica
    num_targets: int
    num_drafters: int
    each: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.num_targets * self.reads.num_gpus + self.num_drafters * self.drafts.num_gpus

    @property
    def most_questions(self) -> int:
        """Questions that all targets hold."""
        return self.num_targets * self.each

    def operate(self, demand: Demand) -> Operation:
        """Return the likely speed with the questions spread over the targets."""
        drafts = replace(self.drafts, losses=LIKELY)
        how = Speculating(self._batch(demand), demand.acceptance)
        if not self.num_drafters:
            return fastest(self._likely, drafts, how, "sequential")
        sharing = math.ceil(self.num_targets / self.num_drafters)
        found = [fastest(self._likely, drafts, how, each, sharing) for each in _SCHEDULES]
        return max(found, key=lambda each: each.speedup)

    def tokens_per_s(self, demand: Demand) -> float:
        """Return the tokens that one question likely gets in a second."""
        return self.operate(demand).speedup / self._likely.plain_s(self._batch(demand))

    @property
    def _likely(self) -> Replica:
        witness = self.drafts.context if self.num_drafters else 0
        return replace(self.reads, losses=LIKELY, witness=witness)

    def _batch(self, demand: Demand) -> int:
        return math.ceil(demand.questions / self.num_targets)


def divide(gpu: GPU, num_gpus: int, demand: Demand) -> Division | None:
    """Return the preferred division that holds all questions; None if there is none."""
    for candidates in _divisions(gpu, num_gpus, demand):
        holding = [each for each in candidates if each.most_questions >= demand.questions]
        if holding:
            return max(holding, key=lambda each: (each.tokens_per_s(demand), each.num_targets))
    return None


def find_fewest_gpus(gpu: GPU, demand: Demand, sizes: Sequence[int]) -> int | None:
    """Return the least of some numbers of GPUs that holds all questions; None if none does."""
    return next((size for size in sizes if divide(gpu, size, demand) is not None), None)


def find_most_questions(gpu: GPU, num_gpus: int, demand: Demand) -> int:
    """Return the most questions at once that some division holds; 0 if not even one."""
    one = replace(demand, questions=1)
    every = [each for candidates in _divisions(gpu, num_gpus, one) for each in candidates]
    return max((each.most_questions for each in every), default=0)


def _divisions(gpu: GPU, num_gpus: int, demand: Demand) -> Iterator[list[Division]]:
    """Yield the divisions for each pair of models and bits, the preferred first."""
    for target in _TARGETS:
        shape = KNOWN_SHAPES[target][1]
        context = demand.context + demand.drafter_context
        reads = Replica(shape, gpu, context, losses=LIMIT)
        size = next(iter(group_sizes(reads, 1)), num_gpus + 1)
        if size > num_gpus:
            continue
        reads = replace(reads, num_gpus=size)
        for drafter in _DRAFTERS:
            if KNOWN_SHAPES[drafter][1].num_parameters > shape.num_parameters:
                for bits in (16, FP8_BITS) if gpu.has_fp8_products else (16,):
                    yield list(_with_drafter(target, drafter, bits, reads, num_gpus, demand))
        itself = Replica(shape, gpu, demand.drafter_context, num_gpus=0, losses=LIMIT)
        each = _most_questions(reads)
        yield [Division(target, target, reads, itself, num_gpus // size, 0, each)]


def _most_questions(reads: Replica) -> int:
    """Return the questions that a replica holds, with two leases each and the KV of one context."""
    for questions in range(reads.max_sequences, 0, -1):
        need = replace(reads.need(2 * questions), kv_pool=reads.kv_of(questions))
        if need.total <= reads.usable:
            return questions
    return 0


def _with_drafter(
    target: str, drafter: str, bits: int, reads: Replica, num_gpus: int, demand: Demand
) -> Iterator[Division]:
    shape = KNOWN_SHAPES[drafter][1]
    drafts = Replica(shape, reads.gpu, demand.drafter_context, layer_bits=bits, losses=LIMIT)
    each = _most_questions(reads)
    for size in group_sizes(drafts, demand.questions):
        for num_drafters in range(1, num_gpus // size + 1):
            num_targets = (num_gpus - size * num_drafters) // reads.num_gpus
            if num_targets:
                yield Division(
                    target,
                    drafter,
                    reads,
                    replace(drafts, num_gpus=size),
                    num_targets,
                    num_drafters,
                    each,
                )
