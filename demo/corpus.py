"""Training text of the demo checkpoint: permissively licensed Python sources of installed packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# Identifiers a licence statement may consist of. Any other word in it refuses the package.
PERMISSIVE = {
    "0BSD", "APACHE", "APACHE-2.0", "BSD", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "BSL-1.0", "MIT", "PSF-2.0",
}  # fmt: skip
NEUTRAL = {"AND", "OR", "WITH", "LLVM-EXCEPTION", "LICENSE", "2.0", "3-CLAUSE"}
VENDORED = {"_vendor", "vendor", "_vendored", "third_party", "extern", "externals", "_external"}
COPYLEFT = re.compile(r"General Public License|\bL?GPL|Mozilla Public|Creative Commons", re.IGNORECASE)
HELD_OUT_OF_256 = 4  # share of files kept for evaluation: 4/256
MIN_BYTES, MAX_BYTES = 300, 200_000


@dataclass(frozen=True)
class Source:
    """One Python file: text, package it came from, and whether training never sees it."""

    package: str
    path: str
    text: str
    held_out: bool


@dataclass
class Package:
    """One package and what was decided about it. `licence` is the statement of its metadata."""

    name: str
    version: str
    licence: str
    accepted: bool
    files: int = 0
    size: int = 0  # bytes


def licence_of(dist: importlib.metadata.Distribution) -> str:
    """The licence statement: SPDX expression, else classifiers, else a one-line `License` field."""
    meta = dist.metadata
    expression = meta.get("License-Expression")
    if expression:
        return expression
    classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License :: OSI Approved ::")]
    classifiers = [c.rsplit("::", 1)[1].strip() for c in classifiers]
    if classifiers:
        return " AND ".join(classifiers)
    text = (meta.get("License") or "").strip()
    return text if text and "\n" not in text and len(text) < 80 else "unknown"


def is_permissive(licence: str) -> bool:
    """True when every word of the statement is a known permissive licence (or a joining word)."""
    text = licence.upper().replace("PYTHON SOFTWARE FOUNDATION", "PSF-2.0")
    words = set(re.findall(r"[A-Z0-9][A-Z0-9.\-]*", text.replace("APACHE SOFTWARE", "APACHE")))
    return bool(words & PERMISSIVE) and words <= PERMISSIVE | NEUTRAL


def python_files(root: Path, names: Iterator[Path]) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the files worth training on: UTF-8, not vendored, not generated tables."""
    for name in sorted(set(names)):
        path = root / name
        if VENDORED & set(name.parts) or not path.is_file():
            continue
        if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        lines = text.count("\n") + 1
        digits = sum(map(text.count, "0123456789"))
        if COPYLEFT.search(text[:4000]) or digits > len(text) // 5 or len(text) > 100 * lines:
            continue
        yield str(name), text


def collect(extra: list[str]) -> tuple[list[Source], list[Package]]:
    """Standard library, packages of this interpreter and under the folders `extra`; no file twice."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = (p.relative_to(stdlib) for p in stdlib.rglob("*.py") if "site-packages" not in p.parts)
    found = [(Package("python-stdlib", sys.version.split()[0], "PSF-2.0", True), stdlib, files)]
    names = set()
    for dist in importlib.metadata.distributions(path=[*sys.path, *extra]):
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()
        if name in names:
            continue
        names.add(name)
        licence = licence_of(dist)
        package = Package(name, dist.version, licence, is_permissive(licence))
        files = (Path(f) for f in dist.files or [] if f.suffix == ".py" and ".." not in f.parts)
        found.append((package, Path(str(dist.locate_file(""))), files))

    sources, seen = [], set()
    for package, root, files in sorted(found, key=lambda item: item[0].name):
        for path, text in python_files(root, files) if package.accepted else ():
            digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            sources.append(Source(package.name, path, text, digest[0] < HELD_OUT_OF_256))
            package.files += 1
            package.size += len(text.encode())
    return sources, [package for package, _, _ in found]


def train_tokenizer(sources: list[Source], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over training files only; id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [s.text for s in sources if not s.held_out]
    tokenizer.train_from_iterator(random.Random(0).sample(texts, min(len(texts), 6000)), trainer)
    return tokenizer


def pack(sources: list[Source], tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """uint16 ids of all training (or held-out) files in a fixed shuffled order, end-of-text after each."""
    chosen = [s for s in sources if s.held_out == held_out]
    random.Random(1).shuffle(chosen)
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for start in range(0, len(chosen), 1000):
        for encoding in tokenizer.encode_batch([s.text for s in chosen[start : start + 1000]]):
            parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def choose_prompts(sources: list[Source], tokenizer: Tokenizer, count: int, per_package: int) -> list[dict]:
    """Prompts of 30 to 200 tokens from held-out files; each starts at a `def` or `class` line."""
    rng = random.Random(2)
    held_out = [s for s in sources if s.held_out]
    rng.shuffle(held_out)
    prompts, used = [], {}
    for source in held_out:
        starts = [m.start() for m in re.finditer(r"^(?:    )?(?:def|class) ", source.text, re.MULTILINE)]
        if not starts or used.get(source.package, 0) >= per_package:
            continue
        ids = tokenizer.encode(source.text[rng.choice(starts) :][:4000]).ids
        length = rng.randint(30, 200)
        text = tokenizer.decode(ids[:length])
        if len(ids) < length + 64 or tokenizer.encode(text).ids != ids[:length]:
            continue
        used[source.package] = used.get(source.package, 0) + 1
        prompts.append({"text": text, "package": source.package, "file": source.path})
        if len(prompts) == count:
            return prompts
    raise ValueError(f"{len(prompts)} held-out prompts found, {count} needed: add packages to the corpus")


def write_data_card(packages: list[Package], path: Path) -> None:
    """The table of packages, versions, licences and sizes that the checkpoint was trained on."""
    used = sorted((p for p in packages if p.files), key=lambda p: -p.size)
    refused = sorted(p.name for p in packages if not p.accepted)
    total = sum(p.size for p in used)
    lines = [
        "# Data of the demo checkpoint",
        "",
        f"{sum(p.files for p in used)} Python files, {total / 1e6:.1f} MB, from {len(used)} packages.",
        "Written by `demo/train.py collect`. The licence is what the package's own metadata states.",
        "Left out: vendored folders, files whose first 4,000 characters name a copyleft licence,",
        f"duplicates, tables, files above {MAX_BYTES // 1000} kB. {HELD_OUT_OF_256} in 256 files, chosen by",
        "hash, are held out: the tokenizer and the training never see them.",
        "",
        "| Package | Version | Licence | Files | MB |",
        "| --- | --- | --- | ---: | ---: |",
        *(f"| {p.name} | {p.version} | {p.licence} | {p.files} | {p.size / 1e6:.2f} |" for p in used),
        "",
        "Refused for their licence statement (copyleft, other, or none): " + ", ".join(refused) + ".",
    ]
    path.write_text("\n".join(lines) + "\n")


def prepare(data: Path, checkpoint: Path, demo: Path, extra: list[str], vocab_size: int) -> None:
    """Collects the corpus; writes `tokenizer.json`, packed ids, `prompts.json` and `DATA.md`."""
    data.mkdir(parents=True, exist_ok=True)
    checkpoint.mkdir(parents=True, exist_ok=True)
    sources, packages = collect(extra)
    tokenizer = train_tokenizer(sources, vocab_size)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    write_data_card(packages, demo / "DATA.md")
    prompts = choose_prompts(sources, tokenizer, count=40, per_package=4)
    (demo / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    train, held_out = pack(sources, tokenizer, False), pack(sources, tokenizer, True)
    np.savez_compressed(data / "tokens.npz", train=train, held_out=held_out)
    print(f"{len(sources)} files; {len(train):,} training and {len(held_out):,} held-out tokens")
