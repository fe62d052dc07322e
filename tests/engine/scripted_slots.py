"""What a scripted model process keeps per slot: options, page tables, paged caches, and the order of steps."""

from __future__ import annotations

import numpy as np

from inkling.engine.pages import CacheLayout, Model
from inkling.errors import GenerationError, ProtocolError, StepGapError
from inkling.protocol import Kind, SlotOptions, Step


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(what)


class PagedStore:
    """One cache kind: per place the position it holds and one value per depth."""

    def __init__(self, page_size: int, num_pages: int, depths: int):
        self.page_size = page_size
        self.num_pages = num_pages
        self.tables: dict[int, np.ndarray] = {}  # slot -> page per index, 0 where none is held
        self.position = np.full(num_pages * page_size, -1)
        self.value = np.zeros((depths, num_pages * page_size), np.int64)
        self.used: set[int] = set()  # pages that were ever declared fresh

    def assign(self, slot: int, index: int, page: int, fresh: int) -> None:
        expect(0 < page < self.num_pages, f"page {page} of {self.num_pages}")
        expect(fresh or page in self.used, f"page {page} was never declared fresh")
        if index >= len(self.tables[slot]):
            self.tables[slot] = np.pad(self.tables[slot], (0, index + 1))
        self.tables[slot][index] = page
        if fresh:
            self.used.add(page)
            self.position[page * self.page_size : (page + 1) * self.page_size] = -1

    def places(self, slot: int, positions: np.ndarray) -> np.ndarray:
        indices = positions // self.page_size
        table = self.tables[slot]
        if len(indices) and (indices[-1] >= len(table) or not table[indices].all()):
            raise ProtocolError(f"slot {slot}: of positions {positions} some have no page in {table}")
        return table[indices] * self.page_size + positions % self.page_size

    def write(self, slot: int, positions: np.ndarray, depth: int, values: np.ndarray) -> None:
        places = self.places(slot, positions)
        self.position[places] = positions
        self.value[depth, places] = values

    def read(self, slot: int, positions: np.ndarray, depth: int) -> np.ndarray:
        places = self.places(slot, positions)
        if (self.position[places] != positions).any():
            raise ProtocolError(f"slot {slot}: {positions} hold positions {self.position[places]}")
        return self.value[depth, places]


class ScriptedModel:
    """Slots, page tables and step numbers, as a model process keeps them."""

    def __init__(self, model: Model, layout: CacheLayout, generation: int, depths: int):
        self.layout = layout
        self.generation = generation
        self.options: dict[int, SlotOptions] = {}  # open slots
        self.masks: dict[int, set[int]] = {}
        self.last_step = 0
        self.calls = 0
        self.stores = {
            kind: PagedStore(pool.page_size, pool.num_pages, depths)
            for kind, pool in zip(Kind, layout.pools(model), strict=True)
            if pool.num_pages
        }

    def begin(self, message: Step) -> None:
        self.calls += 1
        if message.generation != self.generation:
            raise GenerationError(f"generation {message.generation}, not {self.generation}")
        if message.previous_step == 0:
            for slot in list(self.options):
                self._forget(slot)
        elif message.previous_step != self.last_step:
            raise StepGapError(f"step {message.step} follows {message.previous_step}, not {self.last_step}")
        expect(message.step > 0, "step 0")
        for slot in message.closes.tolist():
            expect(slot in self.options, f"slot {slot} is closed but was not open")
            self._forget(slot)
        for words in message.opens:
            options = SlotOptions.from_words(words)
            expect(options.slot not in self.options, f"slot {options.slot} is opened twice")
            self.options[options.slot] = options
            for store in self.stores.values():
                store.tables[options.slot] = np.zeros(8, np.int64)
            self._opened(options)
        for slot, token in message.masks.tolist():
            expect(slot in self.options, f"mask for slot {slot}, which is not open")
            self.masks.setdefault(slot, set()).add(token)
        for slot, kind, index, page, fresh in message.pages.tolist():
            expect(slot in self.options, f"page for slot {slot}, which is not open")
            self.stores[Kind(kind)].assign(slot, index, page, fresh)
        self.last_step = message.step

    def _opened(self, options: SlotOptions) -> None:
        pass

    def _forget(self, slot: int) -> None:
        del self.options[slot]
        self.masks.pop(slot, None)
        for store in self.stores.values():
            del store.tables[slot]

    def lose_step(self) -> None:
        """As if another process had taken over its slots: the next message finds a gap."""
        self.last_step = -1

    def visible(self, kind: Kind, first: int) -> np.ndarray:
        """Positions before a pass that its first row reads."""
        reach = self.layout.reach(kind)
        return np.arange(0 if reach is None else max(0, first - reach), first)

    def stored(self, kind: Kind, first: int, end: int) -> int:
        """First row of a pass over [first, end) that the cache keeps."""
        reach = self.layout.reach(kind)
        return first if reach is None else max(first, end - reach - self.layout.num_draft_tokens - 1)
