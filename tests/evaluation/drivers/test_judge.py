"""Ratings by a language model behind an endpoint that follows a script."""

from __future__ import annotations

import json

import httpx
import pytest

from evaluation.drivers.judge import RUBRICS, Judge, JudgeConfig, JudgeFailed
from evaluation.items import Item
from rapid.chat_messages import Message


def item(*answers: str, **fields: str) -> Item:
    return Item("1", (Message("user", "Who?"),), None, answers, fields=fields)


def judge_that_says(*replies: str, metric: str = "judge") -> tuple[Judge, list[httpx.Request]]:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        reply = replies[len(asked) - 1]
        return httpx.Response(200, json={"choices": [{"message": {"content": reply}}]})

    config = JudgeConfig(url="http://judge/v1/", model="big")
    return Judge(config, RUBRICS[metric], httpx.MockTransport(answer)), asked


def test_the_judge_reads_the_dialogue_and_its_last_rating_counts(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    judge, asked = judge_that_says("First [[9]], but no. Rating: [[4]]", "Rating: [[10]]")
    question = item("Fine.", dialogue="user: How are you?")
    assert judge("So so.", question) == 0.4
    assert judge("So so.", question) == 1
    assert str(asked[0].url) == "http://judge/v1/chat/completions"
    assert asked[0].headers["Authorization"] == "Bearer secret"
    text = asked[0].content.decode()
    assert all(part in text for part in ("user: How are you?", "Fine.", "So so.", '"big"'))


@pytest.mark.parametrize("reply", ["Good.", "Rating: [[11]]", "Rating: [[0]]", "Rating: 5"])
def test_a_judge_without_a_rating_is_an_error_not_a_score(reply):
    judge, _ = judge_that_says(reply)
    with pytest.raises(JudgeFailed, match="no rating"):
        judge("So so.", item("Fine."))


# "Scoring Approach" of the card of ArtificialAnalysis/AA-LCR
EQUALITY = """\
Assess whether the following CANDIDATE ANSWER is CORRECT or INCORRECT.
For the CANDIDATE ANSWER to be correct, it must be consistent with the OFFICIAL ANSWER.

The question, for reference only: Who?
The OFFICIAL ANSWER: Ada; Bea
CANDIDATE ANSWER TO ASSESS: Bea and Ada.

Reply only with CORRECT or INCORRECT."""


@pytest.mark.parametrize(
    ("reply", "score"),
    [("CORRECT", 1), ("**INCORRECT**", 0), ("CORRECT? Ada is missing.\nINCORRECT", 0)],
)
def test_a_judge_of_equality_is_asked_in_the_words_of_aa_lcr(reply, score):
    judge, asked = judge_that_says(reply, metric="judge_equality")
    assert judge("Bea and Ada.", item("Ada; Bea")) == score
    (message,) = json.loads(asked[0].content)["messages"]
    assert message == {"role": "user", "content": EQUALITY}


def test_a_judge_of_equality_without_a_verdict_is_an_error_not_a_score():
    judge, _ = judge_that_says("Yes.", metric="judge_equality")
    with pytest.raises(JudgeFailed, match=r"no rating like CORRECT but 'Yes\.'"):
        judge("Ada.", item("Ada"))


def test_a_judge_that_cannot_be_asked_is_an_error():
    config = JudgeConfig(url="http://judge/v1", model="big")
    transport = httpx.MockTransport(lambda request: httpx.Response(503))
    judge = Judge(config, RUBRICS["judge"], transport)
    with pytest.raises(JudgeFailed, match="503"):
        judge("So so.", item("Fine."))
