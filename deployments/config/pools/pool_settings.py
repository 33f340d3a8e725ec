"""Settings of the pools that answer: of engines, of retrievers and of orchestrators."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from cluster.placement import PoolConfig, RequestPoolConfig
from rapid.config import (
    AnsweringConfig,
    EngineConfig,
    Finite,
    Frozen,
)
from rapid.vllm_config import VllmConfig
from retrieval.settings import RetrievalConfig


def _whose(engine: object) -> str:
    kind = engine.get("kind") if isinstance(engine, dict) else getattr(engine, "kind", None)
    return "ours" if kind is None else "vLLM's"


class EnginePoolConfig(Frozen):
    """Settings of a model's engine and of the replicas that run it."""

    engine: Annotated[
        Annotated[EngineConfig, Tag("ours")] | Annotated[VllmConfig, Tag("vLLM's")],
        Discriminator(_whose),
    ]
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _every_process_has_a_gpu(self) -> Self:
        ranks, gpus = self.engine.tensor_parallel, self.pool.num_gpus
        if ranks > 1 and gpus not in (0, ranks):
            raise ValueError(
                f"tensor_parallel ({ranks}) gives every process a GPU, and num_gpus ({gpus:g}) "
                "reserves another number for the engine: make them equal"
            )
        if ranks % self.pool.nodes:
            raise ValueError(
                f"nodes ({self.pool.nodes}) have an equal part of an engine's processes each, and "
                f"do not divide tensor_parallel ({ranks}): change one of them"
            )
        return self

    @model_validator(mode="after")
    def _kv_pool_holds_one_sequence(self) -> Self:
        engine = self.engine
        if engine.max_context is not None and engine.kv_cache_tokens < engine.max_context:
            raise ValueError(
                f"kv_cache_tokens ({engine.kv_cache_tokens}) cannot hold one sequence of "
                f"max_context ({engine.max_context}): raise kv_cache_tokens or lower max_context"
            )
        return self


class RetrieverPoolConfig(Frozen):
    """Settings of retrieval and of the replicas that run it."""

    retrieval: RetrievalConfig = RetrievalConfig()
    pool: PoolConfig = PoolConfig()

    @property
    def placed(self) -> RetrievalConfig:
        """The settings of retrieval, with the device that the pool gives the embedder.

        Without a GPU of its own a replica may see those of other pools, and must not take one.
        """
        embedder = self.retrieval.embedder
        if getattr(embedder, "device", None) != "auto":
            return self.retrieval
        device = "cuda" if self.pool.num_gpus else "cpu"
        placed = embedder.model_copy(update={"device": device})
        return self.retrieval.model_copy(update={"embedder": placed})

    @model_validator(mode="after")
    def _a_gpu_is_reserved_and_used(self) -> Self:
        device = getattr(self.placed.embedder, "device", "cpu")
        if device.startswith("cuda") and not self.pool.num_gpus:
            raise ValueError(
                f"the embedder's device is {device}, and the retriever's pool reserves no GPU: set "
                "retriever.pool.num_gpus, a fraction will do"
            )
        if not device.startswith("cuda") and self.pool.num_gpus:
            raise ValueError(
                f"the retriever's pool reserves {self.pool.num_gpus:g} GPUs, and the embedder runs "
                f"on the {device}: set retriever.pool.num_gpus to 0, or embedder.device to auto"
            )
        return self

    @model_validator(mode="after")
    def _a_local_store_has_one_owner(self) -> Self:
        if not self.retrieval.store.is_shared and self.pool.max_replicas > 1:
            raise ValueError(
                "a local store lives in one retriever: set retriever.pool.max_replicas to 1, or "
                "retrieval.store to a Qdrant server"
            )
        return self


class OrchestratorPoolConfig(AnsweringConfig):
    """Settings of the orchestrator deployment, which include those of `AnsweringConfig`.

    Attributes:
        acceptance_site: Where blocks are judged: beside the target's logits, or in the orchestrator
            after moving them there (for audits; the tokens are the same).
        retrieval_wait_s: The longest wait for the retriever, in seconds; then the answer goes on
            without. What is embedded by then is there for a later question.
        pool: Settings of the orchestrator's replicas.
    """

    acceptance_site: Literal["target", "orchestrator"] = "target"
    retrieval_wait_s: Finite = Field(30.0, gt=0)
    pool: RequestPoolConfig = RequestPoolConfig()
