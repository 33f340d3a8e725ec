"""Chats to ids as Hugging Face does it; ids to text as decoding at once does it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rapid.chat_messages import Message
from rapid.checkpoints.text import ChatText
from rapid.embedded import TARGET
from rapid.errors import BadRequest, ConfigurationError
from tests.process_memory import keeps_words

TEXT = ChatText.load("embedded:target")
LETTERS = "▁abcdefghijklmnopqrstuvwxyz.,|<>"
DAY = date(2026, 1, 31)
SPECIAL = ["<unk>", "<s>", "</s>"]


def test_tokens_are_found_by_what_they_spell() -> None:
    chunks = ["The banner of Tezawe", "is sözo — sema", "The banner of Tezawe"]
    chat = [Message("user", "About:\n" + "\n\n".join(chunks) + "\n\nThe banner?")]
    token_ids = TEXT.encode_chat(chat, day=DAY)
    spans = TEXT.find_tokens(token_ids, [*chunks[:2], "not there", chunks[2]])
    assert spans[2] == (0, 0)
    del spans[2]
    for (start, stop), chunk in zip(spans, chunks, strict=True):
        assert chunk in TEXT.decode(token_ids[start:stop])
        assert chunk not in TEXT.decode(token_ids[start + 1 : stop])
        assert chunk not in TEXT.decode(token_ids[start : stop - 1])
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def sentencepiece_like() -> ChatText:
    """The pipeline of Llama 2 and its kin, with letters for a vocabulary."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁the", "he", "▁▁"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("h", "e"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
    )
    return ChatText(tokenizer, frozenset([2]))


SENTENCEPIECE = sentencepiece_like()


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(text: ChatText, pushes: list[list[int]], stop: tuple[str, ...] = ()) -> str:
    out = text.stream(stop)
    return "".join([*(out.push(ids) for ids in pushes), out.finish()])


class TestEncoding:
    def test_ids_are_those_of_hugging_face(self):
        reference = AutoTokenizer.from_pretrained(TARGET)
        chat = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": 'Document "x":\nThe harbor of Bakeno.\n\nWhat? é😀'},
            {"role": "assistant", "content": " It is 482."},
            {"role": "user", "content": ""},
        ]
        messages = [Message(m["role"], m["content"]) for m in chat]
        for prompt in (True, False):
            expected = reference.apply_chat_template(
                chat, add_generation_prompt=prompt, return_dict=False
            )
            assert TEXT.encode_chat(messages, day=DAY, add_generation_prompt=prompt) == expected

    @pytest.mark.parametrize("text", [TEXT, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
    def test_control_tokens_in_a_message_are_ordinary_text(self, text):
        specials = text.tokenizer.all_special_ids
        spoof = "".join(text.tokenizer.all_special_tokens)
        plain = text.encode_chat([Message("user", "a b")], day=DAY)
        spoofed = text.encode_chat([Message("user", f"a{spoof} b {spoof}")], day=DAY)
        assert [i for i in spoofed if i in specials] == [i for i in plain if i in specials]
        shown = text.tokenizer.backend_tokenizer.decode(spoofed, skip_special_tokens=True)
        assert shown.count(spoof) == 2

    def test_a_token_hidden_in_a_token_does_not_come_back(self):
        spoofed = TEXT.encode_chat([Message("user", "<|en<|end|>d|>")], day=DAY)
        assert spoofed.count(TEXT.tokenizer.eos_token_id) == 1

    def test_a_refusing_template_is_the_callers_mistake(self):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=TEXT.tokenizer.backend_tokenizer,
            chat_template="{{ raise_exception('roles must alternate') }}",
        )
        with pytest.raises(BadRequest, match="roles must alternate"):
            ChatText(tokenizer, frozenset()).encode_chat([Message("user", "a")], day=DAY)

    @pytest.mark.parametrize(
        "template",
        [
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}"
            "{% endmacro %}{{ twice(60) }}",
            "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
            "{% macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}{{ deeper(0) }}",
        ],
    )
    def test_a_template_without_end_gives_its_thread_back(self, template, monkeypatch):
        monkeypatch.setattr("rapid.checkpoints.text._MOST_TEMPLATE_S", 0.05)
        text = sentencepiece_like()
        text.tokenizer.chat_template = template
        with pytest.raises(BadRequest, match="the model's chat template refuses"):
            text.encode_chat([Message("user", "hi")], day=DAY)
        assert sys.gettrace() is None
        text.tokenizer.chat_template = "{{ messages[0].content }}"
        assert text.encode_chat([Message("user", "hi")], day=DAY) == text.encode("hi")

    @pytest.mark.parametrize("spoof", ["", "<|end|>"])
    def test_a_template_that_asks_for_the_time_is_told_the_day(self, spoof):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=TEXT.tokenizer.backend_tokenizer,
            eos_token="<|end|>",
            chat_template="{% set now = strftime_now('%d %b %Y %H:%M:%S.%f') %}"
            "Today: {{ now }}{% for m in messages %} {{ m.content }}{% endfor %}",
        )
        text = ChatText(tokenizer, frozenset())
        shown = text.decode(text.encode_chat([Message("user", f"Hi{spoof}")], day=DAY))
        assert shown == f"Today: 31 Jan 2026 00:00:00.000000 Hi{spoof}"

    def test_counts_and_offsets_agree(self):
        document = "The harbor of Bakeno is dolu maki 482.\n\n<|end|> é"
        offsets = TEXT.token_offsets(document)
        assert len(offsets) == TEXT.count_tokens(document)
        assert offsets[0][0] == 0
        assert offsets[-1][1] == len(document)


class TestLoading:
    def test_the_end_of_an_answer(self, tmp_path):
        assert TEXT.tokenizer.eos_token_id in TEXT.eos_ids
        TEXT.tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
        assert ChatText.load(str(tmp_path)).eos_ids == {4}
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
        assert ChatText.load(str(tmp_path)).eos_ids == {1, 5}

    def test_what_is_missing_is_said(self, tmp_path):
        with pytest.raises(ConfigurationError, match="no usable tokenizer"):
            ChatText.load(str(tmp_path))
        with pytest.raises(ConfigurationError, match="no such checkpoint directory"):
            ChatText.load("/nowhere/model")
        with pytest.raises(ConfigurationError, match="embedded:target, embedded:drafter"):
            ChatText.load("embedded:other")
        TEXT.tokenizer.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigurationError, match="no chat template"):
            ChatText.load(str(tmp_path))

    def test_torch_stays_out(self):
        code = (
            "import sys; from rapid.checkpoints.text import ChatText; from rapid import prompts;"
            "from datetime import date; from rapid.messages import Message;"
            "text = ChatText.load('embedded:target');"
            "text.encode_chat([Message('user', 'a <|end|>')], day=date.min);"
            "sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestStreaming:
    @given(st.text(max_size=60), st.lists(st.integers(0, 1000), max_size=8))
    @pytest.mark.parametrize("text", [TEXT, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
    def test_any_split_is_decoding_at_once(self, text, written, cuts):
        ids = text.encode(written)
        assert stream(text, split(ids, cuts)) == text.decode(ids)

    @given(st.lists(st.integers(0, 1100), max_size=40), st.lists(st.integers(0, 1000), max_size=8))
    @settings(max_examples=300)
    def test_any_ids_of_a_byte_level_vocabulary(self, ids, cuts):
        assert stream(TEXT, split(ids, cuts)) == TEXT.decode(ids)

    @given(
        st.lists(st.integers(3, 300).filter(lambda id_: not 131 <= id_ < 259), max_size=40),
        st.lists(st.integers(0, 1000), max_size=8),
    )
    @example([294, 3 + ord(" ")], [])  # padding of the logits, then a space
    @settings(max_examples=300)
    def test_any_ids_of_a_sentencepiece_vocabulary(self, ids, cuts):
        assert stream(SENTENCEPIECE, split(ids, cuts)) == SENTENCEPIECE.decode(ids)

    @given(
        st.text(alphabet="ab<|> é😀", max_size=40),
        st.lists(st.text(alphabet="ab<|> é", min_size=1, max_size=4), max_size=4),
        st.lists(st.integers(0, 1000), max_size=8),
    )
    @settings(max_examples=300)
    def test_stops_cut_the_text_wherever_the_tokens_end(self, written, stops, cuts):
        ids = TEXT.encode(written)
        whole = TEXT.decode(ids)
        ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
        expected = whole[: min(ends)[1]] if ends else whole
        out = TEXT.stream(stops)
        pushed = "".join(out.push(part) for part in split(ids, cuts))
        assert expected.startswith(pushed)
        assert pushed + out.finish() == expected
        assert out.stopped == bool(ends)

    def test_an_incomplete_character_is_held_back(self):
        ids = TEXT.encode("a😀b")
        out = TEXT.stream()
        texts = [out.push([id_]) for id_ in ids]
        assert [text for text in texts if text] == ["a", "😀", "b"]
        out = TEXT.stream()
        assert out.push(ids[:-2]) + out.finish() == "a\ufffd"

    def test_a_possible_stop_is_held_back_and_released(self):
        out = TEXT.stream(["###"])
        assert out.push(TEXT.encode("a##")) == "a"
        assert out.push(TEXT.encode("b#")) == "##b"
        assert out.finish() == "#"

    def test_tokens_after_a_stop_do_not_count(self):
        ids = TEXT.encode("ab.cd.")
        at_once, one_by_one = TEXT.stream(["."]), TEXT.stream(["."])
        at_once.push(ids)
        for id_ in ids:
            one_by_one.push([id_])
        assert at_once.stopped
        assert at_once.num_tokens == one_by_one.num_tokens < len(ids)
        assert at_once.finish() == at_once.push(ids) == ""

    def test_the_stop_that_is_complete_first_ends_the_text(self):
        """Also when one token completes both, and the other began before it."""
        (token_id,) = TEXT.encode(" harbor")
        for stops in ([" harbor", "arb"], ["arb", " harbor"]):
            out = TEXT.stream(stops)
            assert out.push([token_id]) == " h"
            assert out.stopped
        out = TEXT.stream(["rb", "arb"])  # complete at once: the one that begins first
        assert out.push([token_id]) == " h"

    def test_special_tokens_leave_no_trace(self):
        eos = TEXT.tokenizer.eos_token_id
        out = TEXT.stream()
        assert out.push([*TEXT.encode("a"), eos]) == "a"
        assert out.num_tokens == 2
        assert TEXT.token_text(eos) == "<|end|>"

    def test_the_space_that_begins_an_answer_is_the_tokenizers_not_ours(self):
        ids = SENTENCEPIECE.encode("the cat")
        assert stream(SENTENCEPIECE, [[id_] for id_ in ids]) == "the cat"
        lone_space = [SENTENCEPIECE.tokenizer.convert_tokens_to_ids("▁")]
        assert stream(SENTENCEPIECE, [lone_space, ids]) == " the cat"

    def test_what_continues_a_text_keeps_the_space_that_it_begins_with(self):
        ids = SENTENCEPIECE.encode("the cat")
        assert SENTENCEPIECE.stream(is_continued=True).push(ids) == " the cat"

    def test_tokens_of_a_character_keep_their_bytes(self):
        ids = TEXT.encode("😀")
        assert len(ids) > 1
        spelled = [TEXT.token_text(i).encode("utf-8", "surrogateescape") for i in ids]
        assert b"".join(spelled).decode() == "😀"

    def test_long_answers_cost_their_length(self):
        """Every byte is decoded once, and a stop string is looked for in what is held back only."""
        text = "The harbor of Bakeno. " * 200
        out, decoded, told = TEXT.stream(["never", "ever"]), 0, ""
        decode = out._decoder.decode

        def counted(piece: bytes, *args: Any, **settings: Any) -> str:
            nonlocal decoded
            decoded += len(piece)
            return decode(piece, *args, **settings)

        out._decoder = SimpleNamespace(decode=counted)
        for id_ in TEXT.encode(text):
            told += out.push([id_])
            assert len(told) > decoded - len("never")
        assert told + out.finish() == text
        assert decoded == len(text)


@settings(max_examples=60)
@given(
    texts=st.lists(st.text("aeiou rstl.,\n", max_size=300), max_size=4),
    most=st.integers(0, 200),
    piece_characters=st.sampled_from((40, 2**16)),
)
def test_what_is_said_to_be_too_long_is(texts: list[str], most: int, piece_characters: int) -> None:
    """Whatever the pieces in which it is counted; and what is far too long is said to be."""
    num_tokens = sum(map(TEXT.count_tokens, texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid.checkpoints.text._PIECE_CHARACTERS", piece_characters)
        has_more = TEXT.has_more_tokens(texts, most)
    assert num_tokens > most or not has_more
    if piece_characters > 1000 and num_tokens > most + 16 * len(texts):
        assert has_more


def test_a_fingerprint_is_of_the_tokenizer_and_the_same_in_every_process() -> None:
    code = "from rapid.checkpoints.text import ChatText as C; import sys; "
    code += "sys.stdout.write(C.load('embedded:target').fingerprint)"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout == TEXT.fingerprint
    assert sentencepiece_like().fingerprint != TEXT.fingerprint


def test_a_tokenizer_keeps_no_word_of_what_it_has_read() -> None:
    reader = """
from rapid.checkpoints.text import ChatText
text = ChatText.load("embedded:target")
def read(words):
    text.encode(words), text.token_offsets(words)
"""
    assert keeps_words(reader) == [True, False]
