"""Recompute an answer from its receipt, token by token, by `rapid.reference`.

A receipt with its explanation holds the prompts and the answer as token ids, the seed and every
resolved setting, so that neither documents nor retrieval are needed, only the models. Each token is
computed after the tokens that stand before it in the receipt.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoModelForCausalLM

from rapid import reference
from rapid.answering.plan.request_plan import spell_words
from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
from rapid.checkpoints.gguf import is_gguf
from rapid.checkpoints.vocabulary import num_ids, pack_tokens
from rapid.config import Contract, Coupling, SamplingConfig
from rapid.constraints.grammars import Grammars
from rapid.constraints.request_shaping import open_shaping
from rapid.constraints.shaping import Shaping
from rapid.errors import BadRequest
from rapid.receipt import Origin
from rapid.reference import Reader
from rapid.requests.sampling_fields import SamplingFields
from rapid.transfers import Transfer

Ids = tuple[int, ...]
Role = Literal["target", "drafter"]
# Fields of a request's body that shape logits by what a receipt does not have.
_UNSET: tuple[object, ...] = (None, [], {}, "")
_SHAPES = re.compile("tools$|guided_|thinking|reasoning|chat_template_kwargs$")


class CannotReplay(ValueError):
    """A file from which no answer can be recomputed; ``str()`` is a sentence for the user."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class SampledRequest(SamplingFields):
    """What a request's body says about sampling, which its receipt leaves out."""

    model_config = ConfigDict(extra="allow", frozen=True)

    temperature: float = Field(ge=0, le=2)

    def find_unknown(self) -> str | None:
        """Return a field that shaped the logits in a way that a replay does not know, if any."""
        given = (self.model_extra or {}).items()
        names = (name for name, value in given if value not in _UNSET)  # a budget of 0 says much
        return next(filter(_SHAPES.match, names), None)


class KnownToken(_Part):
    """One of the ``tokens`` of a receipt; see `rapid.receipt.ExplainedToken`."""

    is_thinking: bool = False


class ExplainedTokens(_Part):
    """The ``explain`` object of a receipt; see `rapid.receipt.Explanation`."""

    target_prompt_ids: Ids
    drafter_prompt_ids: Ids
    witness_prompt_ids: Ids
    token_ids: tuple[Ids, ...]
    origins: tuple[tuple[Origin, ...], ...]
    tokens: tuple[tuple[KnownToken, ...], ...] = ()


class ExplainedReceipt(_Part):
    """The ``rapid`` object of a response, as far as the tokens depend on it."""

    contract: Contract
    seed: int
    coupling: Coupling
    transfer: str
    eta: float
    plausibility: float
    draft_top_k: int | None
    transfer_temperature: float
    refreshes: int
    plain_from: tuple[int | None, ...]
    explain: ExplainedTokens | None = None


class KnownModels(_Part):
    """The names of the models, where the one who wrote the file knew them."""

    target: str | None = None
    drafter: str | None = None


class ReceiptFile(_Part):
    """The content of a file that ``rapid ask --receipt`` writes."""

    request: SampledRequest
    receipt: ExplainedReceipt
    models: KnownModels = KnownModels()


class Mismatch(NamedTuple):
    """The first token that the contract does not explain; indices are from 0."""

    choice: int
    position: int
    token_id: int  # of the receipt
    expected_id: int  # of the contract


def read_receipt(content: str | bytes) -> ReceiptFile:
    """Read the content of a receipt's file.

    Raises:
        CannotReplay: It is no receipt, or lacks something without which the tokens are not
            determined.
    """
    try:
        file = ReceiptFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise CannotReplay(
            f"this is no receipt that 'rapid ask --receipt' wrote ({what})"
        ) from None
    if name := file.request.find_unknown():
        raise CannotReplay(
            f"the answer follows {name}, which a replay does not know; of grammars it knows "
            "response_format and structured_outputs"
        )
    explain = file.receipt.explain
    if explain is None:
        raise CannotReplay("the receipt has no token ids: ask with rapid.explain 'tokens'")
    if file.request.grammar and any(each.is_thinking for each in chain(*explain.tokens)):
        raise CannotReplay(
            "the model thought before it answered, and the receipt does not say where its grammar "
            "begins"
        )
    lengths = [len(each) for each in explain.token_ids]
    if not any(lengths) or lengths != [len(each) for each in explain.origins]:
        raise CannotReplay("the receipt has no tokens, or not one origin for each of them")
    if len(file.receipt.plain_from) != len(lengths):
        raise CannotReplay("the receipt has not one plain_from for each answer")
    if file.receipt.contract == "fused" and file.receipt.transfer not in get_args(Transfer):
        raise CannotReplay(
            f"the answer follows {file.receipt.transfer!r}, a transfer rule that a program "
            "registered for itself: only the method's own rules can be replayed"
        )
    if file.receipt.refreshes:
        raise CannotReplay(
            "the drafter's prompt was retrieved again during the answer, and the receipt has only "
            "the first one: an answer with refreshes cannot be replayed"
        )
    return file


class ShapedReader(Reader):
    """A reader of a model whose logits are shaped as a request asks, anew behind every prefix."""

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        vocab: int | None,
        open_shaping: Callable[[], Shaping | None],
    ) -> None:
        super().__init__(model, prompt, vocab)
        self._open_shaping = open_shaping

    def logits(self, tokens: Sequence[int], count: int = 1) -> reference.Row:
        """Return the rows after the last `count` tokens of prompt and answer [count, vocab]."""
        rows = super().logits(tokens, count)
        for place, num_said in enumerate(range(len(tokens) - count + 1, len(tokens) + 1)):
            if (shaping := self._open_shaping()) is not None:
                shaping.advance(tokens[:num_said])
                rows[place] = shaping.shape(torch.from_numpy(rows[place])).numpy()
        return rows


class ReplayModels:
    """Target and drafter, each loaded when it is needed first, in float32 and without a download.

    Each is a checkpoint directory, the name of a hub model that is on this machine, a name of the
    catalogue, or an embedded model.
    """

    def __init__(self, target: str | None, drafter: str | None) -> None:
        self._names: dict[Role, str | None] = {"target": target, "drafter": drafter}
        self._loaded: dict[str, tuple[Any, Any, Grammars]] = {}

    def reader(
        self,
        role: Role,
        prompt_ids: Ids,
        request: SampledRequest | None = None,
        said_before: bytes = b"",
    ) -> Reader:
        """Return a reader of a prompt, whose logits are shaped as a request asks, if one is given.

        Args:
            said_before: The tokens of the prompt of the model that answers, as `pack_tokens` gives
                them, for a repetition penalty.

        Raises:
            CannotReplay: The model is not named or cannot be loaded, or it has too few tokens, or
                the request contradicts itself.
            ConfigurationError: Its name or its tokenizer is at fault.
        """
        model, tokenizer, grammars = self._load(role)
        vocab = num_ids(tokenizer)
        if not prompt_ids:
            raise CannotReplay(f"the receipt has no prompt of the {role}")
        sampling = _read_sampling(request, tokenizer) if request else SamplingConfig()
        check_ids((*prompt_ids, *(token for _, token in sampling.name_tokens())), vocab, role)
        return ShapedReader(
            model,
            prompt_ids,
            vocab,
            functools.partial(open_shaping, sampling, grammars.eos_ids, grammars.open, said_before),
        )

    def decode(self, role: Role, token_id: int) -> str:
        """Return the text of a token."""
        text: str = self._load(role)[1].decode([token_id])
        return text

    def check_answer(self, role: Role, token_ids: Ids) -> None:
        """Raise `CannotReplay` if the answer has tokens that the model lacks."""
        check_ids(token_ids, num_ids(self._load(role)[1]), role)

    def _load(self, role: Role) -> tuple[Any, Any, Grammars]:
        name = self._names[role]
        if name is None:
            raise CannotReplay(f"the file does not name the {role}: give it with --{role}")
        if name not in self._loaded:
            source = checkpoint_source(name)
            if is_gguf(source):
                raise CannotReplay(f"{name} is a GGUF file: replay needs the model's safetensors")
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    source, dtype=torch.float32, local_files_only=True
                )
            except (OSError, ValueError) as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise CannotReplay(f"the {role} {name} cannot be loaded: {why}") from None
            tokenizer = load_tokenizer(name)
            grammars = Grammars(tokenizer, read_eos_ids(source, tokenizer), num_ids(tokenizer))
            self._loaded[name] = (model.eval(), tokenizer, grammars)
        return self._loaded[name]


def _read_sampling(request: SampledRequest, tokenizer: Any) -> SamplingConfig:
    """Return the settings by which the logits of a request are shaped."""
    given = request.as_sampling(request.temperature)
    spell = functools.partial(tokenizer.encode, add_special_tokens=False)
    words = spell_words(given.pop("bad_words", ()), spell)
    names = given.keys() & SamplingConfig.model_fields.keys() - {"seed"}
    return SamplingConfig(bad_words=words, **{name: given[name] for name in names})


def check_ids(token_ids: Ids, vocab: int, role: Role) -> None:
    """Raise `CannotReplay` if some ids are not below `vocab`, the number of the model's tokens."""
    if not all(0 <= each < vocab for each in token_ids):
        raise CannotReplay(
            f"the receipt has tokens that the {role} lacks: it is not the model that was asked"
        )


def find_mismatch(
    file: ReceiptFile, models: ReplayModels, tell: Callable[[int], None] = lambda _: None
) -> Mismatch | None:
    """Return the first token that the receipt's contract does not explain, or None.

    `tell` is called with the number of tokens that are recomputed.

    Raises:
        CannotReplay: The models are others, or the receipt lacks a prompt.
        ConfigurationError: The name of a model is at fault.
    """
    explain = file.receipt.explain
    assert explain is not None
    num_done = 0
    for choice, token_ids in enumerate(explain.token_ids):
        models.check_answer(answering_role(file.receipt), token_ids)
        try:
            for position, expected in enumerate(_recompute(file, explain, models, choice)):
                if expected != token_ids[position]:
                    return Mismatch(choice, position, token_ids[position], expected)
                num_done += 1
                tell(num_done)
        except BadRequest as error:  # such as a grammar that becomes too complex
            raise CannotReplay(f"the request cannot be followed: {error}") from None
    return None


def answering_role(receipt: ExplainedReceipt) -> Role:
    """Return which model answers, or judges what the other drafts."""
    return "drafter" if receipt.contract == "drafter" else "target"


def _recompute(
    file: ReceiptFile, explain: ExplainedTokens, models: ReplayModels, choice: int
) -> Iterator[int]:
    """Yield the token that the contract gives at each position, after the receipt's before it."""
    receipt = file.receipt
    role = answering_role(receipt)
    prompts = {"target": explain.target_prompt_ids, "drafter": explain.drafter_prompt_ids}
    said_before = pack_tokens(prompts[role])
    read = functools.partial(models.reader, request=file.request, said_before=said_before)
    alone = (read(role, prompts[role]),)
    together: Sequence[Reader] = alone
    if _needs_drafter(file, explain, choice):
        if receipt.contract == "target" and not explain.drafter_prompt_ids:
            raise CannotReplay(
                "drafts of the target's own text, as by prompt lookup, are not in the receipt: "
                "ask with a seed, so that the draft does not change the text"
            )
        together = (*alone, read("drafter", explain.drafter_prompt_ids))
        if explain.witness_prompt_ids:
            together = (*together, read("target", explain.witness_prompt_ids))
    settings = _settings(file, choice)
    token_ids, log_odds = explain.token_ids[choice], 0.0
    for position, origin in enumerate(explain.origins[choice]):
        readers = together if _is_judged(receipt, choice, position, origin) else alone
        committed = token_ids[:position]
        (token,) = reference.generate(
            settings, position + 1, *readers, committed=committed, log_odds=log_odds
        )
        log_odds = token.log_odds
        yield token.id


def _needs_drafter(file: ReceiptFile, explain: ExplainedTokens, choice: int) -> bool:
    """Return whether some token depends on a drafter."""
    receipt = file.receipt
    if receipt.contract == "target" and file.request.temperature == 0:
        return False
    return any(
        _is_judged(receipt, choice, position, origin)
        for position, origin in enumerate(explain.origins[choice])
    )


def _is_judged(receipt: ExplainedReceipt, choice: int, position: int, origin: Origin) -> bool:
    """Return whether a token depends on what the drafter reads or drafts at its position.

    The receipt's word decides where the draft lengths do: a bonus token of `paper`, and a round
    without a draft in `lossless` under `maximal`, are the target's own.
    """
    plain_from = receipt.plain_from[choice]
    if plain_from is not None and position >= plain_from:
        return False
    if receipt.contract == "fused":
        return True
    if receipt.contract == "paper":
        return origin != "bonus"
    is_drafted = receipt.contract == "target" and receipt.coupling == "maximal"
    return is_drafted and origin in ("drafted", "corrected")


def _settings(file: ReceiptFile, choice: int) -> reference.Settings:
    request, receipt = file.request, file.receipt
    return reference.Settings(
        seed=receipt.seed,
        choice=choice,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        rule="paper" if receipt.contract == "paper" else "exact",
        transfer=receipt.transfer,
        eta=receipt.eta,
        plausibility=receipt.plausibility,
        draft_top_k=receipt.draft_top_k,
        transfer_temperature=receipt.transfer_temperature,
        coupling=receipt.coupling,
        max_draft=1,  # one token at a time: what is drawn is a function of its position
    )
