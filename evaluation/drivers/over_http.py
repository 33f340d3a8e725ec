"""The backend that asks a RAPID server, through its public API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from pydantic import SecretStr

from evaluation.drivers.answering import Trial, by_position, result_of, seed_of
from evaluation.drivers.prompter import evidence_found, target_chat, truncate_middle
from evaluation.items import Item
from evaluation.results import Json, Result
from evaluation.systems import BASELINES, DraftKind, System
from evaluation.tasks import DAY, Condition, Task
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.config import Frozen
from rapid.errors import ConfigurationError, RapidError

_RETRIES = 8
_MOST_PATIENCE_S = 60.0  # the longest wait, even if Retry-After says more
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SILENCE_TIMEOUT_S = 3600.0  # a whole answer, queued behind others


class Server(Frozen):
    """A running server.

    Attributes:
        url: Base URL up to, and without, ``/v1``.
        tokenizer: Checkpoint whose tokenizer counts `context_tokens`; None where nothing is cut.
    """

    url: str
    api_key: SecretStr | None = None
    tokenizer: str | None = None

    def public(self) -> Json:
        """Return what a run's configuration says of the server, without its API key."""
        return {"url": self.url, "tokenizer": self.tokenizer}


class ServerRefused(RapidError):
    """The server gave no usable answer; the message has the reason."""


def check_can_serve(systems: Sequence[System], conditions: Sequence[Condition]) -> None:
    """Refuse systems and conditions that no server supports.

    Raises:
        ConfigurationError: A system or condition is not supported; the message names it and says
            what to do.
    """
    refused: dict[str, list[str]] = {}
    for system in systems:
        if reason := _beyond_servers(system):
            refused.setdefault(reason, []).append(system.name)
    for reason, names in refused.items():
        raise ConfigurationError(
            f"{', '.join(names)}: {reason}: leave out --url, or choose other systems with --system"
        )
    for condition in conditions:
        if condition.corruption != "none":
            raise ConfigurationError(
                f"condition {condition.name}: what a server retrieves cannot be corrupted from "
                "outside: leave out --url"
            )


def _beyond_servers(system: System) -> str | None:
    """Return why no server can be `system`, or None."""
    if system.is_drafter_alone:
        return "no server's drafter answers from everything"
    if system.drafts in ("naive", "window"):
        return "no server drafts in this way"
    if system.target_reads == "retrieved":
        return "the target of a server reads everything"
    if system.refresh:
        return "no server retrieves again within an answer"
    return None


def _check_drafts(systems: Sequence[System], drafts: DraftKind) -> None:
    """Refuse systems that draft or answer with another source than this server's."""

    def can_serve(system: System) -> bool:
        return not _beyond_servers(system) and (system.is_plain or system.drafts == drafts)

    if refused := [each.name for each in systems if not can_serve(each)]:
        able = [each.name for each in BASELINES.values() if can_serve(each)]
        raise ConfigurationError(
            f"{', '.join(refused)} cannot be asked of this server, which drafts by {drafts}: "
            f"choose with --system from {', '.join(able)}"
        )


class OverHttp:
    """A backend that asks a server; see `open_over_http`."""

    def __init__(
        self, task: Task, client: httpx.AsyncClient, model: str, text: ChatText | None
    ) -> None:
        self._task = task
        self._client = client
        self._model = model
        self._text = text

    async def answer(self, trial: Trial) -> Result:
        """Return the answer, as `evaluation.drivers.answering.Backend` defines it."""
        item, system, condition, task = trial.item, trial.system, trial.condition, self._task
        document = self._context(item, condition)
        speculation = system.speculation(condition.eta)
        rapid: Json = {"mode": system.method, "date": DAY.isoformat()}
        if system.is_drafted:
            of_drafts = {"coupling", "max_draft", "plausibility", "draft_top_k"}
            rapid |= speculation.model_dump(include=of_drafts)
        if system.fuses:
            rapid |= speculation.model_dump(include={"transfer", "eta"})
        if system.reads_retrieved:
            rapid["retrieval_tokens"] = condition.retrieval_tokens or task.retrieval.tokens
            rapid["query"] = item.query
        messages: Sequence[Message] = item.messages
        attached = document if task.templates is None else None
        if task.templates is not None:
            messages = target_chat(task, item, document)
        if attached is not None:
            rapid["documents"] = [{"name": attached.name, "text": attached.text}]
        reply = await self._ask(trial, messages, task.max_tokens, rapid)
        receipt, usage = reply["rapid"], reply["usage"]
        _check_kept(receipt, system)
        reasoning, prediction = None, _text_of(reply)
        if task.extraction is not None:
            reasoning = prediction
            fields = {"reasoning": reasoning.strip()}
            again = target_chat(task, item, document, task.extraction, fields)
            second = await self._ask(
                trial, again, task.extraction_tokens, {"mode": "plain", "date": DAY.isoformat()}
            )
            prediction = _text_of(second)
        drafting = reply["metrics"]["speculative_decoding"] or {}
        histogram = drafting.get("acceptance_histogram_by_draft_length", {})
        return result_of(
            trial,
            task,
            prediction=prediction,
            reasoning=reasoning,
            context_tokens=0 if system.method == "rag" else usage["prompt_tokens"],
            retrieved_tokens=usage["prompt_tokens"] if system.method == "rag" else 0,
            tokens=usage["completion_tokens"],
            rounds=receipt["rounds"],
            drafted=receipt["drafted"],
            accepted=receipt["accepted"],
            by_position=by_position({int(k): v for k, v in histogram.items()}),
            ms=_times(receipt, reply["metrics"]),
            evidence_found=_evidence_found(item, attached, receipt["chunks"], system),
        )

    def _context(self, item: Item, condition: Condition) -> Document | None:
        limit = self._task.context_limit(condition)
        if limit is None or item.document is None:
            return item.document
        assert self._text is not None
        text = truncate_middle(item.document.text, self._text.token_offsets, limit)
        return replace(item.document, text=text)

    async def _ask(
        self, trial: Trial, messages: Sequence[Message], max_tokens: int, rapid: Json
    ) -> Json:
        body = {
            "model": self._model,
            "messages": [{"role": each.role, "content": each.text} for each in messages],
            "max_completion_tokens": max_tokens,
            "temperature": trial.system.temperature_in(self._task.temperature),
            **({} if self._task.top_k is None else {"top_k": self._task.top_k}),
            "seed": seed_of(self._task, trial.item),
            "rapid": {key: value for key, value in rapid.items() if value is not None},
        }
        return await _post(self._client, body)


@asynccontextmanager
async def open_over_http(
    task: Task, server: Server, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[OverHttp]:
    """Connect to a server, after checking that it supports the task's systems and conditions.

    Raises:
        ConfigurationError: No RAPID server answers at the URL, or it does not support a system or
            condition of the task.
    """
    check_can_serve(task.systems, task.conditions)
    text = None
    if task.context_tokens or any(each.context_tokens for each in task.conditions):
        if server.tokenizer is None:
            raise ConfigurationError(
                "context_tokens needs the served model's tokenizer: name it with --target"
            )
        text = ChatText.load(server.tokenizer)
    key = server.api_key and server.api_key.get_secret_value()
    async with httpx.AsyncClient(
        base_url=server.url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(_SILENCE_TIMEOUT_S, connect=5.0),
        transport=transport,
        trust_env=httpx.URL(server.url).host not in _LOOPBACK,  # no proxy leads back here
    ) as client:
        model, drafts = await _greet(client)
        _check_drafts(task.systems, drafts)
        yield OverHttp(task, client, model, text)


async def _greet(client: httpx.AsyncClient) -> tuple[str, DraftKind]:
    """Return the one model that is served, and its source of drafts, as the pools show."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        models = [str(card["id"]) for card in response.json()["data"]]
        state = (await client.get("/ready")).json()
    except httpx.HTTPStatusError as error:
        raise ConfigurationError(
            f"{client.base_url}: the server answered {_reason(error.response)}"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"no RAPID server answers at {client.base_url} ({error!r}): start one with "
            "`rapid serve`, or correct --url"
        ) from None
    if len(models) != 1:
        raise ConfigurationError(f"{client.base_url} serves {len(models)} models; one is expected")
    if "pools" not in state:
        raise ConfigurationError(
            f"{client.base_url} shows its pools to operators only: give the key of one, which "
            "api.keys marks with operator: true"
        )
    if "drafter" in state["pools"]:
        return models[0], "drafter"
    return models[0], "target" if "retriever" in state["pools"] else "lookup"


async def _post(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Json:
    """Post a request and return the reply.

    A server that is full, restarting or unreachable is asked again, `_RETRIES` times, after its
    Retry-After if it sends one.
    """
    for attempt in range(_RETRIES + 1):
        pause = min(2.0**attempt, _MOST_PATIENCE_S)
        try:
            response = await client.post("/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            reason = f"no answer ({error!r})"
        else:
            if response.status_code == 200:
                reply: Json = response.json()
                return reply
            reason = _reason(response)
            if response.status_code not in (429, 503):
                break
            pause = _retry_after(response, pause)
        if attempt < _RETRIES:
            await asyncio.sleep(pause)
    raise ServerRefused(f"the server: {reason}")


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    try:
        return min(max(0.0, float(response.headers["retry-after"])), _MOST_PATIENCE_S)
    except (KeyError, ValueError):
        return otherwise


def _reason(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}, {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code}: is this a RAPID server?"


def _text_of(reply: Json) -> str:
    return str(reply["choices"][0]["message"]["content"])


def _times(receipt: Json, metrics: Json) -> dict[str, float]:
    """Return milliseconds by phase, from the receipt and the API's metrics.

    `decode` is the API's ``generation_time_ms``, scaled up by an estimate of the first round, which
    it lacks because it begins with the first text. For a single round it is draft plus verify.
    """
    names = ("retrieval", "target_prefill", "drafter_prefill", "draft", "verify")
    ms = {name: receipt["timings_ms"].get(name, 0.0) for name in names}
    rounds, decode = receipt["rounds"], ms["draft"] + ms["verify"]
    if rounds > 1:
        decode = round(metrics["generation_time_ms"] * rounds / (rounds - 1), 3)
    return ms | {"decode": decode}


def _check_kept(receipt: Json, system: System) -> None:
    """Refuse an answer that the server gave in another mode, or partly without its drafter."""
    has_lost = system.method == "lossless" and receipt["is_fallback"]
    if receipt["mode"] != system.method or has_lost:
        raise ServerRefused(
            f"the server answered as {receipt['mode']}, not {system.method}: {receipt['reason']}"
        )
    (alone_from,) = receipt["plain_from"]
    if alone_from is not None:
        raise ServerRefused(f"the server lost its drafter at token {alone_from}")


def _evidence_found(
    item: Item, attached: Document | None, chunks: Sequence[Json], system: System
) -> bool | None:
    """Return whether the receipt's chunks, given as spans of the document, hold the evidence."""
    if attached is None or not system.reads_retrieved:
        return None
    read = [attached.text[c["start"] : c["end"]] for c in chunks if c["document"] == attached.name]
    return evidence_found(item, "\n\n".join(read))
