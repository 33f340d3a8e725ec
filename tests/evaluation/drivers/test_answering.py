"""What is to be answered, and what becomes of answers that fail."""

from __future__ import annotations

from evaluation.drivers.answering import Trial, answer_all, by_position, result_of, trials_left
from evaluation.items import Item
from evaluation.results import Result
from evaluation.systems import find_baseline
from evaluation.tasks import Condition
from rapid.chat_messages import Message
from rapid.errors import PromptTooLong
from tests.evaluation.tiny_task import tiny_task

PLAIN, SD, BOOST = find_baseline("plain"), find_baseline("sd"), find_baseline("rapid-boost")
AS_IS, ETA_5 = Condition(), Condition(name="eta 5", eta=5)
UNRELATED = Condition(name="unrelated", corruption="unrelated")
SHORTER = Condition(name="shorter", context_tokens=100)


def item(name: str) -> Item:
    return Item(name, (Message("user", "What is 6 times 7?"),), None, ("42",))


def keys(trials: list[Trial]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(trial.system.name, trial.condition.name, trial.same) for trial in trials]


def test_a_condition_that_changes_nothing_for_a_system_is_not_answered_again():
    conditions = (AS_IS, ETA_5, UNRELATED, SHORTER)
    task = tiny_task(systems=(PLAIN, SD, BOOST), conditions=conditions)
    (trials,) = trials_left([item("a")], task)
    assert keys(trials) == [
        ("plain", "as is", ("eta 5", "unrelated")),
        ("sd", "as is", ("eta 5",)),
        ("rapid-boost", "as is", ()),
        ("rapid-boost", "eta 5", ()),
        ("sd", "unrelated", ()),
        ("rapid-boost", "unrelated", ()),
        ("plain", "shorter", ()),
        ("sd", "shorter", ()),
        ("rapid-boost", "shorter", ()),
    ]


def test_what_is_done_is_not_answered_again():
    done = frozenset({("a", "plain", "as is"), ("b", "plain", "as is"), ("b", "sd", "as is")})
    (trials,) = trials_left([item("a"), item("b")], tiny_task(systems=(PLAIN, SD)), done)
    assert [(trial.item.id, trial.system.name) for trial in trials] == [("a", "sd")]


async def test_an_answer_that_fails_is_a_result_and_the_run_goes_on(caplog):
    class Backend:
        async def answer(self, trial: Trial) -> Result:
            if trial.item.id == "long":
                raise PromptTooLong("7 tokens too long")
            return result_of(trial, task, prediction="42")

    task, results = tiny_task(), list[Result]()
    trials = [
        Trial(item("long"), PLAIN, AS_IS),
        Trial(item("short"), PLAIN, AS_IS, same=("eta 5",)),
    ]
    right = {"exact": lambda prediction, item: float(prediction in item.answers)}
    await answer_all(Backend(), trials, task, right, results.append, batch=2)
    told = {each.key: (each.scores["exact"], each.error) for each in results}
    assert told == {
        ("long", "plain", "as is"): (0.0, "7 tokens too long"),
        ("short", "plain", "as is"): (1.0, None),
        ("short", "plain", "eta 5"): (1.0, None),
    }
    assert "item long, plain, as is: 7 tokens too long" in caplog.text


def test_positions_count_a_draft_as_judged_up_to_the_first_that_is_rejected():
    # Blocks of three: one kept nothing, one kept all; a block of one kept it.
    assert by_position({3: (1, 0, 0, 1), 1: (0, 1)}) == ((3, 2), (1, 1), (1, 1))
