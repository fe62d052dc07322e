"""Which entries the draft computes for one sequence, in how many depths.

Entry p pairs the target's hidden state of position p with an id of a later position: depth k takes id p+k+1.
Entry p is *final* when every id its depths used is committed. The draft keeps one number per sequence,
``final``: entries below it are final in all D_s depths. A window always begins there, so no depth has a hole
below ``final`` however many depths earlier windows ran.
"""

from __future__ import annotations

from typing import NamedTuple

from inkling.protocol import ring_rows


class Window(NamedTuple):
    """Entries [first, end) in the first ``depths`` depths, then ``drafts`` tokens. Empty: nothing runs."""

    first: int
    end: int
    depths: int
    drafts: int
    num_known: int  # committed ids the window reads: positions first + 1 .. first + num_known


class DraftWindow:
    """The ``final`` rule for one sequence of ``num_depths`` (D_s >= 1) depths.

    Call ``plan`` after each target step, and ``verified`` with the accepted count after the next one.
    """

    __slots__ = ("num_depths", "final", "_chained_at")

    def __init__(self, num_depths: int, final: int = 0):
        """``final`` > 0: the caches already hold so many final entries, of a shared prefix."""
        self.num_depths = num_depths
        self.final = final
        self._chained_at: int | None = None  # E of the last window if its D_s depths ran on drafts

    def plan(self, num_entries: int, num_known_ids: int, num_drafts: int) -> Window:
        """The window after a target step.

        ``num_entries`` (E): positions whose target state exists; ``num_known_ids`` (L): committed ids, E + 1
        of them unless more of the prompt waits; ``num_drafts`` (n) <= D_s, 0 while prompt waits.
        """
        first, depths = self.final, self.num_depths
        # Hidden states of [final, E) must still be in the ring when the next step brings up to D_s + 1 more.
        ring_is_short = num_entries - first + depths + 1 > ring_rows(depths)
        if num_drafts == 0:
            if not ring_is_short and num_known_ids == num_entries + 1:
                return Window(first, first, 0, 0, 0)
            # Only entries whose ids are committed in every depth: they are final at once.
            end = self.final = max(first, min(num_entries, num_known_ids - depths))
            if end == first:
                return Window(first, first, 0, 0, 0)
            return Window(first, end, depths, 0, end - first + depths - 1)
        if ring_is_short or num_drafts == depths:
            self._chained_at = num_entries
            return Window(first, num_entries, depths, num_drafts, num_entries - first)
        return Window(first, num_entries, num_drafts, num_drafts, num_entries - first)

    def shrink(self, num_depths: int) -> None:
        """Keeps the first ``num_depths`` (>= 1) depths only, for good: the others' caches are not kept up."""
        self.num_depths = min(self.num_depths, num_depths)

    def verified(self, num_accepted: int) -> None:
        """``num_accepted``: drafts of the last window that the target confirmed, 0 when none was tried."""
        if self._chained_at is not None:
            # entry p used ids up to p + D_s; committed now are those up to E + accepted
            entries = self._chained_at
            self.final = max(self.final, min(entries, entries + num_accepted - self.num_depths + 1))
            self._chained_at = None
