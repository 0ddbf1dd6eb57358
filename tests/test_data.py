"""Reading and splitting text, and batches that depend on the step alone."""

from __future__ import annotations

import hashlib
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeloom.errors import ArgumentError, DataError
from moeloom.train import data as data_module
from moeloom.train.data import Batches, load_text, validation_windows


@pytest.fixture(scope="module")
def library():
    return load_text(None)


def fill(folder, names, size=2_000):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((f"{name}\n" * size)[: size - 1] + "x")


def test_the_library_splits_by_file_into_about_one_twentieth(library):
    share = library.valid.size / (library.valid.size + library.train.size)
    assert 0.03 <= share <= 0.08
    assert library.split == "split by file"
    assert library.train.dtype == library.valid.dtype == np.uint8
    assert library.sha256 in library.describe()
    assert f"{library.train.size / 1e6:.2f} MB train" in library.describe()


def test_the_library_is_the_same_each_time(library):
    again = load_text(None)
    assert again.sha256 == library.sha256
    assert np.array_equal(again.valid, library.valid)


def test_library_folders_with_tests_and_packages_are_left_out(tmp_path, monkeypatch):
    skipped = ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"]
    fill(tmp_path, [f"{name}/deep/a.py" for name in skipped] + ["notes.txt"], size=100)
    fill(tmp_path, [f"pack/m{number}.py" for number in range(60)] + ["test.py"], size=20_000)
    monkeypatch.setattr(data_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_text(None)
    assert corpus.files == 61
    assert corpus.train.size + corpus.valid.size == 61 * 20_001


def test_a_small_library_asks_for_data(tmp_path, monkeypatch):
    fill(tmp_path, ["a.py", "b.py"])
    monkeypatch.setattr(data_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"2 \.py files with 0\.004 MB .*--data PATH"):
        load_text(None)


def test_a_file_is_split_at_its_end(tmp_path):
    text = os.urandom(60_000).hex().encode()
    (tmp_path / "a.txt").write_bytes(text)
    corpus = load_text(tmp_path / "a.txt")
    assert corpus.train.tobytes() + corpus.valid.tobytes() == text + b"\n"
    assert corpus.valid.size == 120_001 // 20


def test_a_folder_is_read_in_sorted_order_with_newlines_between(tmp_path):
    fill(tmp_path, ["b.md", "a/z.txt", "a.py"], size=40_000)
    corpus = load_text(tmp_path)
    order = [tmp_path / "a.py", tmp_path / "a/z.txt", tmp_path / "b.md"]
    expected = b"".join(path.read_bytes()[:38_001] for path in order)
    # 40,001 bytes with the newline, of which 2,000 are validation text.
    assert corpus.split == "last 5 % of each file"
    assert corpus.train.tobytes() == expected
    assert corpus.valid.tobytes() == b"".join(path.read_bytes()[38_001:] + b"\n" for path in order)


def test_many_files_are_split_by_name_alone(tmp_path):
    names = [f"page{number}.txt" for number in range(200)]
    fill(tmp_path, names)
    corpus = load_text(tmp_path)
    assert corpus.split == "split by file"
    chosen = sorted(n for n in names if int(hashlib.sha256(n.encode()).hexdigest(), 16) % 20 == 0)
    assert corpus.valid.tobytes() == b"".join((tmp_path / name).read_bytes() + b"\n" for name in chosen)


def test_the_digest_covers_names_and_bytes(tmp_path):
    fill(tmp_path, ["a.txt", "b.txt"], size=50_000)
    first = load_text(tmp_path).sha256
    (tmp_path / "a.txt").rename(tmp_path / "aa.txt")
    second = load_text(tmp_path).sha256
    with open(tmp_path / "aa.txt", "r+b") as file:
        file.write(b"!")
    assert len({first, second, load_text(tmp_path).sha256}) == 3


def test_links_binaries_and_hidden_folders_are_left_out(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "out"
    fill(folder, ["a.txt"], size=70_000)
    fill(outside, ["secret.txt"], size=70_000)
    fill(folder, [".git/x.txt", "picture.png"])
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "linked").symlink_to(outside, target_is_directory=True)
    (folder / "binary.txt").write_bytes(b"abc\0def")
    (folder / "empty.txt").touch()
    os.mkfifo(folder / "pipe.txt")
    corpus = load_text(folder)
    assert corpus.files == 1
    assert corpus.train.size + corpus.valid.size == 70_001


@pytest.mark.parametrize("case", ["missing", "empty file", "empty folder", "binary file", "small", "binaries", "pipe"])
def test_what_cannot_be_used_is_refused(tmp_path, case):
    path = tmp_path / "x"
    if case == "empty file":
        path.touch()
    elif case == "binary file":
        path.write_bytes(b"ab\0" * 50_000)
    elif case == "pipe":
        os.mkfifo(path)
    elif case != "missing":
        path.mkdir()
    if case == "small":
        fill(path, ["a.txt"], size=65_535)
    if case == "binaries":
        (path / "a.png").write_bytes(b"x" * 100_000)
        (path / "a.txt").write_bytes(b"\0" * 100_000)
    reason = {"missing": "No such file", "binary file": "binary", "pipe": "neither", "binaries": "2 other files"}
    with pytest.raises(DataError, match=reason.get(case, "at least 65536 bytes")):
        load_text(path)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    fill(tmp_path, ["a.txt"], size=70_000)

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(data_module.Path, "read_bytes", fail)
    with pytest.raises(DataError, match=r"a\.txt.*Permission denied"):
        load_text(tmp_path)


@settings(max_examples=40, deadline=None)
@given(seq=st.integers(1, 30), extra=st.integers(0, 200), batch=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_an_epoch_visits_every_window_once(seq, extra, batch, seed):
    size = 2 * seq + extra
    text = np.arange(size, dtype=np.uint32)
    batches = Batches(text, seq, batch, seed)
    steps = -(-batches.windows // batch)
    parts = [batches.get(step) for step in range(steps)]
    inputs = np.concatenate([part[0].numpy() for part in parts])[: batches.windows]
    targets = np.concatenate([part[1].numpy() for part in parts])[: batches.windows]
    assert np.array_equal(inputs + 1, targets)
    seen = np.sort(inputs.ravel())
    assert np.array_equal(seen, np.arange(seen[0], seen[0] + seen.size))
    assert seen.size > size - 2 * seq


def test_ranks_share_one_global_batch():
    batches = Batches(np.random.default_rng(0).integers(0, 256, 5_000).astype(np.uint8), 16, 12, seed=3)
    for step in (0, 7, 1_000, 31):
        whole = batches.get(step)
        for world in (2, 3, 12):
            fresh = Batches(batches.data, 16, 12, seed=3)
            parts = [fresh.get(step, rank, world) for rank in range(world)]
            for index in (0, 1):
                assert np.array_equal(np.concatenate([part[index] for part in parts]), whole[index])


def test_epochs_and_seeds_differ():
    text = np.arange(1_000, dtype=np.uint32)
    batches = Batches(text, 10, 99, seed=1)
    first, second, other = batches.get(0)[0], batches.get(1)[0], Batches(text, 10, 99, seed=2).get(0)[0]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(np.sort(first[:, 0]), first[:, 0])


def test_the_order_of_windows_is_pinned():
    """A changed order would break every resumed training without a message."""
    starts = Batches(np.arange(1_000, dtype=np.uint32), 10, 8, seed=1234).get(5)[0][:, 0]
    assert starts.tolist() == [14, 314, 264, 104, 454, 524, 684, 574]


def test_a_batch_takes_under_two_milliseconds(library):
    batches = Batches(library.train, 256, 64, seed=0)
    batches.get(0)
    times = []
    for step in range(1, 30):
        start = time.perf_counter()
        batches.get(step)
        times.append(time.perf_counter() - start)
    assert np.median(times) < 2e-3


def test_bad_numbers_are_refused():
    text = np.zeros(100, dtype=np.uint8)
    for seq, batch, seed in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (51, 1, 0)):
        with pytest.raises(ArgumentError):
            Batches(text, seq, batch, seed)
    batches = Batches(text, 10, 6, 0)
    for step, rank, world in ((0, 0, 4), (0, 2, 2), (-1, 0, 1), (0, 0, 0)):
        with pytest.raises(ArgumentError):
            batches.get(step, rank, world)
    for seq, batch, limit in ((0, 1, None), (1, 0, None), (1, 1, 0)):
        with pytest.raises(ArgumentError):
            validation_windows(text, seq, batch, limit)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 300), seq=st.integers(1, 40), batch=st.integers(1, 5))
def test_validation_has_every_byte_as_target_once(size, seq, batch):
    text = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    parts = list(validation_windows(text, seq, batch))
    inputs, targets = (np.concatenate([part[i].numpy() for part in parts]) for i in (0, 1))
    assert {tuple(part[i].shape) for part in parts for i in (0, 1)} == {(batch, seq)}
    real = targets.ravel() != -100
    assert np.array_equal(targets.ravel()[real], text)
    assert np.array_equal(inputs.ravel()[real], np.concatenate([[10], text[:-1]]))


def test_limited_validation_spreads_over_the_text():
    text = np.repeat(np.arange(10, dtype=np.uint8), 100)
    parts = list(validation_windows(text, 10, 4, limit_bytes=100))
    targets = np.concatenate([part[1].numpy() for part in parts])
    assert len(parts) == 3
    assert targets[:10, 0].tolist() == list(range(10))
    assert (targets[10:] == -100).all()
