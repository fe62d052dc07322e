"""Head logits and the draw that stores none: right, row-exact, ties to the lowest id, -1 writes nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from kernels.cuda.head import Drawn, Noise, allocate_drawn, head_draw, head_logits
from kernels.cuda.weight_tiles import TileConfig
from kernels.sampling import gumbel_noise
from tests.cuda.test_experts import random
from tests.kernels.rounding import UNIT, assert_within

MUP = 3.0
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def head_of(vocab_size: int, hidden: int, device: str) -> Tensor:
    return random(vocab_size, hidden, device=device, seed=1, scale=3.0 * MUP * hidden**-0.5)


def logits_of(hidden: Tensor, index: Tensor, head: Tensor, config: TileConfig | None = None) -> Tensor:
    """fp32 [n, V'], NaN where nothing was written."""
    logits = torch.full((len(index), len(head)), float("nan"), device=hidden.device)
    head_logits(hidden, index, head, MUP, logits, config)
    return logits


def draw(
    hidden: Tensor, index: Tensor, head: Tensor, noise: Noise | None = None, config: TileConfig | None = None
) -> Drawn:
    """From poisoned buffers."""
    drawn = allocate_drawn(len(index), head, config)
    for buffer in (drawn.tokens, drawn.best_ids):
        buffer.fill_(-7)
    for buffer in (drawn.scores, drawn.parts):
        buffer.fill_(float("nan"))
    head_draw(hidden, index, head, MUP, noise, drawn, config)
    return drawn


def ids(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def noise_of(num_rows: int, device: str, seed: int = 0) -> Noise:
    """Greedy rows between sampled ones, seeds and positions of every size."""
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(num_rows, generator=generator) * (torch.arange(num_rows) % 3 != 1) * 1.5
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**20, (num_rows,), generator=generator)
    positions[::5] += 2**33
    return Noise(temperature.to(device), seeds.to(device), positions.to(device))


def check_logits(num_rows: int, vocab_size: int, hidden: int, device: str) -> None:
    x, head = random(num_rows + 3, hidden, device=device, seed=2), head_of(vocab_size, hidden, device)
    index = torch.arange(num_rows + 2, 2, -1, dtype=torch.int32, device=device)
    rows, weights = x[index.long()].double(), head.double()
    bound = (rows.abs() @ weights.abs().T) * (hidden + 4) * UNIT / MUP
    assert_within(logits_of(x, index, head), rows @ weights.T / MUP, bound)


def check_draw(num_rows: int, vocab_size: int, hidden: int, device: str) -> None:
    """Against the stored logits: the same token, and the same log-sum-exp as in fp64."""
    x, head = random(num_rows, hidden, device=device, seed=3), head_of(vocab_size, hidden, device)
    index = torch.arange(num_rows, dtype=torch.int32, device=device)
    logits = logits_of(x, index, head)
    greedy = draw(x, index, head)
    assert torch.equal(greedy.tokens, _lowest_argmax(logits))
    noise = noise_of(num_rows, device)
    drawn = draw(x, index, head, noise)
    gumbel = gumbel_noise(noise.seed.cpu(), noise.position.cpu(), vocab_size).to(device)
    value = logits / noise.temperature.clamp(min=0.01)[:, None] + gumbel
    value = torch.where(noise.temperature[:, None] > 0, value, logits)
    taken = value.gather(1, drawn.tokens.long()[:, None])
    # noise lies in [-2.9, 22.9]: three logarithms err by some units of that, the sum by one of its own
    assert ((value.amax(1, keepdim=True) - taken) <= 64 * UNIT * value.abs().amax(1, keepdim=True)).all()
    assert torch.equal(drawn.tokens[noise.temperature == 0], greedy.tokens[noise.temperature == 0])
    for result in (greedy, drawn):
        assert torch.equal(result.scores[:, 0], logits.gather(1, result.tokens.long()[:, None])[:, 0])
        exact = torch.logsumexp(logits.double(), 1)
        assert_within(result.scores[:, 1], exact, 64 * UNIT * (1 + exact.abs()))
    assert torch.equal(greedy.scores[:, 1], drawn.scores[:, 1])


def _lowest_argmax(logits: Tensor) -> Tensor:
    places = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return torch.where(logits == logits.amax(1, keepdim=True), places, logits.shape[1]).amin(1).int()


def check_row_exact(
    vocab_size: int,
    hidden: int,
    device: str,
    counts: Iterable[int],
    most: int,
    config: TileConfig | None = None,
) -> None:
    """Rows drawn among others, in other orders, have the bits of the largest batch; with noise and without."""
    x, head = random(most, hidden, device=device, seed=4), head_of(vocab_size, hidden, device)
    everyone, noise = torch.arange(most, dtype=torch.int32, device=device), noise_of(most, device)
    logits, drawn = logits_of(x, everyone, head, config), draw(x, everyone, head, noise, config)
    for count in counts:
        order = torch.randperm(most, generator=torch.Generator().manual_seed(count))[:count]
        for places in (torch.arange(count), order):
            places = places.to(device)
            index = everyone[places]
            alone = logits_of(x, index, head, config)
            assert torch.equal(alone.view(torch.int32), logits[places].view(torch.int32)), f"{count} rows"
            part = Noise(noise.temperature[places], noise.seed[places], noise.position[places])
            few = draw(x, index, head, part, config)
            assert torch.equal(few.tokens, drawn.tokens[places]), f"{count} rows"
            assert torch.equal(few.scores.view(torch.int32), drawn.scores[places].view(torch.int32)), (
                f"{count} rows"
            )


@pytest.mark.parametrize("num_rows, vocab_size, hidden", [(1, 64, 64), (3, 203, 48), (18, 130, 80)])
def test_logits_are_within_the_bound(num_rows, vocab_size, hidden, device):
    check_logits(num_rows, vocab_size, hidden, device)


@pytest.mark.parametrize("num_rows, vocab_size", [(1, 64), (7, 403)])
def test_the_draw_is_that_of_the_stored_logits(num_rows, vocab_size, device):
    check_draw(num_rows, vocab_size, 48, device)


def test_rows_do_not_depend_on_the_others(device):
    check_row_exact(203, 48, device, (1, 2, 15), 16)


def test_equal_logits_draw_the_lowest_id(device):
    head = torch.zeros(400, 32, dtype=torch.bfloat16, device=device)
    x = torch.ones(1, 32, dtype=torch.bfloat16, device=device)
    assert draw(x, ids(0, device=device), head).tokens.tolist() == [0]
    head[[399, 300, 131, 140]] = 1.0  # in three tiles
    assert draw(x, ids(0, device=device), head).tokens.tolist() == [131]


def test_an_index_of_minus_one_reads_and_writes_nothing(device):
    x, head = random(3, 48, device=device, seed=5), head_of(203, 48, device)
    x[1] = float("nan")
    index = ids(2, -1, 0, device=device)
    logits, drawn = logits_of(x, index, head), draw(x, index, head)
    assert logits[1].isnan().all() and not logits[[0, 2]].isnan().any()
    assert drawn.tokens[1] == -7 and drawn.scores[1].isnan().all() and drawn.parts[:, 1].isnan().all()
    assert torch.equal(drawn.tokens[[0, 2]], draw(x, ids(2, 0, device=device), head).tokens)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_logits_that_are_nan_draw_a_token_that_exists(device):
    x, head = torch.full((1, 48), float("nan"), dtype=torch.bfloat16, device=device), head_of(203, 48, device)
    assert 0 <= draw(x, ids(0, device=device), head).tokens.item() < 203


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 2048])
def test_serving_shapes_are_right_and_row_exact(hidden, device):
    for num_rows in (1, 16, 40):
        check_logits(num_rows, 200058, hidden, device)
        check_draw(num_rows, 200058, hidden, device)
    check_row_exact(200058, hidden, device, (1, 2, 16, 17, 33, 64, 65, 128, 129), 256)


@pytest.mark.gpu
def test_every_row_count_up_to_256_is_row_exact(device):
    check_row_exact(2051, 1024, device, range(1, 257), 256)


@pytest.mark.gpu
def test_logits_beyond_two_to_the_31_elements(device):
    x, head = random(11000, 64, device=device, seed=6), head_of(200058, 64, device)
    everyone = torch.arange(11000, dtype=torch.int32, device=device)
    logits = logits_of(x, everyone, head)
    assert not logits[::500].isnan().any()
    assert torch.equal(logits[-3:], logits_of(x, everyone[-3:], head))


@pytest.mark.gpu
def test_a_replayed_graph_gives_the_bits_of_a_launch(device):
    x, head = random(8, 2048, device=device, seed=7), head_of(32768, 2048, device)
    index, noise, drawn = ids(*range(8), device=device), noise_of(8, device), allocate_drawn(8, head)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        head_draw(x, index, head, MUP, noise, drawn)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head_draw(x, index, head, MUP, noise, drawn)
    for seed in range(20):
        x.copy_(random(8, 2048, device=device, seed=100 + seed))
        noise.position += 1
        drawn.scores.fill_(float("nan"))
        graph.replay()
        again = draw(x, index, head, noise)
        assert torch.equal(drawn.tokens, again.tokens) and torch.equal(drawn.scores, again.scores)
