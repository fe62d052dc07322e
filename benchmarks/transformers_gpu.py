"""transformers on the same weights, prompts and machine: ``python -m benchmarks.transformers_gpu``.

It follows ``benchmarks.gpu_serving``, whose server must be gone: the weights are there once only. First the check,
teacher-forced on the served tokens: transformers' likeliest token must be the served one wherever its lead over the
second exceeds 4 times the largest difference seen on that prompt. The differences are of log probs, over the tokens
that our server found likeliest and returned: those that could take the lead.

Then plain ``generate`` and ``generate(use_mtp=True)``, batch 1: tokens per second after the first token, each prompt
in turn. transformers would read the depths from a file for every call; they are handed to it instead.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn

from benchmarks.results import append_rows, git_commit, print_table, read_rows
from benchmarks.serving import bounds
from benchmarks.serving.answers import ANSWERS, Answers, prompt
from benchmarks.serving.answers import TABLE as SERVED
from benchmarks.serving.conditions import conditions, installed
from inkling.config import ModelConfig
from inkling.settings import Settings
from inkling.synthetic_weights import open_checkpoint
from inkling.tensors import MTP, Naming, TensorSpec, draft_tensors, target_tensors
from inkling.testing import renamed, write_config

TABLE = Path(__file__).with_suffix(".csv")
MIN_QUALIFYING = 0.95  # of the positions of a prompt
MARGIN = 4.0  # of the largest difference
MIN_RATIO = {"plain": 35.0, "use_mtp": 12.0}  # of the served tokens per second over transformers'
WARM_TOKENS = 8
COLUMNS = ("what", "prompts", "tokens", "tokens_per_s", "lowest", "highest", "ttft_ms", "accepted_length")
COLUMNS += (
    "served_tokens_per_s",
    "ratio",
    "equal_to_served",
    "differing",
    "qualifying",
    "largest_difference",
    "bound",
)


@dataclass(frozen=True)
class Models:
    target: Any  # InklingForCausalLM
    depths: Any  # MtpModel


def build(checkpoint: str, device: str, dtype: torch.dtype, attention: str, experts: str | None) -> Models:
    """Both from the checkpoint's own tensors, one by one, without a file."""
    from transformers import InklingForCausalLM, InklingTextConfig
    from transformers.modeling_layers import MtpModel

    files, config = open_checkpoint(checkpoint, device), ModelConfig.from_dir(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), replace(config, format="transformers"), text_only=True)
        theirs = InklingTextConfig.from_pretrained(folder)
    theirs._attn_implementation, theirs._experts_implementation = attention, experts
    wide = tuple(InklingForCausalLM._keep_in_fp32_modules_strict)

    def fill(module: nn.Module, specs: Sequence[TensorSpec], prefix: str, tied: set[str]) -> None:
        state: dict[str, Tensor] = {}
        for spec in specs:
            pieces = renamed(spec, files.read(spec.key).to(device), Naming.TRANSFORMERS_TEXT)
            for name, value in pieces.items():
                is_wide = any(part in name for part in wide)
                state[name.removeprefix(prefix)] = value.to(torch.float32 if is_wide else dtype)
        missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
        assert set(missing) <= tied and not unexpected, (missing, unexpected)

    with torch.device("meta"):
        target = InklingForCausalLM(theirs)
    fill(target, target_tensors(config), "", set())
    with torch.device("meta"):
        depths = MtpModel(target, config.mtp_depths)
    tied = {name for name in depths.state_dict() if name.startswith(("embed_tokens.", "shared_head."))}
    fill(depths, draft_tensors(config), MTP, tied)
    target.generation_config.eos_token_id = None
    return Models(target.eval(), depths.eval())


@dataclass
class Arrivals:
    """When ``generate`` gave how many tokens; it takes this for a streamer."""

    start: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def put(self, ids: Tensor) -> None:
        self.times.append(time.monotonic())
        self.counts.append(ids.numel())

    def end(self) -> None:
        self.times, self.counts = self.times[1:], self.counts[1:]  # the first is the prompt


@torch.inference_mode()
def generate(models: Models, ids: list[int], num_tokens: int, use_mtp: bool) -> tuple[list[int], Arrivals]:
    from transformers.modeling_layers import MtpModel

    given = torch.tensor([ids], device=models.target.device)
    arrivals = Arrivals(time.monotonic())
    with patch.object(MtpModel, "from_pretrained", lambda *_, **__: models.depths):
        out = models.target.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            streamer=arrivals,
            **({"use_mtp": True} if use_mtp else {}),
        )
    return out[0, len(ids) :].tolist(), arrivals


@torch.inference_mode()
def teacher_forced(
    model: Any, ids: list[int], served: list[int], top: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Our server's tokens against transformers' choice at every position of the answer."""
    given = torch.tensor([ids + served], device=model.device)
    logits = model(input_ids=given, use_cache=False, logits_to_keep=len(served) + 1).logits[0, :-1]
    theirs = logits.float().log_softmax(-1)  # [P, V']
    ours = torch.tensor([list(row.values()) for row in top], device=theirs.device)  # [P, K]
    tokens = torch.tensor([[int(token) for token in row] for row in top], device=theirs.device)
    largest = (theirs.gather(1, tokens) - ours).abs().max()
    likeliest = theirs.topk(2)
    is_clear = likeliest.values[:, 0] - likeliest.values[:, 1] > MARGIN * largest
    is_other = likeliest.indices[:, 0] != torch.tensor(served, device=theirs.device)
    return {
        "differing": int((is_clear & is_other).sum()),
        "qualifying": round(float(is_clear.float().mean()), 4),
        "largest_difference": round(float(largest), 5),
    }


def check(models: Models, prompts: list[list[int]], scored: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for number, (ids, answer) in enumerate(zip(prompts, scored, strict=True)):
        found = teacher_forced(models.target, ids, answer["ids"], answer["top"])
        holds = not found["differing"] and found["qualifying"] >= MIN_QUALIFYING
        rows.append(
            {"what": f"teacher-forced, prompt {number}", "prompts": 1, "tokens": len(answer["ids"])} | found
        )
        rows[-1]["bound"] = f"{'passed' if holds else 'MISSED'}: 0 differing, {MIN_QUALIFYING:.0%} qualifying"
    return rows


def speed(
    models: Models, use_mtp: bool, prompts: list[list[int]], served: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    """One row. ``served``: our tokens, to be counted as far as they are equal."""
    generate(models, prompts[0], WARM_TOKENS, use_mtp)
    rates, first, lengths, equal = [], [], [], 0
    for ids, ours in zip(prompts, served, strict=True):
        tokens, arrivals = generate(models, ids, num_tokens, use_mtp)
        rates.append(sum(arrivals.counts[1:]) / (arrivals.times[-1] - arrivals.times[0]))
        first.append(arrivals.times[0] - arrivals.start)
        lengths += arrivals.counts[1:]
        equal += sum(a == b for a, b in zip(tokens, ours, strict=False))
    return {
        "what": "use_mtp" if use_mtp else "plain",
        "prompts": len(prompts),
        "tokens": num_tokens,
        "tokens_per_s": round(statistics.median(rates), 2),
        "lowest": round(min(rates), 2),
        "highest": round(max(rates), 2),
        "ttft_ms": round(1e3 * statistics.median(first), 1),
        "accepted_length": round(statistics.mean(lengths), 2),
        "equal_to_served": f"{equal / (num_tokens * len(prompts)):.3f}",
    }


def compare(row: dict[str, Any], rows_served: list[dict[str, str]], is_bound: bool) -> dict[str, Any]:
    """``row`` beside the server's figure at batch 1: plain beside plain, ``use_mtp`` beside the best."""
    rates = [float(r["tokens_per_s"]) for r in rows_served if row["what"] == "use_mtp" or r["drafts"] == "0"]
    if not rates:
        return row
    ratio, least = max(rates) / row["tokens_per_s"], MIN_RATIO[row["what"]]
    compared = {"served_tokens_per_s": max(rates), "ratio": round(ratio, 2)}
    if is_bound:
        compared["bound"] = f"{'passed' if ratio >= least else 'MISSED'}: ratio >= {least:g}"
    return row | compared


def main(
    checkpoint: Annotated[
        str, typer.Option(help="as gpu_serving had it; original names")
    ] = "synthetic:mini?seed=0",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    answers: Annotated[Path, typer.Option(help="written by gpu_serving")] = ANSWERS,
    served: Annotated[Path, typer.Option(help="table of gpu_serving")] = SERVED,
    table: Annotated[Path, typer.Option(help="CSV file the rows are appended to")] = TABLE,
    num_prompts: Annotated[int, typer.Option(help="timed")] = 2,
    num_tokens: Annotated[int, typer.Option(help="of each")] = 64,
    attention: Annotated[str, typer.Option(help="sdpa or eager")] = "sdpa",
    experts: Annotated[
        str | None, typer.Option(help="implementation; default: transformers' own choice")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the prompts, as gpu_serving had it")] = 0,
    commit: Annotated[str, typer.Option(help="shown in the rows; default: git describe")] = "",
) -> None:
    """Checks the served tokens and times transformers."""
    dtype = Settings(checkpoint, device=device).torch_dtype_name
    source = {"checkpoint": checkpoint, "device": device, "seed": seed, "commit": commit or git_commit()}
    scored = Answers(answers, source).scored
    if not scored:
        sys.exit(
            f"{answers} has no scored answers of {source}; run benchmarks.gpu_serving first, with the same"
        )
    vocab_size = ModelConfig.from_dir(checkpoint).vocab_size
    prompts = [prompt(seed, answer["context"], answer["index"], vocab_size) for answer in scored]
    measured_in = conditions(checkpoint, device, dtype, source["commit"])
    same = {name: measured_in[name] for name in ("commit", "checkpoint", "gpu", "dtype")}
    at = {"context": scored[0]["context"], "batch": 1, "error": ""}
    rows_served = read_rows(served, same | at)
    begin = time.monotonic()
    models = build(checkpoint, device, getattr(torch, dtype), attention, experts)
    print(f"built in {time.monotonic() - begin:.1f} s", flush=True)
    measured_in |= {"transformers": installed("transformers"), "attention": attention}
    measured_in |= {"experts": models.target.config._experts_implementation}
    rows: list[dict[str, Any]] = []

    def add(more: list[dict[str, Any]]) -> None:
        rows.extend({name: row.get(name, "") for name in COLUMNS} for row in more)
        append_rows(table, measured_in, rows[-len(more) :])
        print("\n".join(str(row) for row in more), flush=True)

    add(check(models, prompts, scored))
    ours = [answer["ids"] for answer in scored[:num_prompts]]
    for use_mtp in (False, True):
        row = speed(models, use_mtp, prompts[:num_prompts], ours, num_tokens)
        add([compare(row, rows_served, bounds.apply_to(measured_in))])
    print_table(rows)
    sys.exit(any("MISSED" in row["bound"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
