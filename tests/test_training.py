"""``moeloom train`` and what hangs on it, as a user meets them: processes, signals, kills, resumption."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeloom.errors import ArgumentError, CheckpointError, NonFiniteLoss
from moeloom.train.checkpoint import CheckpointStore
from moeloom.train.data import load_text
from moeloom.train.loop import Trainer
from moeloom.train.metrics import read_metrics
from moeloom.train.model import ModelConfig, MoELanguageModel
from moeloom.train.optimizer import learning_rate, make_optimizer
from moeloom.train.options import PRESETS, Options, build_options
from moeloom.train.report import Reporter
from moeloom.train.snapshot import load_snapshot, take_snapshot
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
SMOKE = replace(PRESETS["smoke"], steps=8, save_every=4, eval_every=4, eval_bytes=1024, batch=4, seq=32)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small text of real source code."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    source = Path(json.__file__).parent
    data = b"".join(p.read_bytes() for p in sorted(source.glob("*.py")))
    path.write_bytes((data * (1 + 80_000 // len(data)))[:80_000])
    return path


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr("moeloom.train.loop.SAMPLE_BYTES", {"before training": 8, "after training": 8})


def trainer(out: Path, text: Path, options: Options = SMOKE, resume=None) -> Trainer:
    corpus = load_text(text)
    return Trainer(options, corpus, out, group=None, device=CPU, resume=resume, reporter=Reporter(silent=True))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moeloom", *arguments]


def moeloom(*arguments: str, seconds: float = 120, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=seconds, env=env, stdin=subprocess.DEVNULL
    )


def tensors(store: Path) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(store / "checkpoints").latest()
    return checkpoint.load_many(checkpoint.names())


# ------------------------------------------------------------------------------------------------------- in process


def test_learns_and_leaves_everything_behind(tmp_path, text):
    options = replace(SMOKE, steps=40, lr=1e-2)
    result = trainer(tmp_path, text, options).run()
    assert result.finished and result.step == 40
    rows = read_metrics(tmp_path / "metrics.jsonl")
    train = [r for r in rows if r["kind"] == "train"]
    assert len(train) == 40 and train[0]["bits_per_byte"] > 7.9
    assert result.valid_bits < train[0]["bits_per_byte"] - 2
    assert any(sum(map(sum, r.get("expert_load", []))) == 2 * 10 * 4 * 32 * 2 for r in train), (
        "10 steps, 2 layers, top-2"
    )
    assert [r["whole_text"] for r in rows if r["kind"] == "valid"][-1]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.pkl"))


def test_same_seed_same_bits_and_another_seed_others(tmp_path, text):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trainer(tmp_path / name, text, replace(SMOKE, seed=seed)).run()
    a, b, c = (tensors(tmp_path / n) for n in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], c[n]) for n in a)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_resume_is_bit_for_bit(tmp_path, text, grad_accum, scoring):
    options = replace(SMOKE, grad_accum=grad_accum, model=replace(SMOKE.model, scoring=scoring))
    trainer(tmp_path / "whole", text, options).run()
    cut = trainer(tmp_path / "cut", text, options)
    original = cut._train_step

    def step() -> None:
        original()
        if cut.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    cut._train_step = step
    assert not cut.run().finished
    checkpoint = CheckpointStore(tmp_path / "cut" / "checkpoints").latest()
    assert checkpoint.step == 5
    options = Options.from_dict(checkpoint.state["options"])
    assert trainer(tmp_path / "cut", text, options, checkpoint).run().finished
    whole, resumed = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert set(whole) == set(resumed) and all(torch.equal(whole[n], resumed[n]) for n in whole)
    losses = [
        [r["bits_per_byte"] for r in read_metrics(tmp_path / n / "metrics.jsonl") if r["kind"] == "train"]
        for n in ("whole", "cut")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_signal_after_the_exchange_waits_for_the_next_one(tmp_path, text):
    """Other ranks have not heard of it: a rank that stopped on its own would leave them waiting for ever."""
    run = trainer(tmp_path, text)
    original = run._balance

    def balance() -> None:
        original()
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run._balance = balance
    assert run.run().step == 4


def test_accumulated_micro_batches_give_the_same_loss(tmp_path, text):
    losses = []
    for parts in (1, 4):
        run = trainer(tmp_path / str(parts), text, replace(SMOKE, grad_accum=parts))
        run.run()
        losses.append(
            [r["bits_per_byte"] for r in read_metrics(tmp_path / str(parts) / "metrics.jsonl") if r["kind"] == "train"]
        )
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*losses, strict=True))


def test_non_finite_loss_stops_with_step_and_rank_after_saving(tmp_path, text):
    run = trainer(tmp_path, text)
    original = run._train_step

    def step() -> None:
        if run.step == 3:
            kept = tensors_of(run)
            with torch.no_grad():
                run.model.head.weight[0, 0] = float("nan")
            run.poisoned = kept
        original()

    run._train_step = step
    with pytest.raises(
        NonFiniteLoss, match="loss of step 4 is not finite, first on rank 0.*state after step 3 is saved"
    ):
        run.run()
    assert CheckpointStore(tmp_path / "checkpoints").latest().step == 3


def tensors_of(run: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in run.model.named_parameters()}


def test_non_finite_gradient_stops_before_the_step(tmp_path, text):
    run = trainer(tmp_path, text)
    before = tensors_of(run)
    run.model.blocks[0].attention.out.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(NonFiniteLoss, match="gradient norm of step 1"):
        run.run()
    assert all(torch.equal(before[n], p) for n, p in run.model.named_parameters())


def test_resume_refuses_another_text_and_another_model(tmp_path, text):
    trainer(tmp_path, text).run()
    checkpoint = CheckpointStore(tmp_path / "checkpoints").latest()
    other = tmp_path / "other.py"
    other.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="SHA-256"):
        trainer(tmp_path, other, SMOKE, checkpoint)
    with pytest.raises(CheckpointError, match=r"another shape or dtype.*(gate_up_proj|down_proj)"):
        trainer(tmp_path, text, replace(SMOKE, model=replace(SMOKE.model, expert_width=48)), checkpoint)
    with pytest.raises(CheckpointError, match=r"missing: .*blocks\.2"):
        trainer(tmp_path, text, replace(SMOKE, model=replace(SMOKE.model, layers=3)), checkpoint)


def test_loaded_weights_are_the_saved_ones_expert_by_expert(tmp_path, text):
    """Report 37: weights that silently stay at their random start."""
    run = trainer(tmp_path, text)
    run.run()
    torch.manual_seed(99)
    model = MoELanguageModel(SMOKE.model)
    load_snapshot(CheckpointStore(tmp_path / "checkpoints").latest(), model, make_optimizer(model, SMOKE))
    for (name, a), (_, b) in zip(model.named_parameters(), run.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    names = CheckpointStore(tmp_path / "checkpoints").latest().names()
    assert (
        "model.blocks.1.moe.experts.3.down_proj" in names
        and "adam.exp_avg.blocks.0.moe.experts.0.gate_up_proj" in names
    )


def test_decay_spares_norms_biases_router_and_embeddings():
    model = MoELanguageModel(SMOKE.model)
    groups = make_optimizer(model, SMOKE).param_groups
    spared = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in spared}
    assert names == {n for n, _ in model.named_parameters() if "norm" in n or "router" in n or "embedding" in n}


def test_learning_rate():
    options = replace(SMOKE, lr=1.0, warmup=4, steps=100)
    rates = [learning_rate(options, s, s / 100) for s in range(101)]
    assert rates[0] < 0.3 and max(rates) == pytest.approx(1.0, abs=0.01) and rates[100] == pytest.approx(0.02)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    "values,message",
    [
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"lr": float("nan")}, "lr must be a number > 0"),
        ({"batch": 6, "grad_accum": 4}, "batch must be a multiple of grad_accum"),
        ({"dtype": "fp16"}, "dtype must be one of auto, fp32, bf16"),
        ({"backend": "magic"}, "backend must be one of"),
        ({"stepps": 3}, "the configuration must use only .*got"),
        ({"model": {"widht": 3}}, "the model configuration must use only"),
        ({"model": {"width": 30}}, "width must be a multiple of 2"),
        ({"model": 3}, "model must be a table"),
    ],
)
def test_wrong_options(values, message):
    with pytest.raises(ArgumentError, match=message):
        build_options("smoke", None, values)


def test_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"steps": 7, "model": {"layers": 1}}')
    got = build_options("smoke", str(path), {"steps": 9})
    assert got.steps == 9 and got.model.layers == 1 and got.model.width == PRESETS["smoke"].model.width
    path.write_text("{")
    with pytest.raises(ArgumentError, match="--config must name a readable JSON file"):
        build_options("smoke", str(path), {})


def test_byte_embedding_sees_exactly_its_ngrams():
    config = ModelConfig(width=8, layers=1, heads=2, experts=2, top_k=1, expert_width=4, ngram_slots=97)
    torch.manual_seed(0)
    embedding = MoELanguageModel(config).embedding
    with torch.no_grad():
        for table in embedding.ngrams:
            table.weight.normal_()
    tokens = torch.randint(0, 256, (1, 20))
    changed = tokens.clone()
    changed[0, 5] ^= 1
    differs = (embedding(tokens) != embedding(changed)).any(-1)[0].nonzero().squeeze(1).tolist()
    assert differs == [5, 6, 7, 8], "orders 2, 3 and 4 reach three bytes back, and never forward"


def test_model_is_causal():
    torch.manual_seed(0)
    model = MoELanguageModel(SMOKE.model).eval()
    with torch.no_grad():
        model.head.weight.normal_()
    tokens = torch.randint(0, 256, (1, 24))
    changed = tokens.clone()
    changed[0, 10] ^= 3
    a, b = model(tokens)[0], model(changed)[0]
    assert torch.allclose(a[0, :10], b[0, :10], atol=1e-5) and not torch.allclose(a[0, 10:], b[0, 10:], atol=1e-3)


# ------------------------------------------------------------------------------------------------------- as a process


def train(out: Path, text: Path, *more: str, **kwargs) -> subprocess.CompletedProcess:
    return moeloom("train", "--preset", "smoke", "--data", str(text), "--out", str(out), *more, **kwargs)


def test_command_line_from_training_to_text(tmp_path, text):
    done = train(tmp_path / "run", text, "--steps", "6")
    assert done.returncode == 0, done.stderr
    for words in (
        "SHA-256",
        "generated before training",
        "generated after training",
        "this model",
        "order-0",
        "order-3",
        "xz",
        "tokens/s",
    ):
        assert words in done.stdout
    again = train(tmp_path / "run", text, "--steps", "6")
    assert again.returncode == 2 and "--resume" in again.stderr and "Traceback" not in again.stderr
    more = moeloom("train", "--out", str(tmp_path / "run"), "--resume", "--steps", "8")
    assert more.returncode == 0 and "continuing after step 6" in more.stdout
    written = moeloom("generate", str(tmp_path / "run"), "--prompt", "import ", "--length", "12")
    assert written.returncode == 0 and written.stdout.startswith("import ")
    measured = moeloom("eval", str(tmp_path / "run" / "checkpoints" / "step-00000008"), "--data", str(text))
    final = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "valid"][-1]["bits_per_byte"]
    assert measured.returncode == 0 and f"step 8: {final:.3f} bits/byte" in measured.stdout


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["train", "--ep", "3", "--preset", "smoke"], "--ep must divide the 4 experts"),
        (["train", "--ep", "0"], "--ep must be an integer >= 1"),
        (["train", "--device", "cuda:77"], "--device must"),
        (["train", "--device", "tpu"], "--device must be auto, cpu, cuda"),
        (["train", "--preset", "huge"], "--preset must be one of"),
        (["train", "--data", "no/such/text"], "--data must name a readable file"),
        (["train", "--resume", "--out", "no/such/run"], "--resume must find a checkpoint"),
        (["train", "--nonsense"], "No such option"),
        (["generate", "no/such/run"], "CHECKPOINT must name"),
        (["eval", "."], "CHECKPOINT must name"),
    ],
)
def test_wrong_calls_end_with_one_message(tmp_path, arguments, message):
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def start(*arguments: str) -> subprocess.Popen:
    """Start ``moeloom train ARGUMENTS`` and wait for its first loss line."""
    process = subprocess.Popen(
        command("train", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in process.stdout:
        if re.match(r"step +\d+  loss", line):
            return process
    raise AssertionError("no loss line")


def start_long(out: Path, text: Path, *more: str) -> subprocess.Popen:
    """Start a training that does not end by itself."""
    return start("--preset", "smoke", "--data", str(text), "--out", str(out), "--steps", "100000", *more)


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout.split()
    return [
        int(pid)
        for pid in found
        if Path(f"/proc/{pid}/cmdline").exists() and b"moeloom" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "number,ranks",
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 2),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_signals_save_and_end_cleanly(tmp_path, text, number, ranks):
    process = start_long(tmp_path, text, "--ep", str(ranks))
    pids = children(process.pid)
    assert len(pids) == (ranks if ranks > 1 else 0)
    process.send_signal(number)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0, rest
    assert "saved" in rest and "Traceback" not in rest
    assert not any(map(alive, pids))
    checkpoint = CheckpointStore(tmp_path / "checkpoints").latest()
    assert checkpoint.step >= 1 and checkpoint.world == ranks
    done = moeloom(
        "train",
        "--out",
        str(tmp_path),
        "--resume",
        "--steps",
        str(checkpoint.step + 2),
        *(["--ep", "2"] if ranks == 2 else []),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_at_any_moment_the_last_checkpoint_works(tmp_path, text):
    for delay in (0.0, 0.4):
        process = (
            start_long(tmp_path / "run", text) if delay == 0.0 else start("--out", str(tmp_path / "run"), "--resume")
        )
        time.sleep(1.5 + delay)
        process.kill()
        process.communicate()
    step = CheckpointStore(tmp_path / "run" / "checkpoints").latest().step
    done = moeloom("train", "--out", str(tmp_path / "run"), "--resume", "--steps", str(step + 2))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows if r["kind"] == "train"] == list(range(1, step + 3))


def test_a_killed_rank_ends_all_with_an_error_that_names_it(tmp_path, text):
    process = start_long(tmp_path, text, "--ep", "2")
    pids = children(process.pid)
    victim = next(p for p in pids if b"RANK=1" in Path(f"/proc/{p}/environ").read_bytes().split(b"\0"))
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    rest = process.communicate(timeout=60)[0]
    assert process.returncode not in (0, None) and time.monotonic() - started < 40
    assert "rank 1 was lost" in rest and "SIGKILL" in rest
    assert not any(map(alive, pids))


def test_ranks_end_when_their_launcher_is_killed(tmp_path, text):
    process = start_long(tmp_path, text, "--ep", "2")
    pids = children(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_two_ranks_learn_like_one_and_checkpoints_move_between_them(tmp_path, text):
    """Report 38: save at EP n, load at EP m."""
    for ranks in (1, 2):
        done = train(tmp_path / f"ep{ranks}", text, "--steps", "10", "--ep", str(ranks))
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [
        [r["bits_per_byte"] for r in read_metrics(tmp_path / f"ep{n}" / "metrics.jsonl") if r["kind"] == "train"]
        for n in (1, 2)
    ]
    assert all(math.isclose(a, b, rel_tol=2e-3) for a, b in zip(*losses, strict=True))
    one, two = tensors(tmp_path / "ep1"), tensors(tmp_path / "ep2")
    assert set(one) == set(two) and {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    assert CheckpointStore(tmp_path / "ep2" / "checkpoints").latest().world == 2
    bits = []
    for ranks in (1, 2):  # The last checkpoint of two ranks, carried on by one and by two.
        copy = tmp_path / f"from2to{ranks}"
        subprocess.run(["cp", "-r", str(tmp_path / "ep2"), str(copy)], check=True)
        done = moeloom("train", "--out", str(copy), "--resume", "--steps", "14", "--ep", str(ranks))
        assert done.returncode == 0, done.stdout + done.stderr
        bits.append([r for r in read_metrics(copy / "metrics.jsonl") if r["kind"] == "valid"][-1]["bits_per_byte"])
    assert max(bits) - min(bits) < 2e-3 * bits[0]


def save_on_ranks(rank: int, world: int, folder: str) -> None:
    run = ranks_trainer(folder, rank, world)
    run._save()


def load_on_ranks(rank: int, world: int, folder: str) -> dict:
    checkpoint = CheckpointStore(Path(folder) / "checkpoints").latest()
    torch.manual_seed(1 + rank)
    run = ranks_trainer(folder, rank, world, checkpoint)
    pieces = take_snapshot(run.model, run.optimizer, rank)
    return {name: t.numpy() for name, t in pieces.items()}


def ranks_trainer(folder: str, rank: int, world: int, resume=None) -> Trainer:
    options = replace(SMOKE, batch=8, model=replace(SMOKE.model, experts=8, layers=1))
    corpus = load_text(Path(folder) / "text.py")
    run = Trainer(
        options, corpus, Path(folder), group=dist.group.WORLD, device=CPU, resume=resume, reporter=Reporter(True)
    )
    if resume is None:
        with torch.no_grad():
            for number, p in enumerate(run.model.parameters()):
                run.optimizer.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": p.detach() * number,
                    "exp_avg_sq": p.detach() ** 2,
                }
    return run


def test_checkpoints_of_four_ranks_load_on_any_number(tmp_path, text):
    """Report 38: one rank's experts kept, or experts swapped, on a reload at another size."""
    (tmp_path / "text.py").write_bytes(text.read_bytes())
    values(run_ranks(save_on_ranks, 4, str(tmp_path)))
    want = tensors(tmp_path)
    assert sum("experts." in name for name in want) == 8 * 2 * 3
    for world in (1, 2, 8):
        got: dict = {}
        for part in values(run_ranks(load_on_ranks, world, str(tmp_path))):
            assert not set(part) & set(got)
            got |= part
        assert set(got) == set(want)
        assert all(torch.equal(torch.from_numpy(got[n]), want[n]) for n in want)


@pytest.mark.slow
def test_under_torchrun(tmp_path, text):
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517", "-m", "moeloom"]
    done = subprocess.run(
        [
            sys.executable,
            *arguments,
            "train",
            "--preset",
            "smoke",
            "--data",
            str(text),
            "--out",
            str(tmp_path),
            "--steps",
            "4",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rank(s)" in done.stdout and CheckpointStore(tmp_path / "checkpoints").latest().world == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_default_run_reaches_its_goal(tmp_path, ranks):
    """On two CPU cores: first loss line within 10 s, the whole run within 180 s, validation at most 2.05 bits a byte."""
    started = time.monotonic()
    process = subprocess.Popen(
        command("train", "--out", str(tmp_path), "--ep", str(ranks)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first, lines = None, []
    for line in process.stdout:
        lines.append(line)
        if first is None and re.match(r"step +1  loss", line):
            first = time.monotonic() - started
    assert process.wait() == 0, "".join(lines)
    seconds = time.monotonic() - started
    bits = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "valid"][-1]["bits_per_byte"]
    print(f"first loss line {first:.1f} s, whole run {seconds:.1f} s, {bits:.3f} bits/byte, {ranks} rank(s)")
    assert bits <= 2.05
    # The goal is for two cores with AVX-512, on which it was set; AVX2 multiplies at about half the rate.
    slow = 1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1.5
    assert first <= 10 * slow and seconds <= 180 * slow
