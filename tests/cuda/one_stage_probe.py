"""On a GPU: do one-stage launches of decode attention give other bits, and other ones each time? Lines, no verdict."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.cuda.relative_attention import AttentionConfig, Heads, Launch
from tests.cuda.test_relative_attention import Sequences

HEADS = Heads(32, 8, 128, extent=1024)
LONE = AttentionConfig(segment=128, block_keys=128, narrow=Launch(True, 4, 2))
CASES = {
    "128 / 128, 1 stage: the fence is late": (LONE, Launch(True, 4, 1)),
    "128 / 128, 1 stage, 8 warps": (LONE, Launch(True, 8, 1)),
    "256 / 64, 1 stage: a barrier follows the fence": (AttentionConfig(), Launch(True, 4, 1)),
}


def main(repeats: int = 20) -> None:
    sequences = Sequences.draw(HEADS, [4096] * 8, "cuda")
    rows = [(slot, 4095, 1) for slot in range(8)]
    for name, (config, launch) in CASES.items():
        wanted = sequences.attend(rows, "decode", config)
        tried = [sequences.attend(rows, "decode", replace(config, narrow=launch)) for _ in range(repeats)]
        wrong = [int((x.view(torch.int16) != wanted.view(torch.int16)).sum()) for x in tried]
        nan = [int(x.isnan().sum()) for x in tried]
        print(f"{name}: differing {wrong} of {wanted.numel()}, NaN {nan}", flush=True)


if __name__ == "__main__":
    main()
