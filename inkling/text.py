"""Text out of token ids, one token at a time.

Released pieces, joined, are byte for byte what ``Tokenizer.decode`` makes of all ids at once, cut before the
stop word that ended the request. A character is never cut, and text that may begin a stop word is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders

from inkling.errors import CheckpointError

REPLACEMENT = "\ufffd"


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of ``tokenizer.json`` in a checkpoint directory; None when the file is absent. Raises
    CheckpointError when it is not a tokenizer."""
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(path, "content", str(error), "it must be a tokenizers JSON file") from error


@lru_cache(maxsize=8)
def longest_piece(tokenizer: Tokenizer) -> int:
    """Bytes of the longest vocabulary entry: a text of more than n times as many has more than n tokens."""
    return max((len(piece.encode()) for piece in tokenizer.get_vocab()), default=1)


class Blocks(Protocol):
    """The blocks of a chat answer (``inkling.chat.ContentBlocks``)."""

    def is_content(self, token_id: int) -> bool: ...


class TextAssembler:
    """Text of one answer. Ids in ``hidden_ids`` and, by default, special tokens have none.

    A stop word ends the text at the token that completes it; of several, the one that is completed first in
    reading order, the longest of those that end at the same character. Before ``min_tokens`` tokens none
    does. Without a tokenizer there is no text. ``blocks`` tells which ids of a chat answer are content; the
    others have no text, so a stop word is looked for in content alone. Amortised time per token is constant
    in the length of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_words: Iterable[str] = (),
        hidden_ids: Iterable[int] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        blocks: Blocks | None = None,
    ):
        self._blocks = blocks
        self._decoder = _decoder(tokenizer, skip_special_tokens)
        self._stop = _StopWords(tuple(stop_words)) if stop_words else None
        self._hidden = frozenset(hidden_ids)
        self._tokens_to_minimum = min_tokens
        self._released: list[str] = []
        self._held = ""  # may begin a stop word

    def append(self, token_id: int) -> bool:
        """Takes the next token. True when it completes a stop word; nothing may be appended after that."""
        self._tokens_to_minimum -= 1
        is_content = self._blocks is None or self._blocks.is_content(token_id)
        if not is_content or token_id in self._hidden:
            return False
        piece = self._decoder.push(token_id)
        if not piece:
            return False
        if self._stop is None:
            self._released.append(piece)
            return False
        text = self._held + piece
        cut = self._stop.feed(piece, may_end=self._tokens_to_minimum <= 0)
        if cut is not None:
            self._released.append(text[: len(self._held) + cut])
            self._held = ""
            self._decoder = _NoText()
            return True
        keep = len(text) - self._stop.depth
        self._released.append(text[:keep])
        self._held = text[keep:]
        return False

    def take(self) -> str:
        """The text that has become certain since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def finish(self) -> str:
        """All text that is left: what was held back, and what remains of an incomplete character."""
        text = self.take() + self._held + self._decoder.finish()
        self._held = ""
        return text


class _StopWords:
    """An Aho-Corasick automaton over characters, fed piece by piece (Aho and Corasick, CACM 18(6), 1975).

    ``depth``: length of the longest end of the text so far that begins a stop word.
    """

    def __init__(self, words: tuple[str, ...]):
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [0]  # length of the longest word that ends at the node; 0: none
        self._fail = [0]
        self._node = 0
        for word in words:
            node = 0
            for depth, char in enumerate(word, 1):
                node = self._next[node].setdefault(char, len(self._next))
                if node == len(self._next):
                    self._next.append({})
                    self._depth.append(depth)
                    self._longest.append(0)
                    self._fail.append(0)
            self._longest[node] = len(word)
        self._link()

    def _link(self) -> None:
        """Failure links in order of depth, and with them the words that end inside longer ones."""
        queue = list(self._next[0].values())
        for node in queue:
            self._longest[node] = self._longest[node] or self._longest[self._fail[node]]
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while char not in self._next[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._next[node][char]

    @property
    def depth(self) -> int:
        return self._depth[self._node]

    def feed(self, piece: str, may_end: bool) -> int | None:
        """Where in ``piece`` the first completed word begins, below 0 when before it; None when none is
        complete."""
        for index, char in enumerate(piece):
            self._node = self._step(self._node, char)
            if may_end and self._longest[self._node]:
                return index + 1 - self._longest[self._node]
        return None


def _decoder(
    tokenizer: Tokenizer | None, skip_special_tokens: bool
) -> _NoText | _ByteDecoder | _PrefixDecoder:
    if tokenizer is None:
        return _NoText()
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return _ByteDecoder(_token_bytes(tokenizer, skip_special_tokens))
    return _PrefixDecoder(tokenizer, skip_special_tokens)


class _NoText:
    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _ByteDecoder:
    """A byte-level vocabulary: pieces are bytes, and the answer is their UTF-8 with invalid bytes
    replaced."""

    def __init__(self, token_bytes: _TokenBytes):
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TokenBytes(dict):
    """token id -> bytes, filled as ids are met."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._byte_of = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or token_id in self._skipped:  # padded ids have no piece
            value = b""
        elif all(char in self._byte_of for char in piece):
            value = bytes(self._byte_of[char] for char in piece)
        else:  # an added token outside the alphabet is its own text
            value = piece.encode()
        self[token_id] = value
        return value


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: Tokenizer, skip_special_tokens: bool) -> _TokenBytes:
    return _TokenBytes(tokenizer, skip_special_tokens)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): printable Latin-1
    characters stand for themselves, the other bytes in ascending order for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _PrefixDecoder:
    """Any other tokenizer: decode a short run of ids again and again, and release what the newest ids add.

    The run starts at ids that are released already, so that the decoder sees what stands before the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._known = 0  # ids at the start of the run whose text is released
        self._before = ""  # the text of those
        self._all: list[int] = []
        self._released = ""

    def push(self, token_id: int) -> str:
        self._all.append(token_id)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._before) or text.endswith(REPLACEMENT):
            return ""  # nothing new, or a character that may not be complete
        piece = text[len(self._before) :]
        del self._ids[: self._known]
        self._known = len(self._ids)
        self._before = self._decode(self._ids)
        self._released += piece
        return piece

    def finish(self) -> str:
        text = self._decode(self._all)
        return text[len(self._released) :] if text.startswith(self._released) else ""
