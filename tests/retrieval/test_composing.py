"""`find_texts` finds passages that a store has of given texts, while retrievers use the store."""

from pathlib import Path

import pytest

from rapid.documents import name_text
from retrieval import StoreUnavailable, open_retriever
from retrieval.composing import find_texts
from retrieval.settings import LocalStoreConfig, ServerStoreConfig
from tests.retrieval.rest_server import RestQdrant
from tests.retrieval.test_retriever import LETTER, SMALL
from tests.retrieval.tokens import words


@pytest.mark.parametrize("kind", ["folder", "server"])
async def test_texts_are_found_by_their_names(tmp_path: Path, kind: str):
    server = RestQdrant()
    store = LocalStoreConfig(folder=str(tmp_path / "chunks"))
    if kind == "server":
        store = ServerStoreConfig(kind="server", url=server.url)
    config = SMALL.model_copy(update={"store": store})
    name = name_text("us", LETTER.digest)
    texts = {name: "us", name_text("them", LETTER.digest): "them"}
    assert await find_texts(config, texts) == set()
    retriever = await open_retriever(config, words, tokenizer="words")
    await retriever.index("us", [LETTER])
    assert await find_texts(config, texts) == {name}
    assert (await retriever.forget_text("us", name)).num_found == 1
    assert await find_texts(config, texts) == set()
    await retriever.close()
    server.stop()
    if kind == "server":
        with pytest.raises(StoreUnavailable):
            await find_texts(config, texts)


async def test_what_is_in_memory_alone_is_not_looked_at():
    assert await find_texts(SMALL, {"a": "us"}) == set()
