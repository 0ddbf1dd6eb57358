"""The counting models against a slow reference, and the compressors against their definition."""

from __future__ import annotations

import json
import lzma
import math
import zlib
from collections import Counter, defaultdict
from dataclasses import asdict

import numpy as np
import pytest

from moeloom.errors import ArgumentError
from moeloom.train import baselines as module
from moeloom.train.baselines import compute_baselines, order_n_bits, xz_bits, zlib_bits
from moeloom.train.data import load_text


def text(seed, size, kinds):
    return np.random.default_rng(seed).integers(0, kinds, size).astype(np.uint8)


class SlowWittenBell:
    def __init__(self, train, order):
        self.counts = [defaultdict(Counter) for _ in range(order + 1)]
        for length in range(order + 1):
            for end in range(length, len(train)):
                self.counts[length][bytes(train[end - length : end])][int(train[end])] += 1

    def chance(self, history, byte):
        value = 1 / 256
        for length, table in enumerate(self.counts[: len(history) + 1]):
            seen = table.get(bytes(history[len(history) - length :]))
            if seen:
                value = (seen[byte] + len(seen) * value) / (seen.total() + len(seen))
        return value


@pytest.mark.parametrize("order", [0, 1, 2, 3, 5])
def test_counting_matches_the_slow_reference(order):
    train, valid = text(1, 700, 5), text(2, 150, 6)
    slow = SlowWittenBell(bytes(train), order)
    bits = [-math.log2(slow.chance(bytes(valid[:end]), int(valid[end]))) for end in range(valid.size)]
    assert order_n_bits(train, valid, order) == pytest.approx(sum(bits) / len(bits), rel=1e-12)


@pytest.mark.parametrize("history", [b"", b"\1\2\3", b"\1\2\377", b"\377\377\377"])
def test_the_chances_of_all_bytes_sum_to_one(history):
    train = text(3, 2_000, 5)

    def bits(part):
        return order_n_bits(train, np.frombuffer(part, np.uint8), 3) * len(part) if part else 0.0

    total = sum(2 ** -(bits(history + bytes([byte])) - bits(history)) for byte in range(256))
    assert total == pytest.approx(1, abs=1e-9)


def test_known_sources_reach_their_entropy():
    assert order_n_bits(text(4, 400_000, 256), text(5, 50_000, 256), 0) == pytest.approx(8, abs=0.01)
    assert order_n_bits(text(6, 400_000, 16), text(7, 50_000, 16), 0) == pytest.approx(4, abs=0.01)
    cycle = np.tile(np.arange(8, dtype=np.uint8), 20_000)
    assert order_n_bits(cycle, cycle[:8_000], 1) < 0.02


def test_texts_shorter_than_the_context_work():
    assert order_n_bits(text(1, 2, 4), text(2, 2, 4), 7) > 0


def test_bad_arguments_are_refused():
    for train, valid, order in ((4, 4, -1), (4, 4, 8), (0, 4, 1), (4, 0, 1)):
        with pytest.raises(ArgumentError):
            order_n_bits(text(0, train, 4), text(0, valid, 4), order)


def test_compressors_follow_their_definition():
    valid = text(8, 9_000, 20)
    assert xz_bits(valid) == 8 * len(lzma.compress(bytes(valid))) / 9_000
    assert zlib_bits(valid) == 8 * len(zlib.compress(bytes(valid))) / 9_000


def test_the_library_gives_the_usual_numbers(tmp_path):
    corpus = load_text(None)
    result = compute_baselines(corpus, tmp_path / "new")
    assert 4.2 < result.order0 < 5.2
    assert 1.85 < result.order3 < 2.35
    assert 1.7 < result.zlib < 2.1
    assert 1.4 < result.xz < 1.75
    assert json.loads((tmp_path / "new/baselines.json").read_text())["bits_per_byte"] == asdict(result)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello baselines\n" * 5_000)
    return load_text(tmp_path / "a.txt")


def test_the_cache_is_used_for_the_same_text_only(tmp_path, corpus, monkeypatch):
    first = compute_baselines(corpus, tmp_path)
    monkeypatch.setattr(module, "order_n_bits", lambda *_: 99.0)
    assert compute_baselines(corpus, tmp_path) == first
    (tmp_path / "a.txt").write_bytes(b"other baselines\n" * 5_000)
    assert compute_baselines(load_text(tmp_path / "a.txt"), tmp_path).order0 == 99.0


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": 3}', '{"sha256": "SAME"}', '{"sha256": "SAME", "bits'])
def test_a_damaged_cache_is_computed_anew(tmp_path, corpus, content):
    (tmp_path / "baselines.json").write_text(content.replace("SAME", corpus.sha256))
    assert compute_baselines(corpus, tmp_path) == compute_baselines(corpus)


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, corpus):
    assert compute_baselines(corpus, tmp_path / "a.txt") == compute_baselines(corpus)
