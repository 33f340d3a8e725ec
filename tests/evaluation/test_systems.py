from __future__ import annotations

import pytest

from evaluation.systems import BASELINES, System, find_baseline


def test_the_papers_rule_is_never_greedy():
    assert BASELINES["rapid-paper"].temperature_in(0.0) == 0.1
    assert BASELINES["rapid-paper"].temperature_in(1.0) == 1.0
    assert BASELINES["rapid-boost"].temperature_in(0.0) == 0.0


def test_runs_from_before_there_was_refresh_go_on():
    assert "refresh" not in BASELINES["sd"].model_dump(mode="json")
    system = System(name="x", method="lossless", refresh=True)
    assert System.model_validate(system.model_dump(mode="json")) == system


def test_runs_from_before_there_was_another_reading_go_on():
    assert "target_reads" not in BASELINES["rapid-boost"].model_dump(mode="json")
    system = BASELINES["rag-both"]
    assert System.model_validate(system.model_dump(mode="json")) == system


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "plain"},
        {"method": "rag"},
        {"method": "lossless"},
        {"method": "fused", "drafts": "target"},
        {"method": "fused", "refresh": True},
    ],
)
def test_a_target_without_the_long_context_is_one_of_two_models(settings):
    with pytest.raises(ValueError, match="system x: target_reads: retrieved goes with"):
        System(name="x", target_reads="retrieved", **settings)


def test_the_drafter_alone_is_not_plain():
    alone = BASELINES["plain-drafter"]
    assert (alone.is_plain, alone.needs_target, alone.needs_drafter) == (False, False, True)
    with pytest.raises(ValueError, match="naive reads nothing that the target does not"):
        System(name="x", method="fused", drafts="naive")


def test_a_conditions_eta_moves_only_systems_that_fuse():
    assert find_baseline("rapid-boost").speculation(eta=5).eta == 5
    assert find_baseline("sd").speculation(eta=5).eta == 0
    assert (
        find_baseline("rapid-boost").eta_in(None) == find_baseline("rapid-boost").speculation().eta
    )


def test_an_unknown_system_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown system 'rapid-bost'; did you mean rapid-boost"):
        find_baseline("rapid-bost")
