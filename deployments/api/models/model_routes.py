"""The routes of models' names, tokens, vectors and relevance, and of the server's version."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.accounts.account_routes import Endpoint
from deployments.api.backend.service import GenerationService
from deployments.api.dialects.chat.wire import Cards
from deployments.api.dialects.fingerprint import read_release
from deployments.api.files.attaching import attach_stored
from deployments.api.gate.allowances import Allowances
from deployments.api.http.bodies import Bodies
from deployments.api.http.dialect import Question
from deployments.api.http.json_bodies import parse_object, read_fields
from deployments.api.models.model_bodies import (
    Detokenization,
    EmbeddingQuestion,
    RerankQuestion,
    Tokenization,
)
from deployments.config.api_config import ApiConfig
from library.accounts.books import Accounts
from library.accounts.usage_ledger import UsageEntry
from library.library_access import LibraryAccess
from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest, new_call_id, utc_day
from retrieval.embeddings.relevance import TextVectors

Json = dict[str, Any]


class CountedDialect(Protocol):
    """A dialect whose questions can be read without being asked."""

    async def read(
        self, fields: Json, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[Question, GenerateRequest]: ...

    def render_refusal(self, body: Json) -> Json: ...


class ModelRoutes:
    """The endpoints about models that generate nothing."""

    def __init__(
        self,
        service: GenerationService,
        bodies: Bodies,
        allowances: Allowances,
        config: Callable[[], tuple[ApiConfig, Cards]],
        accounts: Accounts | None,
        library: LibraryAccess | None,
    ) -> None:
        """Store where answers come from, and a function that returns the settings of the moment."""
        self._accounts, self._library = accounts, library
        self._service, self._bodies = service, bodies
        self._allowances, self._config = allowances, config

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints; keys of any scope may see names."""
        yield "GET", "/v1/models", None, self._list
        yield "GET", "/v1/models/{model:path}", None, self._get
        yield "GET", "/version", None, self._version
        yield "POST", "/tokenize", "ask", self._tokenize
        yield "POST", "/detokenize", "ask", self._detokenize
        yield "POST", "/v1/embeddings", "ask", self._embed
        yield "POST", "/v1/rerank", "ask", self._rerank
        yield "POST", "/rerank", "ask", self._rerank

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*self._config()[1].values()]})

    async def _get(self, request: Request) -> Response:
        model, (config, cards) = request.path_params["model"], self._config()
        config.card_of(model)  # which refuses a name that is none
        return JSONResponse(cards[model])

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": read_release()})

    async def _tokenize(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, Tokenization)
        model = self._model(body.model)
        param = "messages" if body.prompt is None else "prompt"
        asked = body.as_request(model, new_call_id(), request.state.caller)
        async with self._admit(request, body.num_chars, model, param) as settle:
            asked, _ = await attach_stored(self._library, body.stored, asked, self._config()[0])
            found = await self._service.tokenize(asked)
            settle(0)
        return await asyncio.to_thread(_render_tokens, found, body)

    async def count(
        self, dialect: CountedDialect, usual: Json, told: Json, request: Request
    ) -> Response:
        """Answer with the tokens of a question's prompt, documents and tools included.

        Args:
            dialect: The dialect of the question.
            usual: Fields that it needs to be asked and not to be counted.
            told: What the answer has beside the number.
            request: The request.
        """
        config, tenant = self._config()[0], request.state.caller
        async with self._bodies.body(request, tenant, ("application/json",)) as body:
            fields = await asyncio.to_thread(parse_object, body or b"{}")
        fields = {"model": next(iter(config.cards))} | usual | fields
        # Before it is read, for which what it names is loaded: earlier turns, whole documents.
        async with self._admit(request, 0, None, None) as settle:
            asked, sent = await dialect.read(fields, config, new_call_id(), tenant)
            sent, _ = await attach_stored(self._library, asked.stored, sent, config)
            try:
                found = await self._service.tokenize(sent)
            except BadRequest as error:
                error.param = asked.field_of(error.param or "messages")
                raise
            settle(0)
        return JSONResponse(told | {"input_tokens": len(found.token_ids)})

    async def _detokenize(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, Detokenization)
        model = self._model(body.model)
        asked = GenerateRequest(
            new_call_id(), request.state.caller, (), prompts=(body.tokens,), model=model
        )
        async with self._admit(request, len(body.tokens), model, "tokens") as settle:
            text = await self._service.detokenize(asked) if body.tokens else ""
            settle(0)
        return JSONResponse({"prompt": text} | body.receipt)

    async def _embed(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, EmbeddingQuestion)
        num_chars, texts = sum(map(len, body.input)), body.input
        async with self._admit(request, num_chars, body.model, "input", texts) as settle:
            found = await self._service.embed(request.state.caller, body.input, body.model)
            settle(found.num_tokens)
        self._note(request, found)
        return await asyncio.to_thread(_render_vectors, found, body)

    async def _rerank(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, RerankQuestion)
        num_chars = sum(map(len, body.documents)) + len(body.query)
        texts = (*body.documents, body.query)
        async with self._admit(request, num_chars, body.model, "documents", texts) as settle:
            found = await self._service.embed(
                request.state.caller, body.documents, body.model, query=body.query
            )
            settle(found.num_tokens)
        self._note(request, found)
        best = sorted(range(len(body.documents)), key=lambda index: -found.scores[index])
        results: list[Json] = [
            {"index": index, "relevance_score": found.scores[index]} for index in best[: body.top_n]
        ]
        if body.return_documents is not False:
            for each in results:
                each["document"] = {"text": body.documents[each["index"]]}
        usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
        return JSONResponse(
            {
                "id": f"rerank-{secrets.token_hex(16)}",
                "model": found.model,
                "usage": usage,
                "results": results,
            }
            | body.receipt
        )

    def _note(self, request: Request, found: TextVectors) -> None:
        """Write what was embedded into the ledger, as prompts without an answer."""
        if self._accounts is None:
            return
        key = request.state.key
        self._accounts.note(
            UsageEntry(
                request_id=new_call_id(),
                tenant=key.tenant,
                key_id=key.key_id,
                model=found.model,
                day=utc_day().isoformat(),
                prompt_tokens=found.num_tokens,
                cached_tokens=0,
                completion_tokens=0,
                target_s=0.0,
                drafter_s=0.0,
                kv_byte_s=0.0,
                status="ok",
            )
        )

    def _model(self, named: str | None) -> str:
        config = self._config()[0]
        model = next(iter(config.cards)) if named is None else named
        config.card_of(model)  # which refuses a name that is none
        return model

    @asynccontextmanager
    async def _admit(
        self,
        request: Request,
        num_chars: int,
        model: str | None,
        param: str | None,
        embedded: Sequence[str] = (),
    ) -> AsyncIterator[Callable[[int], None]]:
        """Admit a request as `Allowances.admit` does, and name the field that is at fault.

        Args:
            request: The request, whose body is read.
            num_chars: Characters of its texts; a token id counts as one.
            model: The model that it names.
            param: The field with the texts, which errors name; None leaves them as they are.
            embedded: Texts that a model reads, of which a token is a byte at the least.

        Raises:
            BadRequest: There are too many characters, or the service refuses them.
        """
        self._config()[0].check_characters(num_chars, model or "", param or "")
        most = sum(len(text.encode()) for text in embedded)
        try:
            async with self._allowances.admit(request, most) as settle:
                yield settle
        except BadRequest as error:
            if param is not None and error.param != "model":
                error.param = param
            raise


def _render_tokens(found: TokenizedPrompt, body: Tokenization) -> Response:
    answer: Json = {
        "count": len(found.token_ids),
        "max_model_len": found.max_model_len,
        "tokens": list(found.token_ids),
    }
    told = {"token_strs": list(found.token_strs)} if body.return_token_strs else {}
    return JSONResponse(answer | told | body.receipt)


def _render_vectors(found: TextVectors, body: EmbeddingQuestion) -> Response:
    """Return vectors as numbers, or as little-endian float32 in base64, as OpenAI has them."""
    data = []
    for index, vector in enumerate(found.vectors):
        packed = np.asarray(vector, dtype="<f4")
        is_packed = body.encoding_format == "base64"
        told = base64.b64encode(packed.tobytes()).decode() if is_packed else packed.tolist()
        data.append({"object": "embedding", "index": index, "embedding": told})
    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
    answer = {"object": "list", "data": data, "model": found.model, "usage": usage}
    return JSONResponse(answer | body.receipt)
