"""metrics.jsonl across crashes and resumes, and the picture made from it."""

from __future__ import annotations

import errno
import json
import os
import struct

import numpy as np
import pytest

from moeloom.errors import ArgumentError, DataError
from moeloom.train import plots
from moeloom.train.metrics import MetricsWriter, read_metrics
from moeloom.train.plots import plot_training


def rows(steps=200, layers=2, experts=8):
    result = []
    for step in range(1, steps + 1):
        row = {"step": step, "kind": "train", "bits_per_byte": 2 + 6 / step}
        if step % 20 == 0:
            row["expert_load"] = np.full((layers, experts), step).tolist()
            result.append({"step": step, "kind": "valid", "bits_per_byte": 2.1 + 6 / step})
        result.append(row)
    return result


def test_rows_come_back(tmp_path):
    with MetricsWriter(tmp_path / "out" / "metrics.jsonl") as writer:
        writer.write({"step": 1, "load": np.array([[1, 2]]), "loss": np.float32(0.5)})
        assert read_metrics(writer.path) == [{"step": 1, "load": [[1, 2]], "loss": 0.5}]
        writer.write({"step": 2})
    assert [row["step"] for row in read_metrics(writer.path)] == [1, 2]


def test_numbers_that_json_lacks_become_null_with_a_flag(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write({"step": 1, "a": float("nan"), "b": [1.0, float("inf")], "c": {"d": np.float64("-inf")}})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(writer.path.read_text(), parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": [1.0, None], "c": {"d": None}, "non_finite": True}


def test_resuming_drops_later_rows_and_a_cut_line(tmp_path):
    path = tmp_path / "m"
    path.write_text("".join(f'{{"step":{step}}}\n' for step in range(1, 8)) + '{"step":')
    assert len(read_metrics(path)) == 7
    with MetricsWriter(path, resume_from=4) as writer:
        writer.write({"step": 5, "again": True})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["again"]


def test_resuming_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "m"
    path.write_text('{"step":1}\n{"step":2}\n')

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match="broken"):
        MetricsWriter(path, resume_from=1)
    assert len(read_metrics(path)) == 2


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path / "m")
    writer.write({"step": 1})
    real = os.write

    def short(handle, data):
        if len(data) < 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:5])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(DataError, match="No space left"):
        writer.write({"step": 2, "x": "y"})
    monkeypatch.setattr(os, "write", real)
    writer.write({"step": 3})
    writer.close()
    writer.close()
    assert read_metrics(writer.path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step":'])
def test_damage_before_the_end_is_an_error(tmp_path, line):
    (tmp_path / "m").write_text(f'{{"step":1}}\n{line}\n{{"step":2}}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path / "m")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nothing"):
        read_metrics(tmp_path / "nothing")


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("experts", [8, 64])
def test_the_picture_has_its_size(tmp_path, experts):
    out = tmp_path / "training.png"
    plot_training(rows(experts=experts), {"order0": 4.8, "order3": 2.1, "zlib": 1.9, "xz": 1.55}, out)
    assert png_size(out) == (1600, 700)
    assert os.listdir(tmp_path) == ["training.png"]


def test_little_data_still_gives_a_picture(tmp_path):
    only = [{"step": 1, "kind": "train", "bits_per_byte": 8.0}, {"step": 2, "kind": "train", "bits_per_byte": None}]
    plot_training(only, None, tmp_path / "a.png")
    assert png_size(tmp_path / "a.png") == (1600, 700)


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="train row"):
        plot_training([{"step": 1, "kind": "valid", "bits_per_byte": 3.0}], None, tmp_path / "a.png")
    assert not os.listdir(tmp_path)


def test_load_is_relative_to_balance_and_of_the_end():
    early = {"step": 10, "kind": "train", "expert_load": [[100, 0, 0, 0]]}
    late = [{"step": step, "kind": "train", "expert_load": [[30, 10, 10, 30]]} for step in (90, 100)]
    assert np.allclose(plots._final_load([early, *late]), [[1.5, 0.5, 0.5, 1.5]])
    assert plots._final_load([{"step": 1}]) is None
    assert np.allclose(plots._final_load([{"step": 1, "expert_load": [[0, 0]]}]), 0)


def test_labels_keep_their_distance_and_stay_close():
    assert np.allclose(plots._spread(np.array([0.1, 0.5, 0.5, 0.9]), gap=0.1), [0.1, 0.45, 0.55, 0.9])
    spread = plots._spread(np.sort(np.random.default_rng(0).random(12)), gap=0.04)
    assert (np.diff(spread) > 0.04 - 1e-9).all()


def test_smoothing_keeps_the_mean_of_a_constant():
    assert np.allclose(plots._smooth(np.full(500, 3.0)), 3)
    assert plots._smooth(np.random.default_rng(0).normal(size=4000)).std() < 0.15
