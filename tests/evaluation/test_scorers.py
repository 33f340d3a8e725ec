import pytest

from evaluation.items import Item
from evaluation.scorers import METRICS, scorers
from rapid.chat_messages import Message
from rapid.errors import ConfigurationError


def item(*answers: str, **fields: str) -> Item:
    return Item("1", (Message("user", "Who?"),), None, answers, fields=fields)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        (" dolu maki 482.\n", 1),
        ("dolu maki 482", 0),  # the full stop is part of it
        ("Dolu maki 482.", 0),
        ("dolu  maki 482.", 0),
        ("", 0),
    ],
)
def test_exact_is_right_to_the_last_character(prediction, score):
    assert METRICS["exact"](prediction, item("dolu maki 482.", "or this")) == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("They are `Path.rmdir()` and unlink.", 1),
        ("unlink; RMDIR", 1),
        ("rmdir", 0),  # the other part of the answer is missing
        ("rmdirs and unlink", 0),
        ("It is not stated.", 1),
        ("", 0),
    ],
)
def test_contains_wants_every_part_of_an_answer_as_whole_words(prediction, score):
    assert METRICS["contains"](prediction, item("rmdir\nunlink", "not stated")) == score


@pytest.mark.parametrize(
    ("prediction", "score", "score_of_rapid"),
    [
        ("The correct answer is (B).", 1, 1),
        ("The correct answer is B", 1, 1),
        ("**The correct answer is (B)**", 1, 1),
        ("The correct answer is: (B)", 0, 0),  # the colon is not in the rule
        ("So the correct answer is (B)", 0, 1),  # "the" is not "The"
        ("The correct answer is C, no: The correct answer is (B)", 1, 1),  # brackets go first
        ("The correct answer is (C). The correct answer is (B)", 0, 0),
        ("(B)", 0, 0),
        ("The correct answer is (E)", 0, 0),
        ("", 0, 0),
    ],
)
def test_longbench_reads_the_letter_that_is_stated(prediction, score, score_of_rapid):
    assert METRICS["longbench_choice"](prediction, item("B")) == score
    assert METRICS["longbench_choice_rapid"](prediction, item("B")) == score_of_rapid


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("B", 1),
        (" B. Mrs. Dale", 1),
        ("Blue, so A", 1),  # the first letter, even of a word
        ("Mrs. Dale", 1),  # the option's text
        ("Mrs. Dale!", 0),  # not quite, and there is no letter
        ("The answer is: B", 1),
        ("The answer is B", 1),
        ("The answer is Mrs Dale", 0),  # full stops are gone by then, from the answer alone
        ("I think the answer is:", 0),
        ("the option is 'B'", 1),  # quotes become spaces, and many spaces one
        ("It must be B then", 1),
        ("It must be C or B", 0),  # the first counts
        ("it was she", 0),
        ("  ", 0),
    ],
)
def test_infinitebench_choice_by_its_official_rule(prediction, score):
    assert METRICS["infinitebench_choice"](prediction, item("Mrs. Dale", "B")) == score


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("The red, red House!", ["a red house"], 2 * 2 / (3 + 2)),  # one red of two, the house
        ("a house", ["House."], 1),
        ("It's", ["its"], 1),  # punctuation goes before words are made
        ("the", ["The"], 0),  # nothing is left
        ("Anna Dale", ["Anna", "Dale the Elder, Anna"], 2 * 2 / (2 + 3)),  # best of the answers
        ("theatre", ["theatre"], 1),  # no article inside a word
        ("", ["Anna"], 0),
        ("Anna", [], 0),
    ],
)
def test_f1_of_words_without_articles_and_punctuation(prediction, answers, score):
    assert METRICS["f1"](prediction, item(*answers)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("the cat sat\non the mat", ["the cat sat\non the mat"], 1),
        # words in another order: of "a b c d" and "b a d c" a longest common part has 2 of 4
        ("b a d c", ["a b c d"], 0.5),
        # the same as two sentences each: both words of a line are found in the other's lines
        ("c d\na b", ["a b\nc d"], 1),
        ("cats", ["cat"], 0),  # no stemming
        ("dog", ["cat", "dog"], 1),
        ("", ["cat"], 0),
    ],
)
def test_rouge_l_sum(prediction, answers, score):
    assert METRICS["rouge_l_sum"](prediction, item(*answers)) == pytest.approx(score)


def test_scorers_are_refused_before_anything_is_answered():
    with pytest.raises(ConfigurationError, match="unknown metric bleu; known are exact, "):
        scorers(["f1", "bleu"], {})
    with pytest.raises(ConfigurationError, match=r"judge_equality needs an endpoint.*--judge-url"):
        scorers(["f1", "judge_equality"], {})

    def judge(prediction: str, item: Item) -> float:
        return 1.0

    assert scorers(["judge", "f1"], {"judge": judge}) == {"judge": judge, "f1": METRICS["f1"]}
