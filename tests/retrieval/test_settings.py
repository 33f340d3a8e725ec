import pytest
from pydantic import ValidationError

from retrieval.settings import RetrievalConfig, ServerStoreConfig


def refused(**config) -> str:
    with pytest.raises(ValidationError) as error:
        RetrievalConfig.model_validate(config)
    return str(error.value)


def test_the_defaults_are_the_papers_and_need_nothing():
    config = RetrievalConfig()
    assert (config.chunk_tokens, config.embedder.kind, config.store.kind) == (
        512,
        "lexical",
        "local",
    )
    assert config.budget_for(1_000) == 4_096
    assert config.budget_for(131_072) == 131_072 // 24
    assert RetrievalConfig(chunk_tokens=64, budget_tokens=256).budget_for(10**6) == 256


def test_mistakes_are_refused_with_what_to_change():
    assert "raise budget_tokens or lower chunk_tokens" in refused(budget_tokens=256)
    assert "Extra inputs" in refused(chunk_size=512)
    assert "bge-m3" in refused(embedder={"kind": "bge"})
    assert "raise embedder.max_length" in refused(embedder={"kind": "bge-m3", "max_length": 256})
    assert "set store.folder too" in refused(store={"kind": "local", "ttl_s": 600})
    assert "https://host:6333" in refused(store={"kind": "server", "url": "qdrant:6333"})


def test_a_key_never_crosses_a_network_in_the_clear_unasked():
    store = {"kind": "server", "url": "http://qdrant.internal:6333", "api_key": "secret"}
    message = refused(store=store)
    assert "https" in message
    assert "secret" not in message
    for better in ({"allow_plain_http": True}, {"url": "https://qdrant.internal"}):
        config = RetrievalConfig.model_validate({"store": store | better})
        assert config.store.key() == "secret"
        assert "secret" not in repr(config)


def test_a_key_may_live_in_the_environment(monkeypatch):
    store = {"kind": "server", "url": "https://q", "api_key_env": "RAPID_TEST_QDRANT_KEY"}
    config = RetrievalConfig.model_validate({"store": store})
    with pytest.raises(ValueError, match="RAPID_TEST_QDRANT_KEY"):
        config.store.key()
    monkeypatch.setenv("RAPID_TEST_QDRANT_KEY", "secret")
    assert config.store.key() == "secret"


def test_messages_name_a_server_without_its_password():
    store = ServerStoreConfig(kind="server", url="https://me:secret@qdrant.internal:6333/path")
    assert store.address == "https://qdrant.internal:6333/path"
