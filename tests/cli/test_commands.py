"""The command line as scripts see it: what is on standard output, and the exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyengine import Engine

OPTIONS = ["--device", "cpu", "--max-new-tokens", "8"]


def run(
    *words: str, stdin: str | bytes = "", **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """A finished `pyengine` process; standard error is no terminal."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run(
        [sys.executable, "-m", "pyengine", *words],
        input=data, capture_output=True, env=os.environ | variables, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with Engine("demo", device="cpu") as engine:
        prompts = ["The king", "A dog is"]
        return [engine.generate(prompt, max_new_tokens=8).text for prompt in prompts]


def test_one_prompt_prints_the_text_alone(texts: list[str]) -> None:
    for words in (["The king"], ["The king", "--no-stream"]):
        done = run("generate", "demo", *words, *OPTIONS)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode() == texts[0] + "\n"


def test_a_prompt_comes_from_standard_input_a_file_or_lines(
    texts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("The king")
    assert run("generate", "demo", *OPTIONS, stdin="The king").stdout.decode() == texts[0] + "\n"
    assert run("generate", "demo", *OPTIONS, "-f", str(file)).stdout.decode() == texts[0] + "\n"
    file.write_text("The king\n\nA dog is\n")
    done = run("generate", "demo", *OPTIONS, "--json", "--lines", str(file))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["text"] for one in found] == texts
    assert [one["prompt"] for one in found] == ["The king", "A dog is"]


def test_several_prompts_are_told_apart(texts: list[str]) -> None:
    done = run("generate", "demo", "The king", "A dog is", *OPTIONS)
    assert done.stdout.decode() == f"==> The king\n{texts[0]}\n\n==> A dog is\n{texts[1]}\n\n"


def test_json_counts_tokens_and_gives_logprobs() -> None:
    done = run("generate", "demo", "The king", *OPTIONS, "--json", "--logprobs", "2")
    one = json.loads(done.stdout)
    assert one["completion_tokens"] == len(one["token_ids"]) == len(one["logprobs"])
    assert one["finish_reason"] in ("stop", "length")
    best = one["logprobs"][0]
    assert best["id"] == best["top"][0][0] and len(best["top"]) == 2
    assert best["logprob"] == pytest.approx(best["top"][0][1], abs=1e-5)


def test_chat_uses_the_template_and_a_system_message() -> None:
    with Engine("demo", device="cpu") as engine:
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        expected = engine.chat(messages, max_new_tokens=8).text
    done = run("generate", "demo", "Hi", "--chat", "--system", "Be kind.", *OPTIONS)
    assert done.stdout.decode() == expected + "\n"


def test_the_conversation_command_answers_line_by_line_and_ends() -> None:
    words = ["chat", "demo", "--device", "cpu", "--max-new-tokens", "4", "--temperature", "0"]
    done = run(*words, stdin="Hi\nAnd you?\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.decode().splitlines()) >= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "nowhere", "x"], "nowhere: no such file or directory"),
        (["generate", "demo", "x", "--temperature", "-1"], "temperature=-1.0: must be >= 0"),
        (["generate", "demo", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "demo", "x", "--dtype", "f64"], "dtype='f64'"),
        (["generate", "demo", "x", "--device", "hip:x"], "device='hip:x'"),
        (["generate", "demo", "x", "--logit-bias", "a=b"], "--logit-bias 'a=b'"),
        (["generate", "demo", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "demo", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "demo", "x", "--max-batch", "0"], "max_batch=0"),
        (["generate", "demo", "x", "--keep", "lm_head"], "keep='lm_head': nothing is quantised"),
        (["generate", "demo", "x", "--logit-bias", "9999=1"], "logit_bias: id 9999 must be"),
        (["generate", "demo", "--lines", "/dev/null"], "/dev/null: no line holds a prompt"),
        (["bench", "demo", "--prompt-tokens", "600"], "do not fit the context of 512"),
        (["info", "~no-such-user/x"], "~no-such-user/x: "),
        (["generate", "demo", "-f", "/nowhere/p.txt"], "/nowhere/p.txt: No such file"),
        (["generate", "demo", "x", "--no-such-option"], "--no-such-option"),
        (["generate", "demo"], "the prompt is empty"),
        (["info", "/nowhere"], "/nowhere"),
        (["pull", "nothing"], "nothing: not a known model"),
        (["bench", "demo", "--repeats", "0"], "--repeats"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_status_one(words: list[str], message: str) -> None:
    done = run(*words, COLUMNS="200")
    assert done.returncode == 1
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr and done.stdout == b""


def test_what_cannot_be_compared_or_audited_is_exit_status_two(tmp_path: Path) -> None:
    assert run("parity", "/nowhere").returncode == 2
    assert run("parity").returncode == 2
    (tmp_path / "x.so").write_text("no library")
    assert run("audit", str(tmp_path / "x.so")).returncode == 2


def test_a_device_that_cannot_be_had_says_why() -> None:
    done = run("generate", "demo", "x", "--device", "hip")
    assert done.returncode == 1
    assert b"hip" in done.stderr and b"Traceback" not in done.stderr


def test_info_names_traits_memory_and_what_was_ignored(checkpoints: dict[str, Path]) -> None:
    done = run("info", str(checkpoints["gpt2"]), "--json")
    facts = json.loads(done.stdout)
    assert facts["family"] == "gpt2" and facts["position"] == "learned"
    assert facts["parameters"] == 3 * (12 * 128 * 128 + 13 * 128) + (2048 + 256 + 2) * 128
    assert any(name.endswith("attn.bias") for name in facts["ignored_tensors"])
    assert set(facts["memory_bytes"]) == {"weights", "kv_cache", "activations", "step"}
    assert run("info", "demo").returncode == 0


def test_bench_prints_the_share_of_the_measured_bandwidth() -> None:
    words = ["--device", "cpu", "--repeats", "1", "--new-tokens", "4", "--prompt-tokens", "8"]
    report = json.loads(run("bench", "demo", *words, "--json").stdout)
    share = report["weight_bytes"] * report["decode_tok_s"] / (report["read_gb_s"] * 1e9)
    assert report["decode_share"] == pytest.approx(share)
    assert "what the bandwidth allows" in run("bench", "demo", *words).stdout.decode()


def test_version_and_help() -> None:
    assert run("--version").stdout.decode().startswith("pyengine ")
    for words in ([], ["--help"], ["generate", "-h"]):
        done = run(*words)
        assert done.returncode == 0 and b"Usage: pyengine" in done.stdout


def test_an_interrupt_ends_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pyengine", "chat", "demo", "--device", "cpu"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout is not None and process.stdout.read(1)  # it answers: all is set up
    process.send_signal(signal.SIGINT)  # the answer, if it is not over yet
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # the question
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in errors and b"Traceback" not in errors


def test_output_that_cannot_be_written_is_said() -> None:
    words = [sys.executable, "-m", "pyengine", "generate", "demo", "The king", *OPTIONS]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"cannot write" in done.stderr and b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_met_in_silence() -> None:
    command = f"{sys.executable} -m pyengine generate demo 'The king' --device cpu --json | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")
