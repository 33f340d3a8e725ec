"""What an answer must be by the specification, whatever befell its leases on the way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rapid import reference
from rapid.answering.services import Services
from rapid.messages import GenerateRequest
from rapid.receipt import Receipt
from rapid.reference import Settings, Token
from rapid.speculation.pace.refreshing import LEAST_DISTANCE, MAX_REFRESHES
from tests.toy_engine import EOS, ReferenceReader

Readers = list[ReferenceReader | None]


class Specification:
    """The answers of one request, computed by `rapid.reference` from the request alone."""

    def __init__(self, services: Services, request: GenerateRequest, receipt: Receipt) -> None:
        self._services, self._request, self._receipt = services, request, receipt
        self.refreshed_at: list[int] = []
        speculates = receipt.contract in ("fused", "paper")
        self._is_drafted = speculates or (
            receipt.mode == "lossless" and receipt.coupling == "maximal"
        )

    async def tokens(self, choice: int) -> tuple[int, ...]:
        """The tokens of an answer, plain where its receipt says so."""
        plain_from = self._receipt.plain_from[choice]
        settings = self._settings(choice)
        length = self._request.max_tokens
        assert length is not None
        tokens: list[int] = []
        if self._is_drafted:
            tokens = await self._drafted(settings, length if plain_from is None else plain_from)
        if EOS not in tokens:
            readers = [await self._answering()]
            tokens += _until_end(
                reference.generate(settings, length, *readers, committed=tuple(tokens))  # type: ignore[arg-type]
            )
        return tuple(tokens)

    async def _drafted(self, settings: Settings, stop: int) -> list[int]:
        """The tokens before `stop`, with the drafter reading again where that is due."""
        length = self._request.max_tokens
        assert length is not None
        tokens: list[int] = []
        log_odds, latest, num_left = 0.0, 0, MAX_REFRESHES
        readers = await self._readers("")
        while len(tokens) < stop and EOS not in tokens:
            for token in reference.generate(
                settings,
                length,
                *readers,
                committed=tuple(tokens),
                log_odds=log_odds,  # type: ignore[arg-type]
            ):
                tokens.append(token.id)
                log_odds = token.log_odds
                if len(tokens) == stop or token.id == EOS:
                    break
                is_due = not token.is_drafted and len(tokens) - latest >= LEAST_DISTANCE
                if self._request.speculation.refresh and is_due and num_left:
                    latest, num_left = len(tokens), num_left - 1
                    self.refreshed_at.append(latest)
                    readers = await self._readers(self._services.prompts.target.decode(tokens))
                    break
        return tokens

    async def _answering(self) -> ReferenceReader:
        """The model that answers."""
        prompts, request = self._services.prompts, self._request
        if self._receipt.contract == "drafter":
            return self._drafter((await prompts.drafter_prompt(request)).prompt_ids.tolist())
        return ReferenceReader("target", (await prompts.target_prompt(request, 1024)).tolist())

    @property
    def _drafts_itself(self) -> bool:
        pools = self._services.pools
        return pools.drafter is pools.target

    def _drafter(self, prompt_ids: list[int]) -> ReferenceReader:
        name = "target" if self._drafts_itself else "drafter"
        return ReferenceReader(name, prompt_ids)

    async def _readers(self, answer: str) -> Readers:
        """Target, drafter and witness; the last two read what is found for the answer so far."""
        prompts = self._services.prompts
        found = await prompts.drafter_prompt(self._request, answer)
        readers: Readers = [await self._answering(), self._drafter(found.prompt_ids.tolist())]
        if self._receipt.transfer == "adaptive" and self._receipt.eta and not self._drafts_itself:
            witness_ids = await prompts.witness_prompt(self._request, found)
            readers.append(ReferenceReader("target", witness_ids.tolist()))
        return readers

    def _settings(self, choice: int) -> Settings:
        request, receipt = self._request, self._receipt
        return Settings(
            seed=receipt.seed,
            choice=choice,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            rule="paper" if receipt.contract == "paper" else "exact",
            transfer=receipt.transfer,
            eta=receipt.eta,
            plausibility=receipt.plausibility,
            draft_top_k=receipt.draft_top_k,
            transfer_temperature=receipt.transfer_temperature,
            coupling=receipt.coupling,
            max_draft=receipt.max_draft,
        )


def _until_end(tokens: Iterator[Token]) -> list[int]:
    found: list[int] = []
    for token in islice(tokens, 10_000):
        found.append(token.id)
        if token.id == EOS:
            break
    return found
