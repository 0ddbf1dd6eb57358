"""Checkpoints: what is saved comes back, nothing that goes wrong harms the previous one, unsafe content is refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from moeloom.errors import ArgumentError, CheckpointError
from moeloom.train import checkpoint as module
from moeloom.train.checkpoint import Checkpoint, CheckpointStore


def tensors(value=1.0):
    return {
        "w": torch.full((4, 3), float(value)),
        "b": torch.full((5,), value, dtype=torch.bfloat16),
        "n": torch.tensor(int(value), dtype=torch.int64),
        "rng": torch.arange(9, dtype=torch.uint8),
        "none": torch.zeros(0, 7),
    }


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def saved(store):
    """A store with one checkpoint, of step 3."""
    store.save(3, tensors(3), {"seed": 3})
    return store


def shard_of(path):
    return path / "shard-00000-of-00001.safetensors"


def edit_manifest(path, change):
    manifest = json.loads((path / "checkpoint.json").read_text())
    change(manifest)
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def refresh_sums(path):
    """What an attacker would do: make the manifest agree with the changed files."""

    def change(manifest):
        for entry in manifest["files"]:
            file = path / entry["name"]
            entry.update(size=file.stat().st_size, sha256=module._sha256(file))

    edit_manifest(path, change)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


class Ranks:
    """An all-gather between threads that lets only JSON through."""

    def __init__(self, world):
        self.world, self.slots = world, [None] * world
        self.barrier = threading.Barrier(world, timeout=20)

    def gather(self, rank):
        def call(message):
            self.slots[rank] = json.dumps(message)
            self.barrier.wait()
            result = [json.loads(slot) for slot in self.slots]
            self.barrier.wait()
            return result

        return call

    def run(self, store, parts, steps=None, state=None):
        """Save one part per rank; return the error of each rank or None."""
        errors = [None] * self.world

        def work(rank):
            step = steps[rank] if steps else 1
            try:
                store.save(step, parts[rank], state or {}, rank=rank, world=self.world, gather=self.gather(rank))
            except Exception as error:
                errors[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return errors


# ------------------------------------------------------------------------------------------------------- save and load


def test_everything_comes_back_bit_for_bit(store):
    given = tensors(2) | {"strided": torch.arange(12.0).reshape(3, 4).T, "nan": torch.tensor([float("nan"), -0.0])}
    state = {"config": {"layers": 2, "name": "é"}, "seen": 2**60, "lr": 0.1, "list": [1, None, True]}
    store.save(120, given, state)
    found = store.latest()
    assert (found.step, found.state, found.world, found.path.name) == (120, state, 1, "step-00000120")
    assert found.names() == sorted(given)
    for name, tensor in given.items():
        back = found.load(name)
        assert found.shape(name) == tuple(tensor.shape) == tuple(back.shape)
        assert found.dtype(name) == tensor.dtype == back.dtype
        assert bits(back) == bits(tensor)
    assert set(found.load_many(["w", "b"])) == {"w", "b"}
    assert store.warnings == []


def test_only_safetensors_and_json_are_on_disk(saved):
    path = saved.latest().path
    assert sorted(os.listdir(path)) == ["checkpoint.json", "shard-00000-of-00001.safetensors"]
    assert os.listdir(saved.folder) == ["step-00000003"]


def test_loaded_tensors_do_not_depend_on_the_file(saved):
    found = saved.latest()
    loaded = found.load("w")
    os.truncate(shard_of(found.path), 0)
    assert loaded.tolist() == tensors(3)["w"].tolist()


def test_ranks_write_one_checkpoint(store):
    parts = [{f"expert{rank}": torch.full((3,), float(rank)), f"x{rank}": torch.ones(2)} for rank in range(2)]
    parts.append({})
    assert Ranks(3).run(store, parts, state={"a": 1}) == [None] * 3
    found = store.latest()
    assert found.world == 3
    assert found.names() == ["expert0", "expert1", "x0", "x1"]
    assert found.load_many(["expert1", "expert0"])["expert1"].tolist() == [1, 1, 1]
    assert len(os.listdir(found.path)) == 4


def test_an_empty_store_has_no_latest(store):
    assert store.latest() is None
    store.folder.mkdir()
    (store.folder / "step-x").mkdir()
    assert store.latest() is None


def test_the_last_two_stay_and_the_newest_is_chosen_by_number(store):
    for step in (9, 10, 99_999_999, 100_000_000):
        store.save(step, tensors(1), {})
    assert sorted(os.listdir(store.folder)) == ["step-100000000", "step-99999999"]
    assert store.latest().step == 100_000_000


def test_saving_a_step_again_replaces_it(saved):
    saved.save(3, tensors(7), {"again": True})
    assert os.listdir(saved.folder) == ["step-00000003"]
    assert saved.latest().state == {"again": True}
    assert saved.latest().load("n").item() == 7


def test_check_lists_what_differs(saved):
    found = saved.latest()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors().items()}
    found.check(expected)
    wrong = {f"layer{number:02}": ((1,), torch.float32) for number in range(12)}
    wrong |= {**expected, "w": ((3, 4), torch.float32), "b": ((5,), torch.float32)}
    del wrong["rng"]
    with pytest.raises(CheckpointError) as caught:
        found.check(wrong)
    text = str(caught.value)
    assert "12 missing: layer00" in text
    assert "layer09 and 2 more" in text
    assert "1 unexpected: rng" in text
    assert "w (here [4, 3] torch.float32, expected [3, 4] torch.float32)" in text
    assert "b (here [5] torch.bfloat16, expected [5] torch.float32)" in text


def test_an_unknown_name_is_an_error(saved):
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        saved.latest().load("nope")


def test_bad_arguments_start_nothing(store):
    for step, options in ((-1, {}), (0, {"rank": 1}), (0, {"world": 2}), (0, {"rank": -1})):
        with pytest.raises(ArgumentError):
            store.save(step, {}, {}, **options)
    with pytest.raises(ArgumentError):
        CheckpointStore(store.folder, keep=0)
    assert not store.folder.exists()


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"__metadata__": torch.ones(1)}, {}),
        ({"a": [1]}, {}),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, {}),
        ({}, {"x": float("nan")}),
        ({}, {"x": object()}),
        ({}, {"1": 1, 1: 2}),
    ],
)
def test_what_cannot_be_read_again_is_not_written(saved, given, state):
    with pytest.raises(CheckpointError, match="earlier ones are untouched"):
        saved.save(4, given, state)
    assert os.listdir(saved.folder) == ["step-00000003"]


def test_a_state_too_large_to_read_is_not_written(saved, monkeypatch):
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 5_000)
    with pytest.raises(CheckpointError, match="5000 bytes of JSON"):
        saved.save(4, {}, {"x": "y" * 6_000})
    assert saved.latest().step == 3


# --------------------------------------------------------------------------------------------------- errors on one rank


def test_a_name_from_two_ranks_fails_on_all(store):
    errors = Ranks(2).run(store, [{"same": torch.ones(1)}, {"same": torch.ones(1)}])
    assert all("'same' came from rank 0 and from rank 1" in str(error) for error in errors)
    assert os.listdir(store.folder) == []


def test_other_steps_on_other_ranks_fail_on_all(store):
    errors = Ranks(2).run(store, [{}, {}], steps=[1, 2])
    assert all("[1, 2] by rank" in str(error) for error in errors)
    assert os.listdir(store.folder) == []


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("part", ["header", "shard"])
def test_an_error_on_one_rank_is_an_error_on_all(saved, monkeypatch, broken, part):
    parts = [{f"a{rank}": torch.ones(1)} for rank in range(2)]
    if part == "header":
        parts[broken]["bad"] = "text"
    else:
        real = safetensors.torch.save_file

        def save_file(given, path):
            if f"shard-0000{broken}" in str(path):
                raise OSError(errno.EIO, "broken disk")
            real(given, path)

        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    errors = Ranks(2).run(saved, parts)
    assert all(isinstance(error, CheckpointError) and f"rank {broken}: " in str(error) for error in errors)
    assert os.listdir(saved.folder) == ["step-00000003"]
    assert saved.latest().step == 3


# ------------------------------------------------------------------------------------------------------ kill, full disk


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_IN_WORDS = safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, FULL_IN_WORDS])
@pytest.mark.parametrize("where", ["save_file", "fsync", "manifest", "mkdir"])
def test_a_full_disk_leaves_the_previous_checkpoint(saved, monkeypatch, error, where):
    def fail(given, path, *_):
        Path(path).write_bytes(b"half")
        raise error

    def fail_at_once(*_):
        raise error

    with monkeypatch.context() as patch:
        if where == "save_file":
            patch.setattr(safetensors.torch, "save_file", fail)
        elif where == "manifest":
            patch.setattr(module, "_write_file", lambda path, data: fail(data, path))
        else:
            patch.setattr(os, where, fail_at_once)
        with pytest.raises(CheckpointError) as caught:
            saved.save(4, tensors(), {})
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "No space left" in str(caught.value)
    assert "bytes are free" in str(caught.value)
    if where != "mkdir":
        # 48 + 10 + 8 + 9 + 0 bytes of tensors.
        assert "needs about 75 bytes" in str(caught.value)
    assert os.listdir(saved.folder) == ["step-00000003"]
    assert saved.latest().step == 3


def test_an_interrupt_removes_the_temporary_folder(saved, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved.save(4, tensors(), {})
    assert os.listdir(saved.folder) == ["step-00000003"]


def test_everything_is_flushed_before_the_rename(saved, monkeypatch):
    events = []
    sync, rename = os.fsync, os.rename

    def fsync(handle):
        events.append(os.fstat(handle).st_ino)
        sync(handle)

    def renamed(source, target):
        events.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    saved.save(4, tensors(), {})
    path = saved.latest().path
    place = events.index("step-00000004")
    needed = {entry.stat().st_ino for entry in path.iterdir()}
    assert needed <= set(events[:place])
    # The folder is flushed after its last file, the parent after the rename.
    assert events[place - 1] == path.stat().st_ino
    assert saved.folder.stat().st_ino in events[place + 1 :]


KILLS = """
import os, shutil, sys
from pathlib import Path
import safetensors.torch
from moeloom.train import checkpoint as module
from moeloom.train.checkpoint import Checkpoint, CheckpointStore
import torch

base, step = Path(sys.argv[1]), int(sys.argv[2])


def part(value):
    return {"w": torch.full((64,), float(value)), "n": torch.tensor(value)}


def install(limit):
    ticks = [0]

    def tick():
        ticks[0] += 1
        if ticks[0] == limit:
            os._exit(9)

    def around(owner, name, half=None):
        real = getattr(owner, name)

        def hooked(*args, **options):
            tick()
            if half is not None and ticks[0] + 1 == limit:
                half(*args)
            tick()
            result = real(*args, **options)
            tick()
            return result

        setattr(owner, name, hooked)

    for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
        around(os, name)
    around(safetensors.torch, "save_file", lambda given, path: Path(path).write_bytes(b"half a shard"))
    around(module, "_write_file", lambda path, data: Path(path).write_bytes(data[: len(data) // 2]))


def after(work):
    store = CheckpointStore(work)
    found = store.latest()
    for path in work.glob("step-*"):
        Checkpoint.open(path)
    value = found.load("n").item()
    assert found.load("w").tolist() == [float(value)] * 64
    assert found.state == {"value": value}
    assert store.warnings == [], store.warnings
    assert (found.step, value) in [(2, 2), (step, 99)], (found.step, value)
    store.save(7, part(7), {"value": 7})
    assert store.latest().step == 7
    assert not [name for name in os.listdir(work) if name.startswith(".")]
    assert len(os.listdir(work)) == 2
    return value


store = CheckpointStore(base)
for number in (1, 2):
    store.save(number, part(number), {"value": number})
values = []
for limit in range(1, 500):
    work = base.with_name("work")
    shutil.copytree(base, work)
    child = os.fork()
    if not child:
        install(limit)
        CheckpointStore(work).save(step, part(99), {"value": 99})
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    values.append(after(work))
    shutil.rmtree(work)
    if code == 0:
        break
assert values == sorted(values), values
print(len(values), values.count(2))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("step", [3, 2])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, step):
    """Step 3 is new and prunes step 1; step 2 replaces the checkpoint of that step."""
    source = Path(module.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "base"), str(step)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, done.stderr
    moments, before = map(int, done.stdout.split())
    assert moments > 25
    assert 15 < before < moments - 5


def test_a_replaced_checkpoint_is_found_under_its_old_name(saved):
    """The moment between the two renames of a step that is saved again."""
    os.rename(saved.folder / "step-00000003", saved.folder / ".old-step-00000003")
    (saved.folder / ".tmp-step-00000003").mkdir()
    assert saved.latest().load("n").item() == 3
    saved.save(5, tensors(5), {})
    assert sorted(os.listdir(saved.folder)) == ["step-00000003", "step-00000005"]


def test_pruning_waits_for_the_new_checkpoint(saved, monkeypatch):
    saved.save(4, tensors(4), {})
    real, seen = shutil.rmtree, []

    def rmtree(path, *args, **options):
        seen.append(Checkpoint.open(saved.folder / "step-00000005").step)
        real(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    saved.save(5, tensors(5), {})
    assert seen == [5]


def test_an_old_one_that_cannot_be_removed_is_a_warning(saved, monkeypatch):
    saved.save(4, tensors(4), {})

    def fail(*_):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    saved.save(5, tensors(5), {})
    assert saved.latest().step == 5
    assert "busy" in saved.warnings[0]


# -------------------------------------------------------------------------------------------------------------- damage


def cut(path):
    os.truncate(shard_of(path), shard_of(path).stat().st_size - 1)


def flip(path):
    data = bytearray(shard_of(path).read_bytes())
    data[-1] ^= 1
    shard_of(path).write_bytes(data)


def cut_manifest(path):
    os.truncate(path / "checkpoint.json", 100)


def lose_shard(path):
    shard_of(path).unlink()


def lose_manifest(path):
    (path / "checkpoint.json").unlink()


DAMAGES = {
    cut: "and the manifest says",
    flip: "SHA-256 differs",
    cut_manifest: "not valid JSON",
    lose_shard: "No such file",
    lose_manifest: "No such file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back_with_a_warning(saved, damage):
    saved.save(4, tensors(4), {})
    damage(saved.folder / "step-00000004")
    found = saved.latest()
    assert found.step == 3
    assert found.load("n").item() == 3
    assert len(saved.warnings) == 1
    assert DAMAGES[damage] in saved.warnings[0]
    assert "step-00000004" in saved.warnings[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_none_left_is_an_error_that_says_why(saved, damage):
    damage(saved.folder / "step-00000003")
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        saved.latest()


def test_without_verify_the_content_is_not_read(saved):
    path = saved.folder / "step-00000003"
    flip(path)
    assert Checkpoint.open(path, verify=False).step == 3


def test_after_a_fallback_the_damaged_one_goes_and_a_good_one_stays(saved):
    saved.save(9, tensors(9), {})
    flip(saved.folder / "step-00000009")
    assert saved.latest().step == 3
    saved.save(5, tensors(5), {})
    assert sorted(os.listdir(saved.folder)) == ["step-00000003", "step-00000005"]
    assert saved.latest().step == 5


def test_a_good_later_one_is_never_removed(saved):
    for step in (9, 4, 5, 6):
        saved.save(step, tensors(step), {})
    assert sorted(os.listdir(saved.folder)) == ["step-00000005", "step-00000006", "step-00000009"]
    assert "step-00000009 is of a later step" in saved.warnings[-1]


# -------------------------------------------------------------------------------------------------------------- safety


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["model.pt", "x.PTH", "pytorch_model.bin", "a.pkl", "a.pickle", "notes"])
@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_a_planted_pickle_is_refused(saved, tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    path = saved.folder / "step-00000003"
    if kind == "pickle":
        (path / name).write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"a": 1}, path / name)
    with pytest.raises(CheckpointError, match="looks like a pickle"):
        Checkpoint.open(path)
    assert not (tmp_path / "exploded").exists()


def test_a_suffix_of_pickles_is_refused_whatever_is_inside(saved):
    path = saved.folder / "step-00000003"
    (path / "readme.txt").write_text("harmless")
    Checkpoint.open(path)
    (path / "old.pt").write_text("harmless")
    with pytest.raises(CheckpointError, match="old.pt"):
        Checkpoint.open(path)


@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_a_pickle_named_safetensors_is_refused(saved, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = saved.folder / "step-00000003"
    if kind == "pickle":
        shard_of(path).write_bytes(pickle.dumps(Bomb()))
    else:
        with zipfile.ZipFile(shard_of(path), "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    refresh_sums(path)
    with pytest.raises(CheckpointError, match="pickle or zip"):
        Checkpoint.open(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480])
def test_a_header_length_that_reads_like_a_pickle_is_no_pickle(store, length):
    """The first bytes of a safetensors file are a length, which is 80 02 or 80 04 for some honest files."""
    for size in range(1, length):
        name = "n" * size
        data = safetensors.torch.save({name: torch.ones(1)})
        if struct.unpack("<Q", data[:8])[0] == length:
            break
    store.save(1, {name: torch.ones(1)}, {})
    assert shard_of(store.folder / "step-00000001").read_bytes()[0] == 0x80
    assert store.latest().load(name).item() == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/passwd", "absolute"),
        ("\\\\host\\share", "absolute"),
        ("C:shard.safetensors", "absolute"),
        ("../step-00000003/shard-00000-of-00001.safetensors", r"contains '\.\.'"),
        ("..", r"contains '\.\.'"),
        ("sub/shard-00000-of-00001.safetensors", "separator"),
        ("sub\\shard-00000-of-00001.safetensors", "separator"),
        ("weights.safetensors", "not that of a shard"),
        ("shard-00000-of-00001.safetensors\n", "not that of a shard"),
        ("", "not that of a shard"),
    ],
)
def test_file_names_that_lead_elsewhere_are_refused(saved, name, reason):
    path = saved.folder / "step-00000003"

    def change(manifest):
        manifest["files"][0]["name"] = name
        for entry in manifest["tensors"].values():
            entry["file"] = name

    edit_manifest(path, change)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["checkpoint.json", "shard-00000-of-00001.safetensors"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_links_and_special_files_are_refused(saved, tmp_path, name, kind):
    path = saved.folder / "step-00000003"
    (path / name).rename(tmp_path / "elsewhere")
    if kind == "link":
        (path / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(CheckpointError, match="symbolic link" if kind == "link" else "not a regular file"):
        Checkpoint.open(path)


def test_a_linked_checkpoint_folder_is_not_looked_at(saved, tmp_path):
    shutil.move(saved.folder / "step-00000003", tmp_path / "step-00000003")
    (saved.folder / "step-00000003").symlink_to(tmp_path / "step-00000003")
    assert saved.latest() is None


def set_shape(manifest):
    manifest["tensors"]["w"]["shape"] = [3, 4]


def set_dtype(manifest):
    manifest["tensors"]["w"]["dtype"] = "I32"


def drop_tensor(manifest):
    del manifest["tensors"]["w"]


def add_tensor(manifest):
    manifest["tensors"]["extra"] = manifest["tensors"]["w"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_shape, "'w' is .4, 3. F32 in the file and .3, 4. F32"),
        (set_dtype, "'w' is .* F32 in the file and .* I32"),
        (drop_tensor, "differ in the tensors w"),
        (add_tensor, "differ in the tensors extra"),
        (lambda m: m["tensors"]["w"].update(shape=[4, -3]), "no valid shape"),
        (lambda m: m["tensors"]["w"].update(shape=[4, 3.0]), "no valid shape"),
        (lambda m: m["tensors"]["w"].update(dtype="pickle"), "unknown dtype"),
        (lambda m: m["tensors"]["w"].update(file="/etc/passwd"), "in no listed file"),
        (lambda m: m["tensors"].update(w=3), "in no listed file"),
        (lambda m: m["files"].append(m["files"][0]), "twice"),
        (lambda m: m["files"].append("x"), "has no name"),
        (lambda m: m["files"][0].update(sha256="0" * 63), "malformed"),
        (lambda m: m["files"][0].update(sha256="0" * 64), "SHA-256 differs"),
        (lambda m: m["files"][0].update(size=True), "malformed"),
        (lambda m: m.update(version=2), "version is 2"),
        (lambda m: m.update(format="other"), "not a manifest"),
        (lambda m: m.update(step="3"), "'step'"),
        (lambda m: m.update(state=[]), "'state'"),
        (lambda m: m.pop("files"), "'files'"),
        (lambda m: m.update(state={"x": float("nan")}), "NaN is not JSON"),
    ],
)
def test_a_wrong_manifest_is_refused(saved, change, reason):
    path = saved.folder / "step-00000003"
    edit_manifest(path, change)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": "moeloom-checkpoint", "step": 1, "step": 2}', "same key twice"),
        ('{"a": {"b": 1, "b": 1}}', "same key twice"),
        ("[" * 200_000, "not valid JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "refused"),
        ("[]", "not a manifest"),
        ("\x80\x04", "not valid JSON"),
    ],
)
def test_json_that_readers_disagree_about_is_refused(saved, text, reason):
    path = saved.folder / "step-00000003"
    (path / "checkpoint.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(path)


def test_a_huge_manifest_is_refused_unread(saved, monkeypatch):
    path = saved.folder / "step-00000003"
    os.truncate(path / "checkpoint.json", module.MAX_MANIFEST_BYTES + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the manifest was read"))
    with pytest.raises(CheckpointError, match="more than 67108864"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"{}xx"]
)
def test_a_shard_that_is_not_safetensors_is_refused(saved, content):
    path = saved.folder / "step-00000003"
    shard_of(path).write_bytes(content)
    refresh_sums(path)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        Checkpoint.open(path)


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(tmp_path / "nothing")
