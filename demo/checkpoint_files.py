"""Writes the demo network in the original on-disk format, and reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpus import END_OF_TEXT
from network import Inkling, MtpConfig, TextConfig, config_json
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

SHARD_BYTES = 13 * 2**20
FLOAT32 = ("mlp.gate.bias", "mlp.gate.global_scale")  # everything else is bf16 on disk


def disk_tensors(net: Inkling) -> dict[str, Tensor]:
    """Every tensor under its name on disk, in its dtype on disk.

    Rows of the padded vocabulary get values of ordinary size, so that a reader that forgets to cut them is
    caught rather than lucky.
    """
    tensors = {}
    filler = torch.Generator().manual_seed(3)
    for name, value in net.state_dict().items():
        value = value.detach().float().cpu().clone()
        if name in ("model.llm.embed.weight", "model.llm.unembed.weight"):
            real = value[: net.text.unpadded_vocab_size]
            padding = value[net.text.unpadded_vocab_size :]
            padding.copy_(torch.randn(padding.shape, generator=filler) * real.std())
        tensors[name] = value if name.endswith(FLOAT32) else value.to(torch.bfloat16)
    return tensors


def write(net: Inkling, folder: Path) -> None:
    """Trunk shards, `mtp.safetensors`, the index over both and `config.json`, beside `tokenizer.json`."""
    groups: list[dict[str, Tensor]] = [{}]
    depths: dict[str, Tensor] = {}
    size = 0
    for name, value in disk_tensors(net).items():
        if name.startswith("model.mtp."):
            depths[name] = value
            continue
        if size + value.nbytes > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += value.nbytes
    files = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
    files["mtp.safetensors"] = depths
    for name, group in files.items():
        save_file(group, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(v.nbytes for group in files.values() for v in group.values())},
        "weight_map": {key: name for name, group in files.items() for key in group},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(END_OF_TEXT)
    config = config_json(net.text, net.mtp, end)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": net.text.model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")


def read(folder: Path) -> Inkling:
    """The network with the rounded weights of the files, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    special = ("eos_token_id", "bos_token_id")
    text = {key: value for key, value in config["text_config"].items() if key not in special}
    net = Inkling(TextConfig(**text), MtpConfig(**config["mtp_config"]))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(folder / name))
    net.load_state_dict({name: value.float() for name, value in tensors.items()})
    return net.eval()
