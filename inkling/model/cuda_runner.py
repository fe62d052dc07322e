"""The target's process on CUDA: what ``inkling.model.runner.TargetRunner`` is on the CPU, with the same interface.

A step costs few calls: one copy in, one graph (or, with a prompt in it, the kernels one by one), the draws, one copy
out and the one wait for it. Rows lie packed in the order of the step's segments, so padding is at their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.cache import PagedCache
from inkling.model.cuda_draws import TargetDraws, draw_arrays
from inkling.model.cuda_graphs import DeviceStream, Report, StepGraphs, bucket_of, bucket_sizes
from inkling.model.cuda_layer import CudaLayer, CudaPass
from inkling.model.cuda_pass import CudaPasses
from inkling.model.hidden_ring import RING_SLOTS, output_rows
from inkling.model.scoring import widened
from inkling.model.slots import Slots, positions_per_slot
from inkling.model.token_rules import TokenRules
from inkling.model.weights import TargetWeights
from inkling.protocol import Kind, TargetStep, unpack
from inkling.step_clock import StepClock
from kernels.cuda.norm import embed_norm
from kernels.cuda.router import launch_sizes
from kernels.cuda.step_inputs import hand_out

_NO_SCORES = np.empty((0, 2), np.int32)


class DrawKey(NamedTuple):
    """So many greedy draws after a pass."""

    count: int | None


class CudaTargetRunner:
    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,  # bf16, on the device
        *,
        generation: int,
        num_slots: int,
        max_context: int,
        num_draft_tokens: int,
        page_size: Mapping[Kind, int],
        num_pages: Mapping[Kind, int],
        max_tokens_per_step: int,
        outputs: Tensor | None = None,
    ):
        """``outputs``: bf16 [2 or more, ``output_rows``, H] for the states handed out, used in turn."""
        device = weights.embed.device
        positions = positions_per_slot(max_context, num_draft_tokens)
        geometries = [config.layer_geometry(i) for i in range(config.num_layers)]
        self.config, self.weights = config, weights
        self.layers = [
            CudaLayer.build(layer, geometry, config, num_draft_tokens + 1)
            for layer, geometry in zip(weights.layers, geometries, strict=True)
        ]
        self.cache = PagedCache(
            geometries, config.hidden_size, page_size, num_pages, dtype=torch.bfloat16, device=device
        )
        self.slots = Slots(num_slots, positions, page_size, generation)
        self.rules = TokenRules(weights.head.shape[0], device)
        rows = output_rows(max_tokens_per_step, num_slots, num_draft_tokens)
        if outputs is None:
            outputs = torch.zeros(RING_SLOTS, rows, config.hidden_size, dtype=torch.bfloat16, device=device)
        self.outputs = outputs
        self._states = outputs.flatten(0, 1)  # draws name their rows in all of them
        arrays = {"which_output": (torch.int32, (1,)), **draw_arrays(rows), "ids": (torch.int32, (rows,))}
        self.passes = CudaPasses(
            config, config.layer_is_local, self.slots.tables, max_rows=rows, max_segment_rows=num_draft_tokens + 1,
            max_keys=positions, arrays=arrays, device=device,
        )  # fmt: skip
        self.draws = TargetDraws(
            weights.head, config.mup_multiplier, self.slots, self.rules, self.passes.buffer, rows
        )
        self.stream = DeviceStream(device)
        self.graphs = StepGraphs(self.stream, self._run_key, "target")
        self.clock = StepClock()
        self._sequence_sizes = bucket_sizes(num_slots)
        self._row_sizes = bucket_sizes(num_draft_tokens + 1)
        self._draw_sizes = bucket_sizes(num_slots * (num_draft_tokens + 1))
        self._which = 0

    def capture(self, report: Report = lambda line: None) -> None:
        """Warms up and captures a graph for every size of a step without long segments; 10 to 100 ms each."""
        keys = [(s, r) for s in reversed(self._sequence_sizes) for r in reversed(self._row_sizes)]
        keys += [DrawKey(count) for count in reversed(self._draw_sizes)]
        host = self.passes.buffer.host
        host["ids"][:] = host["draw_row"][:] = -1
        self.passes.write_nothing()
        with torch.inference_mode():
            self.passes.buffer.upload("ids", len(host["ids"]))
            self.graphs.capture(keys, self.warm_prompts, report)

    def warm_prompts(self) -> None:
        """Runs a prompt for every choice of launches, so that they compile and load before a request needs them.

        While no slot is open: the rows land in the null page.
        """
        host, weights = self.passes.buffer.host, [p for layer in self.layers for p in layer.product_shapes()]
        longest = min(len(host["ids"]), self.passes.num_slots * self.passes.max_keys)
        experts = self.config.num_experts, self.config.num_experts_per_token
        with self.stream():
            for num_rows in launch_sizes(tuple(sorted(set(weights))), experts, longest):
                if num_rows <= self.passes.max_segment_rows:
                    continue  # a graph's
                tiles = self.passes.write_prompt(num_rows)
                host["ids"][:num_rows] = 0
                self.passes.buffer.upload("ids", num_rows)
                rows = self.passes.begin(-(-num_rows // self.passes.max_keys), num_rows)
                self._run_layers(self.passes.mixed(rows, tiles, False), num_rows)
            self.stream.synchronize()

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """CONTROL (TargetStep) -> drawn tokens int32 [draws], hidden states bf16 [T, H] on the device.

        The states stand in one of ``outputs``, finished, until the next step but one.
        """
        return self.step_scored(control)[:2]

    @torch.inference_mode()
    def step_scored(self, control: np.ndarray) -> tuple[np.ndarray, Tensor, np.ndarray]:
        """The same, and LOGPROBS int32 [scored, 2 + 2K]."""
        message = unpack(TargetStep, control)
        self.slots.begin(message)
        slots, firsts, counts, draws = message.segments.T
        starts = np.cumsum(counts) - counts
        self._which = message.step % len(self.outputs)  # as the ring of hidden states has it
        hidden = self.outputs[self._which]
        with self.stream():
            self.rules.begin(message)
            self.rules.advance(message)
            self.passes.write_pages(message.pages)
            self._write_draws(slots, starts, firsts, counts, draws)
            self._run(slots, starts, firsts, counts, message.ids)
            drawn_scores = self._draw()
            row, ids = message.scores.T
            segment = np.searchsorted(starts, row, side="right") - 1
            prompt_scores = self.draws.score_prompt(hidden, row, ids, slots[segment]) if len(row) else None
            self.clock.stop()
            self.stream.synchronize()
        tokens = self.draws.tokens()
        return tokens, hidden[: len(message.ids)], _joined(drawn_scores, prompt_scores)

    def _write_draws(
        self, slots: np.ndarray, starts: np.ndarray, firsts: np.ndarray, counts: np.ndarray, draws: np.ndarray
    ) -> None:
        """Each segment draws after its last ``draws`` rows."""
        segment = np.repeat(np.arange(len(slots)), draws)
        nth = np.arange(len(segment)) - (np.cumsum(draws) - draws)[segment]
        offset = (counts - draws)[segment] + nth
        rows = starts[segment] + offset + self._which * self.outputs.shape[1]
        self.draws.write(rows, slots[segment], firsts[segment] + offset + 1)
        if size := bucket_of(self._draw_sizes, len(rows)):
            self.draws.pad(size)

    def _draw(self) -> np.ndarray:
        """After ``_run``; -> scores of the rows whose slot wants them."""
        scores, count = _NO_SCORES, self.draws.num_greedy
        if not count:
            scores = self.draws.run(self._states)
        elif (key := DrawKey(bucket_of(self._draw_sizes, count))) in self.graphs:
            self.graphs.replay(key)
        else:
            self.draws.run_greedy(self._states, count)
        self.draws.copy_tokens()
        return scores

    def _run_key(self, key: tuple[int, int] | DrawKey) -> None:
        if isinstance(key, DrawKey):
            self.draws.run_greedy(self._states, key.count)
        else:
            self._run_short(*key, key[0] * key[1])

    def _run(
        self, slots: np.ndarray, starts: np.ndarray, firsts: np.ndarray, counts: np.ndarray, ids: np.ndarray
    ) -> None:
        """The layers, by a graph where one fits."""
        num_segments, num_rows, longest = len(slots), len(ids), int(counts.max())
        key = bucket_of(self._sequence_sizes, num_segments), bucket_of(self._row_sizes, longest)
        use_graph = key in self.graphs
        capacity, padded = (key[0], key[0] * key[1]) if use_graph else (num_segments, num_rows)
        host = self.passes.buffer.host
        host["which_output"][0] = self._which
        host["ids"][:num_rows] = ids
        host["ids"][num_rows:padded] = -1
        self.passes.write_segments(slots, starts, firsts, counts, capacity)
        is_short = longest <= self.passes.max_segment_rows
        tiles = {} if is_short else self.passes.write_tiles(num_segments)
        self.passes.buffer.upload("ids", padded)
        self.clock.start()
        if use_graph:
            self.graphs.replay(key)
        elif is_short:
            self._run_short(num_segments, longest, num_rows)
        else:
            rows = self.passes.begin(num_segments, num_rows)
            has_short = int(counts.min()) <= self.passes.max_segment_rows
            self._run_layers(self.passes.mixed(rows, tiles, has_short), num_rows)

    def _run_short(self, num_segments: int, max_rows: int, num_rows: int) -> None:
        rows = self.passes.begin(num_segments, num_rows)
        self._run_layers(self.passes.short(rows, max_rows), num_rows)

    def _run_layers(self, batch: Mapping[Kind, CudaPass], num_rows: int) -> None:
        """Ids to states after the final norm, which go to the step's output."""
        arrays, weights, eps = self.passes.buffer.device, self.weights, self.config.rms_norm_eps
        x = torch.empty(num_rows, self.config.hidden_size, dtype=torch.bfloat16, device=weights.embed.device)
        normed = torch.empty_like(x)
        norms = [*(layer.attn_norm for layer in weights.layers), weights.norm]
        embed_norm(arrays["ids"][:num_rows], weights.embed, weights.embed_norm, eps, x, norms[0], normed)
        layers = zip(self.layers, self.cache.layers, self.cache.kinds, norms[1:], strict=True)
        for layer, cache, kind, following in layers:
            layer.forward(x, normed, cache, batch[kind], following)
        hand_out(normed, self.outputs, arrays["which_output"])


def _joined(drawn: np.ndarray, prompt: np.ndarray | None) -> np.ndarray:
    """Both tables of scores, one after the other, as wide as the wider."""
    if prompt is None:
        return drawn
    width = max(drawn.shape[1], prompt.shape[1])
    return np.concatenate([widened(table, (width - 2) // 2) for table in (drawn, prompt)])
