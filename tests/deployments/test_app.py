from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from deployments import app
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import check
from rapid.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
UPWARD = ROOT / "cluster/configs/llama-3.1-8b-with-70b-drafter.yaml"


def graph(application: Application) -> dict[str, Application]:
    """Every deployment of an application by name."""
    found: dict[str, Application] = {}

    def walk(node: Application) -> None:
        bound = node._bound_deployment
        found[bound.name] = node
        for argument in bound.init_args:
            if isinstance(argument, Application):
                walk(argument)

    walk(application)
    return found


def test_the_builder_checks_what_serve_hands_it() -> None:
    (application,) = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"]
    args = application["args"]
    built = call_user_app_builder_with_args_if_necessary(app.build, args)
    assert isinstance(built, Application)
    with pytest.raises(ConfigurationError, match="targets: unknown key; did you mean target"):
        call_user_app_builder_with_args_if_necessary(app.build, args | {"targets": {}})


def test_the_application_has_five_deployments_and_its_ingress_is_http() -> None:
    application = app.compose(check(ROOT / "serve_config.yaml"))
    assert set(graph(application)) == {
        "Ingress",
        "Orchestrator",
        "Target",
        "Drafter",
        "Retriever",
        "Librarian",
    }
    assert application._bound_deployment.name == "Ingress"


def test_documents_have_their_retriever() -> None:
    """One replica knows a document, embeds on the pool's device, and is asked first."""
    (file,) = yaml.safe_load(UPWARD.read_text())["applications"]
    config = ServeConfig.model_validate(file["args"])
    retriever = graph(app.compose(config))["Retriever"]._bound_deployment
    assert retriever.init_args[0].embedder.device == "cuda"
    router = retriever._deployment_config.request_router_config
    assert router.request_router_class == "cluster.copied_router.CopiedRouter"


def test_the_ingress_is_told_whether_the_target_is_embedded() -> None:
    embedded = check(ROOT / "serve_config.yaml")
    real = embedded.target.engine.model_copy(update={"model": "/models/smol.gguf"})
    target = embedded.target.model_copy(update={"engine": real})
    for config in (embedded, embedded.model_copy(update={"target": target})):
        told, *_ = app.compose(config)._bound_deployment.init_args
        assert told.cards["rapid-embedded"].is_embedded is (config is embedded)


def test_a_model_that_drafts_for_itself_is_one_pool() -> None:
    config = check(ROOT / "serve_config.yaml").model_copy(update={"drafter": "target"})
    assert set(graph(app.compose(config))) == {
        "Ingress",
        "Orchestrator",
        "Target",
        "Retriever",
        "Librarian",
    }


def test_prompt_lookup_is_one_pool_and_nothing_to_retrieve_with(tmp_path: Path) -> None:
    file = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = file["applications"][0]["args"]
    args["drafter"] = "prompt_lookup"
    del args["retriever"]
    path = tmp_path / "lookup.yaml"
    path.write_text(yaml.safe_dump(file))
    config = check(path)
    assert set(graph(app.compose(config))) == {"Ingress", "Orchestrator", "Target", "Librarian"}
    assert set(config.pools) == {"ingress", "orchestrator", "target", "librarian"}


def test_a_replica_holds_as_many_leases_as_its_engine() -> None:
    config = check(ROOT / "serve_config.yaml")
    deployments = graph(app.compose(config))
    for name, pool in (("Target", config.target), ("Drafter", config.drafter_pool)):
        deployment = deployments[name]._bound_deployment
        assert deployment.max_ongoing_requests == pool.engine.max_leases
        assert deployment.ray_actor_options["num_cpus"] <= 0.1


@pytest.mark.parametrize(
    "code",
    [
        "import deployments.app",
        "from deployments.config.serve_file import check; check('serve_config.yaml')",
    ],
)
def test_nothing_but_an_engine_imports_torch(code: str) -> None:
    """It costs every process 170 MiB and, on two cores, seconds of the start."""
    code = f"import sys; {code}; sys.exit(str(set(sys.modules) & {{'torch'}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "set()"
