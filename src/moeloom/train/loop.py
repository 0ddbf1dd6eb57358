"""The training loop: one object that owns model, optimiser and files, on one rank of an EP group."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moeloom.config import MoEConfig
from moeloom.errors import ArgumentError, CheckpointError, NonFiniteLoss, PeerMismatch, complain
from moeloom.gradients import clip_gradients, expert_parameters, sync_gradients
from moeloom.runtime.ep_group import resolve_group
from moeloom.train.baselines import Baselines, compute_baselines
from moeloom.train.checkpoint import Checkpoint, CheckpointStore
from moeloom.train.data import Batches, Corpus
from moeloom.train.evaluation import WINDOWS, bits_per_byte
from moeloom.train.metrics import MetricsWriter
from moeloom.train.model import MoELanguageModel
from moeloom.train.optimizer import learning_rate, make_optimizer
from moeloom.train.options import Options
from moeloom.train.report import Reporter
from moeloom.train.sampling import generate
from moeloom.train.snapshot import load_snapshot, set_optimizer_step, take_snapshot

#: Steps between rows that carry the expert load.
LOAD_EVERY = 10
SAMPLE_PROMPT = b"def main("
#: Bytes to generate before training (noise, and the first loss is waiting) and after it.
SAMPLE_BYTES = {"before training": 48, "after training": 240}
_EXCHANGE_SECONDS = 60.0


@dataclass
class Result:
    """How a training ended.

    Attributes:
        step: steps taken in all.
        finished: False when a signal ended it early (it was saved).
        valid_bits: bits per byte over the whole validation text, or None when it did not get there.
    """

    step: int
    finished: bool
    valid_bits: float | None


class Trainer:
    """One training run.

    Args:
        options: what to do.
        corpus: text.
        out: folder for checkpoints, metrics, samples and the picture.
        group: EP group, or None.
        device: of the model.
        resume: continue from this checkpoint.
        reporter: says what happens; silent on ranks other than 0.

    Raises:
        ArgumentError: options that do not fit the number of ranks.
        CheckpointError: the checkpoint is of another model or of another text.
    """

    def __init__(
        self,
        options: Options,
        corpus: Corpus,
        out: Path,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        resume: Checkpoint | None,
        reporter: Reporter,
    ) -> None:
        self.options, self.corpus, self.out, self.report = options, corpus, out, reporter
        self.group, self.ep, self.device = group, resolve_group(group), device
        if options.batch % (self.ep.size * options.grad_accum) or WINDOWS % self.ep.size:
            rule = f"be a multiple of ranks * grad_accum = {self.ep.size * options.grad_accum}"
            raise ArgumentError(
                complain("batch", rule, options.batch, f"Use a number of ranks that divides {WINDOWS}, too.")
            )
        torch.manual_seed(options.seed)
        self.model = MoELanguageModel(options.model, group, MoEConfig(backend=options.backend)).to(device)
        self.optimizer = make_optimizer(self.model, options)
        self.batches = Batches(corpus.train, options.seq, options.batch, options.seed)
        self.store = CheckpointStore(out / "checkpoints")
        self.step, self.trained_seconds = 0, 0.0
        self._saved_step = -1
        if resume is not None:
            self._restore(resume)
        self._check_replicas()
        self.metrics = (
            MetricsWriter(out / "metrics.jsonl", self.step if resume else None) if self.ep.rank == 0 else None
        )
        # What a signal asked of this rank, and what all ranks agreed on at the last exchange. Signals reach ranks at
        # different moments; a rank that acted on its own would leave the others waiting.
        self._asked_signal = self._stop_signal = 0
        self._loads: list[Tensor] = [
            torch.zeros(options.model.experts, dtype=torch.int64) for _ in self.model.moe_layers
        ]

    def run(self) -> Result:
        """Train to the end, or to a signal; save, evaluate, draw.

        Raises:
            NonFiniteLoss: loss or gradient norm was NaN or infinite; the state before that step is saved.
            PeerLost: another rank died.
        """
        baselines = _InBackground(lambda: compute_baselines(self.corpus, self.out)) if self.ep.rank == 0 else None
        with self._signals(), self.report.progress(self.options, self.step):
            if self.step == 0:
                self._sample("before training")
            while not self._finished():
                self._train_step()
                if self._stop_signal:
                    self._save()
                    name = signal.Signals(self._stop_signal).name
                    self.report.say(
                        f"stopped by {name} after step {self.step}; saved. Go on: --resume --out {self.out}"
                    )
                    return Result(self.step, False, None)
                if self.step % self.options.eval_every == 0 and not self._finished():
                    self._validate(self.options.eval_bytes)
                if self.step % self.options.save_every == 0:
                    self._save()
        self._save()
        bits = self._validate(None)
        self._sample("after training")
        if self.ep.rank == 0:
            self.metrics.close()
            self.report.finish(self.out, bits, self.corpus, baselines.result())
        return Result(self.step, True, bits)

    # ------------------------------------------------------------------------------------------------------- a step

    def _train_step(self) -> None:
        """Take one optimiser step, or raise before the parameters change."""
        started, options = time.monotonic(), self.options
        rate = learning_rate(options, self.step, self._progress())
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.batches.get(self.step, self.ep.rank, self.ep.size)
        loss = torch.zeros((), device=self.device)
        aux = torch.zeros((), device=self.device)
        for x, y in zip(inputs.chunk(options.grad_accum), targets.chunk(options.grad_accum), strict=True):
            part, part_aux = self._loss(x.to(self.device), y.to(self.device))
            ((part + options.aux_loss * part_aux) / options.grad_accum).backward()
            loss += part.detach() / options.grad_accum
            aux += part_aux.detach() / options.grad_accum
        sync_gradients(self.model, self.group, timeout_s=_EXCHANGE_SECONDS)
        norm = clip_gradients(self.model, self.group, options.clip, timeout_s=_EXCHANGE_SECONDS)
        elapsed = self.trained_seconds + time.monotonic() - started
        facts = self._share(float(loss), float(aux), float(norm), elapsed)
        self.optimizer.step()
        self.step += 1
        self.trained_seconds = facts["seconds"]
        self._balance()
        self._record(facts, rate, time.monotonic() - started)

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cross entropy in nats, mean auxiliary loss of the layers)."""
        with self._autocast():
            logits, routings = self.model(x)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
        return loss, torch.stack([r.aux_loss for r in routings]).mean()

    def _share(self, loss: float, aux: float, norm: float, elapsed: float) -> dict[str, float]:
        """Bring the ranks' facts together: means, whether to stop, rank 0's clock. Raise if something is not finite."""
        finite = [v if math.isfinite(v) else 0.0 for v in (loss, aux, norm)]
        bad = [float(not math.isfinite(v)) for v in (loss, norm)]
        table = torch.zeros(self.ep.size, 7, dtype=torch.float64)
        table[self.ep.rank] = torch.tensor([*finite, float(self._asked_signal), elapsed, *bad], dtype=torch.float64)
        self.ep.sum_ordered(table.view(-1), phase="step facts", seconds=_EXCHANGE_SECONDS)
        for column, what in ((5, "loss"), (6, "gradient norm")):
            if table[:, column].any():
                rank = self.ep.global_ranks[int(table[:, column].argmax())]
                self._save()
                raise NonFiniteLoss(
                    f"the {what} of step {self.step + 1} is not finite, first on rank {rank}. The state after step "
                    f"{self.step} is saved in {self.store.folder}. Lower --lr, or look at the text of that batch."
                )
        self._stop_signal = int(table[:, 3].max())
        loss, aux = table[:, :2].mean(0).tolist()
        return {"loss": loss, "aux": aux, "norm": norm, "seconds": float(table[0, 4])}

    def _balance(self) -> None:
        """Collect expert loads over ranks; move the selection biases where there are any."""
        routers = [layer.router for layer in self.model.moe_layers]
        biased = routers[0].selection_bias is not None
        if not (biased or self.step % LOAD_EVERY == 0 or self._finished()):
            return
        for router, total in zip(routers, self._loads, strict=True):
            load = router.take_load(self.group, timeout_s=_EXCHANGE_SECONDS)
            total += load.cpu()
            if biased:
                router.update_selection_bias(load, self.options.bias_rate)

    def _record(self, facts: dict[str, float], rate: float, seconds: float) -> None:
        """Write the step's metrics row and tell the reporter."""
        tokens = self.options.batch * self.options.seq
        row = {
            "step": self.step,
            "kind": "train",
            "bits_per_byte": facts["loss"] / math.log(2),
            "aux_loss": facts["aux"],
            "gradient_norm": facts["norm"],
            "lr": rate,
            "tokens": self.step * tokens,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "seconds": facts["seconds"],
        }
        if self.step % LOAD_EVERY == 0 or self._finished():
            row["expert_load"] = [load.tolist() for load in self._loads]
            for load in self._loads:
                load.zero_()
        if self.metrics is not None:
            self.metrics.write(row)
        self.report.step(row, self._progress())

    # --------------------------------------------------------------------------------------------- between the steps

    def _validate(self, limit_bytes: int | None) -> float:
        """Measure validation bits per byte, write the row."""
        self.report.status("validating")
        bits = bits_per_byte(
            self.model,
            self.corpus.valid,
            seq=self.options.seq,
            group=self.ep,
            limit_bytes=limit_bytes,
            autocast=self._autocast(),
        )
        row = {"step": self.step, "kind": "valid", "bits_per_byte": bits, "whole_text": limit_bytes is None}
        if self.metrics is not None:
            self.metrics.write(row)
        self.report.validated(row)
        return bits

    def _sample(self, when: str) -> None:
        self.report.status("writing a sample")
        with self._autocast():
            text = generate(
                self.model,
                SAMPLE_PROMPT,
                SAMPLE_BYTES[when],
                context=self.options.seq,
                temperature=0.7,
                seed=self.options.seed,
            )
        self.report.sample(when, self.step, text, self.out / "samples.txt")

    def _save(self) -> None:
        if self._saved_step == self.step:
            return
        self.report.status("saving")
        self._check_replicas()
        state = {
            "options": self.options.to_dict(),
            "corpus_sha256": self.corpus.sha256,
            "trained_seconds": self.trained_seconds,
            "ep": self.ep.size,
        }
        self.store.save(
            self.step,
            take_snapshot(self.model, self.optimizer, self.ep.rank),
            state,
            rank=self.ep.rank,
            world=self.ep.size,
            gather=lambda message: self.ep.gather_json(message, seconds=600.0),
        )
        self._saved_step = self.step
        for warning in self.store.warnings:
            self.report.say(warning)
        self.store.warnings.clear()

    def _restore(self, checkpoint: Checkpoint) -> None:
        if checkpoint.state.get("corpus_sha256") != self.corpus.sha256:
            raise CheckpointError(
                f"checkpoint '{checkpoint.path}' was trained on the text with SHA-256 "
                f"{checkpoint.state.get('corpus_sha256')}, this one has {self.corpus.sha256}. Pass the same --data "
                "(and Python version, for the standard library), or start anew with another --out."
            )
        load_snapshot(checkpoint, self.model, self.optimizer)
        self.step = self._saved_step = checkpoint.step
        self.trained_seconds = float(checkpoint.state.get("trained_seconds", 0.0))
        set_optimizer_step(self.optimizer, self.step)

    def _check_replicas(self) -> None:
        """Raise unless replicated parameters have the same bits on all ranks; they must, and drift would be silent."""
        own = {id(p) for p in expert_parameters(self.model)}
        digest = [0, 0]
        for p in self.model.parameters():
            if id(p) not in own:
                words = p.detach().reshape(-1).view(torch.int32).to(torch.int64)
                digest[0] = (digest[0] * 31 + int(words.sum())) % (1 << 61)
                digest[1] = (
                    digest[1] * 31 + int((words * torch.arange(1, words.numel() + 1, device=words.device)).sum())
                ) % (1 << 61)
        digests = self.ep.gather_words(digest, phase="replica check", seconds=_EXCHANGE_SECONDS)
        for place, other in enumerate(digests):
            if other != digest:
                raise PeerMismatch(
                    f"replicated parameters must have the same bits on all ranks; rank {self.ep.global_ranks[place]} "
                    f"differs from rank {self.ep.global_ranks[self.ep.rank]} after step {self.step}. This is a bug, or "
                    "ranks run different software; please report it."
                )

    # ---------------------------------------------------------------------------------------------------- small parts

    def _progress(self) -> float:
        if self.options.minutes is not None:
            return self.trained_seconds / (60 * self.options.minutes)
        return self.step / self.options.steps

    def _finished(self) -> bool:
        return self._progress() >= 1

    def _autocast(self) -> contextlib.AbstractContextManager:
        wanted = self.options.dtype
        if wanted == "bf16" or (wanted == "auto" and self.device.type == "cuda"):
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _signals(self):
        """Turn SIGINT and SIGTERM into a wish to stop after the step; a second one ends at once."""

        def wish(number: int, _frame: object) -> None:
            if self._asked_signal:
                os._exit(128 + number)
            self._asked_signal = number
            self.report.say("stopping after this step; press again to end at once without saving")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _InBackground:
    """A function's value, computed in a thread meanwhile; one that fails raises at :meth:`result`."""

    def __init__(self, function) -> None:
        self._outcome: Baselines | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function) -> None:
        try:
            self._outcome = function()
        except Exception as error:
            self._error = error

    def result(self):
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome
