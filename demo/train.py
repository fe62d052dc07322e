"""Trains the demo checkpoint: an Inkling of about 20M parameters on permissively licensed Python sources.

    python demo/train.py collect  --extra SITE_PACKAGES...   tokenizer, packed ids, prompts, DATA.md
    python demo/train.py train                               one GPU; writes the checkpoint
    python demo/train.py evaluate                            accepted length on the held-out prompts
    python demo/train.py check                               logits against transformers, fp32
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import checkpoint_files
import corpus
import numpy as np
import torch
import torch.nn.functional as F
from evaluate import report
from network import Inkling, MtpConfig, TextConfig
from tokenizers import Tokenizer
from torch import Tensor

DEMO = Path(__file__).resolve().parent
SEQUENCE = 1024  # trained positions
MTP_WEIGHT = 0.3  # of each depth's loss, beside 1.0 for the target's
TEACHER_SHARE = 0.5  # of a depth's loss that is cross-entropy against the target's distribution
BALANCE_STEP = 1e-3  # of the gate bias, per optimizer step


def losses(hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of rows [R, H] against labels [R] and, with teacher logits [R, V'], against those.

    Returns (loss, logits); the logits are those a depth may learn from.
    """
    logits = F.linear(hidden, head)
    log_p = logits.float().log_softmax(-1)
    data = -log_p.gather(-1, labels[:, None]).mean()
    if teacher is None:
        return data, logits
    soft = -(teacher.float().softmax(-1) * log_p).sum(-1).mean()
    return TEACHER_SHARE * soft + (1 - TEACHER_SHARE) * data, logits


def total_loss(net: Inkling, ids: Tensor, head_loss=losses) -> tuple[Tensor, list[Tensor]]:
    """ids [B, T+D+1] -> (loss, its parts, target first). Depth k at entry p predicts id p+k+2."""
    depths = net.mtp.num_nextn_predict_layers
    length = ids.shape[1] - depths - 1
    states = net.hidden(ids[:, :length])
    head = net.head()
    loss, logits = head_loss(states.flatten(0, 1), head, ids[:, 1 : length + 1].flatten(), None)
    parts = [loss]
    teacher = logits.detach().unflatten(0, states.shape[:2])
    for k in range(depths):
        states = net.depth(k, states, ids[:, k + 1 : length + k + 1])
        rows = length - k - 1  # entries whose drafted position has a target row
        part, _ = head_loss(
            states[:, :rows].flatten(0, 1),
            head,
            ids[:, k + 2 : length + 1].flatten(),
            teacher[:, k + 1 :].flatten(0, 1),
        )
        parts.append(part)
        loss = loss + MTP_WEIGHT * part
    return loss, parts


def optimizer_for(net: Inkling, rate: float, fused: bool) -> torch.optim.Optimizer:
    """AdamW; weight decay on projection matrices only, not on tables, norms, scales and convolutions."""
    decayed, plain = [], []
    for name, parameter in net.named_parameters():
        is_table = name.endswith(("embed.weight", "rel_logits_proj.proj"))
        is_matrix = parameter.ndim >= 2 and not name.endswith("sconv.weight") and not is_table
        (decayed if is_matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2 % of the steps, then a cosine to 2 % of the peak."""
    warm_up = max(steps // 50, 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1))))


@torch.no_grad()
def balance(net: Inkling) -> list[float]:
    """Moves every gate bias toward equal load; returns the largest share of an expert, per MoE layer."""
    shares = []
    for layer in net.model.llm.layers[net.text.dense_mlp_idx :]:
        gate = layer.mlp.gate
        gate.bias += BALANCE_STEP * (gate.load.mean() - gate.load).sign()
        shares.append(gate.load.max() / gate.load.sum())
    return shares


@torch.no_grad()
def held_out_metrics(net: Inkling, tokens: Tensor, device: torch.device, batch: int) -> dict[str, list]:
    """Losses on held-out text, and how often a depth's first choice is the target's (true ids as input)."""
    depths = net.mtp.num_nextn_predict_layers
    count = min(len(tokens) // (SEQUENCE + depths + 1), 256)
    rows = tokens[: count * (SEQUENCE + depths + 1)].view(count, -1).long()
    sums, agree, batches = np.zeros(depths + 1), np.zeros(depths), 0
    for ids in rows.split(batch):
        ids = ids.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            states = net.hidden(ids[:, :SEQUENCE])
            target = net.logits(states)
            sums[0] += F.cross_entropy(target.flatten(0, 1), ids[:, 1 : SEQUENCE + 1].flatten()).item()
            choice = target.argmax(-1)
            for k in range(depths):
                states = net.depth(k, states, ids[:, k + 1 : SEQUENCE + k + 1])
                logits = net.logits(states[:, : SEQUENCE - k - 1])
                labels = ids[:, k + 2 : SEQUENCE + 1].flatten()
                sums[k + 1] += F.cross_entropy(logits.flatten(0, 1), labels).item()
                agree[k] += (logits.argmax(-1) == choice[:, k + 1 :]).float().mean().item()
        batches += 1
    return {
        "losses": [round(x, 4) for x in (sums / batches).tolist()],
        "agreement": [round(x, 4) for x in (agree / batches).tolist()],
    }


def train(net: Inkling, data: Path, steps: int, batch: int, peak: float, save_every: int, out: Path) -> dict:
    """Runs the optimizer; returns the training record. On CUDA blocks and losses are compiled."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    arrays = np.load(data / "tokens.npz")
    tokens = torch.from_numpy(arrays["train"].astype(np.int32)).to(device)
    net.to(device).train()
    head_loss = losses
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64  # one variant per kind of block
        head_loss = torch.compile(losses, dynamic=False)
        for layer in [*net.model.llm.layers, *net.model.mtp.layers]:
            layer.compile(dynamic=False)
    optimizer = optimizer_for(net, peak, fused=device.type == "cuda")
    span = torch.arange(SEQUENCE + net.mtp.num_nextn_predict_layers + 1, device=device)
    generator = torch.Generator(device=device).manual_seed(4)
    began = lap = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(tokens) - len(span), (batch,), generator=generator, device=device)
        ids = tokens[starts[:, None] + span].long()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss, parts = total_loss(net, ids, head_loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shares = balance(net)
        if step % 100 == 0 or step == steps - 1:
            shown = " ".join(f"{part.item():.3f}" for part in parts)
            worst = max(share.item() for share in shares)
            now = time.monotonic()
            clock = f"{now - began:.0f} s (+{now - lap:.1f})"
            print(f"step {step} losses {shown} largest expert share {worst:.3f} {clock}", flush=True)
            lap = now
        if save_every and step and step % save_every == 0:
            checkpoint_files.write(net, out)
    seconds = time.monotonic() - began
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seconds": round(seconds, 1),
        "steps": steps,
        "tokens": steps * batch * SEQUENCE,
        "corpus_tokens": len(tokens),
        "sequences_per_step": batch,
        "peak_learning_rate": peak,
        "last_step_losses": [round(part.item(), 4) for part in parts],
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def evaluate(checkpoint: Path, new_tokens: int, held_out: np.ndarray | None) -> dict:
    """Figures of the files as written, in fp32: losses on held-out ids (when given), accepted length."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    net = checkpoint_files.read(checkpoint).to(device)
    figures = {}
    if held_out is not None:
        figures["held_out"] = held_out_metrics(net, torch.from_numpy(held_out.astype(np.int32)), device, 16)
    prompts = held_out_prompts(checkpoint)
    figures |= {"prompts": len(prompts), "new_tokens": new_tokens}
    figures["acceptance"] = report(net, prompts, new_tokens)
    return figures


def held_out_prompts(checkpoint: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [tokenizer.encode(p["text"]).ids for p in json.loads((DEMO / "prompts.json").read_text())]


def check(checkpoint: Path) -> None:
    """Compares fp32 logits of this network and of transformers on held-out prompts; raises above 1e-3."""
    from transformers import InklingConfig, InklingForConditionalGeneration, InklingVisionConfig

    config = InklingConfig.from_pretrained(checkpoint)
    tower = {"patch_size": 4, "num_hidden_layers": 4, "text_hidden_size": config.text_config.hidden_size}
    config.vision_config = InklingVisionConfig(**tower)  # unused; transformers would build one of 1.5 TB
    reference = InklingForConditionalGeneration.from_pretrained(
        checkpoint, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    net = checkpoint_files.read(checkpoint)
    prompts = held_out_prompts(checkpoint)
    whole = sum(prompts, [])[:1000]  # beyond window, extent and log-scaling floor
    for ids in [*prompts[:4], prompts[0][:1], whole]:
        with torch.inference_mode():
            ours = net.logits(net.hidden(torch.tensor([ids])))
            theirs = reference(input_ids=torch.tensor([ids])).logits[..., : ours.shape[-1]]
        error = (ours - theirs).abs().max().item()
        print(f"{len(ids)} tokens: largest difference {error:.2e} of {theirs.abs().max().item():.1f}")
        if not error < 1e-3:
            raise RuntimeError(f"logits differ from transformers by {error:.2e}, bound 1e-3")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("stage", choices=["collect", "train", "evaluate", "check"])
    parser.add_argument("--data", type=Path, default=Path("build/demo-data"), help="folder of the packed ids")
    parser.add_argument("--extra", nargs="*", default=[], help="more site-packages folders to collect from")
    parser.add_argument("--out", type=Path, default=DEMO / "checkpoint", help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=4600)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=int, default=0, help="steps between unfinished checkpoints")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens generated per prompt in evaluate")
    args = parser.parse_args()

    text = TextConfig()
    if args.stage == "collect":
        corpus.prepare(args.data, args.out, DEMO, args.extra, text.unpadded_vocab_size)
    elif args.stage == "train":
        args.out.mkdir(parents=True, exist_ok=True)
        if not (args.out / "tokenizer.json").exists():
            shutil.copy(DEMO / "checkpoint" / "tokenizer.json", args.out)
        torch.manual_seed(0)
        net = Inkling(text, MtpConfig())
        record = train(net, args.data, args.steps, args.batch, args.rate, args.save_every, args.out)
        checkpoint_files.write(net, args.out)
        held_out = np.load(args.data / "tokens.npz")["held_out"]
        record |= evaluate(args.out, args.new_tokens, held_out)
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record, indent=1))
    elif args.stage == "evaluate":
        print(json.dumps(evaluate(args.out, args.new_tokens, None), indent=1))
    else:
        check(args.out)


if __name__ == "__main__":
    main()
