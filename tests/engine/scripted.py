"""In-memory stand-ins for target and draft that check everything the engine tells them.

``ScriptedTarget`` keeps a running hash of the ids in its paged caches: a token is a function of the ids
before it, so one wrong, missing or stale page, position or id changes what it draws. ``ScriptedDraft``
proposes the true token with a given probability. It gets the true continuation from a callable, which with
``References`` needs nothing of the target's states: it also works beside a real ``TargetRunner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from inkling.engine.pages import CacheLayout, Model
from inkling.engine.request import GenerateRequest
from inkling.protocol import DraftStep, Kind, SlotOptions, TargetStep, ring_rows, unpack
from tests.engine.scripted_slots import ScriptedModel, expect

MASK = (1 << 62) - 1


def mix(state: int, value: int) -> int:
    """The hash of a prefix that is one id longer."""
    return ((state ^ (value + 0x9E37)) * 0x2545F4914F6CDD1D + 0x1B873593) & MASK


class TrueModel:
    """The model both stand-ins imitate: the next token is a hash of all ids so far and the seed."""

    def __init__(self, vocab_size: int = 23):
        self.vocab_size = vocab_size

    def token(self, state: int, seed: int, masked: Iterable[int] = ()) -> int:
        token = (mix(state, seed) >> 17) % self.vocab_size
        while token in masked:
            token = (token + 1) % self.vocab_size
        return token

    def answer(self, request: GenerateRequest, max_context: int = 1 << 30) -> tuple[list[int], str]:
        """Tokens and finish reason of a request served alone, without drafting."""
        stop, seed = request.stop, request.sampling.seed
        room = min(stop.max_tokens, max_context - len(request.prompt_ids))
        state = 0
        for token in request.prompt_ids:
            state = mix(state, token)
        tokens: list[int] = []
        while True:
            before_minimum = len(tokens) < stop.min_tokens
            token = self.token(state, seed, stop.stop_ids if before_minimum else ())
            tokens.append(token)
            if token in stop.stop_ids and not before_minimum:
                return tokens, "stop"
            if len(tokens) == room:
                return tokens, "length"
            state = mix(state, token)


class ScriptedTarget(ScriptedModel):
    """Hidden states are the hashes of the prefixes, int64 [T]."""

    def __init__(self, layout: CacheLayout, model: TrueModel, generation: int = 1, max_rows: int = 1 << 30):
        super().__init__(Model.TARGET, layout, generation, depths=1)
        self.model = model
        self.max_rows = max_rows
        self.rows: list[int] = []  # of every call

    def step(self, control: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        message = unpack(TargetStep, control)
        self.begin(message)
        self.rows.append(len(message.ids))
        expect(0 < len(message.ids) <= self.max_rows, f"{len(message.ids)} rows, {self.max_rows} allowed")
        expect(len(message.ids) == message.segments[:, 2].sum(), "ids and segments differ in length")
        slots = message.segments[:, 0].tolist()
        expect(len(set(slots)) == len(slots), f"slots {slots} repeat")
        tokens: list[int] = []
        states: list[int] = []
        for slot, first, rows, draws in message.segments.tolist():
            expect(slot in self.options, f"rows for slot {slot}, which is not open")
            expect(0 <= draws <= rows and rows > 0, f"{draws} draws of {rows} rows")
            ids = message.ids[len(states) : len(states) + rows].tolist()
            hashes = self._run(slot, first, ids)
            states += hashes
            options = self.options[slot]
            for row in range(rows - draws, rows):
                early = first + row + 1 < options.min_position
                masked = self.masks.get(slot, ()) if early else ()
                tokens.append(self.model.token(hashes[row], options.seed, masked))
        return np.array(tokens, np.int32), np.array(states, np.int64)

    def _run(self, slot: int, first: int, ids: list[int]) -> list[int]:
        history = self.stores[Kind.FULL].read(slot, self.visible(Kind.FULL, first), 0)
        for kind, store in self.stores.items():
            visible = self.visible(kind, first)
            held = store.read(slot, visible, 0)
            expect(bool((held == history[visible]).all()), f"slot {slot}: {kind.name} holds another prefix")
        state = int(history[-1]) if first else 0
        hashes = [state := mix(state, token) for token in ids]
        for kind, store in self.stores.items():
            start = self.stored(kind, first, first + len(ids))
            positions = np.arange(start, first + len(ids))
            store.write(slot, positions, 0, np.array(hashes[start - first :], np.int64))
        return hashes


@dataclass
class DraftSlot:
    known: dict[int, int] = field(default_factory=dict)  # position -> committed id
    final: int = 0  # first entry of the last window
    depths: int = 0  # that are kept: no window runs more, and one that drafts nothing runs all


# (options of the slot, committed ids by position (0 is not among them), position E of the last one, state of
# entry E - 1, n) -> the true ids of positions E + 1 .. E + n, fewer when the answer ends before
Continuation = Callable[[SlotOptions, dict[int, int], int, object, int], list[int]]


class TrueContinuation:
    """From the states that ``ScriptedTarget`` hands over."""

    def __init__(self, model: TrueModel):
        self.model = model

    def __call__(
        self, options: SlotOptions, known: dict[int, int], last: int, state: object, n: int
    ) -> list[int]:
        state = int(state)
        tokens, token = [], known[last]
        for _ in range(n):
            state = mix(state, token)
            tokens.append(token := self.model.token(state, options.seed))
        return tokens


class References:
    """From answers computed before: pairs of a request and the tokens it must get."""

    def __init__(self, answers: Iterable[tuple[GenerateRequest, list[int]]]):
        self._ids: dict[int, list[list[int]]] = {}
        for request, tokens in answers:
            self._ids.setdefault(request.sampling.seed, []).append([*request.prompt_ids, *tokens])

    def __call__(
        self, options: SlotOptions, known: dict[int, int], last: int, state: object, n: int
    ) -> list[int]:
        for ids in self._ids.get(
            options.seed, ()
        ):  # position 0 is unknown here: the first that fits may be wrong
            if len(ids) > last and all(ids[p] == token for p, token in known.items()):
                return ids[last + 1 : last + 1 + n]
        return []


class ScriptedDraft(ScriptedModel):
    """Proposes the true token with ``probability``, else a wrong one; checks windows, ring and caches.

    ``hidden`` may be anything with a length; prefix hashes (int64 arrays) are checked, other states are not.
    """

    def __init__(
        self,
        layout: CacheLayout,
        continuation: Continuation,
        *,
        vocab_size: int,
        num_depths: int,
        probability: float = 0.7,
        seed: int = 0,
        generation: int = 1,
    ):
        super().__init__(Model.DRAFT, layout, generation, depths=num_depths)
        self.continuation = continuation
        self.vocab_size = vocab_size
        self.num_depths = num_depths
        self.probability = probability
        self.random = Random(seed)
        self.true_ids: Callable[[int], list[int]] | None = (
            None  # slot -> committed ids, to check shared pages
        )
        self.slots: dict[int, DraftSlot] = {}
        self.ring: dict[tuple[int, int], tuple[int, object]] = {}  # (slot, row) -> (entry, state)
        self.window_rows: list[int] = []  # entries of each window run

    def _opened(self, options: SlotOptions) -> None:
        expect(
            1 <= options.num_depths <= self.num_depths, f"{options.num_depths} depths of {self.num_depths}"
        )
        self.slots[options.slot] = DraftSlot(depths=options.num_depths)

    def step(self, control: np.ndarray, hidden: object) -> np.ndarray:
        message = unpack(DraftStep, control)
        self.begin(message)
        expect(len(message.segments) > 0, "a draft step without segments")
        drafts: list[int] = []
        start = 0
        for words in message.segments.tolist():
            known = words[8]
            drafts += self._segment(words, message.ids[start : start + known].tolist(), hidden)
            start += known
        expect(start == len(message.ids), f"{len(message.ids)} ids, {start} described")
        return np.array(drafts, np.int32)

    def _segment(self, words: list[int], ids: list[int], hidden: object) -> list[int]:
        slot, hidden_row, hidden_position, hidden_rows, first, end, depths, num_drafts, num_known = words
        expect(slot in self.options, f"a window for slot {slot}, which is not open")
        options, state = self.options[slot], self.slots[slot]
        expect(
            hidden_row >= 0 and hidden_rows > 0 and hidden_row + hidden_rows <= len(hidden), "rows of HIDDEN"
        )
        rows = {hidden_position + i: hidden[hidden_row + i] for i in range(hidden_rows)}
        drafts: list[int] = []
        if end > first:
            self.window_rows.append(end - first)
            expect(1 <= depths <= state.depths and num_drafts <= depths, f"{num_drafts} of {depths} depths")
            expect(first >= state.final and end <= hidden_position + hidden_rows, f"window [{first}, {end})")
            state.final = first
            chained = num_drafts > 0
            new_end = hidden_position + hidden_rows
            expect(not chained or end == new_end, f"states up to {new_end} for a window up to {end}")
            expect(
                num_known == end - first + (0 if chained else depths - 1),
                f"{num_known} ids known",
            )
            if not state.known and first:  # a shared prefix, or a slot opened again
                expect(
                    self.true_ids is not None, f"a first window at {first}, and nobody knows the ids before"
                )
                state.known = dict(enumerate(self.true_ids(slot)[1 : first + 1], 1))
            self._learn(state, first + 1, ids)
            states = self._states(slot, first, end, rows, options)
            self._check_states(state, first, states)
            if chained:
                drafts = self._draft(options, state.known, end, states[-1], max(num_drafts, depths - 1))
            else:
                state.depths = depths  # all that are kept: the others were given up
            self._run(slot, first, end, depths, state.known, drafts)
        else:
            expect(num_drafts == num_known == 0, "an empty window")
        capacity = ring_rows(self.num_depths)
        for entry in list(rows)[-capacity:]:
            self.ring[slot, entry % capacity] = (entry, rows[entry])
        return drafts[:num_drafts]

    def _learn(self, state: DraftSlot, position: int, ids: list[int]) -> None:
        for p, token in enumerate(ids, position):
            expect(state.known.setdefault(p, token) == token, f"id of position {p} changed to {token}")
        expect(len(state.known) == max(state.known), "a hole in the known ids")

    def _states(self, slot: int, first: int, end: int, rows: dict[int, object], options: SlotOptions) -> list:
        waited = min(end, min(rows)) - first
        expect(
            waited <= ring_rows(options.num_depths), f"{waited} entries waited, beyond the ring of this slot"
        )
        states = []
        for entry in range(first, end):
            if entry in rows:
                states.append(rows[entry])
                continue
            held, state = self.ring.get((slot, entry % ring_rows(self.num_depths)), (None, None))
            expect(held == entry, f"slot {slot}: the ring holds entry {held} in place of {entry}")
            states.append(state)
        return states

    @staticmethod
    def _check_states(state: DraftSlot, first: int, states: list) -> None:
        if isinstance(states[0], np.int64):
            for offset in range(1, len(states)):
                follows = mix(int(states[offset - 1]), state.known[first + offset])
                expect(
                    follows == int(states[offset]), f"state of entry {first + offset} is of another prefix"
                )

    def _draft(
        self, options: SlotOptions, known: dict[int, int], last: int, state: object, n: int
    ) -> list[int]:
        true = self.continuation(options, known, last, state, n)
        true = true + [0] * (n - len(true))
        wrong = [(token + self.random.randrange(1, self.vocab_size)) % self.vocab_size for token in true]
        return [t if self.random.random() < self.probability else w for t, w in zip(true, wrong, strict=True)]

    def _run(
        self, slot: int, first: int, end: int, depths: int, known: dict[int, int], drafts: list[int]
    ) -> None:
        """Reads and writes as the depths do. Depth k stores for entry p the id of p + k + 1 that it used."""
        last = max(known)
        ids = known | {last + 1 + i: token for i, token in enumerate(drafts)}
        for kind, store in self.stores.items():
            visible = self.visible(kind, first)
            start = self.stored(kind, first, end)
            for k in range(depths):
                used = store.read(slot, visible, k)
                true = np.array([known[int(p) + k + 1] for p in visible], np.int64)
                expect(
                    bool((used == true).all()), f"slot {slot} depth {k}: a final entry used an id that fell"
                )
                values = [ids[p + k + 1] for p in range(start, end)]
                store.write(slot, np.arange(start, end), k, np.array(values, np.int64))
