"""The task files ask in the benchmarks' own words and with the paper's settings."""

import pytest

from evaluation.drivers.prompter import target_chat
from evaluation.items import Item
from evaluation.tasks import Condition, load_task, task_names
from rapid.chat_messages import Document, Message
from rapid.config import SpeculationConfig

CHOICES = {f"choice_{letter}": f"{letter}-text" for letter in "ABCD"}
OPTIONS = {f"option_{letter}": f"{letter}-text" for letter in "ABCD"}
ITEM = Item(
    "1",
    (Message("user", "Who?"),),
    Document("text", "Once {upon} a time."),
    ("A",),
    fields={"question": "Who?"} | CHOICES | OPTIONS,
)

# prompts/0shot.txt of github.com/THUDM/LongBench
LONGBENCH = """\
Please read the following text and answer the question below.

<text>
Once {upon} a time.
</text>

What is the correct answer to this question: Who?
Choices:
(A) A-text
(B) B-text
(C) C-text
(D) D-text

Format your response as follows: "The correct answer is (insert answer here)"."""

# prompts/0shot_cot.txt
LONGBENCH_COT = """\
Please read the following text and answer the questions below.

<text>
Once {upon} a time.
</text>

What is the correct answer to this question: Who?
Choices:
(A) A-text
(B) B-text
(C) C-text
(D) D-text

Let’s think step by step:"""

# prompts/0shot_cot_ans.txt, with our names of the fields
EXTRACTION = """\
Please read the following text and answer the questions below.

The text is too long and omitted here.

What is the correct answer to this question: {question}
Choices:
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Let’s think step by step: {reasoning}

Based on the above, what is the single, most likely answer choice? \
Format your response as follows: "The correct answer is (insert answer here)"."""

# gpt4_templates of src/prompt.py of github.com/OpenBMB/InfiniteBench
INFINITEBENCH_QA = """\
Read the book below and answer a question.

Once {upon} a time.

Question: Who?

Be very concise."""

INFINITEBENCH_MC = """\
Read the book and answer the question.

Once {upon} a time.

Question: Who?

Only one of the following options is correct, tell me the answer using one single letter \
(A, B, C, or D). Don't say anything else.
A. A-text
B. B-text
C. C-text
D. D-text"""

INFINITEBENCH_SUM = """\
Summarize the following book.

Once {upon} a time."""


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("longbench-v2", LONGBENCH),
        ("longbench-v2-cot", LONGBENCH_COT),
        ("robustness", LONGBENCH_COT),
        ("lengths", LONGBENCH_COT),
        ("infinitebench-qa", INFINITEBENCH_QA),
        ("infinitebench-mc", INFINITEBENCH_MC),
        ("infinitebench-sum", INFINITEBENCH_SUM),
    ],
)
def test_the_target_is_asked_in_the_official_words(name, prompt):
    (message,) = target_chat(load_task(name), ITEM, ITEM.document)
    assert (message.role, message.content) == ("user", prompt)


ON_LONGBENCH = ["longbench-v2", "longbench-v2-cot", "robustness", "lengths"]
ON_INFINITEBENCH = ["infinitebench-qa", "infinitebench-mc", "infinitebench-sum"]


@pytest.mark.parametrize("name", ON_LONGBENCH)
def test_on_longbench_the_drafter_is_told_that_it_reads_retrieved_chunks(name):
    templates = load_task(name).templates
    assert templates is not None
    assert templates.drafter == templates.target.replace(
        "the following text", "the following retrieved text chunks"
    )
    assert templates.extraction == (None if name == "longbench-v2" else EXTRACTION)


@pytest.mark.parametrize("name", [*ON_LONGBENCH, *ON_INFINITEBENCH, "dialogue"])
def test_retrieval_is_as_in_the_paper(name):
    retrieval = load_task(name).retrieval
    assert (retrieval.embedder, retrieval.chunk_tokens, retrieval.floor) == ("bge-m3", 512, 0.3)
    assert (retrieval.tokens, retrieval.selection) == (None, "top-k")


def test_every_kind_of_wrong_retrieval_meets_every_eta():
    headline, *conditions = load_task("robustness").conditions
    assert headline == Condition()  # every system at its own eta
    kinds = [("none", 1.0), ("unrelated", 1.0), ("contradicting", 1.0)]
    kinds += [("replaced", share) for share in (0.25, 0.5, 0.75)]
    etas = (0, 5, 10, 20, 30, 40, 50)
    grid = [(kind, share, eta) for kind, share in kinds for eta in etas]
    assert sorted((c.corruption, c.share, c.eta) for c in conditions) == sorted(grid)
    for each in conditions:
        assert f"{each.corruption.replace('none', 'as is')}" in each.name
        assert each.name.endswith(f"eta {each.eta:g}")
        assert each.corruption != "replaced" or f"{each.share:.0%}".replace("%", " %") in each.name


def test_lengths_are_those_of_figures_1_and_3():
    conditions = load_task("lengths").conditions
    cells = {(each.context_tokens, each.retrieval_tokens) for each in conditions}
    lengths = (4096, 8192, 16384, 32768, 65536, 120000)
    budgets = (4096, 8192, 16384, 32768)
    figure_3 = {(n, budget) for n in lengths for budget in budgets if budget <= n}
    figure_1 = {(120000, 2**exponent) for exponent in range(10, 17)}  # 1K to 64K; 128K is plain
    assert cells == figure_1 | figure_3


@pytest.mark.parametrize("name", task_names())
def test_a_task_that_compares_rules_has_the_default_and_its_controls(name):
    if name in ("laptop-eta", "laptop-refresh"):  # about eta and retrieving again alone
        return
    systems = {each.name for each in load_task(name).systems}
    if "rapid-boost" in systems:
        assert {"rapid-adaptive", "rag-both", "plain"} <= systems
    else:
        assert {"rapid-self-adaptive", "plain"} <= systems


@pytest.mark.parametrize("name", ["longbench-v2", "longbench-v2-cot", *ON_INFINITEBENCH, "aa-lcr"])
def test_a_benchmark_asks_the_question_that_would_change_our_mind(name):
    systems = {each.name: each for each in load_task(name).systems}
    assert {"plain", "rag-drafter", "rag-both", "plain-drafter", "mixture"} <= systems.keys()
    shipped, asked = SpeculationConfig(), systems["rapid-adaptive"].speculation()
    assert (asked.transfer, asked.eta, asked.rule) == (shipped.transfer, shipped.eta, shipped.rule)
