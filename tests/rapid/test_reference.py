"""The method in one file: it is as long as a reader can bear, it runs, and the engines equal it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import rapid
from rapid import reference
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.reference import Reader, Settings, generate
from tests.rapid.tiny_models import EOS, VOCAB, checkpoint, loaded, random_prompt
from tests.reference import load_reference

LONG, SHORT = random_prompt(60, seed=1).tolist(), random_prompt(20, seed=2).tolist()
NUM_TOKENS = 24


def answer(settings: Settings, *, speculates: bool = True, drafter: int = 1) -> list[int]:
    """The reference's answer of two tiny models, up to its end-of-sequence token."""
    has_witness = settings.transfer == "adaptive" and settings.rule == "exact"
    readers = [
        Reader(load_reference(checkpoint(seed=0)), LONG, VOCAB),
        Reader(load_reference(checkpoint(seed=drafter)), SHORT, VOCAB),
        Reader(load_reference(checkpoint(seed=0)), SHORT, VOCAB) if has_witness else None,
    ]
    tokens: list[int] = []
    for token in generate(settings, NUM_TOKENS, *readers, speculates=speculates):
        tokens.append(token.id)
        if token.id == EOS:
            break
    return tokens


def served(settings: Settings, drafter: int = 1) -> list[int]:
    """The engines' answer to the same request."""
    of_method = {"eta": settings.eta, "max_draft": settings.max_draft}
    if settings.rule == "exact":
        of_method |= {"transfer": settings.transfer, "coupling": settings.coupling}
    return list(
        rapid.generate(
            loaded(seed=0),
            loaded(seed=drafter),
            LONG,
            SHORT,
            max_tokens=NUM_TOKENS,
            sampling=SamplingConfig(
                temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed
            ),
            speculation=SpeculationConfig(rule=settings.rule, **of_method),
        ).token_ids
    )


def test_it_is_a_file_to_hold_beside_the_paper():
    assert len(Path(reference.__file__).read_text().splitlines()) <= 200


def test_it_runs_and_speculation_answers_as_the_definition_does(capsys):
    runpy.run_path(reference.__file__, run_name="__main__")
    question, defined, speculated = capsys.readouterr().out.splitlines()
    assert question == "List the four deposits of Pebi."
    assert defined.startswith("0 drafted: The first deposit of Pebi is")
    assert not speculated.startswith("0 ")
    assert speculated.partition(": ")[2] == defined.partition(": ")[2]


@pytest.mark.parametrize("transfer", ["adaptive", "boost", "distill", "mixture"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_change_nothing_and_engines_agree(transfer, temperature, seed):
    settings = Settings(seed=seed, temperature=temperature, top_p=0.95, transfer=transfer)
    defined = answer(settings, speculates=False)
    assert answer(settings) == defined
    assert served(settings) == defined


@pytest.mark.parametrize("transfer", ["adaptive", "boost"])
@pytest.mark.parametrize("seed", [3, 4])
def test_the_maximal_coupling_decides_as_the_engines_do(transfer, seed):
    settings = Settings(seed=seed, transfer=transfer, coupling="maximal", max_draft=4)
    assert answer(settings) == served(settings)


@pytest.mark.parametrize("drafter", [0, 1])
@pytest.mark.parametrize("seed", [5, 6])
def test_the_rule_of_the_papers_code_decides_as_the_engines_do(drafter, seed):
    settings = Settings(
        seed=seed,
        temperature=0.3,
        rule="paper",
        transfer="distill",
        coupling="maximal",
        draft_top_k=None,
        max_draft=3,
    )
    assert answer(settings, drafter=drafter) == served(settings, drafter)
