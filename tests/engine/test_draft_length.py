"""The automatic draft length: nearly the throughput of the best fixed one, and never another token."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from math import pi, sin
from random import Random
from statistics import mean

import pytest

from inkling.engine.draft_length import REVIEW_STEPS, SURE_STEPS, AutoDraftLength
from inkling.engine.load import Load, Prompts
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.engine.step_cost import COST_FADE, SPEED_CALLS, SPELL_CALLS, CostTable, StepCosts
from tests.engine.harness import Bench, arrive, make_layout, requests_of
from tests.engine.simulated_serving import Costs, Simulation

DEPTHS = 4
BOUND = 0.97  # of the best fixed length
UNSTEADY_BOUND = 0.95  # ... on a machine that is twice as slow for a third of the time
STEPS = {1: 8000, 8: 6000, 64: 2000}  # of a run, were nothing drafted, by batch
COSTS = {  # the target alone takes 10 for one row, or a little for each
    "flat": Costs(lambda rows: 10.0, lambda rows: 0.8, call=0.3),
    "linear": Costs(lambda rows: 2.0 + 0.4 * rows, lambda rows: 0.05 * rows, call=0.3),
    "steep": Costs(lambda rows: 0.5 + rows, lambda rows: 0.1 * rows, call=0.1),
    "bandwidth, then arithmetic": Costs(
        lambda rows: max(10.0, 0.2 * rows), lambda rows: 0.6 * max(1.0, rows / 64), call=0.2
    ),
    "demo on a CPU": Costs(lambda rows: 7.0 + 0.4 * rows, lambda rows: 1.0 + 0.1 * rows, call=0.3),
    "a costly call": Costs(lambda rows: 10 + 0.02 * rows, lambda rows: 0.2, call=6.0),
}
ACCEPTANCES = (0.0, 0.3, 0.6, 0.8, 0.95)


def simulation(costs: str, batch: int, acceptance: Callable[[float], float], **options: int) -> Simulation:
    """``acceptance`` of the part of the run that is over, 0 to 1. ``options``: of the simulation."""
    total = STEPS[batch] * batch
    accepts = lambda tokens: acceptance(tokens / total)  # noqa: E731
    return Simulation(COSTS[costs], accepts, batch=batch, num_tokens=total, **options)


def share_of_best(simulated: Simulation) -> float:
    return simulated.auto(DEPTHS) / max(simulated.fixed(n) for n in range(DEPTHS + 1))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("batch", [1, 8])
def test_auto_is_nearly_as_fast_as_the_best_fixed_length(costs: str, batch: int) -> None:
    shares = {a: share_of_best(simulation(costs, batch, lambda _, a=a: a)) for a in ACCEPTANCES}
    assert min(shares.values()) >= BOUND, shares


@pytest.mark.parametrize(
    ("costs", "acceptance"), list(zip([*COSTS], [0.6, 0.0, 0.95, 0.3, 0.6, 0.8], strict=True))
)
def test_auto_is_nearly_as_fast_with_64_sequences(costs: str, acceptance: float) -> None:
    assert share_of_best(simulation(costs, 64, lambda _: acceptance)) >= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "acceptance"), list(product(COSTS, ACCEPTANCES)))
def test_auto_is_nearly_as_fast_with_64_sequences_at_every_acceptance(costs: str, acceptance: float) -> None:
    assert share_of_best(simulation(costs, 64, lambda _: acceptance)) >= BOUND


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("costs", ["linear", "demo on a CPU"])
def test_auto_counts_the_time_of_the_depths_over_prompts(costs: str, acceptance: float) -> None:
    simulated = simulation(costs, 8, lambda _: acceptance, num_prompt=120, answer=64)
    assert share_of_best(simulated) >= BOUND


DRIFTS = {
    "up": lambda part: 0.95 * part,
    "down": lambda part: 0.95 * (1 - part),
    "to and fro": lambda part: 0.475 + 0.475 * sin(4 * pi * part),
    "sudden": lambda part: (0.9, 0.1)[int(4 * part) % 2],
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("drift", DRIFTS)
def test_auto_follows_a_drifting_acceptance(costs: str, drift: str) -> None:
    assert share_of_best(simulation(costs, 8, DRIFTS[drift])) >= BOUND


def test_auto_is_not_misled_by_a_machine_that_slows_down_at_times() -> None:
    unsteady = simulation("demo on a CPU", 8, lambda _: 0.8, is_unsteady=True)
    assert share_of_best(unsteady) >= BOUND


@pytest.mark.parametrize(("acceptance", "is_unsteady"), list(product((0.5, 0.7, 0.85), (False, True))))
def test_auto_learns_among_the_prompts_of_many_streams(acceptance: float, is_unsteady: bool) -> None:
    """Costs, prompts and answers of the demo with 32 streams: half of the steps and more carry prompts. The unsteady
    machine is slow for about 15 steps of 45."""
    shares = [
        share_of_best(
            Simulation(
                Costs(lambda rows: 7.0 + 2.1 * rows**0.66, lambda rows: 2.0 + 0.037 * rows, call=0.8),
                lambda _: acceptance,
                batch=32,
                num_tokens=60_000,
                num_prompt=110,
                answer=64,
                seed=seed,
                is_unsteady=is_unsteady,
            )
        )
        for seed in range(3)
    ]
    assert mean(shares) >= (UNSTEADY_BOUND if is_unsteady else BOUND), shares


@pytest.mark.parametrize("answer", [24, 64])
def test_auto_is_nearly_as_fast_where_every_step_is_full_of_prompts(answer: int) -> None:
    """Long prompts and short answers of 32 streams: more drafts are no reason for more prompts in a step."""
    costs = Costs(lambda rows: 6.0 + 0.0165 * rows + 0.05 * min(rows, 200), lambda rows: 0.4 + 0.0008 * rows, call=0.8)
    shape = {"batch": 32, "num_prompt": 2048, "answer": answer, "max_rows": 2048}
    assert share_of_best(Simulation(costs, lambda _: 0.8, num_tokens=16_000, **shape)) >= BOUND


def after_prompts_of(ended: Prompts) -> AutoDraftLength:
    """One depth, whose drafts stand more often than not, for a step that takes 10 % longer; prompts are dear."""
    lengths = AutoDraftLength(1)
    lengths.ended(ended)
    load = Load(max_rows=100, depths=1, tokens=10)
    load.drafting[1] = load.asked[1] = 4
    for rows, seconds in ((4, 10.0), (8, 11.0)):
        for _ in range(4):
            lengths.costs.add_target(rows, 0, 4, seconds)
    for _ in range(4):
        lengths.costs.add_draft(1, 6, 1.0)
        lengths.costs.add_prompt(100, 10.0, 1, 0)
    lengths.verified(1, 1)
    lengths._first_lengths, lengths._largest_load = [], 4
    for _ in range(SURE_STEPS + REVIEW_STEPS):
        lengths.choose(load)
    return lengths


def test_sequences_go_on_with_the_depths_they_have_when_newcomers_get_none() -> None:
    """What they took over the prompts is spent: it is no reason to give them up."""
    lengths = after_prompts_of(Prompts(rows=500_000, depth_rows=500_000, steps=50, tokens=100))
    assert lengths.prompt_depths(1, 100) == 0
    assert lengths.num_drafts == lengths.num_depths == 1


@pytest.mark.parametrize("ended", [Prompts(), Prompts(rows=500_000, depth_rows=500_000, steps=50, tokens=10_000_000)])
def test_newcomers_get_depths_where_prompts_are_few_beside_tokens(ended: Prompts) -> None:
    """Tokens of long answers that ended count with their prompts, those of a while ago too."""
    assert after_prompts_of(ended).prompt_depths(1, 100) == 1


@pytest.mark.parametrize(("max_tokens", "is_cancelled"), [(1, False), (30, False), (30, True)])
def test_prompts_count_when_their_answers_have_ended_cancelled_or_not(max_tokens: int, is_cancelled: bool) -> None:
    """The first prompts of a burst stand beside few tokens: all who come after them would get no depths."""
    bench = Bench(num_drafts=2, budget=64, chunk=4, auto_draft_length=True)
    lengths, rules = bench.engine.scheduler.lengths, StopRules(max_tokens=max_tokens)
    replies = [
        bench.submit(GenerateRequest(tuple(range(1, 11)), stop=rules, num_draft_tokens=drafts)) for drafts in (2, 0)
    ]
    for _ in range(2 if max_tokens == 1 else 6):
        bench.step()
        assert lengths._ended.rows == 0 < bench.engine.scheduler.running[0].prompts.rows
    for reply in replies:
        reply.cancelled = is_cancelled
    bench.run()
    bench.submit(GenerateRequest((1,), stop=StopRules(max_tokens=1)))
    bench.run()
    ended, tokens = lengths._ended, sum(len(reply.ids) for reply in replies)
    expected = (20, 10 if max_tokens > 1 else 0)  # depths of an answer of one token take nothing
    assert (ended.rows, ended.depth_rows) == pytest.approx(expected, rel=0.05)
    assert round(ended.steps) == 3 and round(ended.tokens) == tokens + 1


@pytest.mark.parametrize(
    "few", [((27, 6.0), (21, 6.0)), ((27, 0.0), (10, 0.0)), ((27, 6.0), (21, 6.0), (10, 0.0))]
)
def test_what_calls_of_few_prompt_rows_take_is_not_the_price_of_every_row(few: tuple) -> None:
    """A chunk of a few rows takes nearly what a call takes, or nothing beside drafts that were slow."""
    costs = StepCosts(8)
    for _ in range(6):
        costs.add_prompt(8 * 2000, 24.0, 8, 0)
        for rows, seconds in few:
            costs.add_prompt(8 * rows, seconds, 8, 0)
    assert costs.prompt_row == 24 / 16_000


def test_steps_that_all_carry_prompts_tell_what_decoding_takes_too() -> None:
    costs = StepCosts(1)
    assert not costs
    for _ in range(3):
        costs.add_target(1000, 900, 50, 10.0)
    assert costs and costs.target(1000, 0, 500) == 10.0


def test_a_spell_of_another_speed_is_noticed_after_a_few_calls() -> None:
    costs = StepCosts(0)
    for seconds in (1.0, 1.5):
        for _ in range(2 * SPEED_CALLS):
            costs.add_target(8, 0, 8, seconds)
    costs.add_target(8, 0, 8, 3.0)
    assert costs.slowness == 1.5
    for _ in range(SPELL_CALLS):
        costs.add_target(8, 0, 8, 1.0)
    assert costs.slowness == 1.0
    assert costs.target(8, 0, 8) == 1.0


def test_calls_with_prompts_are_no_price_of_decoding() -> None:
    costs = StepCosts(0)
    for _ in range(4):
        costs.add_target(64, 0, 64, 1.0)
        costs.add_target(64, 60, 4, 5.0)
    assert costs.target(64, 0, 64) == 1.0
    assert costs.target(64, 60, 4) == 5.0


def test_a_stray_slow_call_moves_no_cost() -> None:
    table = CostTable()
    for i in range(40):
        table.add(8, 1.0 if i % 5 else 50.0)
    assert table.at(8) == 1.0


def test_a_size_that_is_not_tried_slows_down_with_the_machine() -> None:
    costs = StepCosts(0)
    for seconds in (1.0, 2.0):
        for _ in range(20):
            costs.add_target(8, 0, 8, seconds)
            if seconds == 1.0:
                costs.add_target(16, 0, 16, 1.5)
    assert costs.target(16, 0, 16) / costs.target(8, 0, 8) == pytest.approx(1.5, rel=0.02)


def test_a_size_that_no_step_has_seems_cheaper_as_time_passes() -> None:
    costs = StepCosts(0)
    for _ in range(20):
        costs.add_target(16, 0, 16, 10.0)
    before = costs.target(16, 0, 16)
    for _ in range(int(1 / COST_FADE)):
        costs.add_target(8, 0, 8, 1.0)
    assert costs.target(16, 0, 16) == pytest.approx(before / math.e, rel=0.03)


def test_the_sizes_of_a_past_burst_make_no_other_size_cheaper() -> None:
    costs = StepCosts(0)
    for _ in range(20):
        costs.add_target(64, 0, 64, 12.0)
    for _ in range(int(2 / COST_FADE)):
        costs.add_target(1, 0, 1, 10.0)
    assert costs.target(1, 0, 1) == 10.0
    assert costs.target(64, 0, 64) == 10.0


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    costs = StepCosts(1)
    for seconds in (1.0, 0.0):
        for _ in range(10):
            costs.add_target(8, 0, 8, seconds)
            costs.add_target(4, 0, 4, seconds)
            costs.add_draft(1, 4, seconds)
    assert costs.slowness > 0
    assert costs.target(8, 0, 8) > 0


def test_costs_between_known_sizes_are_interpolated_and_bounded_beyond() -> None:
    table = CostTable()
    for rows in (8, 16, 64):
        table.add(rows, 2.0 + rows)
        table.add(rows, 2.0 + rows)
    assert table.at(40) == pytest.approx(42.0)
    assert 10.0 * 4 / 8 <= table.at(4) <= 10.0
    assert 66.0 <= table.at(128) <= 132.0


def test_acceptance_is_learnt_depth_by_depth() -> None:
    lengths, random = AutoDraftLength(3), Random(3)
    true = (0.9, 0.5, 0.2)
    for _ in range(2000):
        accepted = 0
        while accepted < 3 and random.random() < true[accepted]:
            accepted += 1
        lengths.verified(3, accepted)
        lengths._learn(1, 1)
    assert [lengths.acceptance(k) for k in range(3)] == pytest.approx(true, abs=0.12)


@pytest.mark.parametrize("seed", range(24))
def test_auto_changes_no_token(seed: int) -> None:
    """Scripted models check every window and cache; here depths are given up at random times, too."""
    random = Random(seed)
    depths = random.randint(1, 6)
    bench = Bench(
        num_drafts=depths,
        budget=random.choice((4, 16, 64)),
        slots=random.choice((1, 4, 16)),
        chunk=random.choice((1, 4, 1 << 30)),
        probability=random.choice((0, 0.3, 0.7, 1)),
        seed=seed,
        layout=lambda limits: make_layout(limits, window=5),
        auto_draft_length=True,
    )
    lengths, choose = bench.engine.scheduler.lengths, bench.engine.scheduler.lengths.choose
    seen = set()

    def erratic(load: object) -> None:
        choose(load)
        if random.random() < 0.3:
            lengths.num_drafts = random.randint(0, depths)
        if random.random() < 0.05:
            lengths.num_depths = random.randint(0, depths)
        seen.add(lengths.num_drafts)

    lengths.choose = erratic
    arrive(bench, random, requests_of(seed, 24, depths))
    bench.run()
    bench.check_answers()
    assert seen == set(range(depths + 1))


def test_auto_is_a_deployment_setting() -> None:
    from inkling.errors import SettingsError
    from inkling.settings import Settings

    assert EngineLimits.of(Settings("x"), 64, 3).auto_draft_length
    assert not EngineLimits.of(Settings("x", draft_length="fixed"), 64, 3).auto_draft_length
    with pytest.raises(SettingsError, match="fixed or auto"):
        Settings("x", draft_length="some")
