"""The law of the cut: tokens are consumed one by one, and an answer ends with the first token at which a stop id,
a completed stop word, ``max_tokens`` or the context ends it. Ids, text, finish reason, counts and what may be
kept for reuse end there, however many tokens a step brought and whatever was drafted beyond.
"""

from __future__ import annotations

import codecs
import math
from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inkling.engine.outbox import Outbox
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.sequence import Sequence
from inkling.engine.verify import accepted_prefix
from inkling.text import TextAssembler
from tests.engine.harness import Bench, RecordedReply
from tests.engine.scripted import TrueModel, mix

MAX_ACCEPTED = 8
NUM_SETS = 1000
STREAM = 30  # tokens that the model has to say, most of them beyond the stop

# Single bytes, whole characters, and pieces that end inside one character and begin inside another.
BYTES = sorted({bytes([b]) for b in "ab né東🙂".encode()})
WHOLE = [text.encode() for text in ("ab", " b", "ba", "é", "na", "東")]
ACROSS = [b"a\xf0\x9f", b"\x82b", b"\xa9a", b"\xc3\xa9n\xc3", b"\x9d\xb1 "]
PIECES = BYTES + WHOLE + ACROSS
EOS, PAD, TOOL = range(len(PIECES), len(PIECES) + 3)
ADDED = {EOS: ("<|eos|>", True), PAD: ("<|pad|>", True), TOOL: ("<tool é>", False)}
VOCAB_SIZE = len(PIECES) + 3


def make_tokenizer() -> Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    vocab = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for content, special in ADDED.values():
        tokenizer.add_tokens([AddedToken(content, special=special)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE and tokenizer.token_to_id("<tool é>") == TOOL
    return tokenizer


TOKENIZER = make_tokenizer()


@dataclass(frozen=True)
class Case:
    """A stop set, and what the model says when nothing stops it. It also says stop ids before the minimum, which
    a target would not draw: they end nothing there."""

    said: tuple[int, ...]
    stop: StopRules
    context: int  # positions left for the answer
    skip_special: bool
    seed: int

    @property
    def room(self) -> int:
        return min(self.stop.max_tokens, self.context)

    @property
    def hidden(self) -> frozenset[int]:
        return self.stop.stop_ids | {EOS}

    def assembler(self) -> TextAssembler:
        stop = self.stop
        return TextAssembler(TOKENIZER, stop.stop_words, self.hidden, self.skip_special, stop.min_tokens)

    def request(self, num_drafts: int = 0) -> GenerateRequest:
        return GenerateRequest((1, 2, 3), SamplingParams(seed=self.seed), self.stop, num_drafts)


def random_case(seed: int) -> Case:
    random = Random(seed)
    weights = [5] * len(BYTES) + [4] * len(WHOLE) + [4] * len(ACROSS) + [1, 2, 2]
    said = random.choices(range(VOCAB_SIZE), weights, k=STREAM)
    for start in range(0, STREAM, 5):  # whole characters, a byte a token, among the broken ones
        if random.random() < 0.6:
            char = random.choice("é東🙂").encode()
            said[start : start + len(char)] = [PIECES.index(bytes([byte])) for byte in char]
    max_tokens = random.choice((STREAM, random.randint(1, STREAM)))
    min_tokens = random.choice((0, 0, random.randint(0, max_tokens)))
    ids = {EOS} if random.random() < 0.8 else set()
    ids |= set(random.sample(said, random.choice((0, 0, 1, 2))))
    text = TOKENIZER.decode(said, skip_special_tokens=False)
    starts = [random.randrange(len(text)) for _ in range(random.choice((0, 0, 1, 2, 3)))]
    words = [text[start : start + random.randint(1, 5)] for start in starts]
    words += random.choice(([], [], ["\ufffd"], ["ab é", "\ufffdb"]))
    context = random.choice((STREAM, random.randint(1, STREAM)))
    stop = StopRules(max_tokens, min(min_tokens, context), frozenset(ids), tuple(words))
    return Case(tuple(said), stop, context, random.random() < 0.7, seed)


def law(case: Case) -> tuple[list[int], str, str]:
    """Ids, text and finish reason, straight from the definition."""

    def visible(ids: tuple[int, ...]) -> list[int]:
        return [i for i in ids if i not in case.hidden and not (case.skip_special and i in (EOS, PAD))]

    def certain(ids: tuple[int, ...]) -> str:
        """The text so far, without the bytes of a character that may still become complete."""
        data = b"".join(PIECES[i] if i < len(PIECES) else ADDED[i][0].encode() for i in visible(ids))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    for count in range(1, case.room + 1):
        ids = case.said[:count]
        before, now = certain(ids[:-1]), certain(ids)
        if count >= case.stop.min_tokens:
            for end in range(len(before) + 1, len(now) + 1):
                starts = [end - len(word) for word in case.stop.stop_words if now[:end].endswith(word)]
                if starts:
                    return list(ids), now[: min(starts)], "stop"
        is_stop_id = ids[-1] in case.stop.stop_ids and count > case.stop.min_tokens
        if is_stop_id or count == case.room:
            text = TOKENIZER.decode(visible(ids), skip_special_tokens=False)
            return list(ids), text, "stop" if is_stop_id else "length"
    raise AssertionError("room for one token at least")


def serve(
    case: Case, sizes: list[int], stream: bool, random: Random
) -> tuple[Sequence, RecordedReply, list[int]]:
    """The answer in steps of ``sizes`` tokens (the last size repeats), sent at random times; and all ids that
    ``emit`` kept, the measure of what goes with each token, such as log probs."""
    reply = RecordedReply()
    outbox = Outbox(reply, stream, 3)
    request, assembler = case.request(MAX_ACCEPTED), case.assembler()
    sequence = Sequence(request, outbox, assembler, max_tokens=case.room, deadline=math.inf)
    kept, start = [], 0
    for step in range(STREAM):
        size = sizes[min(step, len(sizes) - 1)]
        emitted = sequence.emit(list(case.said[start : start + size]))
        start += size
        kept += emitted
        sequence.push(emitted)
        if (sequence.finish_reason or random.random() < 0.5) and (chunk := outbox.drain()):
            reply.send(chunk)
        if sequence.finish_reason:
            return sequence, reply, kept
    raise AssertionError("the answer did not end")


def test_every_way_of_cutting_the_tokens_into_steps_ends_at_the_same_place():
    endings = Counter()
    for seed in range(NUM_SETS):
        case, random = random_case(seed), Random(seed)
        ids, text, reason = law(case)
        endings[reason, bool(case.stop.stop_words)] += 1
        ways = [[accepted + 1] for accepted in range(MAX_ACCEPTED + 1)]
        ways.append([random.randint(1, MAX_ACCEPTED + 1) for _ in range(STREAM)])
        for sizes in ways:
            for stream in (True, False):
                sequence, reply, kept = serve(case, sizes, stream, random)
                assert (reply.ids, reply.text, reply.finish_reason) == (ids, text, reason), (case, sizes)
                assert kept == ids == sequence.ids[3:] and sequence.num_emitted == len(ids)
                assert stream or len(reply.chunks) == 1
                assert all(chunk.finish_reason == "" for chunk in reply.chunks[:-1])
    assert min(endings.values()) > 40 and len(endings) == 4, endings


def test_stops_fall_inside_tokens_and_characters_and_after_the_minimum():
    """The sets above are worth something: each kind of stop occurs among them."""
    kinds = Counter()
    for case in map(random_case, range(NUM_SETS)):
        ids, text, reason = law(case)
        if reason == "length":
            kinds["context" if case.context < case.stop.max_tokens else "max_tokens"] += 1
        elif ids[-1] in case.stop.stop_ids:
            kinds["eos" if ids[-1] == EOS else "stop id"] += 1
        else:
            uncut = TOKENIZER.decode(
                [i for i in ids if i not in case.hidden], skip_special_tokens=case.skip_special
            )
            kinds["inside a token"] += not any(uncut.endswith(word) for word in case.stop.stop_words)
            kinds["ends with a byte of a character"] += ids[-1] < len(BYTES) and PIECES[ids[-1]] > b"\x7f"
            kinds["at the minimum"] += len(ids) == case.stop.min_tokens
    assert len(kinds) == 7 and min(kinds.values()) >= 5, kinds


# Through the engine


class Recited(TrueModel):
    """Says what each case's model has to say; something else once it is off that path."""

    def __init__(self, cases: list[Case]):
        super().__init__(VOCAB_SIZE)
        self._next: dict[tuple[int, int], int] = {}
        for case in cases:
            state = 0
            for token in case.request().prompt_ids:
                state = mix(state, token)
            for token in case.said:
                self._next[case.seed, state] = token
                state = mix(state, token)

    def token(self, state: int, seed: int, masked=()) -> int:
        if (known := self._next.get((seed, state))) is not None:
            return known
        return super().token(state, seed, masked)


def recite(cases: list[Case], accepted: int | None, seed: int = 0) -> tuple[Counter, Bench]:
    """Serves ``cases`` together and holds each to the law; counts (drafted, accepted, kept) of the steps.

    ``accepted``: drafts of each step, all of which stand; None: any number, and some are wrong.
    """
    probability = 0.7 if accepted is None else 1
    bench = Bench(num_drafts=MAX_ACCEPTED, slots=16, probability=probability, seed=seed, model=Recited(cases))
    choice, steps, commit = Random(seed), Counter(), bench.engine._commit

    def counting_commit(plan: list) -> None:
        commit(plan)
        for segment in plan:
            steps[segment.num_drafts, segment.accepted, len(segment.emitted)] += 1
            sequence = segment.sequence
            assert sequence.num_computed <= len(sequence.ids), "states past the cut count as this sequence's"

    bench.engine._commit = counting_commit
    bench.engine.scheduler.draft_length = lambda sequence: min(
        sequence.max_drafts, choice.randint(0, MAX_ACCEPTED) if accepted is None else accepted
    )
    for number, case in enumerate(cases):
        bench.submit(case.request(MAX_ACCEPTED), stream=number % 2 == 0, assembler=case.assembler())
    bench.run()
    bench.check_idle()
    for case, (_, reply) in zip(cases, bench.sent, strict=True):
        assert reply.error is None and (reply.ids, reply.text, reply.finish_reason) == law(case), case
    return steps, bench


# The engine's context is one for all: cases that the context ends are held above.
ENGINE_CASES = [case for case in map(random_case, range(100)) if case.context >= case.stop.max_tokens]


@pytest.mark.parametrize("accepted", [*range(MAX_ACCEPTED + 1), None])
def test_tokens_and_text_past_a_stop_never_appear_whatever_was_drafted_beyond_it(accepted: int | None):
    steps, _ = recite(ENGINE_CASES, accepted)
    beyond = sum(n for (_, stood, kept), n in steps.items() if kept < stood + 1)
    assert (beyond > 5) == (accepted != 0), steps


def test_zero_accepted_is_a_count_and_not_an_index():
    assert accepted_prefix([7, 8], [1, 2, 3]) == 0
    assert accepted_prefix([], [1]) == 0
    cases = ENGINE_CASES[:20]
    bench = Bench(num_drafts=MAX_ACCEPTED, slots=16, probability=0, model=Recited(cases))
    for case in cases:
        bench.submit(case.request(MAX_ACCEPTED), assembler=case.assembler())
    bench.run()
    for case, (_, reply) in zip(cases, bench.sent, strict=True):
        assert (reply.ids, reply.text, reply.finish_reason) == law(case)
        assert all(chunk.total_accepted_draft_tokens == 0 for chunk in reply.chunks)
        assert all(len(chunk.ids) == 1 for chunk in reply.chunks), "one correction a step"
    assert any(reply.chunks[-1].total_draft_tokens for _, reply in bench.sent)
