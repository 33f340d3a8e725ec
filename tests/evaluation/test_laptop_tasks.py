"""The laptop tasks ask all systems the same, and choose eta on documents of their own."""

from __future__ import annotations

from itertools import islice

import pytest

from evaluation.loaders.generated import load
from evaluation.systems import BASELINES
from evaluation.tasks import load_task, task_names

LAPTOP = [name for name in task_names() if name.startswith("laptop")]


@pytest.mark.parametrize("name", ["laptop", "laptop-quick", "laptop-speed"])
def test_every_baseline_is_run(name):
    assert {system.name for system in load_task(name).systems} == set(BASELINES)


def test_the_headline_has_400_items():
    lengths = load_task("laptop").source.options["lengths"]
    assert max(lengths.values()) >= 400


def test_eta_is_chosen_on_documents_that_no_result_is_of():
    assert [n for n in LAPTOP if load_task(n).source.split == "dev"] == ["laptop-eta"]


def test_wrong_retrieval_is_met_at_every_eta():
    as_is, *conditions = load_task("laptop-robustness").conditions
    assert as_is.eta is None
    kinds = {(each.corruption, each.share) for each in conditions}
    assert len(kinds) == 4
    assert {(each.corruption, each.share, each.eta) for each in conditions} == {
        (*kind, eta) for kind in kinds for eta in (0, 5, 10, 20, 50, None)
    } - {("none", 1.0, None)}


@pytest.mark.parametrize("name", ["laptop", "laptop-quick", "laptop-dialogue"])
def test_the_controls_stand_beside_what_they_control(name):
    systems = {system.name: system for system in load_task(name).systems}
    assert systems["plain-drafter"].is_drafter_alone
    assert systems["mixture"].speculation() == BASELINES["mixture"].speculation()
    boost, both = systems["rapid-boost"], systems["rag-both"]
    assert (both.speculation(), both.drafts) == (boost.speculation(), boost.drafts)
    assert (both.reads_everything, boost.reads_everything) == (False, True)


def test_what_retrieves_again_is_compared_with_the_same_that_does_not():
    systems = {system.name: system for system in load_task("laptop-refresh").systems}
    again = [system for system in systems.values() if system.refresh]
    assert {system.method for system in again} == {"lossless", "fused"}
    for system in again:
        once = systems[system.name.removesuffix("-refresh")]
        assert once.speculation() == system.speculation()
        assert (once.method, once.drafts, once.refresh) == (system.method, system.drafts, False)


@pytest.mark.parametrize("name", LAPTOP)
def test_items_have_the_groups_that_are_reported(name):
    task = load_task(name)
    for item in islice(load(task.source, None), 12):
        assert set(task.groups) <= set(item.groups)
        assert (item.document is None) == (name == "laptop-dialogue")
