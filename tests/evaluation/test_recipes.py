import pytest

from evaluation.recipes import load_recipe, recipe_names
from rapid.errors import ConfigurationError

RECIPES = [load_recipe(name) for name in recipe_names()]
LONGBENCH = [r for r in RECIPES if r.tasks[0].startswith("longbench")]
INFINITEBENCH = [r for r in RECIPES if r.tasks[0].startswith("infinitebench")]

ETAS = {  # as the README of the reference code has them
    "llama-3.1-8b-self": 10,
    "llama-3.1-8b-self-cot": 10,
    "llama-3.1-8b-by-70b": 50,
    "llama-3.1-8b-by-70b-cot": 40,
    "llama-3.1-70b-self": 20,
    "llama-3.1-70b-self-cot": 20,
    "qwen2.5-7b-self": 20,
    "qwen2.5-7b-self-cot": 5,
    "qwen2.5-7b-by-72b": 50,
    "qwen2.5-7b-by-72b-cot": 50,
    "qwen2.5-72b-self": 20,
    "qwen2.5-72b-self-cot": 20,
    "infinitebench-llama-3.1-8b-self": 10,
    "infinitebench-llama-3.1-8b-by-70b": 10,
    "infinitebench-llama-3.1-70b-self": 10,
    "infinitebench-qwen2.5-7b-self": 20,
    "infinitebench-qwen2.5-7b-by-72b": 20,
    "infinitebench-qwen2.5-72b-self": 10,
}


def test_one_recipe_per_published_row():
    assert len(LONGBENCH) == 20
    assert len(INFINITEBENCH) == 10
    assert {r.name: r.system.eta for r in RECIPES if r.system.eta is not None} == ETAS
    assert {r.system.method for r in RECIPES if r.name not in ETAS} == {"plain"}


def test_a_recipe_says_who_answers_and_at_which_settings():
    own = load_recipe("llama-3.1-8b-self")
    assert (own.target.model, own.drafter) == ("meta-llama/Llama-3.1-8B-Instruct", None)
    assert own.system.drafts == "target"
    upward = load_recipe("infinitebench-qwen2.5-7b-by-72b")
    assert upward.drafter is not None
    assert upward.drafter.model == "Qwen/Qwen2.5-72B-Instruct"
    assert upward.target.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    assert upward.system.drafts == "drafter"
    assert upward.system.speculation().rule == "paper"
    assert upward.system.speculation().max_draft == 10


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_its_tasks_are_asked_of_its_system_alone(recipe):
    tasks = recipe.load_tasks()
    assert tuple(task.name for task in tasks) == recipe.tasks
    assert all(task.systems == (recipe.system,) for task in tasks)
    temperature = 1.0 if recipe in INFINITEBENCH else 0.1
    assert {task.temperature for task in tasks} == {temperature}


@pytest.mark.parametrize("recipe", LONGBENCH, ids=lambda recipe: recipe.name)
def test_published_splits_add_up_to_the_published_whole(recipe):
    # 503 items: 192 easy, 311 hard; 180 short, 215 medium, 108 long
    theirs = recipe.published
    by_difficulty = (192 * theirs["easy"] + 311 * theirs["hard"]) / 503
    by_length = (180 * theirs["short"] + 215 * theirs["medium"] + 108 * theirs["long"]) / 503
    assert by_difficulty == pytest.approx(theirs["overall"], abs=0.11)
    assert by_length == pytest.approx(theirs["overall"], abs=0.11)


@pytest.mark.parametrize("recipe", INFINITEBENCH, ids=lambda recipe: recipe.name)
def test_the_published_average_is_that_of_the_published_scores(recipe):
    scores = [recipe.published[task] for task in recipe.tasks]
    assert sum(scores) / 3 == pytest.approx(recipe.published["average"], abs=0.011)


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"did you mean llama-3\.1-8b-self\?"):
        load_recipe("llama-3.1-8b-sellf")
