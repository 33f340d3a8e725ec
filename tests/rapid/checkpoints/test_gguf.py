"""A GGUF file is a checkpoint like any other, or it is refused in one sentence."""

from __future__ import annotations

import datetime
import itertools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rapid.chat_messages import Message
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
from rapid.checkpoints.gguf import read_settings
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary, num_ids
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.shapes import ModelShape
from tests.rapid import tiny_gguf

DAY = datetime.date(2024, 1, 1)


def facts(path: Path, **settings: Any):
    return read_model_facts(EngineConfig(model=str(path), **settings))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_its_facts_are_those_of_the_same_model_elsewhere(tmp_path: Path, family: str) -> None:
    found = facts(tiny_gguf.write(tmp_path / "m.gguf", family))
    assert found.shape == ModelShape.of(tiny_gguf.model(family).config.to_dict())
    assert found.num_positions == tiny_gguf.POSITIONS


def test_output_weights_that_are_not_stored_are_the_embeddings(tmp_path: Path) -> None:
    tied = tiny_gguf.write(tmp_path / "m.gguf", without="output.weight")
    assert facts(tied).shape.tied_embeddings


def test_its_own_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    assert facts(tiny_gguf.write(tmp_path / "m.gguf", more=yarn)).num_positions == 2048


def test_its_tokenizer_and_template_are_the_files(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    text = ChatText.load(str(path))
    ids = text.encode_chat([Message("user", "the 12")], day=DAY)
    assert text.tokenizer.decode(ids) == (
        "<|im_start|>user\nthe 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tiny_gguf.TOKENS.index("<|im_start|>")
    assert text.decode([*text.encode("the 12"), *text.eos_ids]) == "the 12"
    assert text.eos_ids == {tiny_gguf.TOKENS.index(tiny_gguf.END)}


def test_digits_are_split_as_the_vocabulary_was_learned(tmp_path: Path) -> None:
    """Both spaces go before the digits, where GPT-2 would give one of them to the number."""
    tokenizer = load_tokenizer(str(tiny_gguf.write(tmp_path / "m.gguf")))
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.tokenize(" the") == ["Ġt", "he"]
    gpt2 = tiny_gguf.write(tmp_path / "gpt2.gguf", more={"tokenizer.ggml.pre": "gpt-2"})
    assert load_tokenizer(str(gpt2)).tokenize("a  12") == ["a", "Ġ", "Ġ", "1", "2"]


def test_tokens_that_only_pad_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_gguf.write(tmp_path / "m.gguf")))
    assert num_ids(tokenizer) == len(tiny_gguf.TOKENS)


def test_an_answer_ends_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", more={"tokenizer.ggml.eot_token_id": 0})
    assert read_eos_ids(str(path), None) == {0, tiny_gguf.TOKENS.index(tiny_gguf.END)}


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    swapped = [*tiny_gguf.TOKENS[:-2], *reversed(tiny_gguf.TOKENS[-2:])]
    target = ChatText.load(str(tiny_gguf.write(tmp_path / "target.gguf")))
    drafter = ChatText.load(str(tiny_gguf.write(tmp_path / "drafter.gguf", tokens=swapped)))
    with pytest.raises(ConfigurationError, match="different vocabularies: token id 260 is 'he'"):
        check_same_vocabulary(target, drafter)


def test_a_header_is_read_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    assert facts(path).num_positions == 512
    tiny_gguf.write(path, more={"llama.context_length": 256})
    assert facts(path).num_positions == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "llama.block_count"}, "its metadata have no llama.block_count"),
        ({"without": "token_embd"}, "holds no token embeddings"),
        ({"without": "tokenizer."}, "no usable tokenizer: the file holds no tokenizer"),
        ({"without": "tokenizer.chat"}, "has no chat template"),
        ({"more": {"tokenizer.ggml.pre": "new"}}, "split in the way of 'new', which is not supp"),
        ({"more": {"tokenizer.ggml.model": "new"}}, "no usable tokenizer"),
        ({"more": {"split.count": 2}}, "one part of several: join them"),
        ({"more": {"general.architecture": "gptj"}}, "'gptj'; supported are llama, qwen2, qwen3"),
        ({"more": {"general.alignment": 0}}, "general.alignment must be a whole number from 1"),
        ({"more": {"split.count": "two"}}, "one part of several: join them"),
        ({"more": {"llama.embedding_length": "x"}}, "embedding_length must be a whole number fro"),
        ({"more": {"llama.attention.head_count": [4, 4]}}, "head_count must be a whole number fro"),
        ({"more": {"llama.context_length": 0}}, "context_length must be a whole number from 1"),
        ({"more": {"llama.rope.freq_base": 0.0}}, "freq_base must be a number above 0, not '0.0'"),
        ({"more": {"llama.attention.layer_norm_rms_epsilon": "x"}}, "epsilon must be a number ab"),
        ({"more": {"tokenizer.ggml.eos_token_id": 999}}, "eos_token_id is 999, and it has 262 tok"),
        ({"without": "tokenizer.ggml.merges"}, "the file holds no merges of its tokens"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "set rope_scaling to what"),
        (
            {"more": {"llama.rope.scaling.type": "longrope"}},
            "short_factor must be a list of numbers",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", **changes)

    def look_at_it() -> None:
        facts(path)
        ChatText.load(str(path))

    with pytest.raises(ConfigurationError, match=message) as refused:
        look_at_it()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"llama.embedding_length": 128},
            "token_embd.weight has the shape 264 x 64, .* 264 x 128:",
        ),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight has the shape 128 x 64, .* 64 x 64:"),
        ({"llama.attention.head_count": 8}, "attn_q.weight has the shape 64 x 64, .* 128 x 64:"),
        ({"llama.attention.head_count_kv": 1}, "attn_k.weight has the shape 32 x 64, .* 16 x 64:"),
        ({"llama.attention.head_count_kv": 3}, "4 heads of 16 numbers, and 3 for keys, cannot be"),
        ({"llama.attention.key_length": 7}, "4 heads of 7 numbers, and 2 for keys, cannot be"),
        ({"llama.block_count": 1}, r"blk\.1\.\w+\.weight is of a layer that its metadata do not"),
        (
            {"tokenizer.ggml.tokens": ["x"] * 300},
            "has 300 tokens, and its embeddings have 264 rows",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_before_its_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", more=changes)
    with pytest.raises(ConfigurationError, match=message) as refused:
        facts(path)
    assert "\n" not in str(refused.value)


def test_stored_frequencies_are_fine_beside_their_configuration(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert facts(path, rope_scaling={"rope_type": "linear", "factor": 2}).num_positions == 1024


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 20, 30, 500, 3000, 6000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match=r"is cut off|is no GGUF file") as refused:
            facts(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file", "is no GGUF file"),
        (b"GGUF" + b"\xff" * 64, "is of GGUF version 4294967295"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "is cut off or damaged"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        facts(path)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def array(type_id: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + content


def header_of(*entries: bytes, num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries)) + b"".join(entries)


ARRAY = 9


@pytest.mark.parametrize(
    "value",
    [
        *(array(type_id, 2**63) for type_id in range(13)),
        array(0, 10_000),
        array(8, 10_000),
        array(ARRAY, 1) * 5_000 + array(0, 0),
        array(ARRAY, 1) * 2 + array(0, 0),
    ],
)
def test_an_array_that_its_file_cannot_hold_is_refused(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_of(string(b"x") + struct.pack("<I", ARRAY) + value) + bytes(500))
    with pytest.raises(ConfigurationError, match="is cut off or damaged"):
        facts(path)


SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
           11: "<q", 12: "<d"}  # fmt: skip
KEYS = st.sampled_from(
    [
        "general.alignment", "split.count", "llama.block_count", "llama.context_length",
        "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count",
        "llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon",
        "llama.rope.scaling.type", "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id",
    ]
)  # fmt: skip
NAMES = st.sampled_from(["token_embd.weight", "blk.0.attn_q.weight"]) | st.text()
NUMBERS = st.integers(0, 16) | st.sampled_from([2**31, 2**63, 2**64 - 1])


def scalar(type_id: int) -> st.SearchStrategy[bytes]:
    form = SCALARS[type_id]
    return st.binary(min_size=struct.calcsize(form), max_size=struct.calcsize(form))


def values() -> st.SearchStrategy[bytes]:
    """Typed values, with arrays in arrays, whose counts may lie."""
    texts = st.text(max_size=5).map(lambda text: string(text.encode()))
    plain = st.sampled_from(sorted(SCALARS)).flatmap(
        lambda id_: st.tuples(st.just(id_), scalar(id_))
    ) | texts.map(lambda text: (8, text))

    def nested(inner: st.SearchStrategy[tuple[int, bytes]]) -> st.SearchStrategy[tuple[int, bytes]]:
        count = st.sampled_from([1, 2]) | NUMBERS
        return st.tuples(inner, count).map(lambda p: (ARRAY, array(p[0][0], p[1], p[0][1])))

    typed = st.recursive(plain, nested, max_leaves=4)
    return typed.map(lambda pair: struct.pack("<I", pair[0]) + pair[1])


ENTRIES = st.tuples(KEYS | st.text(max_size=9), values()).map(
    lambda pair: string(pair[0].encode()) + pair[1]
)
NAMED = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
COUNTED = [
    string(b"llama." + name) + struct.pack("<II", 4, 1 + name.endswith(b"length"))
    for name in (
        b"embedding_length", b"attention.head_count", b"feed_forward_length", b"block_count",
        b"context_length",
    )
]  # fmt: skip
EPSILON = string(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
TENSORS = st.builds(
    lambda name, shape, kind, offset: (
        string(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    ),
    NAMES,
    st.lists(NUMBERS, max_size=5),
    st.integers(0, 40),
    NUMBERS,
)
HEADERS = st.builds(
    lambda entries, tensors: (
        header_of(NAMED, *COUNTED, EPSILON, *entries, num_tensors=len(tensors)) + b"".join(tensors)
    ),
    st.lists(ENTRIES, max_size=6),
    st.lists(TENSORS, max_size=3),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The header of a sound file."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return tiny_gguf.write(path).read_bytes()[:8192]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(HEADERS | st.binary(max_size=200).map(lambda rest: b"GGUF\x03\0\0\0" + rest))
def test_whatever_a_file_says_it_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    _look(tmp_path, content)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 8191), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, 10**6),
)
def test_a_damaged_header_is_read_or_refused(
    tmp_path: Path, sound: bytes, damage: list[tuple[int, bytes]], more: int
) -> None:
    content = bytearray(sound)
    for at, change in damage:
        content[at : at + len(change)] = change
    _look(tmp_path, bytes(content) + bytes(more))


_numbers = itertools.count()


def _look(folder: Path, content: bytes) -> None:
    path = folder / f"{next(_numbers)}.gguf"  # a header is read once while its file is the same
    path.write_bytes(content)
    refusal = ""
    try:
        read_settings(str(path))
    except ConfigurationError as error:
        refusal = str(error)
    finally:
        path.unlink()
    assert "\n" not in refusal


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no such \.gguf file"):
        checkpoint_source(str(tmp_path / "m.gguf"))


def test_torch_is_not_needed(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    code = (
        "import sys; from rapid.checkpoints.text import ChatText;"
        "from rapid.checkpoints.facts import read_model_facts;"
        "from rapid.config import EngineConfig;"
        f"ChatText.load({str(path)!r}); read_model_facts(EngineConfig(model={str(path)!r}));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
