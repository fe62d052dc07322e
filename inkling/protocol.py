"""The step protocol between ``spec_ensemble``, ``inkling_target`` and ``inkling_mtp``.

A step is one call to the target, then one to the draft, for the whole running batch. Control travels packed in
one INT32 vector (a further CPU tensor costs about 30 us a call); floats and seeds are bit-cast. The engine owns
ids, pages and the schedule; target and draft own the caches and, per slot, what an ``opens`` record told them.

    target:  CONTROL (TargetStep)          -> TOKENS [draws], HIDDEN [T, H], LOGPROBS [scored, 2 + 2K] if asked for
    draft:   CONTROL (DraftStep), HIDDEN   -> DRAFTS [sum of num_drafts over segments]

HIDDEN holds the post-final-norm states of the target's rows, in the compute dtype, bit-cast to INT32, so that one
hand-written config.pbtxt serves fp32 and bf16. Where target and draft map one ring of hidden states, it is neither
asked for nor sent: the step number says where they are.

LOGPROBS has one row for each draw of a slot with ``log_probs``, in the order of TOKENS, then one for each record of
``scores``: log prob of the token (fp32 bits), its rank, the K likeliest ids, their log probs (bits). K is the most
that a row of the step wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache

import numpy as np

from inkling.errors import ProtocolError

CONTROL, TOKENS, HIDDEN, DRAFTS = "CONTROL", "TOKENS", "HIDDEN", "DRAFTS"
LOGPROBS = "LOGPROBS"
TARGET_MODEL, DRAFT_MODEL, ENSEMBLE_MODEL = "inkling_target", "inkling_mtp", "spec_ensemble"
MODELS = (TARGET_MODEL, DRAFT_MODEL, ENSEMBLE_MODEL)

# tensor name -> (Triton data type, dims); a test holds each config.pbtxt equal to these.
TARGET_TENSORS = (
    {CONTROL: ("TYPE_INT32", (-1,))},
    {
        TOKENS: ("TYPE_INT32", (-1,)),
        HIDDEN: ("TYPE_INT32", (-1, -1)),
        LOGPROBS: ("TYPE_INT32", (-1, -1)),
    },
)
DRAFT_TENSORS = (
    {CONTROL: ("TYPE_INT32", (-1,)), HIDDEN: ("TYPE_INT32", (-1, -1))},
    {DRAFTS: ("TYPE_INT32", (-1,))},
)


class Kind(IntEnum):
    """A paged cache kind. The page table of a sequence has one row of pages per kind."""

    FULL = 0  # keys and values, every position
    LOCAL = 1  # keys and values, the last W - 1 positions
    CONV = 2  # inputs of the four short convolutions of a layer, the last 3 positions


RING_SPARE = 32  # rows of a draft ring beyond the D - 1 that one step may have to replay


def ring_rows(num_depths: int) -> int:
    """Target states the draft keeps per sequence: a window can reach back this far without new rows."""
    return num_depths - 1 + RING_SPARE


def table(width: int) -> np.ndarray:
    return field(default_factory=lambda: np.empty((0, width), np.int32), metadata={"width": width})


def vector() -> np.ndarray:
    return field(default_factory=lambda: np.empty(0, np.int32), metadata={"width": 0})


@dataclass(frozen=True)
class SlotOptions:
    """What a model keeps for a slot from its opening on. One ``opens`` record (OPEN_WIDTH words)."""

    slot: int
    num_depths: int  # D_s: depths whose caches this sequence keeps; 0: never drafted
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    min_position: int = 0  # ids listed in ``masks`` may not be drawn for a position below this one
    repetition_penalty: float = 1.0  # 1: off. Penalties, bias and bad words shape the target's rows only
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_length: int = 0  # ids from this position on are output
    log_probs: int = 0  # of drawn tokens. 0: none; n: the token's and the n - 1 likeliest
    prompt_log_probs: int = 0  # the same of ``scores``

    def words(self) -> list[int]:
        floats = [self.temperature, self.top_p, self.min_p]
        floats += [self.repetition_penalty, self.presence_penalty, self.frequency_penalty]
        bits = np.array(floats, np.float32).view(np.int32)
        seed = np.array([self.seed & (2**64 - 1)], np.uint64).view(np.int32)
        return [self.slot, self.num_depths, bits[0], self.top_k, bits[1], bits[2], seed[0], seed[1],
                self.min_position, *bits[3:], self.prompt_length, self.log_probs, self.prompt_log_probs]  # fmt: skip

    @classmethod
    def from_words(cls, words: np.ndarray) -> SlotOptions:
        temperature, top_p, min_p, *penalties = words[[2, 4, 5, 9, 10, 11]].copy().view(np.float32).tolist()
        seed = int(words[6:8].copy().view(np.uint64)[0])
        min_position, *lengths = words[[8, 12, 13, 14]].tolist()
        return cls(int(words[0]), int(words[1]), temperature, int(words[3]), top_p, min_p,
                   seed, min_position, *penalties, *lengths)  # fmt: skip


OPEN_WIDTH = 15


@dataclass
class Step:
    """Fields both step messages share. All arrays int32; ``table(w)`` fields have shape [n, w]."""

    generation: int  # of the target process; another one means that it restarted
    step: int
    previous_step: int  # the last step the receiver must have executed; 0: none, forget every slot
    opens: np.ndarray = table(OPEN_WIDTH)  # SlotOptions.words(); opening clears the slot's page tables
    masks: np.ndarray = table(2)  # (slot, token id): see SlotOptions.min_position
    closes: np.ndarray = vector()  # slots
    pages: np.ndarray = table(
        5
    )  # (slot, kind, index in the table, page, fresh): a fresh page is zeroed first


@dataclass
class TargetStep(Step):
    """``segments``: (slot, first position, rows, draws). A segment's rows are consecutive positions of one
    sequence; tokens are drawn for its last ``draws`` rows, in row order, for the position after each. The ids of
    the last ``draws - 1`` rows are drafts; all others are committed.

    ``bias``, ``bad_words`` and ``history`` come with the ``opens`` record of a slot. ``history`` holds the ids of
    the positions that the slot's next segment leaves out, from position 0 on, for slots that need their history.
    """

    segments: np.ndarray = table(4)
    ids: np.ndarray = vector()  # [T] input ids, segments one after another
    bias: np.ndarray = table(3)  # (slot, token id, fp32 bits), added to the logit
    bad_words: np.ndarray = table(3)  # (slot, word, token id), the ids of a word in order
    history: np.ndarray = table(2)  # (slot, token id)
    scores: np.ndarray = table(2)  # (row, token id): log probs wanted of this id after this row


@dataclass
class DraftStep(Step):
    """``segments``: (slot, hidden row, hidden position, hidden rows, window first, window end, depths, drafts).

    HIDDEN[hidden row + i] is the state of entry ``hidden position + i`` for i < ``hidden rows``: rows the draft
    may need later are kept in the slot's ring. The first ``depths`` depths run over the entries
    [window first, window end); an empty window runs none. ``drafts`` <= ``depths`` tokens are drawn after the
    last entry. ``ids`` holds, per segment, the known ids of positions window first + 1 .. up to
    ``num_known``; later positions are taken from the drafts of the same call. Known ids of a segment:
    with ``drafts`` or a last prompt chunk: window end - window first; otherwise
    window end - window first + depths - 1 (the depths look ahead of the chunk). A sequence may give up its last
    depths for good: from then on no window runs them.
    """

    segments: np.ndarray = table(9)  # the ninth word is the segment's number of known ids
    ids: np.ndarray = vector()


_MAGIC = {TargetStep: 0x494E4B54, DraftStep: 0x494E4B44}  # "INKT", "INKD"
KEY_WORDS = 8
_HEADER = 4 + KEY_WORDS  # magic, key, generation, step, previous step; then one length per array field


@cache
def _sections(kind: type) -> tuple[list[str], list[int]]:
    """Names of the array fields and words of a record; 0: a vector."""
    arrays = [f for f in fields(kind) if f.metadata]
    return [f.name for f in arrays], [f.metadata["width"] for f in arrays]


def pack(message: TargetStep | DraftStep, key: np.ndarray) -> np.ndarray:
    """The CONTROL vector, INT32 [words]. ``key``: INT32 [8], the private key of the run folder."""
    names, _ = _sections(type(message))
    arrays = [getattr(message, name) for name in names]
    head = [_MAGIC[type(message)], *key.tolist(), message.generation, message.step, message.previous_step]
    head = np.array(head + [len(a) for a in arrays], np.int32)
    return np.concatenate([head, *(a.ravel() for a in arrays if len(a))], dtype=np.int32)


def control_key(words: np.ndarray) -> bytes:
    """The key a CONTROL vector carries; empty when it is too short to hold one."""
    return words[1 : 1 + KEY_WORDS].tobytes() if words.size > _HEADER else b""


def control_step(words: np.ndarray) -> int:
    """The step number a CONTROL vector carries."""
    return int(words[2 + KEY_WORDS])


def unpack(kind: type, words: np.ndarray) -> TargetStep | DraftStep:
    """Inverse of ``pack``. Raises ProtocolError on a foreign or truncated vector."""
    if words.size < _HEADER or int(words[0]) != _MAGIC[kind]:
        raise ProtocolError(f"CONTROL of {words.size} words is not a {kind.__name__}")
    names, widths = _sections(kind)
    start = _HEADER + len(names)
    *_, generation, step, previous = words[:_HEADER].tolist()
    lengths = words[_HEADER:start].tolist()
    sizes = [n * (w or 1) for n, w in zip(lengths, widths, strict=False)]
    if len(lengths) < len(names) or min(lengths) < 0 or start + sum(sizes) != words.size:
        raise ProtocolError(f"CONTROL of {words.size} words does not hold sections of {lengths} records")
    arrays = {}
    for name, length, width, size in zip(names, lengths, widths, sizes, strict=True):
        if size:  # the default is empty
            part = words[start : start + size]
            arrays[name] = part.reshape(length, width) if width else part
            start += size
    return kind(generation, step, previous, **arrays)
