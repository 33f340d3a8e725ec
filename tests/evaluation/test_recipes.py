import pytest

from evaluation.recipes import load_recipe, load_tasks, recipe_names
from rapid.errors import ConfigurationError

RECIPES = [load_recipe(name) for name in recipe_names()]
BASELINES = [r for r in RECIPES if r.name.removesuffix("-cot").endswith(("rag", "sd", "magicdec"))]
LONGBENCH = [r for r in RECIPES if r.tasks[0].startswith("longbench") and r not in BASELINES]
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


# Table 1 of the paper: En.QA, En.MC, En.Sum and their average; LongBench v2; the same with CoT
TABLE_1 = {
    "llama-3.1-8b-rag": (31.91, 62.01, 27.27, 40.40, 29.2, 33.4),
    "llama-3.1-8b-sd": (32.90, 55.90, 30.11, 39.64, 29.4, 31.0),
    "llama-3.1-8b-magicdec": (29.83, 52.03, 30.18, 37.35, 29.2, 30.6),
    "llama-3.1-70b-rag": (38.66, 76.86, 27.17, 47.56, 38.0, 39.4),
    "qwen2.5-7b-rag": (20.28, 75.11, 25.60, 40.33, 31.2, 33.8),
    "qwen2.5-72b-rag": (30.72, 80.22, 28.63, 46.52, 38.8, 39.8),
}


def test_one_recipe_per_published_row():
    theirs = [r for r in RECIPES if r not in BASELINES]
    assert len(LONGBENCH) == 20
    assert len([r for r in INFINITEBENCH if r not in BASELINES]) == 10
    assert {r.name: r.system.eta for r in theirs if r.system.eta is not None} == ETAS
    assert {r.system.method for r in theirs if r.name not in ETAS} == {"plain"}


def test_the_baselines_of_table_1_have_recipes_with_its_numbers():
    assert len(BASELINES) == 3 * len(TABLE_1)
    for name, theirs in TABLE_1.items():
        on_infinitebench = load_recipe(f"infinitebench-{name}").published
        overall = [load_recipe(each).published["overall"] for each in (name, f"{name}-cot")]
        assert (*on_infinitebench.values(), *overall) == theirs


def test_the_baselines_answer_as_the_paper_says():
    rag = load_recipe("qwen2.5-72b-rag")
    assert (rag.system.method, rag.system.drafts, rag.drafter) == ("rag", "target", None)
    sd = load_recipe("llama-3.1-8b-sd-cot").system  # RAPID without its transfer
    assert (sd.method, sd.drafts, sd.eta, sd.block) == ("paper", "target", 0, 10)
    magicdec = load_recipe("infinitebench-llama-3.1-8b-magicdec").system
    assert (magicdec.method, magicdec.drafts, magicdec.block) == ("lossless", "window", 10)
    drafting = magicdec.window_drafting
    assert (drafting.num_sinks, drafting.window) == (4, 4096)


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
    tasks = [task for task, _ in load_tasks([recipe])]
    assert tuple(task.name for task in tasks) == recipe.tasks
    assert all(task.systems == (recipe.system,) for task in tasks)
    temperature = 1.0 if recipe in INFINITEBENCH else 0.1
    assert {task.temperature for task in tasks} == {temperature}
    top_k = 20 if "Qwen2.5" in recipe.target.model else 50
    assert {task.top_k for task in tasks} == {top_k}


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


def test_a_large_model_is_computed_by_several_gpus_at_once_and_the_small_one_with_it():
    upward = load_recipe("llama-3.1-8b-by-70b")
    assert upward.drafter is not None
    assert (upward.target.tensor_parallel, upward.drafter.tensor_parallel) == (4, 4)
    assert load_recipe("llama-3.1-8b-self").num_gpus == 1
    assert {each.target.device for each in RECIPES} == {"auto"}


def test_a_large_model_may_be_quantized_under_the_same_published_numbers():
    whole, packed = load_recipe("qwen2.5-7b-by-72b"), load_recipe("qwen2.5-7b-by-72b-int4")
    assert packed.drafter is not None
    assert (packed.drafter.quantization, packed.num_gpus) == ("int4", 2)
    assert packed.target.quantization is None
    assert (packed.published, packed.system) == (whole.published, whole.system)
    names = recipe_names("fp8")
    assert len(names) == len(RECIPES)
    assert {"llama-3.1-8b", "llama-3.1-70b-fp8"} <= set(names)
    with pytest.raises(ConfigurationError, match="take one of fp8, int4"):
        recipe_names("int8")


def test_recipes_of_the_same_models_are_one_run_of_each_of_their_tasks():
    names = ["llama-3.1-8b", "llama-3.1-8b-rag", "infinitebench-llama-3.1-8b-rag"]
    (longbench, both), *books = load_tasks([load_recipe(name) for name in names])
    assert [each.name for each in longbench.systems] == ["plain", "rag-target"]
    assert both == tuple(names[:2])
    assert [(task.name, own) for task, own in books] == [
        (name, (names[2],)) for name in load_recipe(names[2]).tasks
    ]


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"did you mean llama-3\.1-8b-self\?"):
        load_recipe("llama-3.1-8b-sellf")
