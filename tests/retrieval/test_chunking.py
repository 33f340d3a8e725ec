import itertools
import time
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.chunking import Chunk, chunk_text, drop_shared, hf_token_offsets
from tests.retrieval import tokens

FAMILY = "👩‍👩‍👧‍👦"
TEXTS = {
    "prose": "The harbor of Belaron is Tessin. It is deep.\n\nThe mayor of Orrin is Vael. " * 20,
    "no spaces": "abcdefghij" * 100,
    "CJK": "港は深い。船は多い。市長は誰か？" * 40,
    "emoji and combining": f"{FAMILY} e\u0301\u0301 {FAMILY}{FAMILY}\n" * 30,
    "repeats": "same words again\n\n" * 60,
    "white space": " \n\t\n" * 200,
}
pieces = st.sampled_from(
    ["word ", "Sentence. ", "\n", "\n\n", " " * 9, "港。", FAMILY, "e\u0301", "x" * 40, "\u2028"]
)
texts = st.one_of(st.text(max_size=300), st.lists(pieces, max_size=60).map("".join))


def check(text, token_offsets, max_tokens, max_chars, overlap=0) -> list[Chunk]:
    chunks = chunk_text(
        text, token_offsets, max_tokens=max_tokens, max_chars=max_chars, overlap=overlap
    )
    new = drop_shared(chunks)
    assert "".join(chunk.text for chunk in new) == text
    assert [chunk.start for chunk in new] == [0, *(chunk.end for chunk in chunks)][:-1]
    assert overlap or new == chunks
    starts = [start for start, _ in token_offsets(text)]
    for before, chunk in itertools.pairwise(chunks):
        assert before.start <= chunk.start
        assert sum(chunk.start <= start < before.end for start in starts) <= overlap
    for chunk, own in zip(chunks, new, strict=True):
        assert chunk.text == text[chunk.start : chunk.end]
        assert 1 <= len(chunk.text) <= max_chars
        inside = sum(chunk.start <= start < chunk.end for start in starts)
        assert chunk.num_tokens == max(1, inside)
        assert inside <= max_tokens or len(own.text) == 1
    return chunks


@pytest.mark.parametrize(
    "token_offsets", [tokens.words, tokens.characters, tokens.utf8_bytes, tokens.everything]
)
@given(st.data(), texts, st.integers(1, 20), st.integers(1, 200))
def test_every_character_is_new_in_exactly_one_chunk(
    token_offsets, data, text, max_tokens, max_chars
):
    check(text, token_offsets, max_tokens, max_chars)
    overlap = data.draw(st.integers(0, max_tokens // 2))
    check(text, token_offsets, max_tokens, max_chars, overlap)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_hard_texts_keep_both_bounds(text):
    bpe = tokens.byte_level_bpe([text])
    for token_offsets in (tokens.words, tokens.utf8_bytes, hf_token_offsets(bpe)):
        check(text, token_offsets, 16, 100)
        check(text, token_offsets, 16, 100, 8)


def test_without_an_overlap_every_text_is_cut_as_it_was_before_there_were_any():
    found = blake2b(digest_size=8)
    kinds = tokens.words, tokens.characters, tokens.utf8_bytes, tokens.everything
    for each in itertools.product(TEXTS.values(), kinds, (1, 7, 16, 100), (None, 30)):
        text, token_offsets, max_tokens, max_chars = each
        for chunk in chunk_text(text, token_offsets, max_tokens=max_tokens, max_chars=max_chars):
            place = chunk.id, chunk.start, chunk.end, chunk.num_tokens
            found.update(repr(place).encode())
    assert found.hexdigest() == "31e233f98684c276"


@pytest.mark.parametrize(("max_tokens", "overlap"), [(8, 1), (16, 8), (64, 20), (100, 50)])
@pytest.mark.parametrize("text", [TEXTS["prose"], TEXTS["CJK"], TEXTS["repeats"]])
def test_a_chunk_begins_with_the_last_tokens_of_the_one_before(text, max_tokens, overlap):
    bpe = hf_token_offsets(tokens.byte_level_bpe([text]))
    for token_offsets, slack in ((tokens.words, 0), (tokens.characters, 0), (bpe, 2)):
        starts = [start for start, _ in token_offsets(text)]
        chunks = chunk_text(text, token_offsets, max_tokens=max_tokens, overlap=overlap)
        for before, chunk in itertools.pairwise(chunks):
            num_shared = sum(chunk.start <= start < before.end for start in starts)
            most = min(overlap, before.first_token + before.num_tokens)
            assert most - slack <= num_shared <= most  # a character may be several tokens
            assert chunk.end > before.end


@given(st.sets(st.integers(0, 200)), st.sampled_from([(8, 4), (16, 5), (16, 8)]))
def test_neighbours_read_as_the_documents_own_text(numbers, sizes):
    text, (max_tokens, overlap) = TEXTS["prose"], sizes
    chunks = chunk_text(text, tokens.words, max_tokens=max_tokens, overlap=overlap)
    some = [chunks[number] for number in sorted(numbers) if number < len(chunks)]
    covered = sorted({place for chunk in some for place in range(chunk.start, chunk.end)})
    parts = drop_shared(some)
    assert "".join(part.text for part in parts) == "".join(text[place] for place in covered)
    assert all(part.text == text[part.start : part.end] for part in parts)
    num_tokens = len({start for start, _ in tokens.words(text)} & {*covered})
    assert sum(part.num_tokens for part in parts) == num_tokens


def test_a_paragraph_that_fits_beside_an_overlap_is_not_cut():
    text = "One two three four.\n\nFive six seven.\n\nEight nine."
    chunks = chunk_text(text, tokens.words, max_tokens=8, overlap=3)
    assert [each.text for each in chunks] == [
        "One two three four.\n\n",
        "three four.\n\nFive six seven.\n\n",
        "six seven.\n\nEight nine.",
    ]


def test_one_token_of_forty_thousand_characters_is_still_cut():
    chunks = check("x" * 40_000, tokens.everything, 512, 2_000)
    assert len(chunks) == 20


def test_chunks_end_at_paragraphs_then_sentences_then_words():
    def ends(text):
        return [c.text for c in chunk_text(text, tokens.words, max_tokens=8)]

    assert ends("One two. Three four.\n\nFive six seven eight nine.") == [
        "One two. Three four.\n\n",
        "Five six seven eight nine.",
    ]
    assert ends("one two three four five. six seven eight nine") == [
        "one two three four five. ",
        "six seven eight nine",
    ]
    assert ends("one two three four five six seven eight nine") == [
        "one two three four five six seven eight ",
        "nine",
    ]


def test_a_paragraph_that_fits_into_one_chunk_is_not_cut():
    def chunks(text):
        return [c.text for c in chunk_text(text, tokens.words, max_tokens=8)]

    verse = "a b c d e f g"
    assert chunks(f"One.\n\n{verse}\n\nTwo.") == ["One.\n\n", f"{verse}\n\n", "Two."]
    assert chunks(f"One.\n\n{verse}") == ["One.\n\n", verse]
    longer = "a b c d e f g h i"  # is cut anyway: no reason to leave a chunk short
    assert chunks(f"One.\n\n{longer}") == ["One.\n\na b c d e f ", "g h i"]
    assert chunks(f"A\n\nB\n\n{longer}") == ["A\n\nB\n\na b c d e f ", "g h i"]
    whole = "a b c d e f g h"
    assert chunks(f"One.\n\n{whole}\n\nTwo.") == ["One.\n\n", f"{whole}\n\n", "Two."]
    exact = chunk_text("A\n\nbbbbbbbb\n\nC", tokens.characters, max_tokens=8)
    assert [chunk.text for chunk in exact][:2] == ["A\n\n", "bbbbbbbb"]


def test_a_word_keeps_its_tokens_together():
    """Byte-level tokens own the space before a word; a cut after that space would tear the word."""
    text = "aa bbbbcccc " * 40
    bpe = tokens.byte_level_bpe(["aa bbbb", "cccc"] * 50, vocab_size=280)
    for chunk in check(text, hf_token_offsets(bpe), 10, 1_000)[:-1]:
        assert chunk.text.endswith(("aa", "bbbbcccc"))


def test_offsets_that_step_back_move_no_cut():
    """As those of a tokenizer that rewrites text may do."""
    offsets = [(0, 1), (2, 3), (1, 2), (4, 5), (3, 4)]
    chunks = chunk_text("abcde", lambda _: offsets, max_tokens=2, document_id="d")
    assert [(chunk.text, chunk.num_tokens) for chunk in chunks] == [("ab", 1), ("cd", 2), ("e", 2)]


def test_ids_and_names_say_where_a_chunk_comes_from():
    chunk = chunk_text("a b c", tokens.words, max_tokens=2, document_id="d1", name="a.txt")[1]
    assert (chunk.id, chunk.document, chunk.text) == ("d1:1", "a.txt", "c")


def test_empty_text_has_no_chunks_and_impossible_bounds_are_refused():
    assert chunk_text("", tokens.words, max_tokens=4) == []
    with pytest.raises(ValueError, match="max_tokens=0"):
        chunk_text("a", tokens.words, max_tokens=0)
    for overlap in (-1, 5):
        with pytest.raises(ValueError, match="cannot share"):
            chunk_text("a", tokens.words, max_tokens=8, overlap=overlap)


def test_a_slow_tokenizer_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        hf_token_offsets(object())


def test_time_is_linear():
    """Four times the text in well under sixteen times the time."""
    text = TEXTS["prose"] * 40

    def seconds(text):
        offsets = tokens.words(text)
        began = time.process_time()
        chunk_text(text, lambda _: offsets, max_tokens=64)
        return time.process_time() - began

    seconds(text)
    assert seconds(text * 4) < 10 * max(seconds(text), 0.005)
