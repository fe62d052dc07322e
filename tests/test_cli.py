"""``inkling check``, ``plan`` and ``generate`` from the command line; ``serve`` is tested with its server."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from inkling.cli import app, printed
from inkling.testing import write_random_checkpoint


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path):
    write_random_checkpoint(tmp_path)
    return tmp_path


def test_check_passes_a_whole_checkpoint(checkpoint):
    result = run("check", checkpoint)
    assert result.exit_code == 0
    assert f"{checkpoint} is complete" in result.stdout


def test_check_fails_a_checkpoint_that_lacks_a_file(checkpoint):
    (checkpoint / "mtp.safetensors").unlink()
    result = run("check", checkpoint)
    assert result.exit_code == 1
    assert "problem" in result.stdout


def test_plan_prints_how_many_sequences_fit(checkpoint):
    result = run("plan", checkpoint, "--memory-bytes", 10**10, "--sequence-length", 100)
    assert result.exit_code == 0, result.output
    assert "sequences that fit: " in result.stdout and "a sequence of 100 tokens" in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--num-draft-tokens", 9), "num_draft_tokens is 9; the checkpoint has 3 MTP depths"),
        (("--memory-bytes", 1000), "memory is 1.00 kB, and all but the caches takes"),
        (("--memory-bytes", 10**10, "--sequence-length", 5000), "sequence_length is 5000; it must be from 1"),
        (("--cache-bytes", 1, "--memory-bytes", 1), "give cache_bytes or memory_bytes, and not both"),
        (("--device", "tpu"), "device is 'tpu'; it must be cpu or cuda"),
    ],
)
def test_plan_refuses_what_cannot_be_planned(checkpoint, options, reason):
    result = run("plan", checkpoint, *options)
    assert result.exit_code == 1
    assert f"error: {reason}" in result.stderr


def test_plan_names_the_broken_key_of_a_config(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["hidden_size"] = "wide"
    (checkpoint / "config.json").write_text(json.dumps(config))
    result = run("plan", checkpoint)
    assert result.exit_code == 1
    assert "hidden_size" in result.stderr and "'wide'" in result.stderr


def test_generate_names_a_url_it_cannot_use():
    result = run("generate", "a", "--url", "ftp://x:1")
    assert result.exit_code == 1
    assert "error: url is 'ftp://x:1'" in result.stderr


def test_texts_are_printed_as_they_come(capsys):
    responses = printed(iter([{"text_output": "a"}, {"num_output_tokens": 1}, {"text_output": "b"}]))
    next(responses)
    assert capsys.readouterr().out == "a"
    list(responses)
    assert capsys.readouterr().out == "b\n"
