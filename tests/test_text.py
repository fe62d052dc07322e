"""Text out of token ids: whatever the pieces, the whole is the tokenizer's own decoding."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from inkling.errors import CheckpointError
from inkling.text import TextAssembler, load_tokenizer, longest_piece

CORPUS = [
    "def stop(word): return 'the end'",
    "naïve café, 東京 🙂👍🏽 ok",
    "aaaa aab abab\n\n### END ###",
] * 3


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 320 pieces, two special tokens, two added ones (one outside the byte alphabet)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=316, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    tokenizer.add_special_tokens([AddedToken("<|pad é|>", special=True)])
    tokenizer.add_tokens(["<tool>", "« 東 »"])
    assert tokenizer.id_to_token(310) and tokenizer.id_to_token(325) is None  # see IDS
    return tokenizer


def answer(tokenizer: Tokenizer, ids: list[int], takes: list[bool] = (), **options) -> tuple[list[str], int]:
    """Pieces of the answer, and how many ids were taken before a stop word ended it."""
    assembler, pieces = TextAssembler(tokenizer, **options), []
    for count, token_id in enumerate(ids, 1):
        ended = assembler.append(token_id)
        if count <= len(takes) and takes[count - 1]:
            pieces.append(assembler.take())
        if ended:
            return [*pieces, assembler.finish()], count
    return [*pieces, assembler.finish()], len(ids)


IDS = st.lists(st.integers(0, 325), max_size=40)  # the last ids have no piece: padded vocabulary


@settings(max_examples=200, deadline=None)
@given(IDS, st.lists(st.booleans(), max_size=40), st.booleans())
def test_joined_pieces_equal_the_decoding_of_all_ids(tokenizer, ids, takes, skip):
    pieces, _ = answer(tokenizer, ids, takes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
@example(b"\xf0\x9f\x99\x82")
@example(b"\xf0\x9f\x99")
@example(b"\xed\xa0\x80\xff\xc3(\xe2\x82")
@example(b"\xf4\x90\x80\x80\xc0\x80")
def test_any_bytes_one_token_each_decode_as_the_tokenizer_does(tokenizer, data):
    byte_ids = [tokenizer.token_to_id(piece) for piece in byte_pieces(tokenizer)]
    ids = [byte_ids[byte] for byte in data]
    pieces, _ = answer(tokenizer, ids, [True] * len(ids))
    assert "".join(pieces) == tokenizer.decode(ids) == data.decode("utf-8", "replace")


def byte_pieces(tokenizer: Tokenizer) -> list[str]:
    """The piece of each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def test_a_character_is_not_cut(tokenizer):
    byte_ids = [tokenizer.token_to_id(byte_pieces(tokenizer)[byte]) for byte in "🙂é".encode()]
    pieces, _ = answer(tokenizer, byte_ids, [True] * len(byte_ids))
    assert [piece for piece in pieces if piece] == ["🙂", "é"]


WORDS = st.lists(st.text(alphabet="ab 東🙂\ufffd", min_size=1, max_size=4), max_size=4)


def first_cut(texts: list[str], words: list[str], min_tokens: int) -> tuple[int, str] | None:
    """(token count, text) of the first stop, by brute force over ``texts[n]``, what is certain after n
    tokens."""
    for count in range(1, len(texts)):
        for end in range(len(texts[count - 1]) + 1, len(texts[count]) + 1):
            starts = [end - len(word) for word in words if texts[count][:end].endswith(word)]
            if starts and count >= min_tokens:
                return count, texts[count][: min(starts)]
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab 東🙂", max_size=24),
    IDS,
    WORDS,
    st.lists(st.booleans(), max_size=80),
    st.integers(0, 6),
)
def test_text_ends_before_the_first_completed_stop_word(tokenizer, text, tail, words, takes, min_tokens):
    ids = tokenizer.encode(text).ids + tail
    certain, plain = [""], TextAssembler(tokenizer)
    for token_id in ids:
        plain.append(token_id)
        certain.append(certain[-1] + plain.take())
    expected = first_cut(certain, words, min_tokens) or (len(ids), tokenizer.decode(ids))
    pieces, count = answer(tokenizer, ids, takes, stop_words=words, min_tokens=min_tokens)
    assert (count, "".join(pieces)) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)
)
def test_released_text_is_never_more_than_what_no_stop_word_can_take_back(tokenizer, text, words):
    ids = tokenizer.encode(text).ids
    assembler, released = TextAssembler(tokenizer, words), ""
    for count, token_id in enumerate(ids, 1):
        ended = assembler.append(token_id)
        released += assembler.take()
        seen = tokenizer.decode(ids[:count])
        if ended:
            break
        longest = max(
            (n for word in words for n in range(len(word)) if n and seen.endswith(word[:n])), default=0
        )
        assert released == seen[: len(seen) - longest]


def test_hidden_ids_have_no_text(tokenizer):
    ids = tokenizer.encode("ok aab").ids
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool>")
    assert answer(tokenizer, [*ids, end, tool])[0] == ["ok aab<tool>"]
    assert answer(tokenizer, [*ids, end, tool], skip_special_tokens=False)[0] == ["ok aab<|end|><tool>"]
    assert answer(tokenizer, [*ids, end, tool], hidden_ids=[end, tool], skip_special_tokens=False)[0] == [
        "ok aab"
    ]


def test_no_tokenizer_no_text():
    assert answer(None, [1, 2, 3], [True] * 3) == (["", "", "", ""], 3)


def test_a_stop_word_across_tokens_and_inside_one(tokenizer):
    pieces, _ = answer(tokenizer, tokenizer.encode("ok ### END ### more").ids, stop_words=["# END"])
    assert "".join(pieces) == "ok ##"
    tool = tokenizer.token_to_id("<tool>")
    assert answer(tokenizer, [tool, tool], stop_words=["oo"]) == (["<t"], 1)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab c東", max_size=30), takes=st.lists(st.booleans(), max_size=60))
def test_a_tokenizer_that_is_not_byte_level_joins_to_its_own_decoding(text, takes):
    vocab = {chr(c): i for i, c in enumerate(b"abc")} | {"▁": 3, "▁a": 4, "<unk>": 5}
    vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = tokenizer.encode(text).ids
    pieces, _ = answer(tokenizer, ids, takes)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_token_costs_less_than_ten_microseconds(tokenizer):
    ids = (tokenizer.encode("\n".join(CORPUS)).ids * 200)[:20000]
    assembler = TextAssembler(tokenizer, stop_words=["### STOP", "\n\n\n\n", "🙂🙂"])
    start = time.perf_counter()
    for token_id in ids:
        assembler.append(token_id)
    per_token = (time.perf_counter() - start) / len(ids)
    assert assembler.finish() == tokenizer.decode(ids)
    assert per_token < 10e-6


def test_a_tokenizer_is_read_from_the_checkpoint_directory(tokenizer, tmp_path):
    assert load_tokenizer(tmp_path) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("naïve").ids == tokenizer.encode("naïve").ids
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    assert longest_piece(tokenizer) >= len("<|pad é|>".encode())
