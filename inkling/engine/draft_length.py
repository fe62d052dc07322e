"""How many tokens the sequences of a step draft: always all, or what gives the most tokens per second.

Any answer is exact, so ``auto`` may learn as it goes: from verification, how often depth k's draft stands once
those before it stood (a_k); from the clock, what a step costs. With n drafts for each of B sequences a step
emits B (1 + a_1 + a_1 a_2 + ... + a_1 .. a_n) tokens, and its cost follows from B (n + 1) target rows and n
depths of B n entries and one for each accepted draft. The n with the best ratio is used. For newcomers the
ratio also counts prompts: of this traffic, as far as its sequences have ended, a token brings r prompt rows and s
steps that carry some. They take r n c seconds in the depths, for c seconds a row and depth, and in these steps the
target has r / s rows more.

A depth is either kept up for the whole life of a sequence or given up for good, because an entry that was left
out cannot be computed later. Depths that no step uses cost time, so a sequence keeps them only as long as that
is affordable. All that is not the best known choice (trying another n, keeping spare depths) is paid from one
purse, into which EXPLORATION of the time flows.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from inkling.engine.load import Load, Prompts
from inkling.engine.step_cost import MAX_PROMPT_SHARE, MIN_SECONDS, StepCosts
from inkling.protocol import ring_rows

if TYPE_CHECKING:
    from inkling.engine.scheduler import Segment
    from inkling.engine.sequence import Sequence

EXPLORATION = 0.008  # of the time, for what is not the best known choice
PURSE_STEPS = 30.0  # the most it holds, in steps
FIRST_STEPS = 4.0  # what it holds at first, in steps
REVIEW_STEPS, TRIAL_STEPS = 8, 32  # steps between two looks at all lengths; between two trials of a neighbour
SURE_TRIES, SURE_STEPS = 32, 40  # no depth is given up before so many verifications of it, or so many steps
MEMORY = 512  # verifications of a depth that count (for one sequence; a few steps' worth for more)
FADE = 1 / 128  # of the evidence on a depth that no step tries, per step: it may be worth another look
TRAFFIC_FADE = 1 / 2048  # of prompt rows, tokens and steps with prompts, per step
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.3, 1.0  # of the first depth
DOUBT, MIN_VARIANCE = 1.0, 0.05
SWITCH_GAIN = 1.01  # another length must be so much better


class DraftLength:
    """Fixed: every sequence drafts all it may. ``clock`` gives seconds."""

    is_auto = False

    def __init__(self, num_depths: int, clock: Callable[[], float] = time.perf_counter):
        self.num_drafts = num_depths  # of the next step, for each sequence
        self.num_depths = num_depths  # a sequence that keeps more gives them up
        self.target_s = self.draft_s = 0.0  # seconds of all calls so far
        self._clock = clock
        self._started = 0.0

    def call_starts(self) -> None:
        """Before either call."""
        self._started = self._clock()

    def target_ran(self, rows: int, prompt_rows: int, sequences: int) -> float:
        """After the target's call; returns its seconds."""
        seconds = self._clock() - self._started
        self.target_s += seconds
        return seconds

    def draft_ran(self, segments: list[int]) -> float:
        """After the draft's, with the words of its segments (``DraftStep.segments``); returns its seconds."""
        seconds = self._clock() - self._started
        self.draft_s += seconds
        return seconds

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence's drafts of a step, and how many stood."""

    def ended(self, prompts: Prompts) -> None:
        """A sequence is gone."""

    def choose(self, load: Load) -> None:
        """Sets ``num_drafts`` and ``num_depths``."""

    def prompt_depths(self, num_depths: int, rows: int) -> int:
        """Depths that a sequence with ``rows`` more prompt rows shall keep, of the ``num_depths`` it has."""
        return num_depths


class AutoDraftLength(DraftLength):
    """Learns and chooses."""

    is_auto = True

    def __init__(self, num_depths: int, clock: Callable[[], float] = time.perf_counter):
        super().__init__(num_depths, clock)
        self.max_depths = num_depths
        self.costs = StepCosts(num_depths)
        self.best = num_depths  # the best length, were every sequence to have that many depths
        self.kept = num_depths  # the best with the depths that they have
        self.hope = num_depths  # a longer one that may be better for all that is known; else the best
        self._tried = [0.0] * num_depths  # evidence on each depth: verifications, of which
        self._stood = [0.0] * num_depths  # ... so many stood
        self._counts: Counter[tuple[int, int]] = Counter()  # (verified, accepted) since the last review
        self._calls: list[tuple[Callable[..., None], tuple]] = []  # since then: what learns, from what
        self._ended, self._emitted = Prompts(), 0.0  # of late: prompts of sequences that are gone; tokens of all
        self._just_ended: list[Prompts] = []  # since the last choice: their last step may not be counted yet
        self._step_started = 0.0
        self._called_s = 0.0  # seconds of both calls since ``_step_started``
        self._steps = 0  # choices so far
        self._first_lengths: list[int] = []  # still to be tried at this load, the longest first
        self._largest_load = 0  # sequences
        self._next_trial = self._trial = 0
        self._reviewed: tuple[int, tuple[int, int, int]] = (-REVIEW_STEPS, (0, 0, 0))
        self._rates: list[float] = []  # tokens per second by length, of the sequences as they are
        self._step_s = 0.0  # seconds of a step of that length
        self._purse: float | None = None  # seconds; None: nothing is known yet

    # What happened.

    def target_ran(self, rows: int, prompt_rows: int, sequences: int) -> float:
        seconds = super().target_ran(rows, prompt_rows, sequences)
        if self._step_started:
            self._calls.append(
                (self.costs.add_rest, (max(0.0, self._started - self._step_started - self._called_s),))
            )
        self._step_started, self._called_s = self._started, seconds
        self._calls.append((self.costs.add_target, (rows, prompt_rows, sequences, seconds)))
        return seconds

    def draft_ran(self, segments: list[int]) -> float:
        seconds = super().draft_ran(segments)
        self._called_s += seconds
        self._calls.append((self._add_draft, (segments, seconds)))
        return seconds

    def _add_draft(self, segments: list[int], seconds: float) -> None:
        deepest = rows = prompt_rows = 0
        for first, end, depths, drafts in zip(*(segments[word::9] for word in (4, 5, 6, 7)), strict=True):
            deepest = max(deepest, depths)
            rows += depths * (end - first)
            is_prompt = not drafts or end - first > 2 * self.max_depths + 1  # or backlog
            prompt_rows += depths * (end - first) * is_prompt
        if prompt_rows <= MAX_PROMPT_SHARE * rows:
            self.costs.add_draft(deepest, rows / max(1, deepest), seconds)
        else:
            self.costs.add_prompt(prompt_rows, seconds, deepest, (rows - prompt_rows) / deepest)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self._counts[num_drafts, num_accepted] += 1

    def acceptance(self, depth: int, doubt: float = 0.0) -> float:
        """a_k: the share of depth ``depth``'s drafts that stand once those before them stood.

        A depth of which little was seen is taken to be like the one before it. ``doubt``: standard errors to add
        (of a share, with a floor on its variance).
        """
        prior = self.acceptance(depth - 1) if depth else PRIOR_ACCEPTANCE
        tried = self._tried[depth] + PRIOR_WEIGHT
        share = (self._stood[depth] + prior * PRIOR_WEIGHT) / tried
        if not doubt:
            return share
        return min(1.0, share + doubt * math.sqrt((share * (1 - share) + MIN_VARIANCE) / tried))

    def _learn(self, num_sequences: int, num_steps: int) -> None:
        """From the last ``num_steps`` steps at once: in every step it would take 1 % of a short one on a CPU."""
        for learn, what in self._calls:
            learn(*what)
        self._calls.clear()
        tried, stood = [0] * self.max_depths, [0] * self.max_depths
        for (num_drafts, accepted), count in self._counts.items():
            for k in range(min(num_drafts, accepted + 1)):
                tried[k] += count
                stood[k] += count if k < accepted else 0
        self._counts.clear()
        memory = MEMORY + 4 * num_sequences
        for k in range(self.max_depths):
            keep = max(0.0, 1 - (tried[k] / memory if tried[k] else num_steps * FADE))
            self._tried[k] = self._tried[k] * keep + tried[k]
            self._stood[k] = self._stood[k] * keep + stood[k]

    # What follows from it.

    def ended(self, prompts: Prompts) -> None:
        self._just_ended.append(prompts)

    def choose(self, load: Load) -> None:
        self._emitted = (1 - TRAFFIC_FADE) * self._emitted + load.tokens
        self._ended.scale(1 - TRAFFIC_FADE)
        for prompts in self._just_ended:
            self._ended.add(prompts)
        self._just_ended.clear()
        if not load.asked:
            return
        self._steps += 1
        if load.num_drafting >= 2 * self._largest_load and load.drafting:  # nothing is known of such loads
            self._largest_load = load.num_drafting
            self._first_lengths = 2 * list(range(self.max_depths + 1))
        if self._first_lengths and load.drafting:
            self.num_drafts, self.num_depths = min(load.depths, self._first_lengths.pop()), self.max_depths
            return
        shape = (load.asked.total(), load.num_drafting, load.depths)
        since, last_shape = self._reviewed
        if self._steps - since >= REVIEW_STEPS or shape != last_shape:
            self._learn(load.num_drafting, self._steps - since)
            if not self.costs:
                return
            self._review(load)
            self._reviewed = (self._steps, shape)
        self._spend(load)

    def prompt_depths(self, num_depths: int, rows: int) -> int:
        if self._purse is None or num_depths <= self.best or not self._is_sure(self.best):
            return num_depths
        depths = min(self.hope, num_depths)
        extra = self.costs.prompt_row * rows * (depths - self.best)
        if depths <= self.best or self._purse < extra + self._step_s:  # trials of them must be affordable too
            return self.best
        self._purse -= extra
        return depths

    def _is_sure(self, num_depths: int) -> bool:
        """Whether enough was seen of the depths from ``num_depths`` on to give them up."""
        return self._steps >= SURE_STEPS or self._tried[num_depths] >= SURE_TRIES

    def _review(self, load: Load) -> None:
        longest = max(0, min(self.max_depths, load.max_rows // load.asked.total() - 1))
        rates, bold = self._usual_rates(load, longest), self._usual_rates(load, longest, DOUBT)
        self.best = self.hope = _better(self.best, rates)
        if max(bold[self.best :]) > SWITCH_GAIN * rates[self.best]:
            self.hope = max(range(self.best, len(bold)), key=bold.__getitem__)
        self._rates = self._rates_of(load, min(load.depths, longest))
        self.kept = _better(self.kept, self._rates)
        self._step_s = self._seconds(load, self._length, self._length, load.drafts(self._length))
        if self._purse is None:
            self._purse = FIRST_STEPS * self._step_s

    @property
    def _length(self) -> int:
        """The best length, as far as one of the sequences has the depths. Once newcomers get fewer, the others go on
        with theirs while that is the best: the time over their prompts is spent."""
        return min(max(self.best, self.kept), len(self._rates) - 1)

    def _rates_of(self, load: Load, longest: int, doubt: float = 0.0) -> list[float]:
        """Tokens per second of each length, with no more depths than it needs."""
        each = self._each(longest, doubt)
        rates = []
        for n in range(longest + 1):
            entries = load.drafts(n) + sum(
                count * (each[m] - each[m - 1])
                for most, count in load.drafting.items()
                if (m := min(most, n))
            )
            rates.append(self._tokens(load, n, each) / self._seconds(load, n, n, entries))
        return rates

    def _usual_rates(self, load: Load, longest: int, doubt: float = 0.0) -> list[float]:
        """The same were nobody to give up depths, with as many prompts as of late and what they take.

        A sequence's prompt is shared out over its tokens, and how many those are is known when it is gone: until
        then its tokens count, and its prompt does not (else the first of a burst would all seem to be prompt).
        """
        everyone = replace(load, drafting=load.asked, plain=0, prompt_rows=0)
        ended = self._ended
        emitted = max(1.0, self._emitted, ended.tokens)
        depth_s = self.costs.prompt_row * ended.depth_rows / emitted  # of a depth over the prompts, per token
        prompt_rows = ended.rows / ended.steps if ended.steps else 0.0  # in a step that has some
        usual = []
        for n, rate in enumerate(self._rates_of(everyone, longest, doubt)):
            more = self._target_s(everyone, n, prompt_rows) - self._target_s(everyone, n, 0)
            usual.append(1 / (1 / rate + n * depth_s + max(0.0, more) * ended.steps / emitted))  # seconds per token
        return usual

    def _each(self, num_drafts: int, doubt: float = 0.0) -> list[float]:
        """Tokens of one sequence that drafts 0, 1, .. ``num_drafts``."""
        stands, each = 1.0, [1.0]
        for k in range(num_drafts):
            stands *= self.acceptance(k, doubt)
            each.append(each[-1] + stands)
        return each

    @staticmethod
    def _tokens(load: Load, num_drafts: int, each: list[float]) -> float:
        """Expected tokens of a step."""
        return load.plain + sum(count * each[min(most, num_drafts)] for most, count in load.drafting.items())

    def _seconds(self, load: Load, num_drafts: int, depths: int, entries: int) -> float:
        """Of a step with ``entries`` rows in each of ``depths`` depths; 0 entries: no call to the draft."""
        draft = self.costs.draft(depths, entries) if entries else 0.0
        return max(MIN_SECONDS, self._target_s(load, num_drafts, load.prompt_rows) + draft + self.costs.rest)

    def _target_s(self, load: Load, num_drafts: int, prompt_rows: float) -> float:
        sequences = load.plain + load.num_drafting
        return self.costs.target(sequences + load.drafts(num_drafts) + prompt_rows, prompt_rows, sequences)

    def _loss(self, load: Load, num_drafts: int) -> float:
        """Seconds by which a step of ``num_drafts``, with the windows as they are, is worse than the best."""
        depths = load.depths if load.is_ring_short else num_drafts
        seconds = self._seconds(load, num_drafts, depths, max(1, load.entries))
        tokens = self._tokens(load, num_drafts, self._each(num_drafts))
        return max(0.0, seconds - tokens / self._rates[self._length])

    def _spend(self, load: Load) -> None:
        """Tries another length, keeps spare depths, or neither, as the purse allows."""
        length = self._length
        self._purse = min(self._purse + EXPLORATION * self._step_s, PURSE_STEPS * self._step_s)
        self.num_drafts, self.num_depths = length, self.max_depths
        if not load.drafting:
            return
        if (longer := min(load.depths, self.hope, len(self._rates) - 1)) > length and self._try(load, longer):
            return
        if self._steps >= self._next_trial:
            self._next_trial = self._steps + TRIAL_STEPS
            self._trial += 1
            other = (load.depths, length + 1, length - 1, 0)[self._trial % 4]
            if 0 <= other < len(self._rates) and other != length and self._try(load, other):
                return
        if load.depths > length and not self._afford(self._loss(load, length)) and self._is_sure(length):
            self.num_depths = length

    def _try(self, load: Load, num_drafts: int) -> bool:
        if affordable := self._afford(self._loss(load, num_drafts)):
            self.num_drafts = num_drafts
        return affordable

    def _afford(self, seconds: float) -> bool:
        """Whether the purse has them; they are taken out."""
        if affordable := seconds <= self._purse:
            self._purse -= seconds
        return affordable


def _better(current: int, rates: list[float]) -> int:
    """The length with the best rate; the current one when it is about as good."""
    best = max(range(len(rates)), key=rates.__getitem__)
    if current < len(rates) and rates[best] < SWITCH_GAIN * rates[current]:
        return current
    return best


def choose_lengths(
    lengths: DraftLength, plan: list[Segment], max_rows: int, others: Iterable[Sequence] = ()
) -> list[Sequence]:
    """Chooses for the sequences of the step just committed; they give up the depths that are too many.

    ``others`` had no part in it and will decode along with them soon. Returns those that have none left.
    """
    load, drafting, prompts = Load(max_rows), [], []
    num_prompts = sum(segment.draws <= 1 < segment.rows for segment in plan)
    for segment in plan:
        sequence = segment.sequence
        is_prompt = segment.draws <= 1 and segment.rows > 1  # with its last chunk a sequence decodes next
        tokens = segment.accepted + 1 if segment.draws else 0
        load.tokens += tokens
        sequence.prompts.tokens += tokens
        if is_prompt:
            sequence.prompts.rows += segment.rows
            sequence.prompts.depth_rows += segment.rows if sequence.asked_depths else 0
            sequence.prompts.steps += 1 / num_prompts
        if sequence.finish_reason:
            continue
        load.asked[sequence.asked_depths] += 1
        if is_prompt and sequence.window is not None:
            prompts.append((sequence, segment.rows))
        if sequence.num_uncomputed > 1:  # more prompt
            load.prompt_rows += segment.rows
        elif sequence.window is None or sequence.max_drafts == 0:
            load.plain += 1
        else:
            depths, waiting = sequence.window.num_depths, sequence.num_computed - sequence.window.final
            load.drafting[sequence.max_drafts] += 1
            load.depths = max(load.depths, depths)
            load.entries += depths if is_prompt else waiting
            load.is_ring_short |= not is_prompt and waiting + depths + 1 > ring_rows(depths)
            drafting.append(sequence)
    load.asked.update(sequence.asked_depths for sequence in others)
    lengths.choose(load)
    kept = [(sequence, lengths.num_depths) for sequence in drafting]
    kept += [(s, lengths.prompt_depths(s.window.num_depths, rows)) for s, rows in prompts]
    return [sequence for sequence, depths in kept if _shrink(sequence, depths)]


def _shrink(sequence: Sequence, num_depths: int) -> bool:
    """Gives up the depths beyond ``num_depths``; whether none is left of some."""
    if sequence.window is None or sequence.window.num_depths <= num_depths:
        return False
    sequence.shrink(num_depths)
    return num_depths == 0
