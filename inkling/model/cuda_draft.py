"""The draft's process on CUDA: what ``inkling.model.runner.DraftRunner`` is on the CPU, with the same interface.

All windows of a step run through all depths that one of them wants: the ids of depth k + 1 are what depth k drew on
the device, so the host waits once, for the drafts. A window that wants fewer depths leaves entries in caches of
depths that it is to run again before they count; the windows of the next steps begin there or earlier.

The draft need not be row-exact: its bits never reach an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.cache import PagedCache
from inkling.model.cuda_graphs import DeviceStream, Report, StepGraphs, bucket_of, bucket_sizes
from inkling.model.cuda_layer import CudaLayer, CudaPass
from inkling.model.cuda_pass import ArrayTypes, CudaPasses
from inkling.model.slots import Slots, positions_per_slot
from inkling.model.weights import DraftWeights
from inkling.protocol import DraftStep, Kind, ring_rows, unpack
from inkling.step_clock import StepClock
from kernels.cuda.draft_rows import depth_ids, keep_states, window_states
from kernels.cuda.head import Noise, allocate_drawn, head_draw, head_logits
from kernels.cuda.norm import dual_norm_cat, rms_norm
from kernels.cuda.products import linear
from kernels.cuda.router import launch_sizes
from kernels.cuda.rows_meta import Rows
from kernels.cuda.sampling import sample
from kernels.sampling import SamplingRows

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed")


class ChainKey(NamedTuple):
    """The size of a chain of depths."""

    sequences: int
    rows: int
    depths: int
    has_filters: bool  # a window draws with top_k, top_p or min_p


class CudaDraftRunner:
    def __init__(
        self,
        config: ModelConfig,
        weights: DraftWeights,  # bf16, on the device
        embed: Tensor,  # [V, H], the target's
        head: Tensor,  # [V', H], the target's
        *,
        generation: int,
        num_slots: int,
        max_context: int,
        num_draft_tokens: int,
        page_size: Mapping[Kind, int],
        num_pages: Mapping[Kind, int],
        max_tokens_per_step: int,
    ):
        device, num_depths = embed.device, len(weights.depths)
        positions = positions_per_slot(max_context, num_draft_tokens)
        geometries = [config.depth_geometry(k) for k in range(num_depths)]
        self.config, self.weights, self.embed, self.head = config, weights, embed, head
        self.layers = [
            CudaLayer.build(depth.block, geometry, config, num_draft_tokens + 1)
            for depth, geometry in zip(weights.depths, geometries, strict=True)
        ]
        self.cache = PagedCache(
            geometries, config.hidden_size, page_size, num_pages, dtype=torch.bfloat16, device=device
        )
        self.slots = Slots(num_slots, positions, page_size, generation)
        self.ring_rows = ring_rows(num_depths)
        self.ring = torch.zeros(
            num_slots * self.ring_rows, config.hidden_size, dtype=torch.bfloat16, device=device
        )
        rows = max_tokens_per_step + num_slots * self.ring_rows  # a step's own entries, and all that waited
        self.passes = CudaPasses(
            config, config.mtp_is_local[:num_depths], self.slots.tables, max_rows=rows,
            max_segment_rows=max(1, 2 * num_depths), max_keys=positions,
            arrays=_draft_arrays(num_slots, num_depths, rows), device=device,
        )  # fmt: skip
        self.drafts = torch.zeros(max(1, num_depths), num_slots, dtype=torch.int32, device=device)
        self._host_drafts = torch.zeros(
            self.drafts.shape, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._drawn = allocate_drawn(num_slots, head)
        self.stream = DeviceStream(device)
        self.graphs = StepGraphs(self.stream, self._run_regular, "draft")
        self.clock = StepClock()
        self._sequence_sizes = bucket_sizes(num_slots)
        self._depth_sizes = bucket_sizes(num_depths) if num_depths else []

    def capture(self, report: Report = lambda line: None) -> None:
        """Warms up and captures a graph for every size of a chain whose windows are those of decoding."""
        keys = [
            ChainKey(sequences, rows, depths, has_filters)
            for sequences, depths, has_filters in product(
                reversed(self._sequence_sizes), reversed(self._depth_sizes), (False, True)
            )
            for rows in reversed(self._row_sizes(sequences, has_filters))
        ]
        host = self.passes.buffer.host
        for name in ("records", "windows_known", "draw_row"):
            host[name][:] = -1
        host["temperature"][:] = 0
        self.passes.write_nothing()
        with torch.inference_mode():
            self.passes.buffer.upload("ids", len(host["ids"]))
            self.graphs.capture(keys, self.warm_prompts, report)

    def warm_prompts(self) -> None:
        """As the target's: windows of every choice of launches, which take their states from the rings."""
        host, num_depths = self.passes.buffer.host, len(self.layers)
        weights = {shape for layer in self.layers for shape in layer.product_shapes()}
        weights |= {tuple(depth.input_proj.shape) for depth in self.weights.depths}
        experts = self.config.num_experts, self.config.num_experts_per_token
        longest = min(self.passes.max_rows, self.passes.num_slots * self.passes.max_keys)
        host["records"][:] = (-1, 0, np.iinfo(np.int32).max, 0)  # no new states, nor any to keep
        host["windows_known"][:] = 0
        with self.stream():
            for num_rows in launch_sizes(tuple(sorted(weights)), experts, longest):
                if num_rows <= self.passes.max_segment_rows:
                    continue  # a graph's
                tiles, sequences = self.passes.write_prompt(num_rows), -(-num_rows // self.passes.max_keys)
                self.passes.buffer.upload("ids", 0)
                rows = self.passes.begin(sequences, num_rows)
                key = ChainKey(sequences, num_rows, num_depths, False)
                self._run_chain(key, rows, self.passes.mixed(rows, tiles, False), False)
            self.stream.synchronize()

    @torch.inference_mode()
    def step(self, control: np.ndarray, hidden: Tensor) -> np.ndarray:
        """CONTROL (DraftStep) and the target's states bf16 [T, H] -> drafts int32, segment by segment."""
        assert hidden.dtype == torch.bfloat16 and hidden.is_contiguous(), (hidden.dtype, hidden.stride())
        message = unpack(DraftStep, control)
        self.slots.begin(message)
        windows = _Windows(message)
        with self.stream():
            self.passes.write_pages(message.pages)
            self.passes.buffer.host["address"][0] = hidden.data_ptr()
            self._run(windows, message.ids)
            self._host_drafts.copy_(self.drafts, non_blocking=True)
            self.clock.stop()
            self.stream.synchronize()
        drawn = self._host_drafts.numpy()[:, : len(windows.slots)].T  # [segments, depths]
        return drawn[np.arange(drawn.shape[1]) < windows.drafts[:, None]]

    def _run(self, windows: _Windows, ids: np.ndarray) -> None:
        num_segments, num_rows, longest = (
            len(windows.slots),
            int(windows.counts.sum()),
            int(windows.counts.max()),
        )
        has_filters = self._write(windows, ids)
        key = self._graph_key(windows, num_rows, longest, has_filters)
        self.passes.write_segments(
            windows.window_slots, windows.starts, windows.firsts, windows.counts, key.sequences
        )
        self.passes.buffer.host["records"][num_segments : key.sequences, 0] = -1
        self.passes.buffer.host["draw_row"][num_segments : key.sequences] = -1
        self.passes.buffer.host["temperature"][num_segments : key.sequences] = 0
        is_short = longest <= self.passes.max_segment_rows
        tiles = {} if is_short else self.passes.write_tiles(num_segments)
        self.passes.buffer.upload("ids", len(ids))
        self.clock.start()
        if key in self.graphs:
            self.graphs.replay(key)
        elif is_short:
            self._run_regular(key)
        else:
            rows = self.passes.begin(key.sequences, key.rows)
            has_short = int(windows.counts.min()) <= self.passes.max_segment_rows
            self._run_chain(key, rows, self.passes.mixed(rows, tiles, has_short), windows.has_draws)

    def _row_sizes(self, sequences: int, has_filters: bool) -> list[int]:
        """Rows of chains for ``sequences``: a window that drafts in all D depths has D entries, or D + 1 when all of
        the last drafts stood; others have more. Draws with filters cost so much that few rows less save nothing."""
        sizes = {sequences * (len(self.layers) + 1), sequences * self.passes.max_segment_rows}
        return sorted(sizes)[-1:] if has_filters else sorted(sizes)

    def _graph_key(self, windows: _Windows, num_rows: int, longest: int, has_filters: bool) -> ChainKey:
        """The graph that holds the step where there is one, else the step's own size."""
        sequences = bucket_of(self._sequence_sizes, len(windows.slots))
        if windows.are_chained and longest <= self.passes.max_segment_rows and windows.num_depths:
            rows = bucket_of(self._row_sizes(sequences, has_filters), num_rows)
            key = ChainKey(sequences, rows, bucket_of(self._depth_sizes, windows.num_depths), has_filters)
            if key in self.graphs:
                return key
        return ChainKey(len(windows.slots), num_rows, windows.num_depths, has_filters)

    def _write(self, windows: _Windows, ids: np.ndarray) -> bool:
        """Host arrays of a step but the segments; whether a window that draws has filters."""
        host, count, slots = self.passes.buffer.host, len(windows.slots), windows.slots
        host["records"][:count] = windows.records
        host["windows_known"][:count, 0] = np.cumsum(windows.known) - windows.known
        host["windows_known"][:count, 1] = windows.known
        host["ids"][: len(ids)] = ids
        host["draw_row"][:count] = np.where(windows.is_chained, windows.starts + windows.counts - 1, -1)
        temperature = self.slots.temperature[slots]
        host["temperature"][:count] = temperature
        if not temperature.any():
            return False
        for name in ("top_k", "top_p", "min_p"):
            host[name][:count] = getattr(self.slots, name)[slots]
        host["seed"][:count] = self.slots.seed[slots].view(np.int64)
        depths = np.arange(1, host["position"].shape[0] + 1)
        host["position"][:, :count] = windows.ends + depths[:, None]
        is_filtered = (host["top_k"] > 0) | (host["top_p"] < 1) | (host["min_p"] > 0)
        return bool((is_filtered[:count] & (temperature > 0)).any())

    def _run_regular(self, key: ChainKey) -> None:
        rows = self.passes.begin(key.sequences, key.rows)
        self._run_chain(key, rows, self.passes.short(rows, self.passes.max_segment_rows), True)

    def _run_chain(self, key: ChainKey, rows: Rows, batch: Mapping[Kind, CudaPass], has_draws: bool) -> None:
        """States of the windows, then depth by depth."""
        arrays, ring = (
            self.passes.buffer.device,
            (self.ring, self.passes.buffer.device["records"][: key.sequences]),
        )
        hidden_size = self.config.hidden_size
        states = torch.empty(key.rows, hidden_size, dtype=torch.bfloat16, device=self.embed.device)
        if key.rows:
            window_states(arrays["address"], *ring, rows, self.ring_rows, states)
        keep_states(arrays["address"], *ring, self.ring_rows)
        ids = torch.empty(key.rows, dtype=torch.int32, device=self.embed.device)
        for k in range(key.depths):
            depth_ids(k, arrays["windows_known"], arrays["ids"], self.drafts, rows, self.embed.shape[0], ids)
            states = self._run_depth(k, states, ids, batch[self.cache.kinds[k]])
            if has_draws:
                self._draw(k, key, states)

    def _run_depth(self, k: int, states: Tensor, ids: Tensor, batch: CudaPass) -> Tensor:
        """Depth k: ``states`` [T, H] of the depth before and ``ids`` [T] -> states [T, H]."""
        depth, weights, eps = self.weights.depths[k], self.weights, self.config.rms_norm_eps
        both = states.new_empty(states.shape[0], 2 * states.shape[1])
        dual_norm_cat(
            states,
            depth.hidden_norm,
            ids,
            self.embed,
            weights.backbone_embed_norm,
            depth.embed_norm,
            eps,
            both,
        )
        x = linear(both, depth.input_proj)
        normed = rms_norm(x, depth.block.attn_norm, eps, torch.empty_like(x))
        self.layers[k].forward(x, normed, self.cache.layers[k], batch, weights.chain_norm)
        return x if weights.chain_norm is None else normed

    def _draw(self, k: int, key: ChainKey, states: Tensor) -> None:
        """A token after the last entry of each chained window -> ``drafts[k]``."""
        arrays, count, mup = self.passes.buffer.device, key.sequences, self.config.mup_multiplier
        index, tokens = arrays["draw_row"][:count], self.drafts[k, :count]
        options = {name: arrays[name][:count] for name in _OPTIONS}
        position = arrays["position"][k, :count]
        if key.has_filters:
            logits = torch.empty(count, self.head.shape[0], device=states.device)
            head_logits(states, index, self.head, mup, logits)
            unused = torch.empty_like(options["temperature"]), torch.empty_like(options["temperature"])
            sample(logits, SamplingRows(**options, position=position), tokens, *unused)
        else:
            noise = Noise(options["temperature"], options["seed"], position)
            room = replace(self._drawn.first(count), tokens=tokens)
            head_draw(states, index, self.head, mup, noise, room)


def _draft_arrays(num_slots: int, num_depths: int, rows: int) -> ArrayTypes:
    """What a step says of its windows, one entry for each segment."""
    depths = max(1, num_depths)
    return {
        "address": (torch.int64, (1,)),  # of the target's states
        "seed": (torch.int64, (num_slots,)),
        "position": (torch.int64, (depths, num_slots)),  # of the token that each depth draws
        "temperature": (torch.float32, (num_slots,)),
        "top_k": (torch.int32, (num_slots,)),
        "top_p": (torch.float32, (num_slots,)),
        "min_p": (torch.float32, (num_slots,)),
        "records": (torch.int32, (num_slots, 4)),  # slot, first hidden row, its position, hidden rows
        "windows_known": (torch.int32, (num_slots, 2)),  # first known id, known ids
        "draw_row": (torch.int32, (num_slots,)),
        "ids": (torch.int32, (rows + num_slots * depths,)),
    }


class _Windows:
    """The segments of one draft step as arrays [segments]; empty windows have no rows."""

    def __init__(self, message: DraftStep):
        segments = message.segments
        slot, _, _, _, first, end, depths, drafts, known = segments.T
        is_running = (end > first) & (depths > 0)
        self.slots, self.records = slot, segments[:, :4]
        self.window_slots = np.where(is_running, slot, -1)
        self.firsts, self.ends, self.drafts, self.known = first, end, drafts, known
        self.counts = np.where(is_running, end - first, 0)
        self.starts = np.cumsum(self.counts) - self.counts
        self.num_depths = int(depths[is_running].max(initial=0))
        # a window whose ids end with its last entry's own id is continued by drafts
        self.is_chained = is_running & (known == self.counts)
        self.are_chained = bool(self.is_chained[is_running].all())
        self.has_draws = bool(self.is_chained.any())
